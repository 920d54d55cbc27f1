"""The thread that owns an engine inside this process.

All others send it commands and read their own mailboxes; both are `queue.SimpleQueue`, whose `put` may be
called from anywhere, a finaliser included. So callers need no lock, requests of several threads share a batch,
and Ctrl-C, which Python delivers to the main thread, never lands inside a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams, SequenceOutput
from atlas.errors import AtlasError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What one step gave one request.

    index: the request's place in its submission.  time: `time.perf_counter()` at the end of the step.
    """

    index: int
    output: SequenceOutput
    time: float


Mailbox = queue.SimpleQueue[list[Arrival] | AtlasError]


class Submission:
    """Requests that belong together: made by `EngineThread.submission`, then sent once.

    `take` waits for their next outputs. The aborts may be called by anyone at any time, before `send` too, so
    that a caller can enter its `try` before anything runs.
    """

    def __init__(self, thread: EngineThread, request_ids: list[str]) -> None:
        self._thread, self.request_ids = thread, request_ids
        self.mailbox: Mailbox = queue.SimpleQueue()

    def send(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> None:
        """Queue the requests, all before any of them runs. They have been validated: what the engine refuses all
        the same arrives as an output with an error."""
        self._thread.send(_Submit(self, prompts, sampling))

    def take(self) -> list[Arrival]:
        """The outputs of the next step that has any for these requests.

        Raises:
            AtlasError: the engine is gone, or this is a forked child, where no output would ever come.
        """
        self._thread.check_process()
        message = self.mailbox.get()
        if isinstance(message, AtlasError):
            raise message
        return message

    def abort(self, index: int) -> None:
        """End one request; its blocks are free within a step. Nothing happens if it has finished."""
        self._thread.abort([self.request_ids[index]])

    def abort_all(self) -> None:
        """End them all, and wait for it unless this is the engine's own thread (a finaliser may run anywhere)."""
        self._thread.abort(self.request_ids, wait=True)


@dataclasses.dataclass(eq=False)
class _Submit:
    submission: Submission
    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    blocks: int = 0


@dataclasses.dataclass(eq=False)
class _Call:
    work: Callable[[Engine], Any]
    blocks: int
    future: Future[Any]


@dataclasses.dataclass(eq=False)
class _Abort:
    request_ids: list[str]
    done: threading.Event


_Command = _Submit | _Call | _Abort | None
"""None: close."""


class EngineThread:
    """One engine and its thread. Commands are carried out in order, aborts at once.

    A forked child has the object but not the thread: every method raises AtlasError there.
    """

    def __init__(self, engine: Engine) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._process = os.getpid()
        self._closing = threading.Event()
        self._stopped: AtlasError | None = None
        self._thread = threading.Thread(target=self._run, args=(engine,), name="atlas-engine", daemon=True)
        self._thread.start()

    def submission(self, requests: int) -> Submission:
        """Names for so many requests."""
        return Submission(self, [f"r{next(self._ids)}" for _ in range(requests)])

    def call(self, work: Callable[[Engine], T], blocks: int = 0) -> T:
        """The result of `work(engine)`, run between two steps when `blocks` KV blocks are free or nothing else runs."""
        future: Future[T] = Future()
        self.send(_Call(work, blocks, future))
        return future.result()

    def abort(self, request_ids: list[str], wait: bool = False) -> None:
        """See Submission."""
        if self._stopped is not None or os.getpid() != self._process:
            return
        done = threading.Event()
        self._commands.put(_Abort(request_ids, done))
        if wait and threading.current_thread() is not self._thread:
            while not done.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """End what runs and join the thread. Idempotent; in a forked child nothing happens."""
        if os.getpid() != self._process:
            return
        self._closing.set()
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def send(self, command: _Submit | _Call) -> None:
        """Queue a command. Raises AtlasError in a forked child and after the end."""
        self.check_process()
        if self._stopped is not None:
            raise self._stopped
        self._commands.put(command)
        # It may have stopped between the two lines above; a closed thread takes no command any more.
        if self._stopped is not None:
            self._refuse_commands(self._stopped)

    def check_open(self) -> None:
        """Raise AtlasError once `close` was called: what `call` runs asks now and then, so that nobody waits for it."""
        if self._closing.is_set():
            raise _closed()

    def check_process(self) -> None:
        """Raise AtlasError in a forked child."""
        if os.getpid() != self._process:
            raise AtlasError(
                "LLM",
                f"made in process {self._process} and used in its fork {os.getpid()}, which has none of its threads",
                fix="make the LLM in the process that uses it, after forking",
            )

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self, engine: Engine) -> None:
        loop = _Loop(engine, self._commands)
        reason = _closed()
        try:
            loop.run()
        except BaseException as error:
            reason = AtlasError("engine", f"stopped by {type(error).__name__}: {error}", fix="make another LLM")
            reason.__cause__ = error
        self._stopped = reason
        for submission in loop.unfinished():
            submission.mailbox.put(reason)
        for command in loop.waiting:
            _refuse(command, reason)
        self._refuse_commands(reason)

    def _refuse_commands(self, reason: AtlasError) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Abort):
                command.done.set()
            elif command is not None:
                _refuse(command, reason)


def _closed() -> AtlasError:
    return AtlasError("LLM", "closed", fix="make another LLM")


def _refuse(command: _Submit | _Call, reason: AtlasError) -> None:
    if isinstance(command, _Submit):
        command.submission.mailbox.put(reason)
    else:
        command.future.set_exception(reason)


class _Loop:
    """Commands and steps, alternating; blocks only while there is nothing to compute."""

    def __init__(self, engine: Engine, commands: queue.SimpleQueue[_Command]) -> None:
        self._engine, self._commands = engine, commands
        self.waiting: deque[_Submit | _Call] = deque()
        self._owners: dict[str, tuple[Submission, int]] = {}

    def unfinished(self) -> set[Submission]:
        """Submissions that still expect outputs."""
        return {submission for submission, _ in self._owners.values()}

    def run(self) -> None:
        """Until told to close."""
        engine = self._engine
        while True:
            if not self._collect(block=not engine.busy and not self.waiting):
                return
            # In order: a call that waits for KV blocks holds back what comes after it, so that they become free.
            while self.waiting and (engine.pool.free >= self.waiting[0].blocks or not engine.busy):
                self._carry_out(self.waiting.popleft())
            if engine.busy:
                self._deliver(engine.step())

    def _collect(self, block: bool) -> bool:
        """Take every command that has arrived; False: close."""
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if command is None:
                return False
            if isinstance(command, _Abort):
                self._abort(command)
            else:
                self.waiting.append(command)

    def _carry_out(self, command: _Submit | _Call) -> None:
        if isinstance(command, _Call):
            try:
                command.future.set_result(command.work(self._engine))
            except Exception as error:  # the caller's, who gets it
                command.future.set_exception(error)
            return
        submission = command.submission
        for index, (prompt, sampling) in enumerate(zip(command.prompts, command.sampling, strict=True)):
            request_id = submission.request_ids[index]
            self._owners[request_id] = (submission, index)
            try:
                self._engine.add(request_id, prompt, sampling)
            except AtlasError as error:
                self._deliver([SequenceOutput(request_id, [], "error", str(error))])

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        now = time.perf_counter()
        arrivals: dict[Submission, list[Arrival]] = {}
        for output in outputs:
            submission, index = self._owners[output.request_id]
            if output.finish_reason is not None:
                del self._owners[output.request_id]
            arrivals.setdefault(submission, []).append(Arrival(index, output, now))
        for submission, those in arrivals.items():
            submission.mailbox.put(those)

    def _abort(self, command: _Abort) -> None:
        for request_id in command.request_ids:
            self._engine.abort(request_id)
            self._owners.pop(request_id, None)
        aborted = set(command.request_ids)
        self.waiting = deque(
            waiting
            for waiting in self.waiting
            if not isinstance(waiting, _Submit) or waiting.submission.request_ids[0] not in aborted
        )
        command.done.set()
