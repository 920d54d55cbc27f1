"""Which tools a conversation has come to offer: those that are declared, but for what its turns add and remove."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from atlas.serve.anthropic.requests import (
    Conversation,
    Tool,
    ToolAddition,
    ToolDefinition,
    ToolReference,
    ToolRemoval,
    ToolResult,
)
from atlas.serve.errors import invalid


class Offered(msgspec.Struct, frozen=True):
    """A tool, and the path of its definition."""

    tool: Tool
    path: str


def offered_tools(request: Conversation) -> list[Offered]:
    """The tools that the model may call after the last turn, in the order in which they were defined.

    Raises ApiError 400 for the name of a tool that is not there.
    """
    declared = [Offered(tool, f"tools[{position}]") for position, tool in enumerate(request.tools or ())]
    offered = {entry.tool.name for entry in declared if not entry.tool.defer_loading}
    defined: dict[str, list[Offered]] = {}  # what `tools` names twice is for others to refuse
    for entry in declared:
        defined.setdefault(entry.tool.name, []).append(entry)
    for change, path in _changes(request):
        if isinstance(change, ToolAddition) and isinstance(change.tool, ToolDefinition):
            definition = Offered(change.tool.definition, f"{path}.tool.definition")
            # A new definition of a name takes the place of the old one.
            defined.pop(definition.tool.name, None)
            defined[definition.tool.name] = [definition]
            offered.add(definition.tool.name)
            continue
        if isinstance(change, ToolReference):
            name, where = change.tool_name, f"{path}.tool_name"
        else:
            assert not isinstance(change.tool, ToolDefinition)
            name, where = change.tool.name, f"{path}.tool.name"
        if name not in defined:
            raise invalid(where, f"{name[:80]!r}, which is not defined", "a tool of the request")
        if isinstance(change, ToolRemoval):
            offered.discard(name)
        else:
            offered.add(name)
    return [entry for name, entries in defined.items() if name in offered for entry in entries]


def _changes(request: Conversation) -> Iterator[tuple[ToolReference | ToolAddition | ToolRemoval, str]]:
    for n_turn, turn in enumerate(request.messages):
        if isinstance(turn.content, str):
            continue
        for n_block, block in enumerate(turn.content):
            path = f"messages[{n_turn}].content[{n_block}]"
            if isinstance(block, ToolAddition | ToolRemoval):
                yield block, path
            elif isinstance(block, ToolResult) and isinstance(block.content, list):
                for n_part, part in enumerate(block.content):
                    if isinstance(part, ToolReference):
                        yield part, f"{path}.content[{n_part}]"
