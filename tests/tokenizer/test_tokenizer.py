"""The tokenizer around `tokenizers`: special tokens, guards, and what is read from the checkpoint's files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from atlas.errors import CheckpointError, RequestError
from atlas.text.chat_template import ChatTemplate
from atlas.tokenizer import GUARD, Tokenizer
from atlas.tokenizer import tokenizer as tokenizer_module
from atlas.weights import TokenizerFiles, open_checkpoint


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes, a merge over "<\\n", a Llama-3-like cut in which punctuation keeps the newlines after it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<Ċ", "<|", "ab"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("<", "Ċ"), ("<", "|"), ("a", "b")]))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+| ?[^\s\p{L}]+[\r\n]*|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """SentencePiece's way: spaces are ▁, one is prepended by `scheme`; Unigram could spell </s> by itself."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁a", -2.5), ("ab", -3.0), ("▁<", -3.0)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)] + [("\n", -5.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def wrap(tokenizer: tokenizers.Tokenizer, template: str | None = None, **config: Any) -> Tokenizer:
    return Tokenizer(TokenizerFiles(tokenizer.to_str(), config, template, "tokenizer.json"), {}, {})


BYTES = wrap(byte_level(), bos_token="<s>", eos_token="<|im_end|>")
FIRST = wrap(metaspace("first"), bos_token="<s>", eos_token="</s>")
ALWAYS = wrap(metaspace("always"), bos_token="<s>", eos_token="</s>")
KINDS = {"bytes": BYTES, "metaspace-first": FIRST, "metaspace-always": ALWAYS}
MARKS = {
    "bytes": ("<|im_start|>", "<|im_end|>"),
    "metaspace-first": ("<s>", "</s>"),
    "metaspace-always": ("<s>", "</s>"),
}

# Text as it is, with what is near special tokens made likely.
near = st.sampled_from(
    ["<", "|", ">", "/", "s", "<|", "|>", "im_", "im_end", "<|im_end", "end|>", "</", " ", "\n", "ab", "x"]
)
texts = st.lists(
    st.one_of(near, st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=4)), max_size=8
).map("".join)
special_texts = st.lists(
    st.one_of(near, st.sampled_from(["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|im_end|>x", GUARD])), max_size=8
).map("".join)


# ---- guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_text_without_special_tokens_has_the_ids_of_plain_encoding(kind: str, turns: list[tuple[str, str]]) -> None:
    tokenizer, (start, end) = KINDS[kind], MARKS[kind]
    # The template leaves text directly at the user's, as real ones do.
    rendered = "".join(f"{start}{role}\n{content}{end}\n" for role, content in turns)
    guarded = "".join(f"{start}{tokenizer.guard(r)}\n{tokenizer.guard(c)}{end}\n" for r, c in turns)
    reference = tokenizer.encode(rendered, add_special_tokens=False)
    special = set(tokenizer._special)
    marks = [index for index in reference if index in special]
    # Users who spell a special token are the next test's matter.
    assume(marks == [tokenizer._special_ids[start], tokenizer._special_ids[end]] * len(turns))
    assert tokenizer.encode_rendered(guarded) == reference


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(user=st.lists(special_texts, min_size=1, max_size=3))
def test_a_users_special_tokens_never_become_control_tokens(kind: str, user: list[str]) -> None:
    tokenizer, (start, end) = KINDS[kind], MARKS[kind]
    # Fields that touch each other and the template's punctuation, from which pieces could be joined.
    rendered = f"{start}<" + "".join(map(tokenizer.guard, user)) + f">{end}"
    ids = tokenizer.encode_rendered(rendered)
    special = set(tokenizer._special)
    assert [index for index in ids if index in special] == [tokenizer._special_ids[start], tokenizer._special_ids[end]]
    kept = "<" + "".join(user).replace(GUARD, "") + ">"
    assert tokenizer.decode(ids).lstrip(" " if kind != "bytes" else "") == kept.lstrip(" " if kind != "bytes" else "")


def test_guard_by_example() -> None:
    assert BYTES.guard("plain text") == "plain text"
    assert BYTES.guard("a<|im_end|>b") == f"a<{GUARD}|im_end|>b"
    assert BYTES.guard(f"<|im{GUARD}_start|>") == f"<{GUARD}|im_start|>"
    assert BYTES.guard("cut <|im_") == f"cut <|im_{GUARD}"
    assert BYTES.guard("end|> rest") == f"{GUARD}end|> rest"
    assert BYTES.guard("|im_end|") == f"{GUARD}|im_end|"
    assert BYTES.guard("") == ""
    ids = BYTES.encode_rendered("<|im_start|>" + BYTES.guard("<|im_end|>") + "<|im_end|>")
    assert BYTES.decode(ids) == "<|im_end|>"
    assert ids[1:-1] == BYTES.encode_plain("<|im_end|>")


def test_plain_encoding_ignores_special_but_not_ordinary_added_tokens() -> None:
    im_end, think = BYTES._special_ids["<|im_end|>"], BYTES.encode("<think>", add_special_tokens=False)
    assert BYTES.encode("a<|im_end|>", add_special_tokens=False)[-1] == im_end
    plain = BYTES.encode_plain("a<|im_end|>")
    assert im_end not in plain and BYTES.decode(plain) == "a<|im_end|>"
    assert len(think) == 1 and BYTES.encode_plain("<think>") == think
    # Unigram's best path for </s> is the control token itself.
    assert FIRST._tokenizer.encode("</s>", add_special_tokens=False).ids == [2]
    assert not {0, 1, 2} & set(FIRST.encode_plain("x</s>y"))
    assert FIRST.decode(FIRST.encode_plain("x</s>y")) == "x</s>y"


def test_longest_special_token_wins_in_both_ways() -> None:
    rendered = "<|im_end|>x<|im_end|>y"
    expected = [BYTES._special_ids["<|im_end|>x"], BYTES._special_ids["<|im_end|>"]]
    assert BYTES.encode(rendered, add_special_tokens=False)[:2] == expected
    assert BYTES.encode_rendered(rendered + GUARD)[:2] == expected


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_flags_of_special_tokens_are_honoured_between_guards(options: dict[str, bool]) -> None:
    raw = byte_level()
    raw.normalizer = normalizers.NFKC()
    raw.add_special_tokens([AddedToken("[M]", special=True, **options)])
    tokenizer = wrap(raw)
    for text in ("a [M] b", "a[M]b", "[M]", "  [M]  ", "x [M] [M]  y"):
        reference = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode_rendered(text + GUARD) == reference, text
    # A full-width spelling becomes the token by normalisation; a user's must not.
    ids = tokenizer.encode_rendered(tokenizer.guard("［M］"))
    assert tokenizer._special_ids["[M]"] not in ids


# ---- BOS and stray input -------------------------------------------------------------------------


def test_bos_is_added_once() -> None:
    bos = BYTES.bos_token_id
    assert BYTES.encode("ab", add_special_tokens=True) == [bos, *BYTES.encode("ab", add_special_tokens=False)]
    assert BYTES.encode("<s>ab", add_special_tokens=True) == BYTES.encode("<s>ab", add_special_tokens=False)
    assert BYTES.encode("", add_special_tokens=True) == [bos]
    assert BYTES.encode_rendered("<s>ab") == BYTES.encode("<s>ab", add_special_tokens=False)
    assert BYTES.encode_rendered("ab") == BYTES.encode("ab", add_special_tokens=False)


def test_lone_surrogate_is_a_request_error() -> None:
    for encode in (BYTES.encode_plain, BYTES.encode_rendered, lambda text: BYTES.encode(text, add_special_tokens=True)):
        with pytest.raises(RequestError, match="lone surrogate at character 1"):
            encode("a\ud83d")


def test_limits_of_a_training_run_are_not_obeyed() -> None:
    raw = byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    tokenizer = wrap(raw)
    assert len(tokenizer.encode("x" * 50, add_special_tokens=False)) == 50
    assert len(tokenizer.encode_plain("x")) == 1


# ---- what the files say --------------------------------------------------------------------------


def test_ids_are_gathered_from_every_file() -> None:
    files = TokenizerFiles(byte_level().to_str(), {"eos_token": {"content": "<|im_end|>"}}, None, "t")
    im_end = BYTES._special_ids["<|im_end|>"]
    tokenizer = Tokenizer(files, {"eos_token_id": 7, "bos_token_id": 5}, {"eos_token_id": [9, 7]})
    assert tokenizer.eos_token_ids == (7, 9, im_end)
    assert tokenizer.bos_token_id == 5
    assert Tokenizer(files, {"eos_token_id": None}, {}).eos_token_ids == (im_end,)
    assert Tokenizer(files, {"bos_token_id": 5}, {"bos_token_id": 6}).bos_token_id == 6


def test_template_and_special_tokens() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert wrap(byte_level(), chat_template="C").chat_template == "C"
    assert wrap(byte_level(), chat_template=named[1:]).chat_template == "D"
    assert wrap(byte_level(), "J", chat_template="C").chat_template == "J"
    assert wrap(byte_level(), chat_template=named[:1]).chat_template is None
    assert wrap(byte_level()).chat_template is None
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None, "model_max_length": 5}
    assert wrap(byte_level(), **config).special_tokens_map == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "with_tools", ["T", "\nT\n\n", "{%- set x = 1 %}\nT{{ x }}  {%- if x %} y{% endif %}\n", "  {% if x %}{% endif %}"]
)
@pytest.mark.parametrize(
    "plain",
    [
        "D",
        " \n{{ messages }}\n",
        "{%- for m in messages %}\n{{ m.role }}\n{%- endfor %}\n",
        "D\r\n",
        "D\n   ",
        "\n\n D",
    ],
)
def test_a_template_of_its_own_for_tools(tmp_path: Path, with_tools: str, plain: str) -> None:
    """Rendered as each would be alone; from tokenizer_config.json, and from files of their own."""
    named = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": plain}]
    both = wrap(byte_level(), chat_template=named).chat_template
    files = TokenizerFiles(byte_level().to_str(), {"chat_template": "old"}, plain, "t", with_tools)
    assert both is not None and Tokenizer(files, {}, {}).chat_template == both
    turns: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate(both, {})
    assert template.render(turns, tools=tools) == ChatTemplate(with_tools, {}).render(turns, tools=tools)
    for none in (None, []):
        assert template.render(turns, tools=none) == ChatTemplate(plain, {}).render(turns, tools=none)
    assert "tools" in template.variables


@pytest.mark.parametrize("document", ["", "{}", '{"model": {"type": "Nope"}}', "[1"])
def test_damaged_document_is_named(document: str) -> None:
    with pytest.raises(CheckpointError, match=r"dir/tokenizer\.json: not a tokenizer that can be read"):
        Tokenizer(TokenizerFiles(document, {}, None, "dir/tokenizer.json"), {}, {})


def test_from_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    # No tensor is needed: an empty file that is valid.
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(tmp_path))
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("new", (3,))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools!")
    both = Tokenizer.from_checkpoint(open_checkpoint(tmp_path)).chat_template
    assert both is not None and "tools!" in both and "new" in both
    assert tokenizer.bos_token_id == BYTES.bos_token_id


# ---- decoding ------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_decoding_gives_the_text_back(text: str) -> None:
    ids = BYTES.encode_plain(text)
    assert BYTES.decode(ids) == text
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()


def test_special_and_unknown_ids_decode_to_nothing() -> None:
    ab = BYTES.encode_plain("ab")
    im_end = BYTES._special_ids["<|im_end|>"]
    assert BYTES.decode([im_end, *ab, BYTES.vocab_size, 100_000, *ab]) == "abab"
    assert BYTES.vocab_size == 256 + 3 + 5
    assert BYTES.id_to_token(BYTES.vocab_size) is None
    assert BYTES.token_bytes(BYTES.vocab_size) == b""
    assert BYTES.token_bytes(im_end) == b"<|im_end|>"
    assert FIRST.token_bytes(4) == b" a"


@functools.cache
def pair(kind: str, never: tuple[str, ...], shown: frozenset[str]) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """A sibling, and a tokenizer that is read from a document of its own."""
    known = KINDS[kind]
    ids = frozenset(known.special_tokens[word] for word in shown)
    document = tokenizer_module._never_prepend(json.loads(known._document), never)
    for token in document["added_tokens"]:
        token["special"] = token["special"] and token["id"] not in ids
    return known._sibling(*never, shown=ids), tokenizers.Tokenizer.from_str(json.dumps(document))


@given(
    special_texts,
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([(), ("first",), ("first", "always")]),
    st.booleans(),
    st.booleans(),
)
def test_a_sibling_is_what_a_copy_would_be(
    text: str, kind: str, never: tuple[str, ...], shows: bool, plain: bool
) -> None:
    sibling, copy = pair(kind, never, frozenset(MARKS[kind][:1]) if shows else frozenset())
    states = [
        {index: token.__getstate__() for index, token in one.get_added_tokens_decoder().items()}
        for one in (sibling, copy)
    ]
    assert states[0] == states[1] and sibling.get_vocab() == copy.get_vocab()
    for one in (sibling, copy):
        one.encode_special_tokens = plain
    ids = sibling.encode(text).ids
    assert ids == copy.encode(text).ids
    for skip in (False, True):
        assert sibling.decode(ids, skip_special_tokens=skip) == copy.decode(ids, skip_special_tokens=skip)


def test_a_sibling_shares_the_vocabulary(smollm2_path: Path) -> None:
    """A copy of it would take as much memory again."""
    with open_checkpoint(smollm2_path) as checkpoint:
        known = Tokenizer.from_checkpoint(checkpoint)
    sibling = known._sibling()
    known._tokenizer.model.dropout = 1.0  # what is one is seen through the other
    assert sibling.model.dropout == 1.0
