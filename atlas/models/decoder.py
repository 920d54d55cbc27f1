"""The generic decoder: embedding, layers of attention and a gated MLP or experts, head.

Families call `record` with a `ModelConfig`; what differs between them is data, not code.
"""

from __future__ import annotations

from atlas.models import sampling
from atlas.models.family import FormatOf, ModelConfig
from atlas.ops.gated_activation import GELU_ERF, GELU_TANH, SILU
from atlas.runtime.program import Recorder, StepPrograms
from atlas.targets.formats import INTEGER_FORMATS, plain_format
from atlas.targets.layers import Layer
from atlas.targets.quant import DTYPE_BYTES, Recipe
from atlas.targets.shape import KV_BLOCK_SIZE

_ROWS = {"rows": "n_rows"}

_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU_ERF}
"""Shape.hidden_act -> the constant of the ops."""


class _Decoder:
    """Records one decoder; each method records one part, in execution order."""

    def __init__(self, config: ModelConfig, recipe: Recipe, format_of: FormatOf) -> None:
        self.config, self.recipe, self.shape = config, recipe, config.shape
        self.format_of = format_of
        self.activation = _ACTIVATIONS[config.shape.hidden_act]
        self.r = Recorder()
        self.rows, self.residual = "n_rows", "residual"

    def weight(self, name: str, role: str, *shape: int) -> str:
        """A weight buffer in the format that its role, or the checkpoint's tensor, gives it."""
        return self.r.buffer(name, self.format_of(name, role), shape, "weight")

    def vector(self, name: str, *shape: int) -> str:
        """A norm, a bias or frequencies: small, always f32."""
        return self.weight(name, self.recipe.norms, *shape)

    def workspace(self, name: str, dtype: str, *shape: str | int) -> str:
        return self.r.buffer(name, dtype, shape, "workspace")

    def of_rows(self, name: str, dtype: str, columns: int) -> str:
        """A workspace buffer of the rows that are still there, which gives them a name of their own after `select`."""
        return self.workspace(name if self.rows == "n_rows" else f"logits_{name}", dtype, self.rows, columns)

    def select(self) -> None:
        """From here on only rows whose logits are wanted are there."""
        hidden = self.shape.hidden_size
        selected = self.workspace("logits_hidden", self.recipe.residual, "n_logits", hidden)
        self.r.launch(
            "gather_rows",
            "gather_rows",
            {"x": self.residual, "index": "step.logit_row", "out": selected},
            {"rows": "n_rows", "logits": "n_logits"},
            {"hidden": hidden},
        )
        self.rows, self.residual = "n_logits", selected

    def rms_norm(self, name: str, x: str, out: str, dtype: str) -> str:
        hidden = self.shape.hidden_size
        normed = self.of_rows(out, dtype, hidden)
        self.r.launch(
            "rms_norm",
            name,
            {
                "x": x,
                "weight": self.vector(f"{name}.weight", hidden),
                "out": normed,
            },
            {"rows": self.rows},
            {"hidden": hidden, "eps": self.shape.rms_norm_eps},
        )
        return normed

    def linear(self, name: str, x: str, weight: str, out: str, n: int, k: int, *, bias: bool = False) -> str:
        """Record a linear over a declared weight. A bias is the buffer `name`.bias. `out` has x's rows."""
        operands = {"x": x, "weight": weight, "out": out}
        if bias:
            operands["bias"] = self.vector(f"{name}.bias", n)
        integer = self.recipe.integer_activations and self.r.buffers[weight].dtype in INTEGER_FORMATS
        op, rows = "linear_a8" if integer else "linear", str(self.r.buffers[x].shape[0])
        self.r.launch(op, name, operands, {"rows": rows}, {"n": n, "k": k})
        return out

    def projection(self, name: str, x: str, out: str, dtype: str, n: int, k: int, *, bias: bool = False) -> str:
        """A linear of the layers, with a weight of its own."""
        weight = self.weight(f"{name}.weight", self.recipe.projections, n, k)
        return self.linear(name, x, weight, self.of_rows(out, dtype, n), n, k, bias=bias)

    def dtype_into(self, projection: str) -> str:
        """The dtype in which rows enter a projection: its weight's format decides."""
        return self.recipe.entering(self.format_of(f"{projection}.weight", self.recipe.projections))

    def _named(self, name: str, dtype: str) -> str:
        """A workspace buffer's name; one of another dtype than most has a name of its own."""
        return name if dtype == self.recipe.activations else f"{name}_{dtype}"

    def normed(self, name: str, projection: str) -> str:
        """The residual's norm, as `projection` takes it."""
        dtype = self.dtype_into(projection)
        return self.rms_norm(name, self.residual, self._named("normed", dtype), dtype)

    def entering(self, projection: str, x: str, k: int) -> str:
        """Rows that are there in `recipe.attention`, as `projection` takes them."""
        dtype = self.dtype_into(projection)
        if dtype in DTYPE_BYTES:
            return x
        out = self.workspace(f"{x}_{dtype}", dtype, "n_rows", k)
        self.r.launch("quantize_rows", f"{projection}.quantize", {"x": x, "out": out}, _ROWS, {"k": k})
        return out

    def embedding(self) -> None:
        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        self.r.launch(
            "embedding",
            "embedding",
            {
                "row_token": "step.row_token",
                "row_seq": "step.row_seq",
                "seq_slot": "step.seq_slot",
                "last_token": self.r.buffer("last_token", "i32", ("n_slots",), "state"),
                "table": self.weight("embedding.weight", self.recipe.embedding, vocab, hidden),
                "out": self.workspace("residual", self.recipe.residual, "n_rows", hidden),
            },
            {"rows": "n_rows", "seqs": "n_seqs", "slots": "n_slots"},
            {"vocab": vocab, "hidden": hidden, "scale": self.shape.embedding_scale},
        )

    @property
    def added(self) -> str:
        """The dtype of what a block adds to the residual stream; a norm before that reads and leaves f32."""
        return "f32" if self.shape.post_norms else self.recipe.products

    def residual_add(self, layer: str, block: str, x: str) -> None:
        """Add a block's output to the residual stream, through a norm of its own where the family has one."""
        if self.shape.post_norms:
            x = self.rms_norm(f"{layer}.post_{block}_norm", x, "post_normed", self.added)
        self.r.launch(
            "residual_add",
            f"{layer}.{block}_residual",
            {"x": x, "residual": self.residual},
            {"rows": self.rows},
            {"hidden": self.shape.hidden_size, "scale": self.shape.residual_scale},
        )

    def attention(self, layer: str, what: Layer) -> None:
        s, act = self.shape, self.recipe.attention
        q_size, qkv_size = s.n_heads * s.head_dim, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim
        normed = self.normed(f"{layer}.attention_norm", f"{layer}.qkv")
        qkv = self.projection(
            f"{layer}.qkv", normed, "qkv", self.recipe.products, qkv_size, s.hidden_size, bias=s.qkv_bias
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
        rotary_dim = s.rotary_dim or s.head_dim
        turned = {
            "qkv": qkv,
            "inv_freq": self.vector(f"rope.{what.kind}.inv_freq", s.rope_sets, rotary_dim // 2),
            "seq_rope": "step.seq_rope",
        }
        if s.qk_norm:
            turned |= {f"{p}_norm": self.vector(f"{layer}.{p}_norm.weight", s.head_dim) for p in "qk"}
        self.r.launch(
            "rope_kv_append",
            f"{layer}.rope",
            {**turned, "q_out": q, **where},
            dims,
            {
                **heads,
                "rotary_dim": rotary_dim,
                "rope_sets": s.rope_sets,
                "eps": s.rms_norm_eps,
                "rope_scale": self.config.ropes[what.kind].scale,
            },
        )
        attended = self.workspace("attended", act, "n_rows", q_size)
        self.r.launch(
            "paged_attention",
            f"{layer}.attention",
            {"q": q, "out": attended, **where},
            dims,
            {**heads, "window": what.window, "scale": s.attention_scale or s.head_dim**-0.5},
        )
        attended = self.entering(f"{layer}.o", attended, q_size)
        projected = self.projection(
            f"{layer}.o", attended, "projected", self.added, s.hidden_size, q_size, bias=s.o_bias
        )
        self.residual_add(layer, "attention", projected)

    def mlp(self, layer: str) -> None:
        s, inner = self.shape, self.shape.intermediate_size
        normed = self.normed(f"{layer}.mlp_norm", f"{layer}.gate_up")
        gate_up = self.projection(
            f"{layer}.gate_up", normed, "gate_up", "f32", 2 * inner, s.hidden_size, bias=s.mlp_bias
        )
        dtype = self.dtype_into(f"{layer}.down")
        gated = self.of_rows(self._named("gated", dtype), dtype, inner)
        self.r.launch(
            "gated_activation",
            f"{layer}.activation",
            {"gate_up": gate_up, "out": gated},
            {"rows": self.rows},
            {"intermediate": inner, "activation": self.activation},
        )
        projected = self.projection(
            f"{layer}.down", gated, "projected", self.added, s.hidden_size, inner, bias=s.mlp_bias
        )
        self.residual_add(layer, "mlp", projected)

    def experts(self, layer: str) -> None:
        """A router and the experts that it chooses for each row, in the place of the MLP."""
        s, top_k, inner = self.shape, self.shape.experts_per_token, self.shape.moe_intermediate_size
        dtype = self.recipe.entering(self.recipe.router)
        normed = self.rms_norm(f"{layer}.mlp_norm", self.residual, self._named("normed", dtype), dtype)
        router = self.weight(f"{layer}.router.weight", self.recipe.router, s.n_experts, s.hidden_size)
        logits = self.of_rows("router_logits", "f32", s.n_experts)
        self.linear(f"{layer}.router", normed, router, logits, s.n_experts, s.hidden_size)
        routed = {
            "expert_id": self.of_rows("expert_id", "i32", top_k),
            "expert_weight": self.of_rows("expert_weight", "f32", top_k),
        }
        self.r.launch(
            "moe_route",
            f"{layer}.route",
            {"logits": logits, **routed},
            {"rows": self.rows},
            {"n_experts": s.n_experts, "top_k": top_k, "normalise": int(s.norm_topk_prob)},
        )
        gate_up, down = s.n_experts * 2 * inner, s.n_experts * s.hidden_size
        summed = self.of_rows("experts", "f32", s.hidden_size)
        self.r.launch(
            "moe_mlp",
            f"{layer}.experts",
            {
                "x": normed,
                "gate_up": self.weight(f"{layer}.experts.gate_up.weight", self.recipe.experts, gate_up, s.hidden_size),
                "down": self.weight(f"{layer}.experts.down.weight", self.recipe.experts, down, inner),
                **routed,
                "out": summed,
            },
            {"rows": self.rows},
            {
                "n_experts": s.n_experts,
                "top_k": top_k,
                "hidden": s.hidden_size,
                "intermediate": inner,
                "activation": self.activation,
            },
        )
        self.residual_add(layer, "mlp", summed)

    def head(self) -> None:
        s = self.shape
        weight = "embedding.weight"
        if not self.config.tied:
            weight = self.weight("lm_head.weight", self.recipe.lm_head, s.vocab_size, s.hidden_size)
        dtype = self.recipe.entering(self.r.buffers[weight].dtype)
        normed = self.rms_norm("final_norm", self.residual, self._named("normed", dtype), dtype)
        logits = self.workspace("logits", self.recipe.logits, "n_logits", s.vocab_size)
        self.linear("lm_head", normed, weight, logits, s.vocab_size, s.hidden_size)


def record(
    config: ModelConfig, recipe: Recipe, format_of: FormatOf = lambda name, role: plain_format(role)
) -> StepPrograms:
    """Record the forward and sample programs of a decoder. format_of: weight buffer and role -> its format."""
    decoder = _Decoder(config, recipe, format_of)
    decoder.r.begin("forward")
    decoder.embedding()
    for index, layer in enumerate(config.layers):
        decoder.attention(f"layers.{index}", layer)
        if index == len(config.layers) - 1:
            # Of a prompt's last layer others read only what attention does: keys and values.
            decoder.select()
        if layer.sparse:
            decoder.experts(f"layers.{index}")
        else:
            decoder.mlp(f"layers.{index}")
    decoder.head()
    sampling.record(decoder.r, config.shape.vocab_size)
    return decoder.r.finish()
