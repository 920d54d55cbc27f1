"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas.serve.access.auth import ANONYMOUS, CLIENT
from atlas.serve.access.limits import Account, account_of
from atlas.serve.chat_generation import Prepared, prepare
from atlas.serve.errors import ApiError, invalid, unsupported
from atlas.serve.http import MAX_BODY, EventStream, JsonResponse, json_response, unless_gone
from atlas.serve.openai.response_events import StreamEvent, obfuscated
from atlas.serve.openai.response_store import Record
from atlas.serve.openai.responses_background import EventLog, Run
from atlas.serve.openai.responses_conversation import PREVIOUS, Conversation
from atlas.serve.openai.responses_items import (
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    OutputItem,
    ReasoningItem,
    complete,
    items_of,
)
from atlas.serve.openai.responses_making import Input, Making
from atlas.serve.openai.responses_objects import InputItemList, InputTokenCount, ResponseDeleted
from atlas.serve.openai.responses_request import INCLUDABLE, LOGPROBS, SEALED, ResponseRequest, chat_request, parse
from atlas.serve.openai.responses_truncation import fit
from atlas.serve.service import Service, Serving

MAX_PAGE = 100


class _Stored(msgspec.Struct):
    """What a stored response is looked into for."""

    output: list[OutputItem]
    background: bool


class _Asked(msgspec.Struct):
    """A request that was read and found to be right. given: its own items.  history: the responses that it
    continues."""

    request: ResponseRequest
    prepared: Prepared
    given: Input
    history: list[Record]


class _Answered(msgspec.Struct):
    """What is kept of a request while it is answered. Its body and messages are not: an answer takes long.

    size: bytes of what it repeats and stores.  stream: in pieces; hides: of random length.
    """

    making: Making
    size: int
    headers: dict[str, str]
    background: bool
    stream: bool
    hides: bool


async def create_response(http: Request, service: Service) -> Response:
    """Answer the input, after the conversation that it continues."""
    serving, client = service.require(), _client(http)
    answered = await _begin(http, service, serving, client)
    making, headers, account = answered.making, answered.headers, account_of(http.scope)
    if answered.background:
        opening = making.writer.begin(queued=True)
        log = EventLog(await making.encoded(opening)) if answered.stream else None
        run = _go_on(service, client, answered, account.outlive(), log)
        if run.log is not None:
            return EventStream(run.log.follow(-1), headers, end=b"", first_event=0)
        return _json((await run.recorded()).response, headers)
    account.enter_queue(1, answered.size)
    account.spend(making.prompt_tokens)
    if answered.stream:
        return EventStream(_stream(making, account, hides=answered.hides), headers, end=b"", first_event=0)
    await unless_gone(http, _finish(making, account))
    record = await making.recorded()
    await making.keep(record)
    return _json(record.response, headers)


async def count_input_tokens(http: Request, service: Service) -> Response:
    """Tokens of the prompt that such a request would have."""
    asked = await _ask(http, service, service.require(), _client(http))
    (job,) = asked.prepared.jobs
    return json_response(InputTokenCount(input_tokens=len(job.prompt)), asked.prepared.headers)


async def retrieve_response(http: Request, service: Service) -> Response:
    """A stored response, or its events where it was made in the background as a stream."""
    client, response_id = _client(http), http.path_params["response_id"]
    query = _Query(http, service, ("include", "stream", "starting_after", "include_obfuscation"))
    run, record = await _find(service, client, response_id)
    _check_include(query.many("include"), record)
    account_of(http.scope).hold(len(record.response))  # until it is sent, and the client may not read
    if not query.flag("stream"):
        if query.one("starting_after") is not None:
            raise invalid("starting_after", "set, but stream is not true", "starting_after of a stream only")
        return _json(record.response, query.headers)
    if query.flag("include_obfuscation"):
        raise unsupported("include_obfuscation", "true, for events that were written before,")
    after = query.integer("starting_after", -1, 0, 2**53)
    log = run.log if run else EventLog(record.events, record.first_event, ended=True) if record.events else None
    if log is None:
        found = "true, for a response that was not created with background and stream,"
        raise unsupported("stream", found, "retrieve it without")
    log.check(after)  # now: once the stream has begun its status is 200
    return EventStream(log.follow(after), query.headers, end=b"", first_event=after + 1)


async def delete_response(http: Request, service: Service) -> Response:
    """Forget a response; one that is being made in the background is cancelled first."""
    client, response_id = _client(http), http.path_params["response_id"]
    if (run := service.background.find(client, response_id)) is not None:
        await run.cancel()
    if not await service.responses.delete(client, response_id):
        raise _not_found(response_id)
    return json_response(ResponseDeleted(id=response_id))


async def cancel_response(http: Request, service: Service) -> Response:
    """Stop a response that is being made in the background. One that has ended stays as it is."""
    client, response_id = _client(http), http.path_params["response_id"]
    if (run := service.background.find(client, response_id)) is not None:
        await run.cancel()
        return _json((await run.recorded()).response)
    _, record = await _find(service, client, response_id)
    if not msgspec.json.decode(record.response, type=_Stored).background:
        message = f"response {response_id[:80]!r} was not created with background: true, so it cannot be cancelled"
        raise ApiError(400, "not_in_background", message, "response_id")
    return _json(record.response)


async def list_input_items(http: Request, service: Service) -> Response:
    """What a response answers: the items of its request after those of the conversation that it continues."""
    client, response_id = _client(http), http.path_params["response_id"]
    query = _Query(http, service, ("include", "limit", "order", "after"))
    run, record = await _find(service, client, response_id)
    _check_include(query.many("include"), record)
    limit = query.integer("limit", 20, 1, MAX_PAGE)
    if (order := query.one("order") or "desc") not in ("asc", "desc"):
        raise invalid("order", repr(order[:80]), "asc or desc")
    earlier = run.making.history if run else (await service.responses.history(client, response_id) or [record])[:-1]
    account_of(http.scope).hold(_bytes((*earlier, record)))

    def work() -> list[Item]:
        return [item for one in earlier for item in _items(one)] + items_of(record.input)

    serving, size = service.serving, sum(len(one.input) + len(one.response) for one in (*earlier, record))
    items = await serving.frontend.run(work, size) if serving else work()
    if order == "desc":
        items.reverse()
    if (after := query.one("after")) is not None:
        place = next((place for place, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise invalid("after", repr(after[:80]), "the id of an input item of this response")
        items = items[place + 1 :]
    page = items[:limit]
    ids = (page[0].id, page[-1].id) if page else (None, None)
    listed = InputItemList(data=page, first_id=ids[0], last_id=ids[1], has_more=len(items) > limit)
    return json_response(listed, query.headers)


async def _ask(http: Request, service: Service, serving: Serving, client: str) -> _Asked:
    """Read a request and everything that it refers to. Raises ApiError 400, 404 and 413."""
    frontend, account = serving.frontend, account_of(http.scope)
    (request, ignored), body_size = await frontend.read(http, parse)
    history = await _history(service, client, request.previous_response_id)
    named = await frontend.run(partial(_named, request), body_size)
    records = {record.id: record for name in named if (record := await service.responses.find_item(client, name))}
    size = body_size + _bytes(history)
    _check_size(PREVIOUS, size)
    looked_up = _bytes(records.values())
    _check_size("input", size + looked_up)
    account.hold(size + looked_up)

    def converse() -> tuple[Input, Conversation]:
        items, whole = _resolve(request, records.values(), size)
        items, conversation = list(map(complete, items)), Conversation()
        for record in history:
            conversation.extend(_items(record), PREVIOUS)
        where = "input" if isinstance(request.input, str) else [f"input[{n}]" for n in range(len(items))]
        conversation.extend(items, where)
        if request.instructions is not None:
            template = frontend.template
            conversation.instruct(
                request.instructions, knows_developer=template is not None and template.knows_developer
            )
        return Input.of(items, whole), conversation

    given, conversation = await frontend.run(converse, size + looked_up)
    account.hold(given.size)

    async def prepared_of(conversation: Conversation) -> Prepared:
        chat, names = await frontend.run(partial(chat_request, request, conversation), given.size)
        return await prepare(service, serving, chat, given.size, ignored=ignored, fields=names)

    if request.truncation == "auto":
        # Without a wish of the client's, an answer of some length must have room.
        room = request.max_output_tokens or serving.ready.max_context // 8
        prepared = await fit(conversation, prepared_of, room)
    else:
        prepared = await prepared_of(conversation)
    return _Asked(request, prepared, given, history)


async def _begin(http: Request, service: Service, serving: Serving, client: str) -> _Answered:
    """Read a request, and have what it asks for ready to be made. Raises ApiError."""
    asked = await _ask(http, service, serving, client)
    request, prepared = asked.request, asked.prepared
    making = await serving.frontend.run(
        lambda: Making(service, serving, client, request, prepared, asked.given, asked.history), asked.given.size
    )
    hides = bool(request.stream_options and request.stream_options.include_obfuscation)
    return _Answered(making, asked.given.size, prepared.headers, bool(request.background), bool(request.stream), hides)


def _go_on(service: Service, client: str, answered: _Answered, account: Account, log: EventLog | None) -> Run:
    """Start making a response in the background. Raises ApiError 429 where too many wait."""
    making = answered.making
    try:
        account.enter_queue(1, answered.size)
    except ApiError:
        account.close()
        raise
    account.spend(making.prompt_tokens)
    run = Run(making, account, service.config.request_timeout, log)
    service.background.start(client, run)
    return run


async def _finish(making: Making, account: Account) -> None:
    async with aclosing(making.events(account)) as groups:
        async for _ in groups:
            pass


async def _stream(making: Making, account: Account, *, hides: bool) -> AsyncGenerator[bytes, None]:
    async def encoded(events: Iterable[StreamEvent]) -> bytes:
        if making.ended:  # by the time that a client reads of it, it can go on from there
            await making.keep(await making.recorded())
        return b"".join(await making.encoded(map(obfuscated, events) if hides else events))

    yield await encoded(making.writer.begin())
    try:
        async with aclosing(making.events(account)) as groups:
            async for events in groups:
                yield await encoded(events)
    except ApiError as error:
        yield await encoded(making.fail(error))
    except Exception:
        yield await encoded(making.fault())


def _client(http: Request) -> str:
    name: str = http.scope.get(CLIENT, ANONYMOUS)
    return name


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return JsonResponse(body, 200, headers)


async def _history(service: Service, client: str, response_id: str | None) -> list[Record]:
    """The response that a request continues, after those that it continues itself."""
    if response_id is None:
        return []
    if service.background.find(client, response_id) is not None:
        found = f"{response_id[:80]!r}, which is still being made"
        raise invalid(PREVIOUS, found, "a response that has ended", code="previous_response_in_progress")
    history = await service.responses.history(client, response_id)
    if history is None:
        message = f"{PREVIOUS}: there is no response {response_id[:80]!r}, or it is not kept any more"
        raise ApiError(400, "previous_response_not_found", message, PREVIOUS)
    return history


def _named(request: ResponseRequest) -> list[str]:
    """The ids of items that may have to be looked up: references, and reasoning that a client keeps without its
    text."""
    if isinstance(request.input, str):
        return []
    return list(dict.fromkeys(item.id for item in request.input if _is_named(item) and item.id is not None))


def _is_named(item: InputItem) -> bool:
    return isinstance(item, ItemReference) or (isinstance(item, ReasoningItem) and item.is_bare)


def _resolve(request: ResponseRequest, records: Iterable[Record], size: int) -> tuple[list[Item], int]:
    """The request's items, those that it only names taken from `records`, and the bytes of all of it, of which it has
    `size` without those. Raises ApiError 404, and 413 where a few names stand for more than a body may have."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)], size
    known = {item.id: item for record in records for item in _items(record)}
    sizes: dict[str | None, int] = {}
    items: list[Item] = []
    for position, item in enumerate(request.input):
        found = known.get(item.id) if _is_named(item) else None
        if found is not None:
            if item.id not in sizes:
                sizes[item.id] = len(msgspec.json.encode(found))
            size += sizes[item.id]
            _check_size(f"input[{position}]", size)
            items.append(found)
        elif isinstance(item, ItemReference):
            where = f"input[{position}].id"
            message = f"{where}: there is no item {item.id[:80]!r}, or it is not kept any more; send the item itself"
            raise ApiError(404, "item_not_found", message, where)
        else:
            items.append(item)
    return items, size


def _bytes(records: Iterable[Record]) -> int:
    return sum(len(record.input) + len(record.response) for record in records)


def _check_size(where: str, size: int) -> None:
    if size > MAX_BODY:
        message = f"{where}: with all that the request refers to it has {size} bytes; accepted: at most {MAX_BODY}"
        raise ApiError(413, "request_too_large", message, where)


def _items(record: Record) -> list[Item]:
    """What a response adds to a conversation: its input and its output."""
    return [*items_of(record.input), *msgspec.json.decode(record.response, type=_Stored).output]


async def _find(service: Service, client: str, response_id: str) -> tuple[Run | None, Record]:
    """A response of this client, and what makes it if it has not ended. Raises ApiError 404."""
    if (run := service.background.find(client, response_id)) is not None:
        return run, await run.recorded()
    record = await service.responses.get(client, response_id)
    if record is None:
        raise _not_found(response_id)
    return None, record


def _not_found(response_id: str) -> ApiError:
    message = f"there is no response {response_id[:80]!r}, or it is not kept any more"
    return ApiError(404, "response_not_found", message, "response_id")


def _check_include(names: Iterable[str], record: Record) -> None:
    """What was not recorded when the response was made cannot be told later."""
    told = {LOGPROBS: b'"logprobs":[{', SEALED: b'"encrypted_content":"'}
    for name in names:
        if name not in INCLUDABLE:
            raise invalid("include", repr(name[:80]), ", ".join(INCLUDABLE))
        if name in told and told[name] not in record.response:
            raise unsupported("include", f"{name!r}, for a response that was created without,", "create it with")


class _Query:
    """The query of a GET. headers: of the answer, naming the parameters that nothing reads."""

    def __init__(self, http: Request, service: Service, known: Collection[str]) -> None:
        self._given: dict[str, list[str]] = {}
        for name, value in http.query_params.multi_items():
            self._given.setdefault(name.removesuffix("[]"), []).append(value)
        self.headers = service.report_ignored([name for name in self._given if name not in known])

    def many(self, name: str) -> list[str]:
        return self._given.get(name, [])

    def one(self, name: str) -> str | None:
        values = self.many(name)
        if len(values) > 1:
            raise invalid(name, f"given {len(values)} times", "once")
        return values[0] if values else None

    def flag(self, name: str) -> bool:
        value = self.one(name)
        if value not in (None, "true", "false"):
            raise invalid(name, repr(value)[:80], "true or false")
        return value == "true"

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        if not re.fullmatch(r"[0-9]{1,16}", text) or not least <= int(text) <= most:
            raise invalid(name, repr(text[:80]), f"an integer from {least} to {most}")
        return int(text)
