"""Token ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence

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


class ByteDetokenizer:
    """The same for tokenizers whose tokens are spelled bytes, GPT-2's way. There a token stands for its bytes whatever
    is around it, so a table and an incremental UTF-8 decoder do it, several times as fast.
    """

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """As `Detokenizer.push`."""
        table = self._table
        if len(token_ids) == 1:
            return self._decoder.decode(table[token_ids[0]])
        return self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        """As `Detokenizer.finish`."""
        return self._decoder.decode(b"", True)


class ByteTable(dict[int, bytes]):
    """What each token of such a tokenizer stands for: nothing if it is special or unknown. Filled as tokens come."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, byte_of: Mapping[str, int], shown: Collection[int] = ()
    ) -> None:
        """shown: ids of special tokens that stand for their text."""
        super().__init__()
        self._tokenizer, self._byte_of = tokenizer, byte_of
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token.content for index, token in added if token.special and index not in shown)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            made = b""
        else:
            try:
                made = bytes([self._byte_of[character] for character in token])
            except KeyError:  # an added token, such as one with a space: it stands for itself
                made = token.encode()
        self[token_id] = made
        return made
