"""The tools a request declares, as the OpenAI API has them and as chat templates expect them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from atlas.errors import RequestError
from atlas.parsers.cursor import MOST_NAME, is_name

MAX_TOOLS = 1024


class Function(msgspec.Struct):
    """What a function is called, and the JSON schema of its arguments; none: it takes none.

    strict: calls that the model makes by itself keep to the schema too, not only forced ones (docs/tools.md).
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """One entry of `tools`."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    """Which function."""

    name: str


class ToolName(msgspec.Struct):
    """One of the tools that are allowed."""

    function: FunctionName
    type: Literal["function"] = "function"


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """A `tool_choice` that is one function."""

    function: FunctionName


class ToolSet(msgspec.Struct):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: list[ToolName]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that leaves only some of the tools; the model is not told of the others."""

    allowed_tools: ToolSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def check_tools(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Name -> schema of the parameters. Raises RequestError naming what is wrong."""
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    schemas: dict[str, dict[str, Any]] = {}
    for position, tool in enumerate(tools):
        where, function = f"tools[{position}].function", tool.function
        if not is_name(function.name):
            accepted = f"1 to {MOST_NAME} letters, digits and any of _ - . : / @ +"
            raise RequestError(f"{where}.name", repr(function.name[:80]), accepted)
        if function.name in schemas:
            raise RequestError(f"{where}.name", f"{function.name[:80]!r} a second time", "names that differ")
        schemas[function.name] = _check_schema(function.parameters or {}, f"{where}.parameters")
    return schemas


def _check_schema(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """What calls need of a schema: arguments are an object."""
    if (kind := schema.get("type", "object")) != "object":
        raise RequestError(f"{where}.type", repr(kind)[:80], '"object": arguments have names')
    if not isinstance(schema.get("properties", {}), dict):
        raise RequestError(f"{where}.properties", f"a {type(schema['properties']).__name__}", "an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required", repr(required)[:80], "a list of names")
    return schema


def chosen(
    tools: Sequence[Tool], choice: ToolChoice | None
) -> tuple[list[Tool], Literal["none", "auto", "required"] | NamedTool]:
    """The tools that may be called, and whether they must. Raises RequestError for a choice that they cannot answer."""
    names = dict.fromkeys(tool.function.name for tool in tools)
    if isinstance(choice, AllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        for position, name in enumerate(allowed):
            _check_named(name, names, f"tool_choice.allowed_tools.tools[{position}].function.name")
        if not allowed:
            raise RequestError("tool_choice.allowed_tools.tools", "empty", "at least one tool")
        kept = frozenset(allowed)
        return [tool for tool in tools if tool.function.name in kept], choice.allowed_tools.mode
    if isinstance(choice, NamedTool):
        _check_named(choice.function.name, names, "tool_choice.function.name")
    elif choice == "required" and not names:
        raise RequestError("tool_choice", "a call that must be made, without tools", "a request with tools")
    return list(tools), choice or "auto"


def _check_named(name: str, names: Collection[str], where: str) -> None:
    if name not in names:
        found = f"{name[:80]!r}, which is not among the tools"
        raise RequestError(where, found, ", ".join(names)[:400] or "a request with tools")


def definitions(tools: Sequence[Tool], guard: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """What a template gets: names in the order in which transformers has them, without what says nothing."""
    result = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        result.append({"type": tool.type, "function": guard(function)})
    return result
