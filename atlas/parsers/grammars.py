"""Forced calls: for each format a grammar of what a model may write, in Lark as llguidance takes it.

An answer in such a grammar is read back by the format's parser as complete calls of the tools, with arguments that
their schemas accept. Formats that write arguments as JSON hold all of the schema. Formats that write them as bare text
hold the names, which of them have to be there, and each value that is not a string; strings are any text, or one of an
`enum`. Parameters come in the schema's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atlas.parsers.schema_types import resolved, types_of

Schema = Mapping[str, Any]
Special = Mapping[str, int]

_SPACE = r" |\n(?: {0,32}|\t{0,8})"
"""What may stand between two parts of a JSON text. Bounded: models that may write white space without end do so."""

_OUTSIDE = ("$defs", "definitions")
"""Parts of a schema that parts of it refer to."""


class Rules:
    """Rules as they are written down, and names for them.

    special: ids of the special tokens by their text: no other token can stand for them.
    """

    def __init__(self, special: Special) -> None:
        self.special = special
        self._lines: list[str] = []
        self._names = 0
        words = sorted(special, key=len, reverse=True)
        self._pieces = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def rule(self, body: str, attributes: str = "", name: str = "") -> str:
        """The name of a new rule."""
        name = name or self.new_name()
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def word(self, *words: str) -> str:
        """These words one after another."""
        text, terms, at = "".join(words), [], 0
        for match in self._pieces.finditer(text):
            terms += [json.dumps(text[at : match.start()], ensure_ascii=False)] if match.start() > at else []
            terms.append(f"<[{self.special[match[0]]}]>")
            at = match.end()
        terms += [json.dumps(text[at:], ensure_ascii=False)] if at < len(text) else []
        return " ".join(terms)

    def choice(self, options: Sequence[str]) -> str:
        """One of these bodies."""
        return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"

    def json(self, schema: Schema, root: Schema | None = None) -> str:
        """A JSON text. root: the schema that this one is a part of."""
        outside = {name: root[name] for name in _OUTSIDE if root and name in root and name not in schema}
        whole = {**schema, **outside, "x-guidance": {"whitespace_pattern": _SPACE, "lenient": True}}
        return self.rule(f"%json {json.dumps(whole, ensure_ascii=False)}")

    def until(self, word: str, *never: str, frame: str = "", part: Schema | None = None) -> str:
        """Any text without these words, and then `word`. frame: stands before it.  part: what the text must be."""
        parts = [
            "/(?s:.*)/",
            *(f"~/(?s:.*){_escaped(found)}(?s:.*)/" for found in (word, *never)),
            *_limits(part or {}, frame),
        ]
        found = self._pieces.search(word)
        text = frame + (word[: found.start()] if found else word)
        name = self.new_name("T")
        # One terminal with the closing word, so that nothing is left for the lexer to decide; a special token ends it.
        self._lines.append(f"{name}: ({' & '.join(parts)}) {self.word(text)}")
        return f"{name} {self.word(word[found.start() :])}" if found else name

    def new_name(self, letter: str = "r") -> str:
        self._names += 1
        return f"{letter}{self._names}"


def tool_grammar(
    format_name: str, schemas: Mapping[str, Schema], *, special: Special, one: bool, otherwise: str = ""
) -> str:
    """A grammar of calls of these tools, at least one of them.

    format_name: of `TOOL_FORMATS`.  schemas: name -> JSON schema of the arguments; at least one.
    special: the tokenizer's special tokens, text -> id.  one: there is exactly one call.
    otherwise: the body of a rule, for an answer that may be this instead.
    """
    rules = Rules(special)
    start = _FORMATS[format_name](rules, schemas, one)
    if otherwise:
        start = f"{rules.rule(start)} | {rules.rule(otherwise)}"
    rules.rule(start, name="start")
    return rules.text()


def arguments_schema(schema: Schema) -> Schema:
    """The schema of a call's arguments: an object, with no other members than those it names, if it names any."""
    result = {"type": "object", **schema}
    open_parts = ("patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
    if not schema or ("properties" in schema and not any(part in schema for part in open_parts)):
        result.setdefault("properties", {})
        result.setdefault("additionalProperties", False)
    return result


# ---- arguments as JSON -------------------------------------------------------------------------


def _json_calls(rules: Rules, schemas: Mapping[str, Schema], before: str, after: str) -> str:
    """A call of one of the tools; `before` and `after` stand around the arguments, NAME in them for the name."""
    options = []
    for name, schema in schemas.items():
        arguments = rules.json(arguments_schema(schema))
        options.append(f"{rules.word(before.replace('NAME', name))} {arguments} {rules.word(after)}")
    return rules.rule(" | ".join(options))


def _repeated(item: str, gap: str, one: bool) -> str:
    return item if one else f"{item} ({gap} {item})*".replace("  ", " ")


def _hermes(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    call = _json_calls(rules, schemas, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return _repeated(call, rules.word("\n"), one)


def _llama3_json(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    call = _json_calls(rules, schemas, '{"name": "NAME", "parameters": ', "}")
    return _repeated(call, rules.word("; "), one)


def _mistral(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    if "[ARGS]" in rules.special:
        call = _json_calls(rules, schemas, "[TOOL_CALLS]NAME[ARGS]", "")
        return _repeated(call, "", one)
    call = _json_calls(rules, schemas, '{"name": "NAME", "arguments": ', "}")
    return f"{rules.word('[TOOL_CALLS][')} {_repeated(call, rules.word(', '), one)} {rules.word(']')}"


def _deepseek(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    """Both notations: which of them a model knows, it knows best."""
    begin, end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    newer = _json_calls(rules, schemas, f"{begin}NAME{sep}", end)
    older = _json_calls(rules, schemas, f"{begin}function{sep}NAME\n```json\n", f"\n```{end}")
    several = [_repeated(newer, f"{rules.word(chr(10))}?", one), _repeated(older, rules.word("\n"), one)]
    calls = rules.choice([rules.rule(body) for body in several])
    return f"{rules.word('<｜tool▁calls▁begin｜>')} {calls} {rules.word('<｜tool▁calls▁end｜>')}"


# ---- arguments as bare text --------------------------------------------------------------------


def _parameters(schema: Schema, write: Callable[[str, Schema], str]) -> str:
    """The parameters in the schema's order, those that need not be there in brackets."""
    properties = {name: part if isinstance(part, Mapping) else {} for name, part in _properties(schema).items()}
    required = schema.get("required", ())
    return " ".join(write(name, part) + ("" if name in required else "?") for name, part in properties.items())


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _value(rules: Rules, part: Schema, root: Schema, word: str, *never: str, frame: str = "") -> str:
    """A value written as bare text, and the word that closes it. frame: stands on both sides of it."""
    enum = part.get("enum", [part["const"]] if "const" in part else None)
    open_, close = rules.word(frame) if frame else "", rules.word(frame, word)
    if isinstance(enum, list) and enum:
        texts = [item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in enum]
        return f"{open_} {rules.choice([rules.word(text) for text in texts])} {close}"
    if _is_text(part, root):
        return f"{open_} {rules.until(word, *never, frame=frame, part=part)}"
    return f"{open_} {rules.json(part, root)} {close}"


def _is_text(part: Schema, root: Schema) -> bool:
    """Whether a value stands as it is: the schema allows a string, or does not say."""
    types = types_of(part, root)
    return not types or "string" in types


def _tagged(
    rules: Rules, schemas: Mapping[str, Schema], begin: str, parameter: Callable[[Schema, str, Schema], str], end: str
) -> str:
    """A call of one of the tools between tags, NAME in `begin` for its name."""
    options = []
    for name, schema in schemas.items():

        def write(parameter_name: str, part: Schema, schema: Schema = schema) -> str:
            return rules.rule(parameter(schema, parameter_name, part))

        body = _parameters(schema, write)
        options.append(f"{rules.word(begin.replace('NAME', name))} {body} {rules.word(end)}")
    return rules.rule(" | ".join(options))


def _qwen3_coder(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</parameter>", "</tool_call>", frame="\n")
        return f"{rules.word(f'<parameter={name}>')} {value} {rules.word(chr(10))}"

    call = _tagged(rules, schemas, "<tool_call>\n<function=NAME>\n", parameter, "</function>\n</tool_call>")
    return _repeated(call, rules.word("\n"), one)


def _glm(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    line = f"{rules.word(chr(10))}?"  # 4.7 has no line breaks

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</arg_value>", "</tool_call>")
        key = rules.word(f"<arg_key>{name}</arg_key>")
        return f"{key} {line} {rules.word('<arg_value>')} {value} {line}"

    options = []
    for name, schema in schemas.items():

        def write(parameter_name: str, part: Schema, schema: Schema = schema) -> str:
            return rules.rule(parameter(schema, parameter_name, part))

        head, tail = rules.word(f"<tool_call>{name}"), rules.word("</tool_call>")
        options.append(f"{head} {line} {_parameters(schema, write)} {tail}")
    return _repeated(rules.rule(" | ".join(options)), line, one)


def _minimax(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    outer = "</minimax:tool_call>"

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</parameter>", outer)
        return f"{rules.word('<parameter name=', json.dumps(name), '>')} {value} {rules.word(chr(10))}"

    call = _tagged(rules, schemas, '<invoke name="NAME">\n', parameter, "</invoke>\n")
    begin = rules.word("<minimax:tool_call>\n")
    return f"{begin} {_repeated(call, '', one)} {rules.word(outer)}"


def _deepseek_v32(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    mark, outer = "｜DSML｜", "</｜DSML｜function_calls>"

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        string = "true" if _is_text(part, schema) else "false"
        value = _value(rules, part, schema, f"</{mark}parameter>", outer)
        head = rules.word(f'<{mark}parameter name="{name}" string="{string}">')
        return f"{head} {value} {rules.word(chr(10))}"

    call = _tagged(rules, schemas, f'<{mark}invoke name="NAME">\n', parameter, f"</{mark}invoke>\n")
    begin = rules.word(f"<{mark}function_calls>\n")
    return f"{begin} {_repeated(call, '', one)} {rules.word(outer)}"


# ---- Gemma's notation --------------------------------------------------------------------------

_MOST_DEPTH = 8
"""Levels of a schema that are followed; below them any value may stand."""

_BARE_KEY = re.compile(r"[\w.$/-]+")
_PLAIN_TYPES = ("integer", "number", "boolean", "null")


def _gemma(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    older = "<start_function_call>" in rules.special
    begin, quote, end = (
        ("<start_function_call>", "<escape>", "<end_function_call>")
        if older
        else ("<|tool_call>", '<|"|>', "<tool_call|>")
    )
    notation = _Notation(rules, quote)
    options = []
    for name, schema in schemas.items():
        head = rules.word(f"{begin}call:{name}")
        options.append(f"{head} {notation.object(arguments_schema(schema), schema, 0)} {rules.word(end)}")
    return _repeated(rules.rule(" | ".join(options)), "", one)


class _Notation:
    """Values between quote words and without quotes around keys."""

    def __init__(self, rules: Rules, quote: str) -> None:
        self._rules, self._quote = rules, quote
        self._any = ""

    def value(self, part: Any, root: Schema, depth: int) -> str:
        part = resolved(part, root)
        if not isinstance(part, Mapping) or depth > _MOST_DEPTH:
            return self.any()
        enum = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(enum, list) and enum and all(isinstance(item, str | int | float | None) for item in enum):
            return self._rules.choice([self._literal(item) for item in enum])
        types = types_of(part, root)
        options = [self.string(part)] if not types or "string" in types else []
        if plain := [name for name in _PLAIN_TYPES if name in types]:
            options.append(self._rules.json({**part, "type": plain}, root))
        if "object" in types:
            options.append(self.object(part, root, depth))
        if "array" in types:
            options.append(self._list(part, root, depth))
        return self._rules.choice(options)

    def string(self, part: Schema | None = None) -> str:
        return f"{self._rules.word(self._quote)} {self._rules.until(self._quote, part=part)}"

    def object(self, part: Schema, root: Schema, depth: int) -> str:
        properties = _properties(part)
        if not properties:
            return '"{}"' if part.get("additionalProperties") is False else self._free("{", "}")
        required = part.get("required", ())
        members = [
            (self._rules.rule(f"{self._key(name)} {self.value(inner, root, depth + 1)}"), name in required)
            for name, inner in properties.items()
        ]
        # In the schema's order, commas between those that are there.
        tails = [""]
        for rule, needed in reversed(members):
            tails.append(self._rules.rule(f'"," {rule} {tails[-1]}' if needed else f'("," {rule})? {tails[-1]}'))
        tails = tails[::-1][1:]
        options = []
        for (rule, needed), tail in zip(members, tails, strict=True):
            options.append(f"{rule} {tail}")
            if needed:
                break
        else:
            options.append('""')
        return f'"{{" {self._rules.choice(options)} "}}"'

    def _list(self, part: Schema, root: Schema, depth: int) -> str:
        item = self._rules.rule(self.value(part.get("items"), root, depth + 1))
        items = f'{item} ("," {item})*'
        return f'"[" {items} "]"' if part.get("minItems", 0) else f'"[" ({items})? "]"'

    def any(self) -> str:
        if not self._any:
            self._any = self._rules.new_name()
            plain = self._rules.json({"type": list(_PLAIN_TYPES)})
            options = [self.string(), plain, self._free("{", "}"), self._free("[", "]")]
            self._rules.rule(" | ".join(options), name=self._any)
        return self._any

    def _free(self, begin: str, end: str) -> str:
        """An object or a list of anything."""
        item = self.any()
        if begin == "{":
            key = self._rules.rule('/[A-Za-z_][A-Za-z0-9_]{0,63}/ ":"')
            item = f"{key} {item}"
        return f'"{begin}" ({item} ("," {item})*)? "{end}"'

    def _key(self, name: str) -> str:
        quote = "" if _BARE_KEY.fullmatch(name) else self._quote
        return self._rules.word(f"{quote}{name}{quote}:")

    def _literal(self, item: Any) -> str:
        quote = self._quote if isinstance(item, str) else ""
        return self._rules.word(f"{quote}{item if quote else json.dumps(item)}{quote}")


def _limits(part: Schema, frame: str) -> list[str]:
    """What a schema says of a string, as regular expressions. Parsers take one line break off both sides of a value, so
    one that is limited must not have its own there if the grammar writes none (`frame`)."""
    limits = []
    least, most = part.get("minLength", 0), part.get("maxLength")
    if _is_count(least) and (most is None or _is_count(most)) and (least or most is not None):
        limits.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inside = pattern.removeprefix("^")
        inside = inside if end else inside.removesuffix("$")
        limits.append(f"/{begin}({slashed(inside)}){end}/")
    if limits and not frame:
        limits.append(r"~/\n(?s:.*)/ & ~/(?s:.*)\n/")
    return limits


def slashed(pattern: str) -> str:
    """A regular expression that can stand between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100_000


def _escaped(word: str) -> str:
    return re.escape(word).replace("/", "\\/")


_FORMATS: Mapping[str, Callable[[Rules, Mapping[str, Schema], bool], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "minimax": _minimax,
    "deepseek": _deepseek,
    "deepseek_v32": _deepseek_v32,
    "glm": _glm,
    "gemma": _gemma,
}
