"""Names of tensors in Hugging Face checkpoints: the standard table, of which a family states what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from atlas.models.family import ModelConfig, WeightSource


@dataclasses.dataclass(frozen=True)
class Names:
    """Where a family's tensors stand, without `.weight` and `.bias`.

    prefixes: of everything but the head; the first under which the checkpoint has a token table counts. None is
        what a file has that was saved from the model without its head.
    qkv, gate_up: one name for a fused tensor, else one for each part.
    expert_gate_up, expert_down: with {} for the expert's number.
    q_norm, k_norm, post_*: only read where the shape has them.
    """

    prefixes: tuple[str, ...] = ("model.", "")
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_mlp_norm: str = ""
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"

    def weights(self, config: ModelConfig, tensors: Collection[str]) -> dict[str, WeightSource]:
        """Weight buffer of the generic decoder -> its tensors. `tensors`: the names that the checkpoint has."""
        prefix = self._first(self.prefixes, f"{self.embedding}.weight", tensors)
        embedding, head = f"{prefix}{self.embedding}.weight", self._first(self.heads, ".weight", tensors) + ".weight"
        if config.tied and embedding not in tensors and head in tensors:  # one matrix, saved under its other name
            embedding = head
        table = {
            "embedding.weight": WeightSource((embedding,)),
            "final_norm.weight": WeightSource(
                (f"{prefix}{self.final_norm}.weight",), add=config.norm_offset, multiply=config.logits_scale
            ),
        }
        for kind, rope in config.ropes.items():
            sets = (rope.inv_freq * config.shape.rope_sets)[: config.shape.rope_sets]
            table[f"rope.{kind}.inv_freq"] = WeightSource(values=tuple(f for frequencies in sets for f in frequencies))
        if not config.tied:
            table["lm_head.weight"] = WeightSource((head,))
        for i, layer in enumerate(config.layers):
            found = self._attention(config) | (self._experts(config) if layer.sparse else self._mlp(config))
            for buffer, source in found.items():
                names = tuple(f"{prefix}layers.{i}.{name}" for name in source.tensors)
                table[f"layers.{i}.{buffer}"] = dataclasses.replace(source, tensors=names)
        return table

    @staticmethod
    def _first(choices: tuple[str, ...], rest: str, tensors: Collection[str]) -> str:
        return next((choice for choice in choices if choice + rest in tensors), choices[0])

    def _attention(self, config: ModelConfig) -> dict[str, WeightSource]:
        s, add = config.shape, config.norm_offset
        rows = (s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim, s.n_kv_heads * s.head_dim)
        norms = {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}
        if s.qk_norm:
            norms |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        if s.post_norms:
            norms |= {"post_attention_norm": self.post_attention_norm, "post_mlp_norm": self.post_mlp_norm}
        return {
            **{f"{part}.weight": WeightSource((f"{name}.weight",), add=add) for part, name in norms.items()},
            **_linear("qkv", self.qkv, rows, s.qkv_bias),
            **_linear("o", (self.o,), (), s.o_bias),
        }

    def _mlp(self, config: ModelConfig) -> dict[str, WeightSource]:
        s = config.shape
        return {
            **_linear("gate_up", self.gate_up, (s.intermediate_size,) * 2, s.mlp_bias),
            **_linear("down", (self.down,), (), s.mlp_bias),
        }

    def _experts(self, config: ModelConfig) -> dict[str, WeightSource]:
        s = config.shape
        experts = range(s.n_experts)
        gate_up = tuple(name.format(e) for e in experts for name in self.expert_gate_up)
        down = tuple(self.expert_down.format(e) for e in experts)
        return {
            **_linear("router", (self.router,), (), False),
            **_linear("experts.gate_up", gate_up, (s.moe_intermediate_size,) * len(gate_up), False),
            **_linear("experts.down", down, (s.hidden_size,) * len(down), False),
        }


def _linear(buffer: str, names: tuple[str, ...], rows: tuple[int, ...], bias: bool) -> dict[str, WeightSource]:
    """A linear's weight and, where it has one, its bias. Fused in the checkpoint, it is one tensor with all rows."""
    parts = rows if len(names) > 1 else ()
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{buffer}.{kind}": WeightSource(tuple(f"{name}.{kind}" for name in names), parts) for kind in kinds}


STANDARD = Names()
