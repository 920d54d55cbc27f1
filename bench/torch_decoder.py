"""A dense decoder in PyTorch, in float32 on a GPU, from weights that a runner holds: the independent opinion on logits.

Written from the Llama and Qwen3 papers' definitions; shares nothing with Atlas but the names of weight buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atlas.runtime.runner import Runner


def logits(runner: Runner, config: Mapping[str, Any], ids: list[int]) -> Any:
    """Logits [len(ids), vocab] as a NumPy array. Weights are read back from the device, dequantised."""
    import torch
    import torch.nn.functional as F

    torch.backends.cuda.matmul.allow_tf32 = False

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(runner.read(name).astype("float32")).cuda()

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w

    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inverse = config["rope_theta"] ** (-torch.arange(0, dim, 2, device="cuda", dtype=torch.float64) / dim)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = (
            scaling["original_max_position_embeddings"] / scaling[f"{end}_freq_factor"] for end in ("low", "high")
        )
        smooth = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        between = (1 - smooth) * inverse / scaling["factor"] + smooth * inverse
        slow, fast = wavelength > low, wavelength < high
        inverse = torch.where(slow, inverse / scaling["factor"], torch.where(fast, inverse, between))
    angle = torch.arange(len(ids), device="cuda", dtype=torch.float64)[:, None] * inverse
    cosine, sine = angle.cos().float()[:, None], angle.sin().float()[:, None]

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    embedding = weight("embedding.weight")
    x = embedding[torch.tensor(ids, device="cuda")]
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        qkv = norm(x, weight(f"{layer}.attention_norm.weight")) @ weight(f"{layer}.qkv.weight").T
        q, k, v = qkv.view(len(ids), heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
        if f"{layer}.q_norm.weight" in runner.buffers:
            q, k = norm(q, weight(f"{layer}.q_norm.weight")), norm(k, weight(f"{layer}.k_norm.weight"))
        q, k = turn(q), turn(k)
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in (q, k, v)), is_causal=True
            )
        x = x + attended[0].transpose(0, 1).reshape(len(ids), -1) @ weight(f"{layer}.o.weight").T
        gate, up = (norm(x, weight(f"{layer}.mlp_norm.weight")) @ weight(f"{layer}.gate_up.weight").T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ weight(f"{layer}.down.weight").T
    head = weight("lm_head.weight") if "lm_head.weight" in runner.buffers else embedding
    return (norm(x, weight("final_norm.weight")) @ head.T).cpu().numpy()
