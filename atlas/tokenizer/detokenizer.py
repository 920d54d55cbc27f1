"""Token ids to text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one growing sequence, piece by piece.

    A character whose bytes come in several tokens is held back until it is whole, so U+FFFD appears
    only where the model wrote bytes that are no UTF-8. The pieces joined are what decoding all ids at
    once gives. Special tokens and ids that the tokenizer does not know are skipped.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = ""
        self._broken = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that became complete; "" while a character is still in parts."""
        pieces = [self._push_one(token_id) for token_id in token_ids]
        text = "".join(pieces)
        self._sent += text
        return text

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._broken:
            return ""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # The library's stream gives up for good when a decoder rewrites text that it has already
            # seen. What was sent stands; finish() adds the rest.
            self._broken = True
            return ""

    def finish(self) -> str:
        """The text still held back, at the end of the sequence; an unfinished character shows as U+FFFD."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest = text[len(self._sent) :] if text.startswith(self._sent) else ""
        self._sent += rest
        return rest
