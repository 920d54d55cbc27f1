"""The tools of the Responses API, and the same as chat templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from atlas.serve.errors import unsupported
from atlas.serve.openai.requests import about
from atlas.serve.reference.unknown_fields import Unread
from atlas.text.tools import AllowedTools, Function, FunctionName, NamedTool, Tool, ToolChoice, ToolName, ToolSet


class FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(msgspec.Struct, tag_field="type", tag="namespace"):
    """Functions of one origin, as agent tools group those of an MCP server. The model knows each as NAMESPACE.NAME;
    calls have the two apart."""

    name: str
    tools: list[FunctionTool]
    description: Annotated[str | None, about("Stands before the description of the first function.")] = None


class WebSearchTool(msgspec.Struct, tag_field="type", tag="web_search"):
    """OpenAI's search, which agent tools offer beside functions of their own. The model is not told of it."""


ResponseTool = FunctionTool | NamespaceTool | WebSearchTool


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function"):
    """A `tool_choice`: this function."""

    name: str


class AllowedFunctions(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice`: one of these functions, or with mode "auto" none."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


ResponseToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return f"{namespace}.{name}" if namespace else name


def normalise_tools(value: dict[str, Any]) -> list[str]:
    """Refuse by name what OpenAI's API has and Atlas has not, which a type error would not explain, before the body is
    converted; the paths of tools that the model is not offered. Raises ApiError 400.

    A search of the web beside functions is an offer that an answer may do without. Alone it is what the client wants.
    """
    choice = value.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise unsupported("tool_choice.type", repr(kind[:80]), "name a function, or leave it out")
    tools = value.get("tools")
    if not isinstance(tools, list):
        return []
    unread: list[str] = []
    kinds = [tool.setdefault("type", "function") if isinstance(tool, dict) else None for tool in tools]
    for position, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if kind == "web_search" and ("function" in kinds or "namespace" in kinds):
            tools[position] = {"type": kind}
            unread.append(Unread(f"tools[{position}].type", "this server has no web_search to offer to the model"))
        elif kind == "namespace":
            _check_inner(tool.get("tools"), f"tools[{position}].tools")
        elif isinstance(kind, str) and kind != "function":
            raise _no_such_tool(f"tools[{position}].type", kind)
    return unread


def _check_inner(tools: object, where: str) -> None:
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _no_such_tool(f"{where}[{position}].type", kind)


def _no_such_tool(where: str, kind: str) -> Exception:
    return unsupported(where, repr(kind[:80]), 'declare tools of type "function"')


def functions_of(tools: Sequence[ResponseTool]) -> list[tuple[Tool, str]]:
    """The functions that the model is told of, and the path of each in the request."""
    found: list[tuple[Tool, str]] = []
    for place, tool in enumerate(tools):
        match tool:
            case FunctionTool():
                found.append((_tool(tool, tool.name, tool.description), f"tools[{place}]"))
            case NamespaceTool():
                for inner, function in enumerate(tool.tools):
                    texts = [tool.description if inner == 0 else None, function.description]
                    description = "\n\n".join(text for text in texts if text) or None
                    name = full_name(tool.name, function.name)
                    found.append((_tool(function, name, description), f"tools[{place}].tools[{inner}]"))
    return found


def names_apart(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """For each function of a namespace, by what the model calls it: the namespace and the name."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {full_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}


def choice_of(choice: ResponseToolChoice | None) -> ToolChoice | None:
    """The same as a chat request has it."""
    match choice:
        case FunctionChoice(name):
            return NamedTool(FunctionName(name))
        case AllowedFunctions(mode, tools):
            return AllowedTools(ToolSet(mode, [ToolName(FunctionName(tool.name)) for tool in tools]))
    return choice


def _tool(tool: FunctionTool, name: str, description: str | None) -> Tool:
    return Tool(Function(name, description, tool.parameters, tool.strict))
