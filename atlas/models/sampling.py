"""The sample program: what every family does with the logits of a step."""

from __future__ import annotations

from atlas.ops.logprobs import MAX_TOP
from atlas.runtime.program import Recorder

ON_REQUEST = ("adjust_logits", "logprobs")
"""Ops whose launches leave rows that ask for nothing alone."""


def record(recorder: Recorder, vocab: int) -> None:
    """Record the sample program over buffer `logits` [n_logits, vocab], which the forward program leaves.

    Per-slot state: `logit_bias` and `token_count` [n_slots, vocab], written by the host when a sequence that uses
    them gets its slot; from then on `sample` counts. Steps whose rows ask for nothing of ON_REQUEST do without those.
    """
    recorder.begin("sample")
    sizes = {"vocab": vocab}
    per_slot = ("n_slots", vocab)
    adjusted = recorder.buffer("adjusted", "f32", ("n_logits", vocab), "workspace")
    token = recorder.buffer("token", "i32", ("n_logits",), "result")
    token_count = recorder.buffer("token_count", "i32", per_slot, "state")
    recorder.launch(
        "adjust_logits",
        "adjust_logits",
        {
            "logits": "logits",
            "adjust": "step.logit_adjust",
            "slot": "step.logit_slot",
            "bias": recorder.buffer("logit_bias", "f32", per_slot, "state"),
            "token_count": token_count,
            "repetition": "step.logit_repetition",
            "frequency": "step.logit_frequency",
            "presence": "step.logit_presence",
            "mask_index": "step.logit_mask",
            "mask": recorder.buffer("logit_mask", "u32", ("n_logits", -(-vocab // 32)), "delivery"),
            "adjusted": adjusted,
        },
        {"logits": "n_logits", "slots": "n_slots"},
        sizes,
    )
    recorder.launch(
        "sample",
        "sample",
        {
            "logits": "logits",
            "adjusted": adjusted,
            "adjust": "step.logit_adjust",
            "temperature": "step.logit_temperature",
            "top_k": "step.logit_top_k",
            "top_p": "step.logit_top_p",
            "min_p": "step.logit_min_p",
            "seed": "step.logit_seed",
            "position": "step.logit_position",
            "slot": "step.logit_slot",
            "token": token,
            "last_token": "last_token",
            "token_count": token_count,
        },
        {"logits": "n_logits", "slots": "n_slots"},
        sizes,
    )
    recorder.launch(
        "logprobs",
        "logprobs",
        {
            "logits": "logits",
            "n_top": "step.logit_n_top",
            "target": "step.logit_target",
            "token": token,
            "logprob": recorder.buffer("logprob", "f32", ("n_logits",), "result"),
            "rank": recorder.buffer("rank", "i32", ("n_logits",), "result"),
            "top_token": recorder.buffer("top_token", "i32", ("n_logits", MAX_TOP), "result"),
            "top_logprob": recorder.buffer("top_logprob", "f32", ("n_logits", MAX_TOP), "result"),
        },
        {"logits": "n_logits"},
        {**sizes, "max_top": MAX_TOP},
    )
