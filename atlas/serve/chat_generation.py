"""A conversation, whichever API it came through, made into the sequences that answer it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import msgspec

from atlas.engine.sampling import Thinking
from atlas.errors import RequestError
from atlas.parsers import AnswerParser, Markers, ToolFormat, shown_words
from atlas.serve.answer_grammar import answer_grammar
from atlas.serve.errors import ApiError, invalid, unsupported
from atlas.serve.frontend import ChatPrompt, Frontend
from atlas.serve.generation import Job
from atlas.serve.jobs import make_jobs, sampling_of
from atlas.serve.openai.requests import ChatRequest
from atlas.serve.reasoning import Reasoning, marker_ids, reasoning_of
from atlas.serve.reference.unknown_fields import NO_SWITCH, NOT_SHOWN, Unread
from atlas.serve.service import Service, Serving
from atlas.text.chat_template import ChatTemplate
from atlas.text.messages import ChatMessage, guard_all
from atlas.text.tools import NamedTool, Tool, check_tools, chosen

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")


class Prepared(msgspec.Struct, frozen=True):
    """What is needed to answer.

    jobs: one for each choice.  headers: for the response, the fields that nobody reads among them.
    """

    jobs: list[Job]
    headers: dict[str, str]


class Plan(msgspec.Struct, frozen=True):
    """A request's tools and reasoning, checked, for one model.

    tools: those that the template gets.  schemas: name -> JSON schema of the arguments.
    format: how calls are written; None: no call may be made.  markers: around reasoning; None: there is none.
    variables: for the template.  unread: paths of what the template does not ask for.
    choice: whether a call may or must be made.  one: it is one call and no more.
    """

    tools: list[Tool]
    schemas: dict[str, dict[str, Any]]
    format: ToolFormat | None
    markers: Markers | None
    reasoning: Reasoning
    variables: dict[str, Any]
    unread: list[Unread]
    choice: Literal["none", "auto", "required"] | NamedTool = "none"
    one: bool = False

    @property
    def callable(self) -> dict[str, dict[str, Any]]:
        """The schemas of those tools that may be called."""
        if not isinstance(self.choice, NamedTool):
            return self.schemas
        return {self.choice.function.name: self.schemas[self.choice.function.name]}


async def prepare(
    service: Service,
    serving: Serving,
    request: ChatRequest,
    body_size: int,
    *,
    ignored: Sequence[str] = (),
    fields: Mapping[str, str] | None = None,
    named: Callable[[str], str] | None = None,
) -> Prepared:
    """Everything about a request that can be wrong is found here: raises ApiError 400 (404: another model).

    body_size: bytes of the request, which decide where its work is done.
    ignored: fields that the caller found nobody to read, for the header that tells of them.
    fields: what the caller's API calls a field of `ChatRequest`, for errors. A path may stand for all below it:
        {"messages": "input", "max_tokens": "max_output_tokens"}.
    named: the same for what the template does not read; None: as `fields` says.
    """
    with renamed(fields or {}):
        service.check_model(request.model)
        frontend, ready = serving.frontend, serving.ready
        plan = await frontend.run(partial(plan_of, frontend, request), body_size)
        defaults = frontend.presets.sampling(plan.reasoning.asked.thinks)
        sampling = await sampling_of(service, serving, request, defaults, body_size)
        told = named or partial(called, fields=fields or {})
        headers = service.report_ignored([*ignored, *(path.renamed(told(path)) for path in plan.unread)])
        prompt = await chat_prompt(frontend, request, plan, body_size, ready.max_context)
        inside = plan.markers is not None and _begins_inside(plan.markers, request, prompt.text)
        wanted = await answer_grammar(
            frontend,
            request,
            frontend.presets.tool_format if plan.format is not None else None,
            plan.callable,
            body_size,
            forced=plan.choice not in ("none", "auto"),
            one=plan.one,
        )
        thinking = _thinking(frontend, plan, inside, wanted is not None)
        params = msgspec.structs.replace(sampling.params, thinking=thinking, grammar=wanted.grammar if wanted else None)
        sampling = msgspec.structs.replace(sampling, params=params)
        field = called(wanted.where, fields or {}) if wanted else ""
        made = partial(make_jobs, [prompt.ids], sampling, ready.max_context, grammar_field=field)
        jobs, notes = await frontend.run(made, body_size)
        if plan.format is not None or plan.markers is not None:
            parser = partial(AnswerParser, plan.format, plan.schemas, plan.markers, inside=inside)
            shown = shown_words(plan.format, plan.markers)
            jobs = [msgspec.structs.replace(job, parser=parser, shown=shown, one_call=plan.one) for job in jobs]
    return Prepared(jobs, headers | notes)


async def chat_prompt(
    frontend: Frontend, request: ChatRequest, plan: Plan, body_size: int, max_context: int | None
) -> ChatPrompt:
    """The prompt of a conversation. max_context: as for `Frontend.chat_prompt`."""
    return await frontend.chat_prompt(
        request.messages,
        max_context,
        body_size,
        tools=plan.tools,
        variables=plan.variables,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final=bool(request.continue_final_message),
    )


def plan_of(frontend: Frontend, request: ChatRequest) -> Plan:
    """Raises ApiError 400 for what this model cannot do."""
    template = frontend.require_template()
    presets = frontend.presets
    markers, switches = presets.markers, presets.switches
    reasoning = reasoning_of(request, presets)
    variables = _guarded(frontend, reasoning.asked.variables)
    unread = [Unread(path, NO_SWITCH) for path in reasoning.asked.ignored]
    unread += _not_shown(template, request.messages)
    _check_continued(request)
    try:
        schemas = check_tools(request.tools or [])
        tools, choice = chosen(request.tools or [], request.tool_choice)
    except RequestError as error:
        raise invalid(error.where, error.found, error.accepted) from None
    if not tools or choice == "none":
        # The model is not told of tools that it may not call.
        return Plan([], {}, None, markers, reasoning, variables, unread)
    if not switches.takes_tools:
        message = (
            "tools: this model's chat template has no place for tools; leave them out, serve a model whose template "
            "has, or serve with --chat-template FILE, a template that has a place for tools: docs/tools.md"
        )
        raise ApiError(400, "no_tool_template", message, "tools")
    if presets.parser is None:
        fix = "name the format that the model writes calls in with --tool-parser"
        raise unsupported("tools", "a model whose tool calls have no known format", fix)
    schemas = {tool.function.name: schemas[tool.function.name] for tool in tools}
    one = request.parallel_tool_calls is False or isinstance(choice, NamedTool)
    return Plan(tools, schemas, presets.parser, markers, reasoning, variables, unread, choice, one)


def _not_shown(template: ChatTemplate, messages: Sequence[ChatMessage]) -> list[Unread]:
    """What the model is not told of the conversation: the first of a kind."""
    found: dict[str, int] = {}
    for position, message in enumerate(messages):
        if message.tool_calls and not template.shows_calls:
            found.setdefault("tool_calls", position)
        if message.name is not None and message.role == "user" and not template.shows_names:
            found.setdefault("name", position)
    return [Unread(f"messages[{position}].{field}", NOT_SHOWN) for field, position in found.items()]


def _guarded(frontend: Frontend, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template in which no text of the client becomes a special token."""

    def guard(text: str) -> str:
        # Templates compare such words; a guard in one would make it another.
        return text if _PLAIN_WORD.fullmatch(text) else frontend.tokenizer.guard(text)

    try:
        return {name: guard_all(value, guard) for name, value in variables.items()}
    except RecursionError:
        raise invalid("chat_template_kwargs", "nested too deeply") from None


def _begins_inside(markers: Markers, request: ChatRequest, prompt: str) -> bool:
    """Whether the answer begins as reasoning."""
    content = request.messages[-1].text if request.continue_final_message else ""
    if not content:
        return markers.inside(prompt)
    start, end = content.rfind(markers.start), content.rfind(markers.end)
    if start != end:  # the client has written markers itself
        return start > end
    return prompt.removesuffix(content).rstrip().endswith(markers.start)


def _check_continued(request: ChatRequest) -> None:
    """Raises ApiError 400: there is nothing that an answer could go on with."""
    if not request.continue_final_message or not request.messages:
        return
    last = request.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        found = f"true, but the last message is the {last.role}'s{' and has tool calls' if last.tool_calls else ''}"
        raise invalid("continue_final_message", found, "an assistant's message with content as the last one")
    if request.add_generation_prompt:
        raise invalid("continue_final_message", "true, and add_generation_prompt as well", "one of the two")


def _thinking(frontend: Frontend, plan: Plan, inside: bool, before_grammar: bool) -> Thinking | None:
    """What the engine must know of reasoning, where anything hangs on it: a budget, or where a grammar begins."""
    if plan.markers is None or (plan.reasoning.budget is None and not before_grammar):
        return None
    begin, end = (marker_ids(frontend.tokenizer, marker) for marker in (plan.markers.start, plan.markers.end))
    if before_grammar and plan.reasoning.asked.thinks is False:
        begin = ()  # an answer that is not to reason begins with its grammar
    return Thinking(end, inside, plan.reasoning.budget, begin)


@contextmanager
def renamed(fields: Mapping[str, str]) -> Generator[None]:
    """Errors raised inside name fields as `fields` says."""
    try:
        yield
    except ApiError as error:
        path = error.body.param
        if path is None or (other := called(path, fields)) == path:
            raise
        message = error.body.message
        if message.startswith(path):
            message = other + message[len(path) :]
        raise ApiError(error.status, error.body.code, message, other, error.headers) from None


def called(path: str, fields: Mapping[str, str]) -> str:
    """What a path of `ChatRequest` is to the caller's API, as `fields` says."""
    prefix = max((name for name in fields if _leads_to(name, path)), key=len, default=None)
    return path if prefix is None else fields[prefix] + path[len(prefix) :]


def _leads_to(field: str, path: str) -> bool:
    """Whether `path` is that of the field or of something in it."""
    return path.startswith(field) and not re.match(r"\w", path[len(field) : len(field) + 1])
