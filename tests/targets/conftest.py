"""A small kernel tree to select from and resolve in."""

import json
import shutil
from pathlib import Path

import pytest

from atlas.ops import OPS

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

CARD = """
name = "{name}"
description = "a card"
inherits = "base"
arch = "sm_90a"
compute_capability = [9, 0]
multiprocessors = 132
shared_memory_per_block = 232448
"""

LATER = {"architectures": ["LaterForCausalLM"]}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """cpu; an abstract base with an (empty) kernel for every op; two cards that inherit from it; two models that
    a family records and one, `later`, that none does."""
    shutil.copytree(KERNELS / "cpu", tmp_path / "cpu")
    for folder in ("base", "card", "other", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "HARDWARE.toml").write_text(
        'name = "base"\nkind = "cuda"\ndescription = "shared"\nabstract = true\nquants = ["bf16"]\n'
    )
    for name in ("card", "other"):
        (tmp_path / name / "HARDWARE.toml").write_text(CARD.format(name=name))
    facts = json.loads((KERNELS / "models" / "smollm2-135m.json").read_text())
    for name, changes in {"small": {}, "large": {"hidden_size": 1152}, "later": LATER}.items():
        (tmp_path / "models" / f"{name}.json").write_text(json.dumps({**facts, **changes}))
    for op in OPS:
        (tmp_path / "base" / f"{op}.cu").write_text("")
    return tmp_path
