"""The shape: the constants of a model, on one shard, that kernels are compiled for.

One function derives it from `config.json` (or the public facts in `kernels/models/<model>.json`,
which use the same field names) and a shard. Build and load both call it, so they cannot disagree.
Kernel sets are keyed by the shape's hash, never by a model's name: any fine-tune matches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from atlas.errors import CheckpointError

KV_BLOCK_SIZE = 16
"""Tokens in one KV block (formats.md)."""

_MAX_DIMENSION = 1 << 24


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of a model one device holds.

    tp_rank, tp_size: tensor-parallel rank and group size.
    expert_begin, expert_end: range of experts held; None means all of them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    expert_begin: int = 0
    expert_end: int | None = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """Per-shard constants. Field names are the names that op constants are derived from."""

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str

    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the sorted fields: the key of kernel sets."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_field(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One field of config.json, checked. A null counts as absent.

    Raises:
        CheckpointError: absent without a default, of another type, or out of any sane range.
    """
    value = config.get(name)
    if value is None:
        if default is None:
            raise CheckpointError("config.json", f"required field {name!r} is missing", kind.__name__)
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError("config.json", f"{name} is {value!r}", f"a value of type {kind.__name__}")
    if isinstance(value, int) and not 0 < value <= _MAX_DIMENSION:
        raise CheckpointError("config.json", f"{name} is {value}", f"an integer in 1..{_MAX_DIMENSION}")
    return value


def shape(config: Mapping[str, Any], shard: Shard = Shard()) -> Shape:
    """The shape of `config` (Hugging Face spelling) on `shard`.

    Raises:
        CheckpointError: a field is missing or absurd, or fields contradict each other or the shard.
    """
    n_heads = config_field(config, "num_attention_heads", int)
    n_kv_heads = config_field(config, "num_key_value_heads", int, n_heads)
    hidden_size = config_field(config, "hidden_size", int)
    intermediate_size = config_field(config, "intermediate_size", int)
    vocab_size = config_field(config, "vocab_size", int)
    if n_heads % n_kv_heads:
        raise CheckpointError(
            "config.json",
            f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}",
        )
    if config.get("head_dim") is None and hidden_size % n_heads:
        raise CheckpointError(
            "config.json",
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {n_heads}",
            "an explicit head_dim, or a hidden_size that divides",
        )
    hidden_act = config_field(config, "hidden_act", str, "silu")
    if hidden_act != "silu":
        raise CheckpointError("config.json", f"hidden_act is {hidden_act!r}", "'silu'")
    split = shard.tp_size
    if not 0 <= shard.tp_rank < split:
        raise CheckpointError("shard", f"tp_rank {shard.tp_rank} of tp_size {split}", "0 <= tp_rank < tp_size")
    sizes: tuple[tuple[str, int], ...] = (
        ("num_attention_heads", n_heads),
        ("num_key_value_heads", n_kv_heads),
        ("intermediate_size", intermediate_size),
        ("vocab_size", vocab_size),
    )
    for name, value in sizes:
        if value % split:
            raise CheckpointError("shard", f"tp_size {split} does not divide {name} {value}")
    return Shape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size // split,
        n_heads=n_heads // split,
        n_kv_heads=n_kv_heads // split,
        head_dim=config_field(config, "head_dim", int, hidden_size // n_heads),
        vocab_size=vocab_size // split,
        # GGUF stores 1e-5 as the nearest fp32, JSON as the nearest fp64: one shape, one hash.
        rms_norm_eps=float(f"{config_field(config, 'rms_norm_eps', float, 1e-6):.6g}"),
        hidden_act=hidden_act,
    )
