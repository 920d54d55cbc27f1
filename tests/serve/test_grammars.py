"""What an answer must be, in every API's words: to the engine as one grammar, or 400 with the path of what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
import time
from typing import Any

import pytest

from atlas.engine.sampling import Grammar, Thinking
from atlas.serve import grammars
from atlas.serve.errors import ApiError
from atlas.serve.grammar_worker import Vocabulary
from atlas.serve.grammars import FIELDS, GrammarChecker, Wanted, schema_of
from tests.engine.schemas import SCHEMAS
from tests.serve.in_process import Server, make_model

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TEXT = '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    running = Server(make_model(tmp_path_factory.mktemp("grammars") / "model"), reasoning_parser="think")
    running.say_text(1, "answer")
    return running


def ask(server: Server, path: str = "/v1/chat/completions", **body: Any) -> Any:
    given = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
    response = asyncio.run(server.post(path, seed=1, **given, **body))
    return response


def submitted(server: Server, path: str = "/v1/chat/completions", **body: Any) -> Any:
    response = ask(server, path, **body)
    assert response.status_code == 200, response.text
    assert "x-atlas-ignored-fields" not in response.headers
    return server.engine.submitted[-1][1]


SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a-B_1", "schema": SCHEMA, "strict": True},
            }
        },
        Grammar("json_schema", TEXT),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", TEXT)),
    ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"guided_json": True}, Grammar("json_schema", "{}")),
    ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"guided_choice": ["yes", "né"]}, Grammar("choice", '["yes","né"]')),
    ({"guided_grammar": 'start: "a" | "b"'}, Grammar("lark", 'start: "a" | "b"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"ebnf": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"guided_grammar": "start: <|eot|>"}, Grammar("lark", "start: <|eot|>")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {}}, None),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("body", "expected"), SPELLINGS, ids=str)
def test_every_spelling_reaches_the_engine(
    server: Server, path: str, body: dict[str, Any], expected: Grammar | None
) -> None:
    assert submitted(server, path, **body).grammar == expected


def test_no_field_is_read_that_requests_do_not_have() -> None:
    from atlas.serve.openai.requests import ChatRequest, CompletionRequest

    for kind in (ChatRequest, CompletionRequest):
        assert set(FIELDS) <= {*kind.__struct_fields__}


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"response_format": "json"}, "response_format", "invalid_value", "a string"),
    ({"response_format": {}}, "response_format.type", "invalid_value", "None"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "invalid_value", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_grammar", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "invalid_grammar",
        "missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_value",
        "'a b'",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"not": {}}}}}},
        "response_format.json_schema.schema.items.not",
        "invalid_grammar",
        "cannot be enforced",
    ),
    (
        {"guided_json": {"$defs": {"b": {"anyOf": [{}, {"type": "string", "format": "x"}]}}, "$ref": "#/$defs/b"}},
        "guided_json.$defs.b.anyOf[1].format",
        "invalid_grammar",
        "Unknown format",
    ),
    (
        {"guided_json": {"properties": {"a": {"type": "strin"}}}},
        "guided_json.properties.a.type",
        "invalid_grammar",
        "strin",
    ),
    (
        {"guided_json": {"properties": {"a": {"enum": []}}, "required": ["a"], "type": "object"}},
        "guided_json.properties.a.enum",
        "invalid_grammar",
        "Unsatisfiable",
    ),
    ({"guided_json": False}, "guided_json", "invalid_grammar", "accepts nothing"),
    ({"guided_json": "{"}, "guided_json", "invalid_grammar", "no JSON"),
    ({"guided_json": [1]}, "guided_json", "invalid_grammar", "a list"),
    ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json.$ref", "invalid_grammar", "example.com"),
    (
        {"guided_json": {"properties": {"a": {"$ref": "#/x"}}}},
        "guided_json.properties.a.$ref",
        "invalid_grammar",
        "'/x'",
    ),
    ({"guided_json": {"items": {"pattern": "(["}}}, "guided_json.items.pattern", "invalid_grammar", "unclosed"),
    (
        {"guided_json": {"items": [{}, {"anyOf": [True, {"not": {}}]}]}},
        "guided_json.items[1].anyOf[1].not",
        "invalid_grammar",
        "enforced",
    ),
    ({"json_schema": {"uniqueItems": True, "type": "array"}}, "json_schema.uniqueItems", "invalid_grammar", "enforced"),
    ({"guided_regex": "a("}, "guided_regex", "invalid_grammar", "unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "invalid_grammar", "an empty string"),
    ({"regex": 5}, "regex", "invalid_grammar", "a number"),
    ({"guided_choice": []}, "guided_choice", "invalid_grammar", "at least one string"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "invalid_grammar", "at least one string"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "invalid_grammar", "x"),
    ({"guided_grammar": "start: <|nobody|>"}, "guided_grammar", "invalid_grammar", "nobody"),
    ({"grammar": "root ::= ("}, "grammar", "invalid_grammar", "gbnf"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "invalid_value", "json"),
    ({"structured_outputs": {"regex": "a["}}, "structured_outputs.regex", "invalid_grammar", "unclosed"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json", "conflicting_parameters", "regex"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "conflicting_parameters", "beside guided_json"),
    (
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "regex",
        "conflicting_parameters",
        "beside response_format",
    ),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "grammar_too_large", "300000 bytes"),
    ({"guided_choice": ["a"] * 10_001}, "guided_choice", "invalid_grammar", "10001 choices"),
]


@pytest.mark.parametrize(("body", "param", "code", "found"), WRONG, ids=str)
def test_what_is_wrong_is_named_with_its_path(
    server: Server, body: dict[str, Any], param: str, code: str, found: str
) -> None:
    response = ask(server, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert found in error["message"] and error["message"].startswith(param)


KEYWORDS: dict[str, Any] = {
    # Keywords of JSON Schema 2020-12 that restrict, each where it does.
    **{name: {"type": "number", name: 5} for name in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")},
    **{name: {"type": "string", name: 2} for name in ("minLength", "maxLength")},
    **{name: {"type": "array", name: 2} for name in ("minItems", "maxItems")},
    **{name: {"type": "object", name: 2} for name in ("minProperties", "maxProperties")},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "minContains": {"type": "array", "contains": {"type": "null"}, "minContains": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}]},
    "unevaluatedItems": {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
    "additionalItems": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "null"}],
        "additionalItems": False,
    },
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "null"}, "then": False},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}},
    "$recursiveRef": {"$recursiveRef": "#"},
    "format": {"type": "string", "format": "email"},
    "pattern": {"type": "string", "pattern": "a"},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_holds_or_is_refused(name: str) -> None:
    """Never dropped in silence: a text that breaks the rule is none of the grammar's, or there is no grammar."""
    import jsonschema

    from atlas.engine.grammar import Compiler
    from atlas.errors import RequestError
    from tests.engine.grammar_model import byte_ids, compiler

    schema = KEYWORDS[name]
    texts = ["null", "true", "3", "7", "5", "12.5", '""', '"abc"', '"a"', "[]", "[null]", "[1]", "[null,1]", "[1,1]"]
    texts += ["[null,null,null]", "[[],[],[]]", "{}", '{"a":1}', '{"a":null}', '{"a":1,"b":2}', '{"a":1,"b":2,"c":3}']
    texts += ['{"abcd":1}', "[null,null]"]
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    bad = [text for text in texts if not validator.is_valid(json.loads(text))]
    made: Compiler = compiler()
    try:
        matcher = made.matcher(Grammar("json_schema", json.dumps(schema)))
    except RequestError:
        return
    for text in bad:
        ids = byte_ids(text)
        count = matcher.deep_copy().try_consume_tokens(ids)
        copy = matcher.deep_copy()
        copy.try_consume_tokens(ids)
        assert count < len(ids) or not copy.is_accepting(), f"{text} is accepted"


def test_schemas_of_every_kind_pass(server: Server) -> None:
    for name, schema in SCHEMAS.items():
        assert submitted(server, guided_json=schema).grammar == schema_of(schema, name).grammar


# ---- limits --------------------------------------------------------------------------------------


EXPENSIVE = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{i}}}.*x"} for i in range(1, 30)]}
"""llguidance needs time for it that doubles with each part, and cannot be interrupted."""


def test_what_is_too_expensive_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 1.0)
    checker = GrammarChecker(Vocabulary(300, {}))

    async def main() -> None:
        await checker.check(Wanted(Grammar("regex", "a"), "x"))  # a process is there
        slow = asyncio.create_task(checker.check(Wanted(schema_of(EXPENSIVE, "s").grammar, "s")))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        for n in range(5):
            await checker.check(Wanted(Grammar("regex", f"b{{{n + 1}}}"), "x"))
        assert not slow.done() or time.monotonic() - began > 0.9
        with pytest.raises(ApiError) as caught:
            await slow
        assert (caught.value.status, caught.value.body.code) == (400, "grammar_too_complex")
        assert caught.value.body.param == "s"
        await checker.check(Wanted(Grammar("regex", "c"), "x"))  # after the process was killed

    asyncio.run(main())
    checker.close()
    assert not checker._idle


def test_a_worker_that_dies_is_replaced() -> None:
    """And the grammar that comes next is not said to be at fault."""
    checker = GrammarChecker(Vocabulary(300, {}))

    async def main() -> None:
        await checker.check(Wanted(Grammar("regex", "a"), "x"))
        checker._idle[0].kill()
        checker._idle[0].wait()
        await checker.check(Wanted(Grammar("regex", "b"), "x"))

    asyncio.run(main())
    checker.close()


class _Emptied(list):  # type: ignore[type-arg]
    """A list whose last element another thread takes just before."""

    def __len__(self) -> int:
        return 1


def test_a_worker_that_another_thread_takes_first_is_not_missed() -> None:
    checker = GrammarChecker(Vocabulary(300, {}))
    checker._idle = _Emptied()
    asyncio.run(checker.check(Wanted(Grammar("regex", "a"), "x")))
    (worker,) = list.copy(checker._idle)
    worker.kill()
    worker.communicate()


def test_a_worker_that_does_not_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = grammars.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(popen(["sleep", "60"], **options))
        return started[-1]

    monkeypatch.setattr(grammars.subprocess, "Popen", start)
    monkeypatch.setattr(grammars, "START_SECONDS", 0.1)
    checker = GrammarChecker(Vocabulary(300, {}))
    with pytest.raises(TimeoutError):
        asyncio.run(checker.check(Wanted(Grammar("regex", "a"), "x")))
    assert started[0].returncode is not None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_large_is_looked_at_in_a_thread(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema may have megabytes: the streams of others go on."""
    threads = []
    check_depth = grammars._check_depth

    def seen(*args: Any) -> None:
        threads.append(threading.current_thread())
        check_depth(*args)

    monkeypatch.setattr(grammars, "_check_depth", seen)
    error = ask(server, path, guided_json={"enum": [[0, 0, 0] for _ in range(100_000)]}).json()["error"]
    assert error["code"] == "grammar_too_large"
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_with_thousands_of_connections() -> None:
    """Each is an open file; with 1,024 of them `select` fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    checker = GrammarChecker(Vocabulary(300, {}))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        asyncio.run(checker.check(Wanted(Grammar("regex", "a"), "x")))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        checker.close()


def test_what_was_right_is_not_compiled_again() -> None:
    checker = GrammarChecker(Vocabulary(300, {}))

    async def main() -> None:
        wanted = Wanted(Grammar("regex", "a"), "x")
        await checker.check(wanted)
        checker.close()
        assert await checker.check(wanted) == wanted.grammar
        assert not checker._idle

    asyncio.run(main())


def test_a_deep_schema_is_refused_and_a_deep_enough_one_is_not(server: Server) -> None:
    def deep(levels: int) -> Any:
        schema: Any = {"type": "null"}
        for _ in range(levels):
            schema = {"type": "array", "items": schema}
        return schema

    submitted(server, guided_json=deep(30))
    error = ask(server, guided_json=deep(200)).json()["error"]
    assert (error["param"], error["code"]) == ("guided_json", "grammar_too_large")


# ---- thinking ------------------------------------------------------------------------------------


def test_a_grammar_begins_after_thinking(server: Server) -> None:
    def marker(text: str) -> tuple[int, ...]:
        return tuple(server.frontend.tokenizer.encode(text, add_special_tokens=False))

    begin, end = marker("<think>"), marker("</think>")
    on = submitted(server, guided_regex="a", enable_thinking=True)
    assert on.thinking == Thinking(end, True, None, begin)
    off = submitted(server, guided_regex="a", enable_thinking=False)
    assert off.thinking == Thinking(end, False, None, ())
    assert submitted(server, guided_regex="a").thinking == off.thinking, "this template's model does not by itself"
    both = submitted(server, guided_regex="a", enable_thinking=True, thinking_budget=7)
    assert both.thinking == Thinking(end, True, 7, begin)
    assert submitted(server).thinking is None
