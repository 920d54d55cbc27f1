"""Work for a client ends with it, and a cancellation from outside is never taken for one of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from asgi import nothing_more, scope_of
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from atlas.serve.http import PIECE_BYTES, EventStream, JsonResponse, unless_gone

SLOW_END = 0.03


class Scene:
    """A request whose client can go away, and work for it that takes a moment to end when it is cancelled."""

    def __init__(self, *, slow_end: bool = False) -> None:
        self.gone, self.done, self.ended = asyncio.Event(), asyncio.Event(), False
        self.begun = asyncio.Event()
        self.fault: Exception | None = None
        self._slow_end = slow_end

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def http(self) -> Request:
        return Request(scope_of("POST", "/v1/x", []), self.receive)

    async def work(self) -> str:
        try:
            self.begun.set()
            await self.done.wait()
            if self.fault is not None:
                raise self.fault
            return "answer"
        except asyncio.CancelledError:
            if self._slow_end:
                await asyncio.sleep(SLOW_END)
            raise
        finally:
            self.ended = True

    def start(self) -> asyncio.Task[str]:
        return asyncio.create_task(unless_gone(self.http, self.work()))


Act = Callable[[Scene, asyncio.Task[str]], Any]

GOES: Act = lambda scene, _: scene.gone.set()  # noqa: E731
ANSWERS: Act = lambda scene, _: scene.done.set()  # noqa: E731
CANCELS: Act = lambda _, task: task.cancel()  # noqa: E731


@pytest.mark.parametrize("slow_end", [False, True])
@pytest.mark.parametrize(
    ("acts", "outcome"),
    [
        ([ANSWERS], "answer"),
        ([GOES], ClientDisconnect),
        ([ANSWERS, GOES], "answer"),
        ([CANCELS], asyncio.CancelledError),
        ([CANCELS, GOES], asyncio.CancelledError),
        ([GOES, CANCELS], asyncio.CancelledError),
        ([ANSWERS, CANCELS], asyncio.CancelledError),
        ([ANSWERS, GOES, CANCELS], asyncio.CancelledError),
    ],
)
def test_at_once(acts: list[Act], outcome: Any, slow_end: bool) -> None:
    async def main() -> None:
        scene = Scene(slow_end=slow_end)
        task = scene.start()
        await scene.begun.wait()
        for act in acts:
            act(scene, task)
        if isinstance(outcome, str):
            assert await task == outcome
        else:
            with pytest.raises(outcome):
                await task
        assert scene.ended

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("first", [GOES, CANCELS])
def test_cancelled_while_the_work_is_being_ended(first: Act, times: int) -> None:
    """It was swallowed there: the request went on, above its time limit."""

    async def main() -> None:
        scene = Scene(slow_end=True)
        task = scene.start()
        await scene.begun.wait()
        first(scene, task)
        for _ in range(times):
            await asyncio.sleep(SLOW_END / 10)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled() and scene.ended

    asyncio.run(main())


@pytest.mark.parametrize("slow_end", [False, True])
@pytest.mark.parametrize("goes", [False, True])
def test_a_time_limit_around_it(goes: bool, slow_end: bool) -> None:
    async def main() -> None:
        scene = Scene(slow_end=slow_end)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                if goes:
                    asyncio.get_running_loop().call_later(0.015, scene.gone.set)
                try:
                    await unless_gone(scene.http, scene.work())
                except ClientDisconnect:
                    await asyncio.sleep(1)
        assert scene.ended
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(main())


@pytest.mark.parametrize("gone", [False, True])
def test_a_fault_of_the_work_is_told(gone: bool, recwarn: pytest.WarningsRecorder) -> None:
    async def main() -> None:
        scene = Scene()
        scene.fault = RuntimeError("broken")
        task = scene.start()
        await scene.begun.wait()
        scene.done.set()
        if gone:
            scene.gone.set()
        with pytest.raises(RuntimeError, match="broken"):
            await task

    asyncio.run(main())
    assert not list(recwarn)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_a_long_answer_goes_as_its_client_reads(size: int) -> None:
    """So that the request is under way until then, and what it holds is counted."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        await JsonResponse(bytes(range(256)) * (size // 256 + 1))(scope_of("GET", "/", []), nothing_more(), send)

    asyncio.run(main())
    start, *pieces = sent
    body = b"".join(piece["body"] for piece in pieces)
    assert body == bytes(range(256)) * (size // 256 + 1)
    assert dict(start["headers"]) == {b"content-length": b"%d" % len(body), b"content-type": b"application/json"}
    assert max(len(piece["body"]) for piece in pieces) <= PIECE_BYTES
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(pieces) == 1 or not pieces[-1]["body"]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("how", ["gone", "cancelled", "both", "cancelled twice"])
def test_a_stream(how: str, reads: bool) -> None:
    """Its generator is closed before anything else is raised, wherever it was: making an event, or waiting for the
    client to read one."""

    async def main() -> None:
        scene, closed = Scene(), False

        async def events() -> AsyncGenerator[bytes, None]:
            nonlocal closed
            try:
                yield b"data: 1\n\n"
                scene.begun.set()
                await asyncio.Event().wait()
            finally:
                if reads:
                    await asyncio.sleep(SLOW_END)
                closed = True

        async def send(message: Message) -> None:
            if not reads and message.get("body"):
                scene.begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(SLOW_END)

        stream = EventStream(events(), {})
        task = asyncio.create_task(stream(scope_of("POST", "/v1/x", []), scene.receive, send))
        await scene.begun.wait()
        if how in ("gone", "both"):
            scene.gone.set()
        if how == "both":
            await asyncio.sleep(SLOW_END / 10)
        if how != "gone":
            task.cancel()
        if how == "cancelled twice":
            await asyncio.sleep(SLOW_END / 10)
            task.cancel()
        await asyncio.wait((task,))
        assert closed and task.cancelled() == (how != "gone")

    asyncio.run(main())
