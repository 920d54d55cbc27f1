"""Streaming text: the pieces are whole characters and join to what decoding at once gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from atlas.tokenizer import Detokenizer, Tokenizer
from atlas.tokenizer.detokenizer import ByteDetokenizer, ByteTable
from atlas.tokenizer.tokenizer import _BYTE_OF
from atlas.weights import open_checkpoint


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's decoder: bytes as <0x..>, words with ▁, one leading space stripped."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁the", "a", "b", "▁a"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


BYTES, FALLBACK = byte_level(), byte_fallback()


def streamed(tokenizer: tokenizers.Tokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def ids_of(text: str) -> list[int]:
    ids: list[int] = BYTES.encode(text).ids
    return ids


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20), size=st.integers(1, 5))
def test_text_streams_in_whole_characters(text: str, size: int) -> None:
    ids = ids_of(text)
    pieces = streamed(BYTES, [ids[at : at + size] for at in range(0, len(ids), size)])
    assert "".join(pieces) == text
    assert all(piece.count("\ufffd") <= text.count("\ufffd") for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 258), max_size=25))
def test_any_ids_join_to_the_whole_decoding(ids: list[int]) -> None:
    assert "".join(streamed(BYTES, [[index] for index in ids])) == BYTES.decode(ids, skip_special_tokens=True)


WORDS = st.sampled_from([256, 257, 258, 259, 260, 261])
UTF8 = st.text(max_size=3).map(lambda text: list(text.encode()))


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.one_of(UTF8, WORDS.map(lambda index: [index])), max_size=12))
def test_byte_tokens_join_to_the_whole_decoding(parts: list[list[int]]) -> None:
    ids = [index for part in parts for index in part]
    assert "".join(streamed(FALLBACK, [[index] for index in ids])) == FALLBACK.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0x7E, 0xFF), WORDS), max_size=25))
def test_invalid_byte_tokens_lose_no_word(ids: list[int]) -> None:
    def words(text: str) -> str:
        return "".join(char for char in text if char in "theab ")

    whole = FALLBACK.decode(ids, skip_special_tokens=True)
    assert words("".join(streamed(FALLBACK, [[index] for index in ids]))) == words(whole)


def test_stream_goes_on_after_a_decoder_took_text_back() -> None:
    # 0x00 is shown, then 0x80 makes the library's decoder turn both into U+FFFD.
    assert streamed(FALLBACK, [[0], [128], [258], [259], [128]]) == ["\x00", "", "\ufffda", "b", "", "\ufffd"]


def test_emoji_appears_when_its_last_byte_does() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([index]) for index in ids_of("a👋é")] == ["a", "", "", "", "👋", "", "é"]
    assert detokenizer.finish() == ""


def test_cut_character_shows_once_at_the_end() -> None:
    ids = ids_of("Hi 😀")
    pieces = streamed(BYTES, [ids[:-1]])
    assert pieces == ["Hi ", "\ufffd"]


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    lone = ids_of("é")[1]
    assert "".join(streamed(BYTES, [[lone], *[[index] for index in ids_of("abc")]])) == "\ufffdabc"


def test_special_and_unknown_ids_give_no_text() -> None:
    end = BYTES.token_to_id("<|end|>")
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(ids) for ids in ([end], ids_of("a"), [5000], ids_of("b"), [], [end])] == [
        "",
        "a",
        "",
        "b",
        "",
        "",
    ]
    assert detokenizer.finish() == ""


def test_finish_without_tokens_is_empty() -> None:
    assert Detokenizer(BYTES).finish() == ""


def bytes_streamed(tokenizer: tokenizers.Tokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = ByteDetokenizer(ByteTable(tokenizer, _BYTE_OF))
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def with_odd_tokens() -> tokenizers.Tokenizer:
    """Added tokens with a space, with letters that spell other bytes, and with none."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["two words", "Ġé", "漢字", "plain"])
    return tokenizer


ODD = with_odd_tokens()


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=25), size=st.integers(1, 4))
def test_spelled_bytes_are_what_the_library_decodes(ids: list[int], size: int) -> None:
    chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert "".join(bytes_streamed(ODD, chunks)) == ODD.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20), size=st.integers(1, 5))
def test_spelled_bytes_stream_as_the_library_does(text: str, size: int) -> None:
    ids = ids_of(text)
    chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
    if "\ufffd" not in text:  # which the library holds back as if it were a part
        assert bytes_streamed(BYTES, chunks) == streamed(BYTES, chunks)
    cut = [*chunks, ids_of("😀")[:2]]
    assert "".join(bytes_streamed(BYTES, cut)) == text + "\ufffd"


def test_a_real_vocabulary(smollm2_path: Path) -> None:
    """Random ids, most of which are no UTF-8, special and unknown ones among them; with special tokens shown, too."""
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_path))
    assert isinstance(tokenizer.stream(), ByteDetokenizer)
    draw = random.Random(3)
    for shown in (frozenset[str](), frozenset({"<|im_start|>x"})):
        library = tokenizer.show(shown)
        for _ in range(300):
            ids = [draw.randrange(300 if draw.random() < 0.5 else tokenizer.vocab_size + 3) for _ in range(40)]
            stream = tokenizer.stream(shown)
            pieces = [stream.push([index]) for index in ids]
            assert "".join(pieces) + stream.finish() == library.decode(ids, skip_special_tokens=True)
    start = tokenizer.stream(frozenset({"<|im_start|>x"})).push([1])
    assert start == "<|im_start|>" and tokenizer.stream().push([1]) == ""
