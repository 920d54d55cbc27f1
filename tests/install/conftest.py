"""Install paths, tried for real: minutes of compiling, so they run only where `-m` asks for them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "install" in str(config.getoption("markexpr")):
        return
    for item in items:
        if item.get_closest_marker("install"):
            item.add_marker(pytest.mark.skip(reason="builds Atlas several times: run `pytest -m install`"))
