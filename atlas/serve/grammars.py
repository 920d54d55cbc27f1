"""What an answer must be, in the words of several APIs: from a request's fields to a `Grammar`, checked."""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from atlas.engine.grammar import MAX_CHOICES, MAX_TEXT_BYTES
from atlas.engine.sampling import Grammar, GrammarSyntax
from atlas.serve.errors import ApiError, invalid
from atlas.serve.grammar_worker import LENGTH, Verdict, Vocabulary
from atlas.serve.offload import Offload

MAX_DEPTH = 64
"""Levels of a schema."""
COMPILE_SECONDS = 5.0
START_SECONDS = 30.0
KNOWN = 1024
"""Grammars that are remembered to be right."""
WORKERS = 3
"""Processes that compile. One client has at most two of them at once."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FLAT: Mapping[str, GrammarSyntax] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "gbnf",
    "grammar": "gbnf",
}
_STRUCTURED: Mapping[str, GrammarSyntax] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}
FIELDS = ("response_format", "structured_outputs", *_FLAT)
"""Fields of a request that `grammar_of` reads."""


class Wanted(msgspec.Struct, frozen=True):
    """A grammar, and the path of the field that it comes from."""

    grammar: Grammar
    where: str


def grammar_of(request: object) -> Wanted | None:
    """What the fields of `request` ask for, if they ask for anything. Not compiled yet.

    Raises:
        ApiError: 400; a field of the wrong type, an unknown option, or two fields that each ask for something.
    """
    found: list[Wanted] = []
    for name in FIELDS:
        value = getattr(request, name, None)
        if value is None:
            continue
        if name == "response_format":
            found += _response_format(value)
        elif name == "structured_outputs":
            found += _structured_outputs(value)
        else:
            found.append(_wanted(_FLAT[name], value, name))
    if len(found) > 1:
        where, other = found[1].where, found[0].where
        raise invalid(where, f"given beside {other}", "one description of the answer", code="conflicting_parameters")
    return found[0] if found else None


def schema_of(schema: Any, where: str) -> Wanted:
    """A JSON Schema, an object or its text, as a grammar. Raises ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _bad(where, f"no JSON ({error})", "a JSON Schema") from None
    if schema is True:  # which accepts everything, as an empty one does
        schema = {}
    if not isinstance(schema, dict):
        raise _bad(where, "false, which accepts nothing" if schema is False else f"a {_kind(schema)}", "a JSON Schema")
    _check_depth(schema, where)
    return Wanted(Grammar("json_schema", _text(schema, where)), where)


def _response_format(value: Any) -> list[Wanted]:
    where = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        # llama.cpp has a schema here, too.
        schema = value.get("schema")
        return [_wanted("json_object", True, where) if schema is None else schema_of(schema, f"{where}.schema")]
    if kind == "json_schema":
        inside = value.get("json_schema")
        where = f"{where}.json_schema"
        if not isinstance(inside, dict):
            raise _bad(where, "missing" if inside is None else f"a {_kind(inside)}", "an object with name and schema")
        name = inside.get("name")
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise invalid(f"{where}.name", repr(name)[:80], "1 to 64 letters, digits, _ and -")
        if "schema" not in inside:
            raise _bad(f"{where}.schema", "missing", "a JSON Schema")
        if not isinstance(inside.get("strict", None), bool | None):
            raise invalid(f"{where}.strict", repr(inside["strict"])[:80], "true or false")
        return [schema_of(inside["schema"], f"{where}.schema")]
    if kind == "grammar":
        return [_wanted("lark", value.get("grammar"), f"{where}.grammar")]
    found = f"a {_kind(value)}" if not isinstance(value, dict) else repr(kind)[:80]
    accepted = "text, json_object, json_schema, grammar"
    raise invalid(f"{where}.type" if isinstance(value, dict) else where, found, f"an object whose type is {accepted}")


def _structured_outputs(value: Any) -> list[Wanted]:
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(where, f"a {_kind(value)}", f"an object with one of {', '.join(_STRUCTURED)}")
    given = {name: entry for name, entry in value.items() if entry is not None and entry is not False}
    for name in given:
        if name not in _STRUCTURED:
            raise invalid(f"{where}.{name}", "an option that is not supported", ", ".join(_STRUCTURED))
    return [_wanted(_STRUCTURED[name], entry, f"{where}.{name}") for name, entry in given.items()]


def _wanted(syntax: GrammarSyntax, value: Any, where: str) -> Wanted:
    if syntax == "json_schema":
        return schema_of(value, where)
    if syntax == "json_object":
        if value is not True:
            raise invalid(where, repr(value)[:80], "true or false")
        return Wanted(Grammar("json_object"), where)
    if syntax == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise _bad(where, repr(value)[:80], "a list of at least one string")
        if len(value) > MAX_CHOICES:
            raise _bad(where, f"{len(value)} choices", f"at most {MAX_CHOICES}")
        return Wanted(Grammar("choice", _text(value, where)), where)
    if not isinstance(value, str) or not value:
        found = "an empty string" if value == "" else f"a {_kind(value)}"
        raise _bad(where, found, "a regular expression" if syntax == "regex" else "a grammar")
    if syntax in ("lark", "gbnf"):
        # Either spelling is called "grammar" somewhere; the notation tells which it is.
        syntax = "gbnf" if "::=" in value else "lark"
    _check_size(value.encode(errors="surrogatepass"), where)
    return Wanted(Grammar(syntax, value), where)


def _check_depth(schema: Any, where: str) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > 2 * MAX_DEPTH:  # a level of a schema is two of JSON: its keyword, and what that holds
            raise _bad(where, "nested too deeply", f"at most {MAX_DEPTH} levels", code="grammar_too_large")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner


def _text(value: Any, where: str) -> str:
    text = msgspec.json.encode(value)
    _check_size(text, where)
    return text.decode()


def _check_size(text: bytes, where: str) -> None:
    if len(text) > MAX_TEXT_BYTES:
        raise _bad(where, f"{len(text)} bytes", f"at most {MAX_TEXT_BYTES}", code="grammar_too_large")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _bad(where: str, found: str, accepted: str, *, code: str = "invalid_grammar") -> ApiError:
    return invalid(where, found, accepted, code=code)


class GrammarChecker:
    """Compiles what requests ask for before the engine gets it.

    Work is done in at most `WORKERS` other processes, started when first needed; they end with this object.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: OrderedDict[bytes, None] = OrderedDict()  # by digest: a grammar may have 256 KiB
        self._idle: list[subprocess.Popen[bytes]] = []
        self._threads = Offload(WORKERS)
        self._end = weakref.finalize(self, _end, self._idle)

    async def check(self, wanted: Wanted) -> Grammar:
        """The grammar. Raises ApiError 400: it is none, or takes more than `COMPILE_SECONDS` or memory to compile."""
        grammar = wanted.grammar
        known = hashlib.sha256(f"{grammar.syntax}\0{grammar.text}".encode(errors="surrogatepass")).digest()
        if known in self._known:
            self._known.move_to_end(known)
            return grammar
        verdict = await self._threads.run(self._judge, grammar)
        if verdict is None:
            accepted = f"a {grammar.syntax} that takes less than {COMPILE_SECONDS:g} s and 2 GB to compile"
            raise _bad(wanted.where, "too expensive", accepted, code="grammar_too_complex")
        if verdict.error:
            where = f"{wanted.where}.{verdict.path}" if verdict.path else wanted.where
            what = {"json_schema": "a JSON Schema whose every part can be enforced", "regex": "a regular expression"}
            raise _bad(where, verdict.error, what.get(grammar.syntax, f"a grammar ({grammar.syntax})"))
        self._known[known] = None
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the processes."""
        self._end()

    def _judge(self, grammar: Grammar) -> Verdict | None:
        """None: it took too long, or ended the process."""
        worker = self._worker()
        try:
            _write(worker, grammar)
            verdict = msgspec.msgpack.decode(_read(worker, time.monotonic() + COMPILE_SECONDS), type=Verdict)
        except (OSError, EOFError):  # TimeoutError is one of the former
            _kill(worker)
            return None
        self._idle.append(worker)
        return verdict

    def _worker(self) -> subprocess.Popen[bytes]:
        """An idle process, or a new one. One that has ended meanwhile says nothing of the next grammar."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # also where another thread has just taken the last
                return self._start()
            if worker.poll() is None:
                return worker
            _kill(worker)

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for the server, whose end it sees by that of its stdin.
        worker = subprocess.Popen(
            [sys.executable, "-m", "atlas.serve.grammar_worker"], stdin=pipe, stdout=pipe, start_new_session=True
        )
        try:
            _write(worker, self._vocabulary)
            _read(worker, time.monotonic() + START_SECONDS)
        except BaseException:
            _kill(worker)
            raise
        return worker


def _write(worker: subprocess.Popen[bytes], message: Grammar | Vocabulary) -> None:
    assert worker.stdin is not None
    body = msgspec.msgpack.encode(message)
    worker.stdin.write(LENGTH.pack(len(body)) + body)
    worker.stdin.flush()


def _read(worker: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The next frame. Raises TimeoutError, or EOFError if the process ended."""
    assert worker.stdout is not None
    received, wanted, descriptor = b"", LENGTH.size, worker.stdout.fileno()
    readable = select.poll()  # not `select`, which fails once this process has 1,024 files open, connections among them
    readable.register(descriptor, select.POLLIN)
    while len(received) < wanted:
        if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        piece = os.read(descriptor, wanted - len(received))
        if not piece:
            raise EOFError
        received += piece
        if len(received) == LENGTH.size == wanted:
            wanted += LENGTH.unpack(received)[0]
    return received[LENGTH.size :]


def _end(idle: list[subprocess.Popen[bytes]]) -> None:
    while idle:
        _kill(idle.pop())


def _kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.communicate()
