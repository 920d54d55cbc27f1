"""The step block: one flat, versioned struct that describes a step completely.

Python fills it, the core copies it to the device in one transfer, and kernels read its fields as
ordinary buffers. Nothing else crosses from Python to C++ for a step, so a step can be stored and
replayed. This table is the only definition: the recorder takes field shapes from it, the core takes
the offsets, the engine takes NumPy views.

A step's input is *rows*. Each row is one token of one sequence: a prompt token (prefill), the last
sampled token (decode), or a draft token to verify. `seq_*` arrays describe the step's sequences and
`logit_*` arrays the rows whose logits are wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlas.ops.lazy import np
from atlas.targets.expression import evaluate
from atlas.targets.quant import DTYPE_BYTES

STEP_VERSION = 3
"""Raised with every change of this file's tables; the core refuses another version."""

ROW_PREFILL, ROW_DECODE, ROW_VERIFY = 0, 1, 2

COUNTS = ("n_rows", "n_seqs", "n_logits")
"""Symbols that change from step to step."""

LIMITS = ("max_blocks", "n_blocks", "n_slots")
"""Symbols fixed at load: blocks per sequence, KV blocks in the arena, sequence slots."""

SYMBOLS = (*COUNTS, *LIMITS)
"""All symbolic dims of a program. Symbol i stands in word i + 1 of the header, after the version."""

SYMBOL_OF_DIM = {symbol.removeprefix("n_"): symbol for symbol in SYMBOLS}
"""What an op's run-time dims are bound to where each has the symbol of its own name."""

HEADER_WORDS = 16

PHASE_PREFILL, PHASE_DECODE = 0, 1
"""What a step's rows are, in the last word of the header: prompt rows, or rows of generated tokens. Kernels of a
GPU may be made for one of the two; a CPU's serve both, and may get mixed steps."""

PHASE_WORD = HEADER_WORDS - 1
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class StepField:
    """One array of the step block; shape in symbols, evaluated at the load-time limits."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


FIELDS = (
    StepField("header", "i32", (HEADER_WORDS,)),
    # rows
    StepField("row_token", "i32", ("n_rows",)),  # token id; negative: the slot's last sampled token
    StepField("row_seq", "i32", ("n_rows",)),  # index into the step's sequences
    StepField("row_position", "i32", ("n_rows",)),  # position in the sequence
    StepField("row_kind", "i32", ("n_rows",)),  # ROW_PREFILL, ROW_DECODE or ROW_VERIFY
    # rows whose logits are wanted
    StepField("logit_row", "i32", ("n_logits",)),
    StepField("logit_slot", "i32", ("n_logits",)),  # slot that remembers the token; negative: none
    StepField("logit_position", "i32", ("n_logits",)),  # position of the token to be sampled
    StepField("logit_temperature", "f32", ("n_logits",)),
    StepField("logit_top_k", "i32", ("n_logits",)),
    StepField("logit_top_p", "f32", ("n_logits",)),
    StepField("logit_min_p", "f32", ("n_logits",)),
    StepField("logit_seed", "i64", ("n_logits",)),
    StepField("logit_adjust", "i32", ("n_logits",)),  # ADJUST_* bits of atlas/ops/adjust_logits.py
    StepField("logit_repetition", "f32", ("n_logits",)),
    StepField("logit_frequency", "f32", ("n_logits",)),
    StepField("logit_presence", "f32", ("n_logits",)),
    StepField("logit_mask", "i32", ("n_logits",)),  # row of the delivered mask
    StepField("logit_n_top", "i32", ("n_logits",)),  # likeliest tokens to report; negative: no log-probabilities
    StepField("logit_target", "i32", ("n_logits",)),  # token they are for; negative: the sampled one
    # sequences; block_table is last, so that a step copies no more of it than it uses
    StepField("seq_slot", "i32", ("n_seqs",)),
    StepField("seq_rope", "i32", ("n_seqs",)),  # which of the model's sets of RoPE frequencies
    StepField("block_table", "i32", ("n_seqs", "max_blocks")),
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest value of every symbol: what memory is planned for."""

    n_rows: int
    n_seqs: int
    n_logits: int
    max_blocks: int
    n_blocks: int
    n_slots: int

    def symbols(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def offsets(limits: Limits) -> tuple[dict[str, int], int]:
    """Byte offset of each field, and the size of the whole block."""
    position, result = 0, {}
    for field in FIELDS:
        result[field.name] = position
        size = DTYPE_BYTES[field.dtype]
        for extent in field.shape:
            size *= evaluate(extent, limits.symbols(), field.name)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return result, position


class StepBlock:
    """NumPy views of the fields over one buffer (pinned by the backend where that helps).

    Every field is an attribute: `block.row_token` is an int32 array [n_rows limit].
    """

    def __init__(self, memory: Any, limits: Limits) -> None:
        """`memory`: a writable buffer of at least `offsets(limits)[1]` bytes. Every field becomes zero."""
        self.limits = limits
        self._offsets, self.nbytes = offsets(limits)
        raw = np.frombuffer(memory, dtype=np.uint8)
        raw[: self.nbytes] = 0
        self.fields: dict[str, Any] = {}
        for field in FIELDS:
            dtype = np.dtype(field.dtype.replace("i", "int").replace("f32", "float32").replace("u32", "uint32"))
            shape = tuple(evaluate(extent, limits.symbols(), field.name) for extent in field.shape)
            count = int(np.prod(shape))
            start = self._offsets[field.name]
            self.fields[field.name] = raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
        self.fields["header"][0] = STEP_VERSION
        self.fields["logit_n_top"][:] = self.fields["logit_target"][:] = -1  # who says nothing asks for nothing
        self.set_symbols(limits.symbols())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def set_symbols(self, values: Mapping[str, int]) -> None:
        """Write symbols into the header. Raises ValueError above a limit."""
        for name, value in values.items():
            if not 0 <= value <= getattr(self.limits, name):
                raise ValueError(f"step symbol {name} is {value}, accepted: 0..{getattr(self.limits, name)}")
            self.fields["header"][1 + SYMBOLS.index(name)] = value

    def set_phase(self, phase: int) -> None:
        """PHASE_PREFILL, which a new block is of, or PHASE_DECODE."""
        self.fields["header"][PHASE_WORD] = phase

    @property
    def phase(self) -> int:
        """The step's phase."""
        return int(self.fields["header"][PHASE_WORD])

    def symbols(self) -> dict[str, int]:
        """The header's symbols."""
        return {name: int(self.fields["header"][1 + i]) for i, name in enumerate(SYMBOLS)}

    def used_bytes(self) -> int:
        """How much of the block this step needs on the device: whole but for unused block tables."""
        row_bytes = 4 * self.limits.max_blocks
        return self._offsets["block_table"] + row_bytes * int(self.fields["header"][1 + SYMBOLS.index("n_seqs")])
