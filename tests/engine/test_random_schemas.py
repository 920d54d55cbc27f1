"""Random schemas, random walks through their grammars: every text is JSON that `jsonschema` accepts.

python -m tests.engine.test_random_schemas 0 5000     # seeds from, to; some 15 ms each
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from atlas.engine.sampling import Grammar
from atlas.errors import RequestError
from tests.engine.grammar_model import EOS, compiler

NAMES = ["a", "b", "c d", "é", '"q"', "0", "$ref2", "x-y"]
VALUES: list[Any] = ["a", 'b"c', 1, 2.5, None, True, [1], {"x": "y"}, "é☃", "\\", "a/b", "", [], {}, "\n\t", -0.5, 1e20]
PATTERNS = [
    "^[a-z]{2,4}$",
    "[0-9]$",
    "^a.*b$",
    "^(foo|ba+r)$",
    "x",
    r"^\d{3}-[a-f]+$",
    r"^\S{1,3}$",
    '^[^"]{2}$',
    "^é+$",
]
# Not "time": `jsonschema` without more libraries takes only times without a zone, which no RFC has.
FORMATS = ["date", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname"]
REFERENCES = ["#/$defs/one", "#/$defs/two"]

Make = Callable[[random.Random, int], dict[str, Any]]


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """One of every kind, with subschemas down to `depth` levels."""
    kinds: list[Make] = [string, number, simple, enum, const, pattern, form]
    if depth:
        kinds += [members, items, tuples, either, mapping, reference, types, both] * 2
    return rng.choice(kinds)(rng, depth)


def string(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 8)}


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    low = rng.randint(-300, 300) + (0.25 if made["type"] == "number" and rng.random() < 0.5 else 0)
    if rng.random() < 0.6:
        made[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        made[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(13, 5000)
    if made["type"] == "integer" and rng.random() < 0.3:
        made["multipleOf"] = rng.choice([2, 3, 5, 10])
    return made


def simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(VALUES)}


def pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    made = {"type": "string", "pattern": rng.choice(PATTERNS)}
    return made | ({"maxLength": 9} if rng.random() < 0.5 else {})


def form(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(FORMATS)}


def members(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }
    choice = rng.random()
    if choice < 0.7:
        made["additionalProperties"] = False if choice < 0.5 else schema(rng, 0)
    if rng.random() < 0.3:
        made["maxProperties"] = max(len(made["required"]), rng.randint(1, 5))
    return made


def items(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 3),
    }


def tuples(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, {"type": "null"}])
    return {"type": "array", "prefixItems": parts, "items": rest, "minItems": rng.randint(0, 2), "maxItems": 4}


def either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def mapping(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = {"^x[0-9]{1,2}$": schema(rng, depth - 1)}
    return {"type": "object", "patternProperties": inner, "additionalProperties": False, "maxProperties": 3}


def reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": rng.choice(REFERENCES)}


def types(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["string", "null", "integer", "boolean", "array"], 2)
    return {"type": names, "maxLength": 4, "maxItems": 0, "minimum": 3}


def both(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [schema(rng, depth - 1), rng.choice([{"maxLength": 9}, {"maxItems": 3}, {}, {"minimum": -1000}])]}


def check(seed: int) -> int:
    """How many texts of the seed's schema were found valid: none if it is refused, or where walks lead nowhere."""
    rng = random.Random(seed)
    defs = {"one": schema(rng, 0), "two": {"type": "boolean"}}
    whole = {"$defs": defs, **schema(rng, 3)}
    grammar = Grammar("json_schema", json.dumps(whole))
    try:
        compiler().matcher(grammar)
    except RequestError:
        return 0
    valid = 0
    for _ in range(3):
        text = walk(grammar, rng)
        if text is None:
            continue
        try:
            jsonschema.validate(
                json.loads(text),
                whole,
                format_checker=jsonschema.FormatChecker(),
                cls=jsonschema.Draft202012Validator,
            )
        except (jsonschema.ValidationError, ValueError) as error:
            if "0000-" in text or "-02-29" in text:
                continue  # dates are checked as a form, and not against a calendar
            raise AssertionError(f"seed {seed}: {json.dumps(whole)} gives {text}: {error}") from error
        valid += 1
    return valid


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """A text of the grammar by allowed tokens at random, that close what is open after a while. None: too long."""
    matcher, tokens, made = compiler().matcher(grammar), [], compiler().tokenizer
    while len(tokens) < 600:
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.3):
            return made.decode_bytes(tokens).decode()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != EOS]
        if not allowed:
            assert matcher.is_accepting(), matcher.get_error()
            continue
        closing = [token for token in allowed if made.decode_bytes([token])[:1] in (b'"', b"}", b"]")]
        tokens.append(rng.choice(closing if closing and len(tokens) > 60 and rng.random() < 0.5 else allowed))
        assert matcher.try_consume_tokens(tokens[-1:]) == 1, matcher.get_error()
    return None


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_walks_through_random_schemas(first: int) -> None:
    assert sum(check(seed) for seed in range(first, first + 40)) > 80


if __name__ == "__main__":
    print(sum(check(seed) for seed in range(int(sys.argv[1]), int(sys.argv[2]))), "texts are valid")
