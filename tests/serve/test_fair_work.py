"""Work in threads is begun in turns: whoever asks for much does not make others wait behind all of it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from atlas.serve import offload
from atlas.serve.grammar_worker import Verdict
from atlas.serve.offload import Offload
from tests.serve.in_process import Server, make_model


class Works:
    """Works of an `Offload` that end when they are told to. began: their names, in order."""

    def __init__(self, threads: int) -> None:
        self.pool = Offload(threads)
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self._ends: dict[str, threading.Event] = {}

    def ask(self, *names: str) -> None:
        """Each is a work of the owner that its first letter stands for."""
        for name in names:
            context = contextvars.copy_context()
            context.run(offload.owner.set, name[0])
            self._ends[name] = threading.Event()
            self.tasks[name] = asyncio.get_running_loop().create_task(self._run(name), context=context)

    async def _run(self, name: str) -> str:
        def work() -> str:
            self.began.append(name)
            assert self._ends[name].wait(10)
            return name

        return await self.pool.run(work)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            assert await self.tasks[name] == name

    async def settled(self, count: int) -> list[str]:
        """What had begun when that were `count` works, and no more come."""
        for _ in range(400):
            await asyncio.sleep(0.005)
            if len(self.began) >= count:
                break
        await asyncio.sleep(0.02)
        assert len(self.began) == count, self.began
        return self.began

    def close(self) -> None:
        for event in self._ends.values():
            event.set()


def run(main: Callable[[Works], Coroutine[Any, Any, None]], threads: int) -> None:
    async def with_works() -> None:
        works = Works(threads)
        try:
            await main(works)
        finally:
            works.close()

    asyncio.run(with_works())


def test_owners_take_turns() -> None:
    async def main(works: Works) -> None:
        works.ask("a0")
        await works.settled(1)
        works.ask(*(f"a{i}" for i in range(1, 50)), "b0", "b1", "c0")
        for count in range(1, 6):
            await works.end(works.began[-1])
            await works.settled(count + 1)
        assert works.began == ["a0", "a1", "b0", "c0", "a2", "b1"]

    run(main, 1)


def test_one_thread_is_always_for_another() -> None:
    async def main(works: Works) -> None:
        works.ask(*(f"a{i}" for i in range(20)))
        assert await works.settled(2) == ["a0", "a1"]
        works.ask("b0")
        assert await works.settled(3) == ["a0", "a1", "b0"]
        works.ask("c0")
        await works.end("b0")
        assert (await works.settled(4))[3] == "c0"
        await works.end("c0", "a1")
        assert (await works.settled(5))[4] == "a2"

    run(main, 3)


def test_all_threads_are_used() -> None:
    async def main(works: Works) -> None:
        works.ask("a0")
        await works.end("a0")  # its thread is idle now
        works.ask("a1", "b0", "c0", "d0")
        assert sorted((await works.settled(4))[1:]) == ["a1", "b0", "c0"]

    run(main, 3)


def test_what_is_cancelled_is_never_begun() -> None:
    async def main(works: Works) -> None:
        works.ask("a0")
        await works.settled(1)
        works.ask("a1", "b0", "a2")
        await asyncio.sleep(0)
        for name in ("a1", "b0", "a0"):
            works.tasks[name].cancel()
        works.close()
        assert await works.tasks["a2"] == "a2"
        assert works.began == ["a0", "a2"]
        assert not works.pool._waiting
        for name in ("a1", "b0", "a0"):
            with pytest.raises(asyncio.CancelledError):
                await works.tasks[name]

    run(main, 1)


@pytest.mark.parametrize("place", ["frontend", "grammars"])
def test_who_floods_a_server_does_not_hold_up_another(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole requests, told apart by their keys: a small one is begun while all large ones of another still wait."""
    server = Server(make_model(tmp_path / "model"), keys=["many", "one"])
    server.say_text(5, "hi")
    go, begun = threading.Event(), list[str]()

    def blocked(text: str) -> None:
        begun.append(text)
        assert go.wait(10)

    grammars, template = server.frontend.grammars, server.frontend.require_template()
    if place == "frontend":
        render = template.render
        monkeypatch.setattr(
            template, "render", lambda turns, **more: (blocked(turns[0]["content"][:4]), render(turns, **more))[1]
        )
    else:
        monkeypatch.setattr(grammars, "_judge", lambda grammar: (blocked(grammar.text[:4]), Verdict())[1])

    async def ask(key: str, number: int = 0) -> int:
        text = key + str(number)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "yo"}], "seed": 5, "guided_regex": text}
        if place == "frontend":
            body = {"messages": [{"role": "user", "content": text + 10_000 * "x"}], "seed": 5}
        headers = {"authorization": f"Bearer {key}"}
        return (await server.http.post("/v1/chat/completions", json=body, headers=headers)).status_code

    async def until(count: int) -> None:
        for _ in range(500):
            await asyncio.sleep(0.01)
            if len(begun) >= count:
                break
        await asyncio.sleep(0.05)  # in which no more begin

    async def main() -> None:
        tasks = [asyncio.create_task(ask("many", number)) for number in range(12)]
        await until(2)
        assert begun == ["many"] * 2
        tasks.append(asyncio.create_task(ask("one")))
        await until(3)
        assert begun == ["many"] * 2 + ["one0"]
        go.set()
        assert {await task for task in tasks} == {200} and len(begun) == 13

    asyncio.run(main())


def test_faults_reach_who_asked() -> None:
    def work(text: str) -> int:
        return int(text)

    async def main() -> None:
        pool = Offload()
        with pytest.raises(ValueError, match="ten"):
            await pool.run(work, "ten")
        assert await pool.run(work, "10") == 10

    asyncio.run(main())
