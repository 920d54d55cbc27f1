"""Sizes that follow from the memory of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atlas.errors import DeviceError
from atlas.runtime import core, limits
from atlas.runtime.kernel_set import Choice


@pytest.mark.parametrize(("weights", "budget"), [(0, 8 << 30), (3 << 30, 5 << 30), ((8 << 30) - 4096, 4096)])
def test_the_kv_cache_gets_what_weights_leave_of_the_share(
    monkeypatch: pytest.MonkeyPatch, weights: int, budget: int
) -> None:
    assert abs(_budget(monkeypatch, weights) - budget) <= 1


@pytest.mark.parametrize("weights", [(8 << 30) - 4000, 9 << 30])
def test_weights_that_leave_no_kv_cache(monkeypatch: pytest.MonkeyPatch, weights: int) -> None:
    with pytest.raises(DeviceError) as caught:
        _budget(monkeypatch, weights)
    assert str(caught.value) == (
        f"GPU: weights of {weights / 2**30:.2f} GiB in fp8; accepted: 8.00 GiB and a KV cache: 80% of the memory is "
        "for both; take a quant of fewer bytes (--quant) or a smaller model, or say how large the KV cache is "
        "(--kv-memory)"
    )


def _budget(monkeypatch: pytest.MonkeyPatch, weights: int) -> int:
    devices = [{"index": 0, "name": "other", "total_memory": 1}, {"index": 1, "name": "GPU", "total_memory": 10 << 30}]
    monkeypatch.setattr(core, "extension", lambda: SimpleNamespace(cuda_devices=lambda: devices))
    programs: Any = SimpleNamespace(weight_bytes=lambda: weights)
    return limits.kv_budget(Choice("cuda", "fp8", None, 1, ""), programs, 4096)
