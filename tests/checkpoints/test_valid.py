"""Every valid checkpoint loads to its expected logits and greedy tokens, on `cpu` and on `reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.cases import expected, params, path
from tests.models import run

BOUNDS = {"f32": 2e-3, "bf16": 2e-2, "stored": 5e-2}
"""Relative L2 of logits; "stored" is what the CPU makes of the file when nothing is said: integer blocks are kept, and
meet activations rounded to int8. A wrong reading of any of these checkpoints is at least 0.12 off."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def models(name: str) -> list[Path]:
    """What may be given to load it: the folder; for a split GGUF its first file too."""
    folder = path("valid", name)
    first = sorted(folder.glob("*-00001-of-*.gguf"))
    return [*first, folder]


def close(actual: np.ndarray[Any, Any], sequence: dict[str, Any], quant: str) -> None:
    """Logits [n, vocab] of a sequence against its last row, its argmax and its log-sum-exp."""
    last = np.array(sequence["last_logits"])
    off = np.linalg.norm(actual[-1] - last) / np.linalg.norm(last)
    assert off <= BOUNDS[quant], f"{quant}: last logits are {off:.2e} off"
    error = np.abs(actual[-1] - last).max()
    sure = np.array(sequence["margin"]) > 4 * max(error, BOUNDS[quant])
    np.testing.assert_array_equal(actual.argmax(-1)[sure], np.array(sequence["argmax"])[sure])
    top = actual.max(-1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(actual - top).sum(-1))
    assert np.linalg.norm(lse - sequence["lse"]) <= BOUNDS[quant] * np.linalg.norm(sequence["lse"])


@pytest.mark.parametrize(
    ("backend", "quant"),
    [("cpu", "f32"), ("cpu", "bf16"), ("cpu", "stored"), ("reference", "f32"), ("reference", "bf16")],
)
@pytest.mark.parametrize("name", params("valid"))
def test_logits(name: str, backend: str, quant: str) -> None:
    for model in models(name):
        runner = run.load(model, backend, None if quant == "stored" else quant)
        for sequence in expected()["valid"][name]["sequences"]:
            close(run.logits(runner, sequence["ids"], chunk=37), sequence, quant)


@pytest.mark.parametrize("name", params("valid"))
def test_greedy_tokens(name: str) -> None:
    """As far as the margin between the first two logits is wide enough to tell."""
    case = expected()["valid"][name]
    runner = run.load(models(name)[0], "cpu", "f32")
    runs = [(s["ids"], s["greedy"], s["greedy_margin"]) for s in case["sequences"] if "greedy" in s]
    # `lengths` counts tokens of one text, which other cases hold more of.
    first = case["sequences"][0]["ids"]
    texts = [s["ids"] for other in expected()["valid"].values() for s in other["sequences"]]
    longest = max((ids for ids in texts if ids[: len(first)] == first), key=len)
    lengths = [prefix for prefix in case.get("lengths", []) if prefix["n"] <= len(longest)]
    prefixes = [{**prefix, "ids": longest[: prefix["n"]]} for prefix in lengths]
    for more in [*prefixes, *([case["crossing"]] if "crossing" in case else [])]:
        if more["min_margin"] > 0.05:
            runs.append((more["ids"], more["greedy"], [more["min_margin"]] * len(more["greedy"])))
    for ids, greedy, margins in runs:
        (tokens,) = run.greedy(runner, [ids], len(greedy), 1)
        sure = next((at for at, margin in enumerate(margins) if margin <= 0.05), len(greedy))
        assert tokens[:sure] == greedy[:sure]
