"""The engine client against scripted engine processes: routing, aborts, and every way an engine can end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atlas.config import EngineConfig
from atlas.engine import messages
from atlas.engine.client import EngineClient, EngineUnavailableError, _make_folder
from atlas.engine.messages import SamplingParams, SequenceOutput

ENGINE = Path(__file__).parents[1] / "serve" / "scripted_engine.py"
TOKENS = {"tokens": [10, 11, 12, 3]}
ENDLESS = {"tokens": [20, 21], "delay": 0.01}

Body = Callable[[EngineClient], Awaitable[None]]


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `body` with a client on a scripted engine; then nothing may be left of either."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()

    def run(body: Body, *, ready: bool = True, **script: Any) -> list[dict[str, Any]]:
        path, log = tmp_path / "script.json", tmp_path / "log.jsonl"
        behaviours = {"1": ENDLESS, **script.pop("behaviours", {})}
        document = {"default": TOKENS, "behaviours": behaviours, "log": str(log), **script}
        path.write_text(json.dumps(document))
        root = str(Path(messages.__file__).parents[2])
        monkeypatch.setenv("PYTHONPATH", root)

        async def main() -> None:
            config = EngineConfig(model="/m", quant="f32")
            client = EngineClient(config, command=[sys.executable, str(ENGINE), str(path)])
            await client.start()
            try:
                if ready:
                    await asyncio.wait_for(client.wait_ready(), 10)
                await asyncio.wait_for(body(client), 10)
            finally:
                await asyncio.wait_for(client.shutdown(grace=1.0), 5)
                assert list((tmp_path / "tmp").iterdir()) == []
                assert client.state == "dead"

        asyncio.run(main())
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for entry in entries:
            if entry["event"] == "configure":
                assert not _alive(entry["pid"])
        return entries

    return run


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def params(seed: int = 0, max_tokens: int = 100) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=(2, 3))


async def whole(client: EngineClient, **options: Any) -> tuple[list[int], SequenceOutput]:
    tokens: list[int] = []
    output = SequenceOutput("", [])
    with client.submit([1, 2], params(**options)) as stream:
        async for output in stream:
            tokens += output.token_ids
    return tokens, output


def test_one_request_and_the_configuration(drive: Any, tmp_path: Path) -> None:
    async def body(client: EngineClient) -> None:
        assert not list((tmp_path / "tmp").iterdir()), "the socket's path goes once the engine has connected"
        assert client.ready is not None and client.ready.max_context == 512
        tokens, last = await whole(client)
        assert (tokens, last.finish_reason) == ([10, 11, 12, 3], "stop")
        assert client.running == 0

    log = drive(body)
    assert log[0]["config"] == json.loads(EngineConfig(model="/m", quant="f32").to_json())
    assert [entry["event"] for entry in log] == ["configure", "submit", "shutdown"]


def test_the_sockets_folder_is_private() -> None:
    folder = _make_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()


def test_many_requests_keep_their_tokens(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        results = await asyncio.gather(*(whole(client, seed=i % 2, max_tokens=5) for i in range(40)))
        for index, (tokens, _) in enumerate(results):
            assert tokens == ([20, 21, 20, 21, 20] if index % 2 else [10, 11, 12, 3])

    drive(body)


def test_a_slow_consumer_gets_what_collected_in_one_piece(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([1], params(seed=1, max_tokens=30)) as slow:
            await slow.__anext__()
            for _ in range(5):
                assert (await whole(client))[0] == [10, 11, 12, 3]
            await asyncio.sleep(0.6)
            rest = [output async for output in slow]
        assert len(rest) == 1 and rest[0].finish_reason == "length"
        assert len(rest[0].token_ids) >= 20

    drive(body)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_consumer_that_goes_away_aborts(drive: Any, how: str) -> None:
    async def body(client: EngineClient) -> None:
        if how == "close":
            with client.submit([1], params(seed=1)) as stream:
                await stream.__anext__()
        else:
            task = asyncio.create_task(whole(client, seed=1))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert client.running == 0
        while (await client.stats()).running:
            await asyncio.sleep(0.01)

    aborts = [entry for entry in drive(body) if entry["event"] == "abort"]
    assert [entry["known"] for entry in aborts] == [True]


def test_a_finished_request_is_not_aborted(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        await whole(client)

    assert not [entry for entry in drive(body) if entry["event"] == "abort"]


def test_stats(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        with client.submit([1], params(seed=1)) as stream:
            await stream.__anext__()
            first, second = await asyncio.gather(client.stats(), client.stats())
            assert first.running == second.running == 1

    drive(body)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [({"die_after": 5}, "killed by SIGKILL"), ({"garbage_after": 5}, "broken protocol")],
)
def test_death_fails_every_request_at_once(drive: Any, behaviour: dict[str, int], words: str) -> None:
    async def body(client: EngineClient) -> None:
        others = [asyncio.create_task(whole(client, seed=1, max_tokens=100_000)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await whole(client, seed=2, max_tokens=1000)
        began = time.monotonic()
        for _, last in await asyncio.gather(*others):
            assert last.finish_reason == "error" and last.error is not None and "engine" in last.error
        assert time.monotonic() - began < 0.5
        await asyncio.wait_for(client.died.wait(), 2)
        assert words in client.reason and client.state == "dead" and client.running == 0
        with pytest.raises(EngineUnavailableError, match=words):
            client.submit([1], params())
        with pytest.raises(EngineUnavailableError):
            await client.stats()

    drive(body, behaviours={"2": {**ENDLESS, **behaviour}})


def test_what_an_engine_said_before_it_died_is_read_first(drive: Any) -> None:
    """However late: a busy process may see the end of the other before it has read what that wrote."""

    async def body(client: EngineClient) -> None:
        assert client._connection is not None and client._connection._transport is not None
        client._connection._transport.pause_reading()  # type: ignore[attr-defined]
        reading = asyncio.create_task(whole(client, seed=2, max_tokens=1000))
        await asyncio.sleep(0.5)
        client._connection._transport.resume_reading()  # type: ignore[attr-defined]
        tokens, last = await reading
        assert tokens == [20, 21, 20, 21] and last.finish_reason == "error"
        await asyncio.wait_for(client.died.wait(), 2)
        assert "killed by SIGKILL" in client.reason

    drive(body, behaviours={"2": {"tokens": [20, 21], "die_after": 5}})


def test_a_message_that_claims_to_be_huge(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        assert client._connection is not None
        client._connection.data_received(messages.LENGTH.pack(messages.MAX_MESSAGE_BYTES + 1))
        assert client.state == "dead" and f"{messages.MAX_MESSAGE_BYTES + 1} bytes" in client.reason

    drive(body)


def test_only_one_connection_is_taken(monkeypatch: pytest.MonkeyPatch, drive: Any, tmp_path: Path) -> None:
    """Someone who connects while the engine does is turned away; afterwards there is no path to connect to."""
    remove_folder = EngineClient._remove_folder
    monkeypatch.setattr(EngineClient, "_remove_folder", lambda client: None)

    async def body(client: EngineClient) -> None:
        path = next((tmp_path / "tmp").iterdir()) / "engine.sock"
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(messages.encode(messages.Fatal("not the engine")))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert client.state == "ready" and (await whole(client))[0] == [10, 11, 12, 3]
        remove_folder(client)

    drive(body)


@pytest.mark.parametrize(
    ("script", "words"),
    [({"fatal": "no such tensor"}, "no such tensor"), ({"exit_on_load": 9}, "exited with code 9")],
)
def test_a_start_that_fails(drive: Any, script: dict[str, Any], words: str) -> None:
    async def body(client: EngineClient) -> None:
        with pytest.raises(EngineUnavailableError, match=words):
            await client.wait_ready()

    drive(body, ready=False, **script)


def test_a_program_that_does_not_connect(tmp_path: Path) -> None:
    async def main() -> None:
        client = EngineClient(EngineConfig(model="/m"), command=[sys.executable, "-c", "raise SystemExit(5)"])
        await client.start()
        with pytest.raises(EngineUnavailableError, match="exited with code 5"):
            await asyncio.wait_for(client.wait_ready(), 10)
        await client.shutdown()

    asyncio.run(main())


def test_a_long_temporary_folder(drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / "tmp" / ("x" * 120)

    async def body(client: EngineClient) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(long))
        long.mkdir()
        config = EngineConfig(model="/m")
        second = EngineClient(config, command=client._command)
        await second.start()
        folder = second._folder
        assert folder is not None and folder.parent == Path("/tmp")
        await asyncio.wait_for(second.wait_ready(), 10)
        await second.shutdown()
        assert not folder.exists() and list(long.iterdir()) == []
        long.rmdir()

    drive(body)


def test_loading_stages_and_requests_before_ready(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        seen = set()
        while client.state == "loading":
            seen.add(client.stage)
            with pytest.raises(EngineUnavailableError, match="not ready"):
                client.submit([1], params())
            await asyncio.sleep(0.01)
        assert {"a", "b"} <= seen and client.state == "ready"

    drive(body, ready=False, stages=["a", "b"], load_seconds=0.4)


@pytest.mark.parametrize("ready", [True, False])
def test_a_deaf_engine_is_killed(drive: Any, ready: bool) -> None:
    async def body(client: EngineClient) -> None:
        if not ready:
            while client.stage != "weights":
                await asyncio.sleep(0.01)
        began = time.monotonic()
        await client.shutdown(grace=0.5)
        assert time.monotonic() - began < 2.5

    drive(body, ready=ready, deaf=True, load_seconds=0.0 if ready else 30.0)


def test_fail_all_ends_requests_and_keeps_the_engine(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        running = asyncio.create_task(whole(client, seed=1, max_tokens=1000))
        await asyncio.sleep(0.1)
        client.fail_all("going home")
        _, last = await running
        assert (last.finish_reason, last.error) == ("abort", "going home")
        assert (await whole(client))[0] == [10, 11, 12, 3]

    drive(body)


def test_a_stopped_engine_does_not_answer_stats(drive: Any) -> None:
    async def body(client: EngineClient) -> None:
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailableError, match="no answer within"):
            await client.stats(timeout=0.2)
        os.kill(client._process.pid, signal.SIGCONT)
        assert (await client.stats()).running == 0

    drive(body)
