"""Compiles grammars in a process of its own, which can be killed: `python -m atlas.serve.grammar_worker`.

Nothing bounds how long llguidance takes over some regular expressions, and nothing interrupts it. So what a request
asks for is compiled here first, over a tokenizer that has only bytes and the model's special tokens; the engine
compiles what has passed. Frames on stdin and stdout: a little-endian uint32 length, then msgpack. The first is
`Vocabulary`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from atlas.engine.grammar import Compiler, hidden
from atlas.engine.sampling import Grammar
from atlas.errors import RequestError

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 2 << 30
"""Address space of the process: a grammar that takes more ends it, and is refused."""
MAX_PLACES = 256
"""Subschemas that are looked at for the one that is at fault."""

_ONE = ("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "additionalItems")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_UNIMPLEMENTED = "Unimplemented keys: "
_SHARED = ("$defs", "definitions")


class Vocabulary(msgspec.Struct, frozen=True):
    """tokens: of the model's logits.  special: the special tokens, text -> id."""

    tokens: int
    special: dict[str, int]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a grammar; "" if nothing is. path: of the subschema at fault, as "properties.a.items"."""

    error: str = ""
    path: str = ""


def judge(compiler: Compiler, grammar: Grammar) -> Verdict:
    """Compile a grammar, and take its first step."""
    try:
        matcher = compiler.matcher(grammar)
    except RequestError as error:
        if grammar.syntax != "json_schema":
            return Verdict(error.found)
        with contextlib.suppress(ValueError, RecursionError):
            return _at_fault(compiler, json.loads(grammar.text), error.found)
        return Verdict(error.found)
    allowed = matcher.compute_logit_bias().find(200)
    if allowed >= 0 and not matcher.is_error():
        matcher.consume_token(allowed)
    if matcher.is_error():  # it has no text, as where a schema refers to itself, or is too large
        return Verdict(" ".join(matcher.get_error().replace("<non-verbose/>", "").split()) or "no text")
    return Verdict()


def _at_fault(compiler: Compiler, schema: Any, message: str) -> Verdict:
    """The innermost subschema that is wrong by itself, the keyword of it without which it is not, and why."""
    shared = {name: schema[name] for name in _SHARED if isinstance(schema, dict) and name in schema}
    path, left = "", MAX_PLACES

    def wrong(part: dict[str, Any]) -> str:
        """What is wrong with a subschema; "" if nothing is."""
        nonlocal left
        left -= 1
        try:
            compiler.matcher(Grammar("json_schema", json.dumps({**shared, **part})))
        except RequestError as error:
            return error.found
        return ""

    inside = True
    while inside and left > 0:
        inside = False
        for name, part in _parts(schema):
            if left > 0 and (found := wrong(part)):
                path, schema, message, inside = _joined(path, name), part, found, True
                break
    # What a schema is about comes last: without it nearly anything is right.
    for keyword in sorted(schema, key=("properties", "type").__contains__) if isinstance(schema, dict) else ():
        if left > 0 and keyword not in _SHARED and not wrong({k: v for k, v in schema.items() if k != keyword}):
            path = _joined(path, keyword)
            message = "a keyword that cannot be enforced" if message.startswith(_UNIMPLEMENTED) else message
            break
    return Verdict(message, path)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The subschemas right inside that are objects, with what each is called. `items` may be one, or a list of them."""
    if not isinstance(schema, dict):
        return
    for name in _ONE:
        if isinstance(schema.get(name), dict):
            yield name, schema[name]
    for name in (*_MANY, "items"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}[{i}]", inner) for i, inner in enumerate(schema[name]) if isinstance(inner, dict))
    if isinstance(schema.get("items"), dict):
        yield "items", schema["items"]
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}.{key}", inner) for key, inner in schema[name].items() if isinstance(inner, dict))


class _Bytes:
    """A tokenizer of bytes and special tokens, as llguidance takes one."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = {text: index for text, index in vocabulary.special.items() if 0 <= index < vocabulary.tokens}
        taken = {*special.values()}
        size = max(vocabulary.tokens, 257 + len(taken))  # a tiny model's vocabulary may not have all bytes
        free = (index for index in range(size) if index not in taken)
        self.tokens = [b""] * size
        for byte in range(256):
            self.tokens[next(free)] = bytes([byte])
        for text, index in special.items():
            self.tokens[index] = hidden(text).encode()
        self.eos_token_id = next(free) if not taken else min(taken)
        if not taken:
            self.tokens[self.eos_token_id] = b"<end>"
        self.special_token_ids = sorted(taken) or [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text]


def compiler_of(vocabulary: Vocabulary) -> Compiler:
    """A compiler that finds what is wrong with a grammar, but knows no tokens of several bytes."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(vocabulary)), slices=[])
    return Compiler(lambda: tokenizer)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


def main() -> None:
    """Serve until stdin ends. systemd stops a service by a signal to this process too, but what it is asked is still to
    be answered."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    compiler = compiler_of(msgspec.msgpack.decode(first, type=Vocabulary))
    _answer(sink, Verdict())  # ready: only from now on does time count
    while (frame := read_frame(source)) is not None:
        _answer(sink, judge(compiler, msgspec.msgpack.decode(frame, type=Grammar)))


def _answer(sink: BinaryIO, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


if __name__ == "__main__":
    main()
