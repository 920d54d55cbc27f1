"""Op contracts, one file each, with their NumPy reference implementation beside them.

An op is found by its name in three places: `atlas/ops/<op>.py` (contract and reference),
`kernels/<hardware>/<op>.{cpp,cu}` (kernel) and `tests/contract/test_<op>.py`.
"""

from atlas.ops.adjust_logits import ADJUST_LOGITS
from atlas.ops.embedding import EMBEDDING
from atlas.ops.gated_activation import GATED_ACTIVATION
from atlas.ops.gated_linear import GATED_LINEAR
from atlas.ops.gather_rows import GATHER_ROWS
from atlas.ops.linear import LINEAR
from atlas.ops.linear_a8 import LINEAR_A8
from atlas.ops.load_rows import LOAD_ROWS
from atlas.ops.logprobs import LOGPROBS
from atlas.ops.moe_mlp import MOE_MLP
from atlas.ops.moe_route import MOE_ROUTE
from atlas.ops.norm_parts import NORM_PARTS
from atlas.ops.normed_gated_linear import NORMED_GATED_LINEAR
from atlas.ops.normed_linear import NORMED_LINEAR
from atlas.ops.normed_logits import NORMED_LOGITS
from atlas.ops.normed_qkv_append import NORMED_QKV_APPEND
from atlas.ops.op import Op, Operand
from atlas.ops.paged_attention import PAGED_ATTENTION
from atlas.ops.quantize_rows import QUANTIZE_ROWS
from atlas.ops.residual_add import RESIDUAL_ADD
from atlas.ops.residual_linear import RESIDUAL_LINEAR
from atlas.ops.residual_rms_norm import RESIDUAL_RMS_NORM
from atlas.ops.rms_norm import RMS_NORM
from atlas.ops.rope_attention import ROPE_ATTENTION
from atlas.ops.rope_kv_append import ROPE_KV_APPEND
from atlas.ops.rope_rows import ROPE_ROWS
from atlas.ops.sample import SAMPLE
from atlas.ops.sample_largest import SAMPLE_LARGEST

OPS = {
    op.name: op
    for op in (
        EMBEDDING,
        RMS_NORM,
        RESIDUAL_RMS_NORM,
        NORM_PARTS,
        QUANTIZE_ROWS,
        LINEAR,
        GATED_LINEAR,
        RESIDUAL_LINEAR,
        NORMED_LINEAR,
        NORMED_LOGITS,
        NORMED_GATED_LINEAR,
        LINEAR_A8,
        ROPE_ROWS,
        NORMED_QKV_APPEND,
        ROPE_KV_APPEND,
        PAGED_ATTENTION,
        ROPE_ATTENTION,
        GATED_ACTIVATION,
        MOE_ROUTE,
        MOE_MLP,
        RESIDUAL_ADD,
        GATHER_ROWS,
        ADJUST_LOGITS,
        SAMPLE,
        SAMPLE_LARGEST,
        LOGPROBS,
        LOAD_ROWS,
    )
}

__all__ = ["OPS", "Op", "Operand"]
