"""An engine process that follows a script: same protocol as the real one, no model.

`scripted_engine.py SCRIPT.json --socket PATH`. A request's seed picks its behaviour from the script, so a
test says what the engine does to one request while others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import time
from pathlib import Path

import msgspec

from atlas.engine import messages


class Behaviour(msgspec.Struct, forbid_unknown_fields=True):
    """What happens to one request.

    tokens: repeated for ever unless they end with an end id.
    group: ids in one output. delay: seconds before each output.
    error_after, die_after, garbage_after, hang_after: after so many ids fail, kill this process, break the protocol,
        do nothing any more.
    stall_after: after so many ids only this request gets no more, although the engine still answers.
    timing: seconds queued and prefilling, told with the first ids.
    logprob: of each of its tokens, and of the prompt's, for requests that ask.
    """

    tokens: list[int]
    group: int = 1
    delay: float = 0.0
    error_after: int | None = None
    die_after: int | None = None
    garbage_after: int | None = None
    hang_after: int | None = None
    stall_after: int | None = None
    timing: tuple[float, float] | None = None
    logprob: float = -0.5


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """What the engine does: `default` for seeds that `behaviours` does not have."""

    default: Behaviour
    behaviours: dict[str, Behaviour] = {}
    stages: tuple[str, ...] = ("weights",)
    load_seconds: float = 0.0
    fatal: str | None = None
    exit_on_load: int | None = None
    deaf: bool = False  # ignores Shutdown and SIGTERM
    mute: bool = False  # answers no GetStats
    max_context: int = 512
    vocab_size: int = 320
    embedding_size: int = 8
    log: str = ""


def report(ids: list[int], n_top: int | None, logprob: float) -> tuple[messages.TokenLogprobs, ...]:
    """Log-probabilities of tokens, the likeliest being the token itself and then those of the lowest ids."""
    if n_top is None:
        return ()
    entries = []
    for token in ids:
        tops = [token, *(other for other in range(n_top) if other != token)][:n_top]
        entries.append(messages.TokenLogprobs(token, logprob, 1, tops, [logprob - i for i in range(len(tops))]))
    return tuple(entries)


def embedding(prompt: list[int], pooling: str, size: int) -> bytes:
    """Some vector that depends on the prompt: the ids' count, sum, first, last, and ones."""
    numbers = [len(prompt), sum(prompt), prompt[0], prompt[-1] if pooling == "last" else -1, *[1] * size][:size]
    return struct.pack(f"<{size}f", *numbers)


class Engine:
    def __init__(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.script, self.reader, self.writer = script, reader, writer
        self.running: dict[str, asyncio.Task[None]] = {}
        self.steps = 0

    def log(self, entry: dict[str, object]) -> None:
        if self.script.log:
            with open(self.script.log, "ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    def send(self, message: messages.FromEngine) -> None:
        self.writer.write(messages.encode(message))

    async def receive(self) -> messages.ToEngine:
        (length,) = messages.LENGTH.unpack(await self.reader.readexactly(4))
        return messages.decode_to_engine(await self.reader.readexactly(length))

    async def run(self) -> None:
        script = self.script
        configure = await self.receive()
        assert isinstance(configure, messages.Configure), configure
        self.log({"event": "configure", "config": msgspec.to_builtins(configure.config), "pid": os.getpid()})
        for stage in script.stages:
            self.send(messages.Loading(stage))
            await asyncio.sleep(script.load_seconds / len(script.stages))
        if script.exit_on_load is not None:
            os._exit(script.exit_on_load)
        if script.fatal is not None:
            self.send(messages.Fatal(script.fatal))
            await self.writer.drain()
            os._exit(1)
        ledger = [(stage, 0.01) for stage in script.stages]
        limits = script.max_context, script.vocab_size
        self.send(messages.Ready("scripted", "none", "a test", *limits, ledger, embedding_size=script.embedding_size))
        while True:
            match await self.receive():
                case messages.Submit(request_id, prompt, sampling):
                    self.log({"event": "submit", "id": request_id, "prompt": prompt, "sampling": sampling})
                    behaviour = script.behaviours.get(str(sampling.seed), script.default)
                    work = self.follow(request_id, prompt, behaviour, sampling)
                    self.running[request_id] = asyncio.create_task(work)
                case messages.Abort(request_id):
                    self.log({"event": "abort", "id": request_id, "known": request_id in self.running})
                    if task := self.running.pop(request_id, None):
                        task.cancel()
                case messages.GetStats():
                    self.log({"event": "stats"})
                    if script.mute:
                        continue
                    self.send(messages.Stats(len(self.running), 0, 10, 10, self.steps))
                case messages.Shutdown():
                    self.log({"event": "shutdown"})
                    if not script.deaf:
                        return

    async def follow(
        self, request_id: str, prompt: list[int], behaviour: Behaviour, sampling: messages.SamplingParams
    ) -> None:
        done, told_prompt = 0, False
        if sampling.pooling is not None:
            vector = embedding(prompt, sampling.pooling, self.script.embedding_size)
            self.send(messages.StepOutput([messages.SequenceOutput(request_id, [], "length", embedding=vector)]))
            self.running.pop(request_id, None)
            return
        ends = set(sampling.stop_token_ids)
        while True:
            await asyncio.sleep(behaviour.delay)
            ids: list[int] = []
            reason: messages.FinishReason | None = None
            while len(ids) < behaviour.group and reason is None:
                ids.append(behaviour.tokens[done % len(behaviour.tokens)])
                done += 1
                if ids[-1] in ends:
                    reason = "stop"
                elif done == sampling.max_tokens:
                    reason = "length"
            if behaviour.die_after is not None and done >= behaviour.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour.garbage_after is not None and done >= behaviour.garbage_after:
                self.writer.write(messages.LENGTH.pack(3) + b"\xc1\xc1\xc1")
            if behaviour.hang_after is not None and done >= behaviour.hang_after:
                time.sleep(3600)
            if behaviour.stall_after is not None and done >= behaviour.stall_after:
                await asyncio.sleep(3600)
            error = None
            if behaviour.error_after is not None and done >= behaviour.error_after:
                ids, reason, error = [], "error", "the logits are not finite"
            self.steps += 1
            told = messages.Timing(*behaviour.timing) if behaviour.timing and done == len(ids) else None
            output = messages.SequenceOutput(
                request_id,
                ids,
                reason,
                error,
                logprobs=report(ids, sampling.logprobs, behaviour.logprob),
                prompt_logprobs=() if told_prompt else report(prompt[1:], sampling.prompt_logprobs, behaviour.logprob),
                timing=told,
            )
            told_prompt = True
            self.send(messages.StepOutput([output]))
            await self.writer.drain()
            if reason is not None:
                self.running.pop(request_id, None)
                return


async def main(script_path: str, socket_path: str) -> None:
    script = msgspec.json.decode(Path(script_path).read_bytes(), type=Script)
    if script.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reader, writer = await asyncio.open_unix_connection(socket_path)
    with contextlib.suppress(asyncio.IncompleteReadError):  # then the API process is gone
        await Engine(script, reader, writer).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[sys.argv.index("--socket") + 1]))
