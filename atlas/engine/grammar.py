"""Grammars as matchers: what a text in a grammar may go on with, in a model's tokens. By llguidance.

Compiling is bounded in memory and time by `LIMITS`: it spends fuel, and runs out of it with an error. It releases the
interpreter lock; making a `Compiler`'s tokenizer does not, and takes about 0.3 s for 50,000 tokens and 3 s for
260,000.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from atlas.engine.sampling import Grammar
from atlas.errors import AtlasError, RequestError

# The libraries are imported where they are used: a start does not wait for them.
if TYPE_CHECKING:
    import llguidance

MAX_TEXT_BYTES = 256 << 10
MAX_CHOICES = 10_000
CACHED, CACHED_CHARACTERS = 32, 1 << 20
"""Compiled grammars that are kept, the last used ones, and characters of their texts: compiled, one takes about 60
times as many bytes. What is followed adds to that: up to 50 MB a lexer, where a grammar is made to have as many states
as it may."""

_LEXERS, _SECONDS = 32, 0.25
"""Lexers that one grammar may have, of twice as many in all, and the processor time that making them may take: 1 to 3
ms each for a usual schema. With one for each of 128 sequences, masks take twice the time at first."""

WHITESPACE = r" |\n(?: {0,32}|\t{0,8})"
"""What may stand between two parts of a JSON text: nothing, a space, or a new line with indentation. Bounded, because
small models that are allowed to write whitespace without end do so."""

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_PLAIN}{{1,{length}}}" for length in (1, 2, 3, 4, 6, 8, 10, 15, 30)),
    f"{_PLAIN}+",
]
"""Groups of tokens that llguidance allows at once, where the grammar's next part takes all texts of a group's pattern;
other tokens it looks up one by one. It has the whitespace, the lengths 10 and 30 and the last group by itself. With
128,256 tokens a string of at most 30 characters then takes 0.2 ms a mask, and 1.3 ms within ten characters of its end;
with the other lengths 0.02, and 0.2 to 0.9 ms."""

_SALT = secrets.token_hex(8)
_LARK = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|<(?P<special>[^<>\[\s][^<>\s]*)>""", re.DOTALL)
"""Of a Lark grammar: comments, strings, regular expressions, and names of special tokens, which are none of these."""

_CLASS = re.compile(r"\\.|\[\^", re.DOTALL)
_JSON: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 50,000 are spent in a millisecond
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of 0.2 to 1 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


@dataclasses.dataclass
class _Compiled:
    """A grammar. Copies of a matcher share its lexer and wait for each other there, so there may be several.

    lexers: number, matcher at the beginning, and whose copies are in use.  seconds: what making them took.
    """

    lexers: list[tuple[int, llguidance.LLMatcher, WeakSet[Any]]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def may_have_another(self, size: int) -> bool:
        """Whether one more lexer is worth its time and memory. size: characters of the grammar."""
        count = len(self.lexers) + 1
        seconds = self.seconds * count / (count - 1)
        return count <= _LEXERS and seconds < _SECONDS and size * count < CACHED_CHARACTERS // 4


class Compiler:
    """Matchers of grammars over one tokenizer. May be used by several threads.

    tokenizer: gives the llguidance tokenizer, when it is first needed.
    """

    def __init__(self, tokenizer: Callable[[], llguidance.LLTokenizer]) -> None:
        self._make = tokenizer
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._failed = False
        self._cache: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._cached_characters = 0
        self._numbers = itertools.count(1)
        self._lock, self._making = threading.Lock(), threading.Lock()

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer, made now if it was not. Its vocabulary is the tokenizer's own: a model's may be larger."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._make()
            return self._tokenizer

    @property
    def end(self) -> int | None:
        """The token that a matcher allows where its text may end; None if that token has a text."""
        token = self.tokenizer.eos_token
        return token if self.tokenizer.is_special_token(token) else None

    @property
    def ready(self) -> bool:
        """Nothing is left for `prepare` to do."""
        return self._tokenizer is not None or self._failed

    def prepare(self) -> None:
        """Make the tokenizer, if it can be; why it cannot is told to whoever needs it."""
        try:
            _ = self.tokenizer
        except (AtlasError, ValueError):
            self._failed = True

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the beginning of `grammar`, the caller's own.

        Raises:
            RequestError: what is wrong with it, or that it is too large or too expensive. `where` is "grammar".
        """
        return self.lease(grammar, None)[0]

    def lease(self, grammar: Grammar, user: object | None) -> tuple[llguidance.LLMatcher, int]:
        """A `matcher`, and the number of its lexer, which it shares with few that are in use, where that is cheap.

        user: as long as this lives, the matcher is in use.
        """
        with self._lock:
            if (compiled := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                number, matcher, users = min(compiled.lexers, key=lambda lexer: len(lexer[2]))
                if not users or not compiled.may_have_another(len(grammar.text)):
                    if user is not None:
                        users.add(user)
                    return matcher.deep_copy(), number
        began = time.thread_time()
        matcher = self._compile(grammar)
        seconds = time.thread_time() - began
        with self._lock:
            compiled = self._cache.setdefault(grammar, _Compiled())
            number = next(self._numbers)
            compiled.lexers.append((number, matcher, WeakSet(() if user is None else (user,))))
            compiled.seconds += seconds
            self._cached_characters += len(grammar.text)
            while (
                len(self._cache) > CACHED
                or self._cached_characters > CACHED_CHARACTERS
                or sum(len(each.lexers) for each in self._cache.values()) > 2 * _LEXERS
            ):
                dropped, old = self._cache.popitem(last=False)
                self._cached_characters -= len(dropped.text) * len(old.lexers)
            return matcher.deep_copy(), number

    def renew(self, grammar: Grammar, user: object | None) -> tuple[llguidance.LLMatcher, int] | None:
        """As `lease`, with a new lexer. None: it is not known to be made soon."""
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is None or compiled.seconds > _SECONDS * len(compiled.lexers):
                return None
        self.forget(grammar)
        return self.lease(grammar, user)

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for whoever wants it next: one of its lexers is full, of what all that share it have seen."""
        with self._lock:
            if (old := self._cache.pop(grammar, None)) is not None:
                self._cached_characters -= len(grammar.text) * len(old.lexers)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        import llguidance

        compiled = llguidance.LLMatcher(
            self.tokenizer, source(grammar), log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
        )
        if compiled.is_error():
            fault = _one_line(compiled.get_error()).replace(_SALT, "")
            raise RequestError("grammar", fault, f"a {grammar.syntax} that can be followed")
        return compiled


def source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it.

    Raises:
        RequestError: it is too large, or no text of its syntax. What `LLMatcher` finds is not looked for.
    """
    if (size := len(grammar.text.encode(errors="surrogatepass"))) > MAX_TEXT_BYTES:
        raise RequestError("grammar", f"{size} bytes", f"at most {MAX_TEXT_BYTES}")
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        match grammar.syntax:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(_without_escaped(grammar.text), overrides=_JSON)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                return LLMatcher.grammar_from_lark(_alternatives(grammar.text))
            case "gbnf":
                return LLMatcher.grammar_from_lark(_salted(gbnf_to_lark(grammar.text)))
            case _:
                return LLMatcher.grammar_from_lark(_salted(grammar.text))
    except GbnfToLarkError as error:
        raise RequestError("grammar", _one_line(str(error)), "a grammar as llama.cpp writes it") from None
    except (ValueError, RecursionError, UnicodeEncodeError) as error:
        raise RequestError("grammar", _one_line(str(error)), f"a {grammar.syntax}") from None


def compiler_of(path: Path) -> Compiler:
    """Of the checkpoint at `path`, whose tokenizer is read when a grammar is first asked for.

    Its methods raise CheckpointError, then, where it has none that can be used.
    """

    def read() -> llguidance.LLTokenizer:
        from atlas.tokenizer.tokenizer import end_ids
        from atlas.weights import open_checkpoint

        with open_checkpoint(path) as checkpoint:
            ends = end_ids(checkpoint.generation_config, checkpoint.config)
            return tokenizer_of(checkpoint.tokenizer_files().tokenizer_json, ends)

    return Compiler(read)


def tokenizer_of(document: str, ends: Iterable[int]) -> llguidance.LLTokenizer:
    """Of a `tokenizers` document, with one of the model's end tokens: where a matcher allows it, its text may end."""
    import llguidance

    document = _hide_special_tokens(document)
    first = next(iter(ends), None)
    try:
        return llguidance.LLTokenizer(document, eos_token=first, slices=_SLICES)
    except ValueError:  # an id that the tokenizer does not have
        return llguidance.LLTokenizer(document, slices=_SLICES)


def hidden(special: str) -> str:
    """The name that a special token has in llguidance.

    Where a grammar leaves one text only, llguidance takes the tokens that the tokenizer makes of it, and a tokenizer
    makes a special token of that token's text, which no matcher accepts. So the names are such as no grammar has.
    """
    return f"<{_SALT}{special[1:]}" if special.startswith("<") else _SALT + special


def _hide_special_tokens(document: str) -> str:
    """A `tokenizers` document in which special tokens have the names that `hidden` gives them."""
    tokenizer = json.loads(document)
    texts = {token["content"] for token in tokenizer.get("added_tokens") or () if token.get("special")} - {""}
    for token in tokenizer.get("added_tokens") or ():
        if token["content"] in texts:
            token["content"] = hidden(token["content"])
    model = tokenizer["model"]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {hidden(text) if text in texts else text: index for text, index in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pieces and their scores
        model["vocab"] = [[hidden(text) if text in texts else text, score] for text, score in vocab]
    if model.get("unk_token") in texts:
        model["unk_token"] = hidden(model["unk_token"])
    tokenizer["post_processor"] = None  # it names special tokens, and matchers want none around a text
    return json.dumps(tokenizer)


def _salted(lark: str) -> str:
    return _LARK.sub(lambda found: f"<{_SALT}{found['special']}>" if found["special"] else found[0], lark)


def _without_escaped(schema: str) -> str:
    """The schema with patterns that mean in llguidance what they say.

    It lets a repeated class of characters that has all control characters match any escape of JSON, also that of a
    quote or a backslash which the class leaves out, as `[^"]+` does. So negated classes leave out the form feed, too.
    """
    return json.dumps(mended(json.loads(schema))) if "[^" in schema else schema


def mended(schema: Any) -> Any:
    """A schema, decoded, as `source` compiles it."""
    if isinstance(schema, list):
        return [mended(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for name, value in schema.items():
        if name in ("const", "enum", "default", "examples"):
            result[name] = value
        elif name == "pattern" and isinstance(value, str):
            result[name] = _mended_pattern(value)
        elif name == "patternProperties" and isinstance(value, dict):
            result[name] = {_mended_pattern(pattern): mended(inner) for pattern, inner in value.items()}
        else:
            result[name] = mended(value)
    return result


def _mended_pattern(pattern: str) -> str:
    return _CLASS.sub(lambda found: found[0] + r"\f" if found[0] == "[^" else found[0], pattern)


def _alternatives(text: str) -> str:
    """A JSON array of strings as a Lark grammar. Lark's strings are JSON's."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("grammar", repr(text)[:60], "a JSON array of at least one string")
    if len(choices) > MAX_CHOICES:
        raise RequestError("grammar", f"{len(choices)} choices", f"at most {MAX_CHOICES}")
    words = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices) if choice]
    # One word of the language, and no rules: thousands would be too many to follow at once.
    start = " | ".join(["CHOICE"] * bool(words) + ['""'] * ("" in choices))
    return f"start: {start}\n" + (f"CHOICE: {' | '.join(words)}" if words else "")


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 400 else words[:397] + "..."
