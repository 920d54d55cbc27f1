"""Grammars of forced calls, by llguidance: what they let through is read back as complete calls that fit schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atlas.parsers import TOOL_FORMATS, AnswerParser, collect
from atlas.parsers.grammars import tool_grammar
from tests.parsers.parsing import events_of
from tests.serve.in_process import spelled

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "now": {},
    "book": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a b", "c/d"]},
            "when": {"$ref": "#/$defs/when"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$", "maxLength": 6},
            "seats": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "first": {"type": "boolean"},
            "note": {"type": ["string", "null"], "minLength": 1},
        },
        "required": ["when", "seats", "code"],
        "additionalProperties": False,
        "$defs": {
            "when": {
                "type": "object",
                "properties": {"day": {"type": "integer"}, "at": {"enum": ["x", "y"]}},
                "required": ["day"],
                "additionalProperties": False,
            }
        },
    },
}
SPECIALS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "deepseek": [w for w in TOOL_FORMATS["deepseek"].words if w[0] == "<"],
    "deepseek_v32": ["｜DSML｜"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gemma": ["<|tool_call>", "<tool_call|>", '<|"|>'],
}
END = 256


class Vocabulary:
    """A token for each byte, an end, and these special tokens."""

    def __init__(self, special: list[str]) -> None:
        vocab = {spelled(bytes([byte])): byte for byte in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<eos>", *special)])
        self.tokenizer = tokenizer
        self.special = {word: END + 1 + place for place, word in enumerate(special)}
        self.guidance = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=END)
        self.size = END + 1 + len(special)

    def matcher(self, text: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.guidance, llguidance.LLMatcher.grammar_from_lark(text), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{text}"
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def write(self, grammar: str, chance: random.Random, words: Sequence[str]) -> str:
        """A random text that the grammar lets through. words: what is tried now and then, as chance would spell them
        late."""
        matcher, ids = self.matcher(grammar), []
        tried = [self.tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        for _ in range(3000):
            for word in tried:
                if chance.random() < 0.3 and matcher.validate_tokens(word) == len(word):
                    assert matcher.consume_tokens(word)
                    ids += word
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(self.size) if mask[token // 8] >> token % 8 & 1]
            if END in allowed or matcher.is_stopped():
                if matcher.is_stopped() or chance.random() < 0.5 or len(allowed) == 1:
                    text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
                    return text
                allowed.remove(END)
            # What leads on, most of the time: else strings and numbers have no end.
            leads_on = [token for token in allowed if token > END or token in b'"}],<'] or allowed
            ids.append(chance.choice(leads_on if chance.random() < 0.6 else allowed))
            assert matcher.consume_token(ids[-1])
        raise AssertionError("it does not come to an end")


CLOSE = ["</parameter>", "\n</parameter>", "</arg_value>", "</｜DSML｜parameter>", "<escape>", '<|"|>']


@pytest.fixture(params=sorted(TOOL_FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["special", "plain"])
def vocabulary(request: pytest.FixtureRequest, name: str) -> Vocabulary:
    return Vocabulary(SPECIALS[name] if request.param == "special" else [])


def read(name: str, text: str, schemas: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a text. All are complete, fit their schemas, and nothing else is there."""
    parser = AnswerParser(TOOL_FORMATS[name], schemas)
    answer = collect([*parser.feed(text), *parser.finish()])
    assert answer.content == "", text
    calls = []
    for call in answer.calls:
        assert call.complete, text
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schemas[call.name] or {"maxProperties": 0})
        calls.append((call.name, arguments))
    return calls


@pytest.mark.parametrize("one", [True, False])
def test_what_is_let_through_is_calls(name: str, vocabulary: Vocabulary, one: bool) -> None:
    chance = random.Random(1)
    found: dict[str, int] = dict.fromkeys(SCHEMAS, 0)
    numbers = set()
    grammar = tool_grammar(name, SCHEMAS, special=vocabulary.special, one=one)
    for _ in range(24 if one else 10):
        text = vocabulary.write(grammar, chance, CLOSE)
        calls = read(name, text, SCHEMAS)
        numbers.add(len(calls))
        for called, _ in calls:
            found[called] += 1
    assert all(found.values()), "each tool is called by some"
    assert numbers == {1} if one else 0 not in numbers and max(numbers) > 1


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"when": {"day": 1}, "seats": [1, 2], "code": "AB/12"}, True),
        (
            {"kind": "c/d", "when": {"day": 1, "at": "x"}, "code": "AB/1", "seats": [1], "first": True, "note": "n"},
            True,
        ),
        ({"kind": "c", "when": {"day": 1}, "code": "AB/1", "seats": [1]}, False),
        ({"when": {"day": 1}, "code": "AB/1", "seats": []}, False),
        ({"when": {"day": "x"}, "code": "AB/1", "seats": [1]}, False),
        ({"when": {}, "code": "AB/1", "seats": [1]}, False),
        ({"when": {"day": 1}, "code": "AB/12345", "seats": [1]}, False),
        ({"when": {"day": 1}, "code": "ab/1", "seats": [1]}, False),
        ({"when": {"day": 1}, "code": "AB/1"}, False),
        ({"when": {"day": 1}, "code": "AB/1", "seats": [1], "other": 1}, False),
    ],
)
def test_arguments_that_fit_and_that_do_not(arguments: dict[str, Any], fits: bool) -> None:
    """In each format, written as its models write it, with the parameters in the schema's order."""
    order = list(SCHEMAS["book"]["properties"])
    given = {key: arguments[key] for key in sorted(arguments, key=lambda key: order.index(key) if key in order else 99)}
    bare = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    texts = {
        "hermes": f'<tool_call>\n{{"name": "book", "arguments": {json.dumps(given)}}}\n</tool_call>',
        "llama3_json": f'{{"name": "book", "parameters": {json.dumps(given)}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "book", "arguments": {json.dumps(given)}}}]',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>"
        f"{json.dumps(given)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "qwen3_coder": "<tool_call>\n<function=book>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in bare.items())
        + "</function>\n</tool_call>",
        "glm": "<tool_call>book\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in bare.items())
        + "</tool_call>",
        "minimax": '<minimax:tool_call>\n<invoke name="book">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in bare.items())
        + "</invoke>\n</minimax:tool_call>",
    }
    for name, text in texts.items():
        vocabulary = Vocabulary([])
        if fits:
            assert read(name, text, SCHEMAS) == [("book", given)], name
        for one in (True, False):
            grammar = tool_grammar(name, SCHEMAS, special={}, one=one)
            assert vocabulary.accepts(grammar, text) == fits, (name, text)


def test_a_call_too_many_is_not_let_through(name: str, vocabulary: Vocabulary) -> None:
    chance = random.Random(2)
    several = tool_grammar(name, {"now": {}}, special=vocabulary.special, one=False)
    texts = {vocabulary.write(several, chance, ()) for _ in range(20)}
    single = tool_grammar(name, {"now": {}}, special=vocabulary.special, one=True)
    for text in texts:
        calls = read(name, text, {"now": {}})
        assert vocabulary.accepts(several, text) and vocabulary.accepts(single, text) == (len(calls) == 1)
    assert events_of([min(texts, key=len)], name)


def test_many_tools_fit(name: str) -> None:
    """What is alike in them is written once, and what is for people not at all."""
    part = {"path": {"type": "string", "description": "x" * 1000}, "title": {"type": "integer", "title": "T" * 1000}}
    schemas = {f"tool_{number}": {"type": "object", "properties": part, "required": ["path"]} for number in range(200)}
    vocabulary = Vocabulary(SPECIALS[name])
    grammar = tool_grammar(name, schemas, special=vocabulary.special, one=True)
    assert len(grammar) < 150 * len(schemas) + 10_000 and "xxx" not in grammar
    vocabulary.matcher(grammar)
    if name == "hermes":
        call = '<tool_call>\n{"name": "tool_199", "arguments": {"path": "a", "title": 3}}\n</tool_call>'
        assert vocabulary.accepts(grammar, call) and not vocabulary.accepts(grammar, call.replace("3", '"b"'))


GEMMA = {
    "type": "object",
    "properties": {
        "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        "few": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2},
        "fixed": {"const": [1, {"a b": "c"}]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
        "both": {"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}]},
    },
    "required": ["pair", "tuple"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("pair:[1,2],tuple:[1,true]", True),
        ("pair:[1,2,3],few:[],tuple:[1,true]", True),
        ('pair:[1,2],few:[Qx","],tuple:[1,true]', False),
        ("pair:[1,2],few:[QxQ,QyQ],tuple:[1,true],fixed:[1,{Qa bQ:QcQ}]", True),
        ("pair:[1,2],tuple:[1,true],either:QabQ,both:{a:true}", True),
        ("pair:[1,2],tuple:[1,true],either:3", True),
        ("pair:[1,2],tuple:[1,true],either:QabcQ", False),
        ("pair:[1,2],tuple:[1,true],both:{}", False),
        ("pair:[1],tuple:[1,true]", False),
        ("pair:[1,2,3,4],tuple:[1,true]", False),
        ("pair:[1,2],few:[QxQ,QxQ,QyQ],tuple:[1,true]", False),
        ("pair:[1,2],tuple:[true,1]", False),
        ("pair:[1,2],tuple:[1,true],fixed:[2]", False),
    ],
)
def test_gemmas_notation_holds_lists_and_alternatives(call: str, fits: bool) -> None:
    text = "<|tool_call>call:f{" + call.replace("Q", '<|"|>') + "}<tool_call|>"
    grammar = tool_grammar("gemma", {"f": GEMMA}, special={}, one=True)
    assert Vocabulary([]).accepts(grammar, text) == fits
    if fits:
        assert [called for called, _ in read("gemma", text, {"f": GEMMA})] == ["f"]


def test_a_schema_that_goes_on_doubling_is_cut_off() -> None:
    node = {"type": "object", "properties": {f"c{i}": {"$ref": "#/$defs/node"} for i in range(12)}}
    schema = {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    grammar = tool_grammar("gemma", {"f": schema}, special={}, one=True)
    assert len(grammar) < 1 << 20


def test_schemas_that_are_none_do_not_break_it(name: str) -> None:
    """What is wrong inside of a schema is for the compiler to say."""
    wrong = [
        3,
        "x",
        None,
        [],
        True,
        {"required": 5},
        {"properties": 3},
        {"allOf": 3},
        {"allOf": [3]},
        {"anyOf": [None]},
    ]
    wrong += [{"type": 3}, {"type": "array", "items": 3, "minItems": "x", "prefixItems": 3}, {"enum": 3}, {"enum": []}]
    wrong += [{"type": "string", "pattern": 3, "minLength": -1}, {"$ref": 3}, {"$ref": "#/x/y"}, {"$ref": "#"}]
    wrong += [{"type": "object", "properties": {"a": 3}, "required": {"a": 1}}, {"const": {"a": [None, 1.5]}}]
    for part in wrong:
        schema = {"type": "object", "properties": {"a": part, "b": {"allOf": [part]}}, "required": ["a"]}
        assert tool_grammar(name, {"f": schema}, special={}, one=True)
