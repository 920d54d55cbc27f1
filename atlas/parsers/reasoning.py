"""The words between which models reason, and whether an answer begins between them.

Sources: the chat templates of the models named. Markers count only where they may stand: the opening one where the
answer (or the text after an earlier block) begins, the closing one while reasoning. Elsewhere they are text.
"""

from __future__ import annotations

import msgspec


class Markers(msgspec.Struct, frozen=True):
    """always: the model reasons at the start of each answer even if neither it nor its template writes `start`."""

    start: str
    end: str
    always: bool = False

    def inside(self, prompt: str) -> bool:
        """Whether the answer to this rendered prompt begins as reasoning.

        A template may end with the opening marker (reasoning has begun), or with the closing one, alone or after
        the opening one (the model is not to reason).
        """
        prompt = prompt.rstrip()
        if prompt.endswith(self.start):
            return True
        return self.always and not prompt.endswith(self.end)


MARKERS = {
    # Qwen3 and later, GLM-4.5 and later, MiniMax-M2, DeepSeek V3.1 and later
    "think": Markers("<think>", "</think>"),
    # DeepSeek-R1 and its distillations leave the opening marker out at times
    "deepseek_r1": Markers("<think>", "</think>", always=True),
    # Magistral 2507 and later, Mistral Small 4
    "mistral": Markers("[THINK]", "[/THINK]"),
    # Gemma 4; the name of the channel is part of the marker
    "gemma": Markers("<|channel>thought", "<channel|>"),
}
