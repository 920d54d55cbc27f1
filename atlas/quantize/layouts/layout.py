"""What a layout is: how a named kind of checkpoint stores a quantised matrix, and what its config.json says."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.quantize.writer import Entry
from atlas.weights.quantized import Array, QuantizedArray


@dataclass(frozen=True)
class Context:
    """What a matrix is quantised with, besides its values.

    name: of the tensor, for errors.
    absmax: largest value of all tensors that share the scale per tensor; 0 where nothing is shared.
    importance: mean square of each input channel [k], or None.
    input_absmax: largest value that entered the matrix in calibration, or None.
    """

    name: str
    absmax: float = 0.0
    importance: Array | None = None
    input_absmax: float | None = None


class Layout(ABC):
    """One layout in one format.

    shares_scale: one scale per tensor, which members of a fused matrix share.
    calibrated: needs what enters each matrix (static activation scales).
    """

    shares_scale: bool = False
    calibrated: bool = False

    def refuses(self, n: int, k: int) -> str:
        """Why a matrix [n, k] cannot be stored; empty where it can."""
        return ""

    @abstractmethod
    def entries(self, n: int, k: int) -> dict[str, Entry]:
        """The tensors of a module that stand for its weight: name within the module -> dtype and shape."""

    @abstractmethod
    def quantize(self, values: Array, context: Context) -> QuantizedArray:
        """Quantise float values [n, k] to exactly what this layout can say."""

    @abstractmethod
    def pack(self, array: QuantizedArray, context: Context) -> dict[str, Array]:
        """The tensors that `entries` names."""

    @abstractmethod
    def quantization_config(self, kept: Mapping[str, str]) -> dict[str, Any]:
        """`quantization_config` of config.json. kept: modules that are not quantised."""

    def files(self, kept: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Further JSON files of the layout: name -> contents."""
        return {}


def pack_int32(codes: Array, bits: int) -> Array:
    """Unsigned codes [rows, m] as int32 [rows, ceil(m * bits / 32)], the first code in the lowest bits."""
    assert sys.byteorder == "little"
    per_word = 32 // bits
    padded = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word) * per_word), np.uint8)
    padded[:, : codes.shape[1]] = codes
    packed = padded[:, 0::2] | padded[:, 1::2] << 4 if bits == 4 else padded
    return np.ascontiguousarray(packed).view(np.int32)


def words(m: int, bits: int) -> int:
    """int32 words that hold m codes."""
    return -(-m * bits // 32)
