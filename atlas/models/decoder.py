"""The generic decoder: embedding, layers of attention and a gated MLP, head.

Families call `record` with a `ModelConfig`; what differs between them is data, not code.
"""

from __future__ import annotations

from atlas.models import sampling
from atlas.models.family import FormatOf, ModelConfig
from atlas.ops.gated_activation import SILU
from atlas.runtime.program import Recorder, StepPrograms
from atlas.targets.formats import INTEGER_FORMATS
from atlas.targets.quant import Recipe, plain_format
from atlas.targets.shape import KV_BLOCK_SIZE, Shape

_ROWS = {"rows": "n_rows"}


class _Decoder:
    """Records one decoder; each method records one part, in execution order."""

    def __init__(self, config: ModelConfig, recipe: Recipe, format_of: FormatOf) -> None:
        self.config, self.recipe, self.shape = config, recipe, config.shape
        self.format_of = format_of
        self.r = Recorder()

    def weight(self, name: str, role: str, *shape: int) -> str:
        """A weight buffer in the format that its role, or the checkpoint's tensor, gives it."""
        return self.r.buffer(name, self.format_of(name, role), shape, "weight")

    def workspace(self, name: str, dtype: str, *shape: str | int) -> str:
        return self.r.buffer(name, dtype, shape, "workspace")

    def rms_norm(self, name: str, x: str, weight: str, dim: str = "n_rows") -> str:
        hidden = self.shape.hidden_size
        out = self.workspace("normed" if dim == "n_rows" else "logits_normed", self.recipe.activations, dim, hidden)
        self.r.launch(
            "rms_norm",
            name,
            {"x": x, "weight": self.weight(weight, self.recipe.norms, hidden), "out": out},
            {"rows": dim},
            {"hidden": hidden, "eps": self.shape.rms_norm_eps},
        )
        return out

    def linear(self, name: str, x: str, weight: str, out: str, n: int, k: int, dim: str = "n_rows") -> str:
        integer = self.recipe.integer_activations and self.r.buffers[weight].dtype in INTEGER_FORMATS
        op = "linear_a8" if integer else "linear"
        self.r.launch(op, name, {"x": x, "weight": weight, "out": out}, {"rows": dim}, {"n": n, "k": k})
        return out

    def embedding(self) -> str:
        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        residual = self.workspace("residual", self.recipe.residual, "n_rows", hidden)
        self.r.launch(
            "embedding",
            "embedding",
            {
                "row_token": "step.row_token",
                "row_seq": "step.row_seq",
                "seq_slot": "step.seq_slot",
                "last_token": self.r.buffer("last_token", "i32", ("n_slots",), "state"),
                "table": self.weight("embedding.weight", self.recipe.embedding, vocab, hidden),
                "out": residual,
            },
            {"rows": "n_rows", "seqs": "n_seqs", "slots": "n_slots"},
            {"vocab": vocab, "hidden": hidden, "scale": 1.0},
        )
        return residual

    def residual_add(self, name: str, x: str) -> None:
        constants = {"hidden": self.shape.hidden_size, "scale": 1.0}
        self.r.launch("residual_add", name, {"x": x, "residual": "residual"}, _ROWS, constants)

    def attention(self, layer: str) -> None:
        s, act = self.shape, self.recipe.attention
        q_size, qkv_size = s.n_heads * s.head_dim, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim
        normed = self.rms_norm(f"{layer}.attention_norm", "residual", f"{layer}.attention_norm.weight")
        qkv = self.linear(
            f"{layer}.qkv",
            normed,
            self.weight(f"{layer}.qkv.weight", self.recipe.projections, qkv_size, s.hidden_size),
            self.workspace("qkv", self.recipe.products, "n_rows", qkv_size),
            qkv_size,
            s.hidden_size,
        )
        cache_shape = ("n_blocks", s.n_kv_heads, KV_BLOCK_SIZE, s.head_dim)
        where = {
            "row_position": "step.row_position",
            "row_seq": "step.row_seq",
            "block_table": "step.block_table",
            "k_cache": self.r.buffer(f"{layer}.k_cache", self.recipe.kv, cache_shape, "state"),
            "v_cache": self.r.buffer(f"{layer}.v_cache", self.recipe.kv, cache_shape, "state"),
        }
        dims = {"rows": "n_rows", "seqs": "n_seqs", "max_blocks": "max_blocks", "blocks": "n_blocks"}
        heads = {"n_heads": s.n_heads, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim}
        q = self.workspace("q", act, "n_rows", q_size)
        inv_freq = self.weight("rope.inv_freq", "f32", 1, s.head_dim // 2)
        self.r.launch(
            "rope_kv_append",
            f"{layer}.rope",
            {"qkv": qkv, "inv_freq": inv_freq, "seq_rope": "step.seq_rope", "q_out": q, **where},
            dims,
            {**heads, "rotary_dim": s.head_dim, "rope_sets": 1, "eps": s.rms_norm_eps, "rope_scale": 1.0},
        )
        attended = self.workspace("attended", act, "n_rows", q_size)
        self.r.launch(
            "paged_attention",
            f"{layer}.attention",
            {"q": q, "out": attended, **where},
            dims,
            {**heads, "window": 0, "scale": s.head_dim**-0.5},
        )
        projected = self.linear(
            f"{layer}.o",
            attended,
            self.weight(f"{layer}.o.weight", self.recipe.projections, s.hidden_size, q_size),
            self.workspace("projected", self.recipe.products, "n_rows", s.hidden_size),
            s.hidden_size,
            q_size,
        )
        self.residual_add(f"{layer}.attention_residual", projected)

    def mlp(self, layer: str) -> None:
        s, act = self.shape, self.recipe.activations
        normed = self.rms_norm(f"{layer}.mlp_norm", "residual", f"{layer}.mlp_norm.weight")
        gate_up = self.linear(
            f"{layer}.gate_up",
            normed,
            self.weight(f"{layer}.gate_up.weight", self.recipe.projections, 2 * s.intermediate_size, s.hidden_size),
            self.workspace("gate_up", self.recipe.products, "n_rows", 2 * s.intermediate_size),
            2 * s.intermediate_size,
            s.hidden_size,
        )
        gated = self.workspace("gated", act, "n_rows", s.intermediate_size)
        self.r.launch(
            "gated_activation",
            f"{layer}.activation",
            {"gate_up": gate_up, "out": gated},
            _ROWS,
            {"intermediate": s.intermediate_size, "activation": SILU},
        )
        projected = self.linear(
            f"{layer}.down",
            gated,
            self.weight(f"{layer}.down.weight", self.recipe.projections, s.hidden_size, s.intermediate_size),
            self.workspace("projected", self.recipe.products, "n_rows", s.hidden_size),
            s.hidden_size,
            s.intermediate_size,
        )
        self.residual_add(f"{layer}.mlp_residual", projected)

    def head(self) -> None:
        """Only rows whose logits are wanted pass the final norm and the head."""
        s = self.shape
        selected = self.workspace("logits_hidden", self.recipe.residual, "n_logits", s.hidden_size)
        self.r.launch(
            "gather_rows",
            "gather_rows",
            {"x": "residual", "index": "step.logit_row", "out": selected},
            {"rows": "n_rows", "logits": "n_logits"},
            {"hidden": s.hidden_size},
        )
        normed = self.rms_norm("final_norm", selected, "final_norm.weight", "n_logits")
        if self.config.tied:
            weight = "embedding.weight"
        else:
            weight = self.weight("lm_head.weight", self.recipe.lm_head, s.vocab_size, s.hidden_size)
        logits = self.workspace("logits", self.recipe.logits, "n_logits", s.vocab_size)
        self.linear("lm_head", normed, weight, logits, s.vocab_size, s.hidden_size, "n_logits")


def kv_bytes_per_block(shape: Shape, n_layers: int, dtype_bytes: int) -> int:
    """Bytes of one KV block over all layers, K and V."""
    return 2 * n_layers * shape.n_kv_heads * KV_BLOCK_SIZE * shape.head_dim * dtype_bytes


def record(
    config: ModelConfig, recipe: Recipe, format_of: FormatOf = lambda name, role: plain_format(role)
) -> StepPrograms:
    """Record the forward and sample programs of a decoder. format_of: weight buffer and role -> its format."""
    decoder = _Decoder(config, recipe, format_of)
    decoder.r.begin("forward")
    decoder.embedding()
    for index in range(config.n_layers):
        decoder.attention(f"layers.{index}")
        decoder.mlp(f"layers.{index}")
    decoder.head()
    sampling.record(decoder.r, config.shape.vocab_size)
    return decoder.r.finish()
