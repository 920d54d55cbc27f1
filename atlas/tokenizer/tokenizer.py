"""One model's tokenizer: `tokenizers` plus what a server needs around it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import tokenizers

from atlas.errors import CheckpointError, RequestError
from atlas.tokenizer.detokenizer import ByteDetokenizer, ByteTable, Detokenizer
from atlas.weights.checkpoint import Checkpoint, TokenizerFiles

# A Unicode noncharacter, reserved for use inside a program: no text means anything by it.
GUARD = "\ufdd0"

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encode, decode and stream for one checkpoint.

    vocab_size: one more than the largest id that has a text; a model's logits may have more rows.
    bos_token_id: None when the model has none.
    eos_token_ids: every id that ends a turn by generation_config, config or tokenizer_config, ascending.
    chat_template: Jinja source; chat_template.jinja wins over tokenizer_config.json; None when absent. Where the model
        has a template of its own for requests with tools, it is both, and `tools` decides.
    special_tokens_map: bos_token, eos_token, ... -> text, for templates.

    Raises:
        CheckpointError: the tokenizer document is damaged or of a kind that `tokenizers` does not know.
    """

    def __init__(self, files: TokenizerFiles, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
        self._document = files.tokenizer_json
        self._showing: dict[frozenset[int], tokenizers.Tokenizer] = {}
        self._in_words: dict[frozenset[str], frozenset[int]] = {}
        self._tables: dict[frozenset[int], ByteTable] = {}
        self._source = files.source
        self._tokenizer = self._load(files.tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {index: token for index, token in added.items() if token.special and token.content}
        largest = max(added, default=-1)
        self.vocab_size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), largest + 1)
        self.special_tokens_map = {
            role: text for role in _ROLES if (text := _token_text(files.tokenizer_config.get(role))) is not None
        }
        self.chat_template = _template_of(files)
        bos = self._id_of("bos_token")
        for source in (generation_config, config):
            bos = source.get("bos_token_id") if bos is None else bos
        self.bos_token_id: int | None = bos
        end = self._id_of("eos_token")
        ends = {*end_ids(generation_config, config), *(() if end is None else (end,))}
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(ends))
        self._special_ids = {token.content: index for index, token in self._special.items()}
        self._guards = _Guards(token.content for token in self._special.values())
        # A normaliser could turn other text into such a token, which guarding cannot see.
        self._always_split = any(token.normalized for token in self._special.values())

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint. Raises CheckpointError when it has none that can be used."""
        return cls(checkpoint.tokenizer_files(), checkpoint.config, checkpoint.generation_config)

    def _load(self, document: str) -> tokenizers.Tokenizer:
        try:
            tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # The library raises bare Exception for every fault in a document.
            raise CheckpointError(
                self._source,
                f"not a tokenizer that can be read ({error})",
                "a `tokenizers` document",
                "download it again",
            ) from None
        # A document may carry the limits of a training run; a prompt is never cut or padded in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens_map.get(role)
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text -> id of the tokens that are no text: control tokens, which decoding skips."""
        return self._special_ids

    # ---- encoding ------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which special tokens are recognised.

        add_special_tokens: add what the model's tokenizer adds around a text, usually BOS; a BOS that
            the text already begins with is not doubled.

        Raises:
            RequestError: the text holds a lone surrogate, which no encoding of Unicode has.
        """
        ids = self._encode(self._tokenizer, text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which the characters of a special token are characters like any others."""
        return self._encode_text(self._plain, text)

    def guard(self, text: str) -> str:
        """Mark a user's text before it is put into a chat template, for `encode_rendered`.

        Every special token in it is broken by an invisible noncharacter, and so is a beginning or an
        end that could complete one with what the template puts beside it. The noncharacter is first
        removed from the text itself.
        """
        return self._guards.guard(text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template whose user strings went through `guard`.

        The template's special tokens become control tokens, a user's do not, and no character of
        either is lost. Nothing is added around: the template writes BOS where the model wants it.
        Without a user's special token the ids are those of ``encode(rendered, add_special_tokens=False)``.
        """
        if GUARD not in rendered and not self._always_split:
            return self.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        at, strip_left = 0, False
        for match in self._special_pattern.finditer(rendered):
            index = self._special_ids[match[0]]
            token = self._special[index]
            segment = rendered[at : match.start()].replace(GUARD, "")
            segment = segment.lstrip() if strip_left else segment
            ids += self._segment(segment.rstrip() if token.lstrip else segment, first=at == 0)
            ids.append(index)
            at, strip_left = match.end(), token.rstrip
        tail = rendered[at:].replace(GUARD, "")
        return ids + self._segment(tail.lstrip() if strip_left else tail, first=at == 0)

    def _segment(self, text: str, *, first: bool) -> list[int]:
        return self._encode_text(self._plain if first else self._plain_continued, text)

    def _encode_text(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        ids = self._encode(tokenizer, text, False)
        if self._special.keys().isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) can spell a special token with the model itself. Cutting the
        # text inside it leaves nothing that could.
        first, *others = self._guards.break_inside(text).split(GUARD)
        ids = self._encode(tokenizer, first, False)
        for piece in others:
            ids += self._encode(self._plain_bare, piece, False)
        return [index for index in ids if index not in self._special]

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("text", f"a lone surrogate at character {error.start}", "Unicode text") from None
        # The batch form releases the interpreter lock, and "fast" leaves out offsets that nobody reads.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def warm_up(self) -> None:
        """Make all that is made at its first use, for which a request, and with it all of a server, would wait."""
        for name, value in vars(Tokenizer).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """The document without its vocabulary."""
        parts = msgspec.json.decode(
            self._document, type=dict[str, msgspec.Raw]
        )  # of megabytes: nothing is made of most
        empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
        return empty | {name: msgspec.json.decode(part) for name, part in parts.items() if name not in empty}

    def _sibling(self, *never: str, shown: frozenset[int] = frozenset()) -> tokenizers.Tokenizer:
        """Another tokenizer of the same vocabulary, which is not copied: that of a large one takes a second and 200 MB.

        never: schemes by which no space is prepended.  shown: special tokens that are none.
        """
        sibling = self._load(json.dumps(_never_prepend(self._parts, never)))
        sibling.model = self._tokenizer.model
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        sibling.add_tokens([_as_text(token) if index in shown else token for index, token in added])
        return sibling

    def _plain_sibling(self, *never: str) -> tokenizers.Tokenizer:
        # An object of its own: the switch is state, and other threads may be encoding.
        tokenizer = self._sibling(*never)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return self._plain_sibling()

    @cached_property
    def _plain_continued(self) -> tokenizers.Tokenizer:
        """For text after a special token: some tokenizers prepend a space, but only at the very start."""
        return self._plain_sibling("first")

    @cached_property
    def _plain_bare(self) -> tokenizers.Tokenizer:
        """For the rest of a text that was cut: no space is prepended at all."""
        return self._plain_sibling("first", "always")

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        # Longest first: the library prefers the longest token that begins at a place.
        tokens = sorted(self._special.values(), key=lambda token: -len(token.content))
        alternatives = []
        for token in tokens:
            pattern = re.escape(token.content)
            if len(token.content) == 1:
                # It has no inside to break, so its guard stands after it.
                pattern += f"(?!{GUARD})"
            alternatives.append(rf"(?<!\w){pattern}(?!\w)" if token.single_word else pattern)
        return re.compile("|".join(alternatives) or r"(?!)")

    # ---- decoding ------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids without a text are skipped, and special tokens unless they are wanted."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, shown: frozenset[str] = frozenset()) -> Detokenizer | ByteDetokenizer:
        """A detokenizer for one sequence that is being generated.

        shown: words of formats of reasoning and tool calls; special tokens that they consist of are not skipped.
        """
        if not self._is_only_byte_level:
            return Detokenizer(self.show(shown))
        ids = self._special_in(shown)
        if (table := self._tables.get(ids)) is None:
            table = self._tables[ids] = ByteTable(self._tokenizer, _BYTE_OF, ids)
        return ByteDetokenizer(table)

    def _special_in(self, words: frozenset[str]) -> frozenset[int]:
        return frozenset(
            index for index, token in self._special.items() if any(token.content in word for word in words)
        )

    def show(self, words: frozenset[str]) -> tokenizers.Tokenizer:
        """The tokenizer to whose decoder the special tokens in these words are text. Made once for each set."""
        if not (ids := self._special_in(words)):
            return self._tokenizer
        if (made := self._showing.get(ids)) is None:
            made = self._showing[ids] = self._sibling(shown=ids)
        return made

    def id_to_token(self, index: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        token: str | None = self._tokenizer.id_to_token(index)
        return token

    def token_bytes(self, index: int) -> bytes:
        """The bytes that one token stands for, possibly part of a character; b"" for an unknown id."""
        token = self.id_to_token(index)
        if token is None:
            return b""
        if index in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_only_byte_level(self) -> bool:
        return (self._parts.get("decoder") or {}).get("type") == "ByteLevel"

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self._parts.get("decoder"))


class _Guards:
    """Finds and breaks special tokens in a user's text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = sorted(tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self.longest = max(map(len, self.tokens), default=0)
        self.beginnings = {token[:length] for token in self.tokens for length in range(1, len(token))}
        self.endings = {token[length:] for token in self.tokens for length in range(1, len(token))}

    def break_inside(self, text: str) -> str:
        """A guard in every special token of `text`, also where they overlap."""
        result, at = [], 0
        while match := self.pattern.search(text, at):
            result.append(text[at : match.start() + 1])
            at = match.start() + 1
            result.append(GUARD)
        return "".join(result) + text[at:]

    def guard(self, text: str) -> str:
        text = text.replace(GUARD, "")
        lengths = range(1, min(self.longest, len(text) + 1))
        begins = any(text[:length] in self.endings for length in lengths)
        ends = any(text[-length:] in self.beginnings for length in lengths)
        # A text that lies wholly inside a token could be completed from both sides.
        inside = 0 < len(text) < self.longest and any(text in token for token in self.tokens)
        return GUARD * (begins or inside) + self.break_inside(text) + GUARD * ends


def end_ids(*configurations: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of every configuration's `eos_token_id`, one id or several, ascending; what is no id is left out."""
    values = [source.get("eos_token_id") for source in configurations]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(sorted({item for item in flat if type(item) is int and item >= 0}))  # not `true`, which is an int too


def _token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json spells it: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of(files: TokenizerFiles) -> str | None:
    template, with_tools = files.tokenizer_config.get("chat_template"), None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template, with_tools = named.get("default"), named.get("tool_use")
    if files.chat_template:
        template, with_tools = files.chat_template, files.tool_template
    if not isinstance(template, str) or not template:
        return None
    if not isinstance(with_tools, str) or not with_tools:
        return template
    # Each stands as it would alone: a break behind a tag is dropped, as is one at a template's end; the empty text
    # keeps spaces that would be dropped before a tag.
    tools, plain = (re.sub(r"(\r\n|\r|\n)\Z", "", text) for text in (with_tools, template))
    return f"{{% if tools %}}\n{tools}{{{{ '' }}}}{{% else %}}\n{plain}{{{{ '' }}}}{{% endif %}}"


def _as_text(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _never_prepend(document: Any, schemes: Sequence[str]) -> Any:
    """The same document in which a space that one of `schemes` prepends is never prepended."""
    if isinstance(document, dict):
        return {
            key: "never" if key == "prepend_scheme" and value in schemes else _never_prepend(value, schemes)
            for key, value in document.items()
        }
    return [_never_prepend(value, schemes) for value in document] if isinstance(document, list) else document


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }


_BYTE_OF = _byte_alphabet()
