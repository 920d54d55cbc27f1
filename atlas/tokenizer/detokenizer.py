"""Token ids to text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one growing sequence, piece by piece.

    A character whose bytes come in several tokens is held back until it is whole, so U+FFFD appears
    only where the model wrote bytes that are no UTF-8. The pieces joined are what decoding all ids at
    once gives, except where a decoder takes back characters it has already given because invalid bytes
    follow (SentencePiece's byte tokens); text once sent stands. Use this for answers that are not
    streamed too, so that both read the same. Special tokens and unknown ids are skipped.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent: list[str] = []  # joined at the end only: that takes as long as the text is
        self._held_from = 0  # index into _ids of the first id whose text has not been sent

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that became complete; "" while a character is still in parts."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # The library gives up when the decoder rewrites text that was already sent. What is held
            # goes through a new stream: its first id is a byte, so it needs no context.
            self._stream = DecodeStream(skip_special_tokens=True)
            held = self._ids[self._held_from :]
            text = "".join([self._stream.step(self._tokenizer, index) or "" for index in held])
        if text:
            self._held_from = len(self._ids)
            self._sent.append(text)
        return text

    def finish(self) -> str:
        """The text still held back, at the end of the sequence; an unfinished character shows as U+FFFD."""
        if self._held_from == len(self._ids):
            return ""
        text, sent = self._tokenizer.decode(self._ids, skip_special_tokens=True), "".join(self._sent)
        if text.startswith(sent):
            rest: str = text[len(sent) :]
        else:
            rest = self._tokenizer.decode(self._ids[self._held_from :], skip_special_tokens=True)
        self._sent.append(rest)
        self._held_from = len(self._ids)
        return rest
