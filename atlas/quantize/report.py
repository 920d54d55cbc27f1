"""What quantising cost: errors of each tensor, as JSON and as a table of the worst."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas.weights.quantized import Array, QuantizedArray

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class TensorError:
    """relative_l2: |quantised - value| / |value|, Euclidean.  max_abs: largest |quantised - value|.
    absmax: largest |value|.  bits: stored per weight, scales included."""

    tensor: str
    shape: tuple[int, int]
    relative_l2: float
    max_abs: float
    absmax: float
    bits: float


def measure(tensor: str, values: Array, array: QuantizedArray, stored_bytes: int) -> TensorError:
    """Hold a quantised matrix against its values [n, k], some rows at a time."""
    n, k = array.shape
    error = power = largest = absmax = 0.0
    step = max(1, _CHUNK // max(k, 1))
    for begin in range(0, n, step):
        part = np.asarray(values[begin : begin + step], np.float32)
        difference = array.rows(begin, min(begin + step, n)).dequantize() - part
        error += float(np.square(difference, dtype=np.float64).sum())
        power += float(np.square(part, dtype=np.float64).sum())
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        absmax = max(absmax, float(np.abs(part).max(initial=0)))
    relative = math.sqrt(error / power) if power else 0.0
    return TensorError(tensor, (n, k), relative, largest, absmax, 8 * stored_bytes / max(n * k, 1))


@dataclasses.dataclass(frozen=True)
class Report:
    """run: what was asked for.  kept: modules that were not quantised -> why."""

    run: Mapping[str, Any]
    errors: tuple[TensorError, ...]
    kept: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        weights = sum(math.prod(error.shape) for error in self.errors)
        relative = [error.relative_l2 for error in self.errors]
        summary = {
            "quantised_tensors": len(self.errors),
            "quantised_weights": weights,
            "bits_per_weight": sum(error.bits * math.prod(error.shape) for error in self.errors) / max(weights, 1),
            "relative_l2_mean": float(np.mean(relative)),
            "relative_l2_worst": max(relative),
        }
        tensors = {error.tensor: dataclasses.asdict(error) for error in self.errors}
        return {**self.run, "summary": summary, "kept": dict(sorted(self.kept.items())), "tensors": tensors}

    def table(self, count: int = 10) -> str:
        """The `count` tensors with the largest relative error, worst first, and the mean of all."""
        worst = sorted(self.errors, key=lambda error: -error.relative_l2)[:count]
        width = max(len("tensor"), *(len(error.tensor) for error in worst))
        lines = [f"{'tensor':<{width}}  {'shape':>13}  rel. L2   max |error|  max |value|"]
        for error in worst:
            shape = f"{error.shape[0]}x{error.shape[1]}"
            numbers = f"{error.relative_l2:.5f}  {error.max_abs:11.4g}  {error.absmax:11.4g}"
            lines.append(f"{error.tensor:<{width}}  {shape:>13}  {numbers}")
        mean = float(np.mean([error.relative_l2 for error in self.errors]))
        lines.append(f"{'mean of ' + str(len(self.errors)):<{width}}  {'':>13}  {mean:.5f}")
        return "\n".join(lines)
