"""The sample program: what every family does with the logits of a step."""

from __future__ import annotations

from atlas.runtime.program import Recorder


def record(recorder: Recorder, vocab: int) -> None:
    """Record the sample program over buffer `logits` [n_logits, vocab], which the forward program leaves."""
    recorder.begin("sample")
    mask_shape = ("n_logits", -(-vocab // 32))
    recorder.launch(
        "mask_logits",
        "mask_logits",
        {
            "mask_index": "step.logit_mask",
            "mask": recorder.buffer("logit_mask", "u32", mask_shape, "delivery"),
            "logits": "logits",
        },
        {"logits": "n_logits"},
        {"vocab": vocab},
    )
    recorder.launch(
        "sample",
        "sample",
        {
            "logits": "logits",
            "temperature": "step.logit_temperature",
            "top_k": "step.logit_top_k",
            "top_p": "step.logit_top_p",
            "seed": "step.logit_seed",
            "position": "step.logit_position",
            "slot": "step.logit_slot",
            "token": recorder.buffer("token", "i32", ("n_logits",), "state"),
            "last_token": "last_token",
        },
        {"logits": "n_logits", "slots": "n_slots"},
        {"vocab": vocab},
    )
