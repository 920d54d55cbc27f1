"""Renders a model's own chat template: messages in, prompt text out. A request never brings a template."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from atlas.errors import CheckpointError, ConfigError, RequestError
from atlas.text.sandbox import Sandbox
from atlas.text.template_names import outside_names

RENDER_SECONDS = 5.0
PROBE_SECONDS = 1.0
"""For a short conversation that is rendered to learn about a template, a few times while a server starts."""

MAX_SOURCE = 1 << 20


class _TemplateRaisedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class CallStyle(NamedTuple):
    """null_content: a turn with calls and without text has the content None instead of "".
    text_arguments: arguments are JSON text instead of an object.
    """

    null_content: bool = False
    text_arguments: bool = False


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is inert."""

    tags = {"generation"}  # noqa: RUF012  # the type that Extension declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template's text, from the checkpoint.
        special_tokens: names such as `bos_token` that the template may print.

    Attributes:
        source: as given.
        variables: the names that it expects from outside, but for special tokens.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, seconds: float = RENDER_SECONDS) -> None:
        self.source = source
        self._seconds = seconds
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
        )
        self._sandbox.filters["tojson"] = self._to_json
        self._sandbox.globals["raise_exception"] = _raise_exception
        self._sandbox.globals["strftime_now"] = _strftime_now
        self.knows_developer = "developer" in source
        if len(source) > MAX_SOURCE:
            raise CheckpointError("chat template", f"{len(source)} characters", f"at most {MAX_SOURCE}")
        try:
            with self._sandbox.limits(seconds):
                self._template = self._sandbox.from_string(source)
                self.variables = outside_names(self._sandbox.parse(source)) - special_tokens.keys()
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"chat template, line {line}" if line else "chat template"
            raise CheckpointError(where, str(error), "a Jinja2 template") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> str:
        """The prompt text. Raises RequestError with the template's own words if it refuses.

        tools: function definitions, as the OpenAI API has them.
        variables: more names for the template (`enable_thinking`, ...), plain JSON data.
        seconds: less time for it than the template has otherwise.
        """
        names = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        chunks = []
        try:
            with self._sandbox.limits(min(seconds or self._seconds, self._seconds)) as budget:
                for chunk in self._template.generate({**self._special_tokens, **(variables or {}), **names}):
                    budget.output(len(chunk))
                    chunks.append(chunk)
        except _TemplateRaisedError as error:
            raise RequestError("messages", f"refused by the model's chat template: {error}") from None
        except Exception as error:  # whatever a template provokes is about this request, never the server
            found = f"the model's chat template failed: {type(error).__name__}: {error}"
            raise RequestError("messages", found) from None
        return "".join(chunks)

    @property
    def call_style(self) -> CallStyle:
        """How this template wants tool calls of the history: the first way in which a call gets into the prompt."""
        return self._calls[0]

    @property
    def shows_calls(self) -> bool:
        """Whether tool calls of the history get into the prompt; also where a template refuses whatever was tried."""
        return self._calls[1]

    @functools.cached_property
    def shows_names(self) -> bool:
        """Whether the `name` of a user's message gets into the prompt."""
        turns = ({"role": "user", "content": "Hi", "name": "probe-name"},)
        try:
            return "probe-name" in self.render(turns, seconds=PROBE_SECONDS)
        except RequestError:
            return True

    @functools.cached_property
    def _calls(self) -> tuple[CallStyle, bool]:
        refused = True
        for style in (CallStyle(null, text) for text in (False, True) for null in (False, True)):
            arguments: Any = {"place": "probe-value"}
            function = {"name": "probe-name", "arguments": json.dumps(arguments) if style.text_arguments else arguments}
            call = {"id": "probe0001", "type": "function", "function": function}
            content = None if style.null_content else ""
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "name": "probe-name", "tool_call_id": "probe0001", "content": "done"},
            ]
            try:
                tools = [{"type": "function", "function": {"name": "probe-name"}}]
                text = self.render(turns, tools=tools, seconds=PROBE_SECONDS)
            except RequestError:
                continue
            if "probe-value" in text:
                return style, True
            refused = False
        return CallStyle(), refused

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja2's own filter escapes HTML, which no model was trained on."""
        if indent is not None and indent > 16:
            raise ValueError("tojson: indent above 16")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def load_template(
    own: str | None, special_tokens: Mapping[str, str], file: str | None, option: str = "--chat-template"
) -> tuple[ChatTemplate | None, str]:
    """The chat template of `file`, else the model's `own`; or None, and why.

    Raises:
        ConfigError: the file cannot be used; `option` is what named it.
    """
    if file is not None:
        try:
            return ChatTemplate(Path(file).read_text(encoding="utf-8"), special_tokens), ""
        except CheckpointError as error:
            raise ConfigError(option, f"{file}: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(option, f"{file}: {why}", "a file with a Jinja2 template") from None
    if own is None:
        return None, "this model has no chat template"
    try:
        return ChatTemplate(own, special_tokens), ""
    except CheckpointError as error:
        return None, f"this model's chat template cannot be used ({error})"


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRaisedError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256:
        raise ValueError("strftime_now: a pattern of more than 256 characters")
    return datetime.datetime.now().strftime(pattern)
