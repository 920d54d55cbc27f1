"""Forced calls: for each format a grammar of what a model may write, in Lark as llguidance takes it.

An answer in such a grammar is read back by the format's parser as complete calls of the tools, with arguments that
their schemas accept. Formats that write arguments as JSON hold all of the schema. Formats that write them as bare text
hold the names, which of them have to be there, and each value that is not a string; strings are any text, or one of an
`enum`. Parameters come in the schema's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

from atlas.engine.grammar import mended
from atlas.parsers import TOOL_FORMATS
from atlas.parsers.grammar_gemma import gemma_calls, gemma_words
from atlas.parsers.grammar_rules import (
    COMBINED,
    COUNTED,
    Rules,
    Schema,
    Special,
    arguments_schema,
    has_limits,
    properties_of,
    repeated,
)
from atlas.parsers.schema_types import types_of, united


def tool_grammar(
    format_name: str,
    schemas: Mapping[str, Schema],
    *,
    special: Special,
    one: bool,
    strict: Collection[str] = (),
    free: bool = False,
    otherwise: str = "",
) -> str:
    """A grammar of calls of these tools, at least one of them.

    format_name: of `TOOL_FORMATS`.  schemas: name -> JSON schema of the arguments; at least one.
    special: the tokenizer's special tokens, text -> id.  one: there is exactly one call.
    strict: tools whose schemas have to be enforced whole; keywords of others that cannot be are left out.
    free: any text may stand before the calls, or in their place.
    otherwise: the body of a rule, for an answer that may be this instead.

    Raises:
        RequestError: a strict tool's schema has what the format cannot hold; `where` is the tool's name.
    """
    rules = Rules(special, strict)
    schemas = {name: mended(schema) for name, schema in schemas.items()}
    start = _free(rules, format_name, schemas, one) if free else _FORMATS[format_name](rules, schemas, one)
    if otherwise:
        start = f"{rules.rule(start)} | {rules.rule(otherwise)}"
    rules.rule(start, name="start")
    return rules.text()


def _free(rules: Rules, format_name: str, schemas: Mapping[str, Schema], one: bool) -> str:
    """Text, calls, or calls behind a text. The text has no word that the parser would take for the beginning of one."""
    write, parser = _FORMATS[format_name], TOOL_FORMATS[format_name]
    if not parser.opens:  # calls stand where the answer begins, or are none
        return f"{rules.rule(write(rules, schemas, one))} | {rules.free(begins=parser.bare)}"
    opener = opener_of(format_name, rules.special)
    others = [word for word in parser.opens if word != opener]
    text = rules.free(opener, *others)
    before = rules.until(opener, *others)
    listed = format_name in _LISTED or (format_name == "mistral" and "[ARGS]" not in rules.special)
    rules.opened = opener
    calls = rules.rule(write(rules, schemas, one or not listed))
    rules.opened = ""
    if not (one or listed):
        calls += f" ({rules.word(chr(10))}? {rules.rule(write(rules, schemas, True))})*"
    return f"{text} | {before} {calls}"


def opener_of(format_name: str, special: Special) -> str:
    """The word that opens calls, for formats that have one."""
    if format_name == "gemma":
        return gemma_words(special)[0]
    return TOOL_FORMATS[format_name].opens[0]


# ---- arguments as JSON -------------------------------------------------------------------------


def _json_calls(rules: Rules, schemas: Mapping[str, Schema], before: str, after: str) -> str:
    """A call of one of the tools; `before` and `after` stand around the arguments, NAME in them for the name."""
    options = []
    for name, schema in schemas.items():
        rules.tool(name)
        arguments = rules.json(arguments_schema(schema))
        options.append(f"{rules.word(before.replace('NAME', name))} {arguments} {rules.word(after)}")
    return rules.rule(" | ".join(options))


def _hermes(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    call = _json_calls(rules, schemas, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return repeated(call, rules.word("\n"), one)


def _llama3_json(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    call = _json_calls(rules, schemas, '{"name": "NAME", "parameters": ', "}")
    return repeated(call, rules.word("; "), one)


def _mistral(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    if "[ARGS]" in rules.special:
        call = _json_calls(rules, schemas, "[TOOL_CALLS]NAME[ARGS]", "")
        return repeated(call, "", one)
    call = _json_calls(rules, schemas, '{"name": "NAME", "arguments": ', "}")
    return f"{rules.word('[TOOL_CALLS][')} {repeated(call, rules.word(', '), one)} {rules.word(']')}"


def _deepseek(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    """Both notations: which of them a model knows, it knows best."""
    begin, end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    newer = _json_calls(rules, schemas, f"{begin}NAME{sep}", end)
    older = _json_calls(rules, schemas, f"{begin}function{sep}NAME\n```json\n", f"\n```{end}")
    several = [repeated(newer, f"{rules.word(chr(10))}?", one), repeated(older, rules.word("\n"), one)]
    calls = rules.choice([rules.rule(body) for body in several])
    return f"{rules.word('<｜tool▁calls▁begin｜>')} {calls} {rules.word('<｜tool▁calls▁end｜>')}"


# ---- arguments as bare text --------------------------------------------------------------------


def _parameters(rules: Rules, schema: Schema, write: Callable[[str, Schema], str]) -> str:
    """The parameters in the schema's order, those that need not be there in brackets."""
    properties = {name: part if isinstance(part, Mapping) else {} for name, part in properties_of(schema).items()}
    required = schema.get("required", ())
    rules.hold(schema, *COMBINED, *COUNTED, "patternProperties", "$ref")
    return " ".join(write(name, part) + ("" if name in required else "?") for name, part in properties.items())


def _value(rules: Rules, part: Schema, root: Schema, word: str, *never: str, frame: str = "") -> str:
    """A value written as bare text, and the word that closes it. frame: stands on both sides of it."""
    one = united(part, root)
    part = one if isinstance(one, Mapping) else part
    enum = part.get("enum", [part["const"]] if "const" in part else None)
    open_, close = rules.word(frame) if frame else "", rules.word(frame, word)
    if isinstance(enum, list) and enum:
        texts = [item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in enum]
        return f"{open_} {rules.choice([rules.word(text) for text in texts])} {close}"
    if not _is_text(part, root):
        return f"{open_} {rules.json(part, root)} {close}"
    rules.hold(part, *COMBINED)
    rules.hold_format(part)
    types = types_of(part, root)
    if types - {"string", "null", "boolean"}:
        rules.hold(part, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items")
        rules.hold(part, "properties", "additionalProperties", "minItems", "maxItems", "pattern")
    text = rules.until(word, *never, frame=frame, part=part)
    if "null" in types and has_limits(part):
        text = rules.choice([f"{rules.word('null')} {close}", text])
    return f"{open_} {text}"


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
        rules.tool(name)

        def write(parameter_name: str, part: Schema, schema: Schema = schema) -> str:
            return rules.rule(parameter(schema, parameter_name, part))

        body = _parameters(rules, schema, write)
        options.append(f"{rules.word(begin.replace('NAME', name))} {body} {rules.word(end)}")
    return rules.rule(" | ".join(options))


def _qwen3_coder(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</parameter>", "</tool_call>", frame="\n")
        return f"{rules.word(f'<parameter={name}>')} {value} {rules.word(chr(10))}"

    call = _tagged(rules, schemas, "<tool_call>\n<function=NAME>\n", parameter, "</function>\n</tool_call>")
    return repeated(call, rules.word("\n"), one)


def _glm(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    line = f"{rules.word(chr(10))}?"  # 4.7 has no line breaks

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</arg_value>", "</tool_call>")
        key = rules.word(f"<arg_key>{name}</arg_key>")
        return f"{key} {line} {rules.word('<arg_value>')} {value} {line}"

    options = []
    for name, schema in schemas.items():
        rules.tool(name)

        def write(parameter_name: str, part: Schema, schema: Schema = schema) -> str:
            return rules.rule(parameter(schema, parameter_name, part))

        head, tail = rules.word(f"<tool_call>{name}"), rules.word("</tool_call>")
        options.append(f"{head} {line} {_parameters(rules, schema, write)} {tail}")
    return repeated(rules.rule(" | ".join(options)), line, one)


def _quoted(name: str) -> str:
    return f"'{name}'" if '"' in name else f'"{name}"'


def _minimax(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    outer = "</minimax:tool_call>"

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        value = _value(rules, part, schema, "</parameter>", outer)
        return f"{rules.word(f'<parameter name={_quoted(name)}>')} {value} {rules.word(chr(10))}"

    call = _tagged(rules, schemas, '<invoke name="NAME">\n', parameter, "</invoke>\n")
    begin = rules.word("<minimax:tool_call>\n")
    return f"{begin} {repeated(call, '', one)} {rules.word(outer)}"


def _halves(part: Schema, root: Schema) -> list[tuple[str, Schema]]:
    """A schema as those of its strings ("true") and of its other values ("false"), of which there may be none."""
    one = united(part, root)
    part = one if isinstance(one, Mapping) else part
    enum = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(enum, list) and enum:
        parts = [[item for item in enum if isinstance(item, str) is string] for string in (True, False)]
        return [(word, {"enum": items}) for word, items in zip(("true", "false"), parts, strict=True) if items]
    if not _is_text(part, root):
        return [("false", part)]
    others = sorted(types_of(part, root) - {"string"})
    return [("true", {**part, "type": "string"}), *([("false", {**part, "type": others})] if others else [])]


def _deepseek_v32(rules: Rules, schemas: Mapping[str, Schema], one: bool) -> str:
    mark, outer = "｜DSML｜", "</｜DSML｜function_calls>"

    def parameter(schema: Schema, name: str, part: Schema) -> str:
        options = []
        for string, half in _halves(part, schema):
            value = _value(rules, half, schema, f"</{mark}parameter>", outer)
            head = rules.word(f'<{mark}parameter name={_quoted(name)} string="{string}">')
            options.append(f"{head} {value} {rules.word(chr(10))}")
        return rules.choice(options)

    call = _tagged(rules, schemas, f'<{mark}invoke name="NAME">\n', parameter, f"</{mark}invoke>\n")
    begin = rules.word(f"<{mark}function_calls>\n")
    return f"{begin} {repeated(call, '', one)} {rules.word(outer)}"


_LISTED = ("deepseek", "deepseek_v32", "minimax")
"""Formats in which one word opens all calls."""

_FORMATS: Mapping[str, Callable[[Rules, Mapping[str, Schema], bool], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "minimax": _minimax,
    "deepseek": _deepseek,
    "deepseek_v32": _deepseek_v32,
    "glm": _glm,
    "gemma": gemma_calls,
}
