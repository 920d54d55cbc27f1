"""Finds a model's files in a process of its own, so that a download can be stopped at once.

A thread cannot be stopped, and the downloader starts processes itself; a session of its own is ended with
all of them. The answer comes back as one JSON object on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from atlas.errors import AtlasError
from atlas.serve.offload import Offload


class Resolved(msgspec.Struct, omit_defaults=True):
    """Where the files are, or why they are not."""

    path: str = ""
    error: tuple[str, str, str, str] | None = None


async def resolve(model: str, *, offline: bool) -> Path:
    """The directory or file of `model`. Raises AtlasError with the downloader's own words."""
    from atlas.weights.fetch import local_path

    if local_path(model) is not None:  # nothing to download, so nothing to stop
        return await Offload(1).run(resolve_here, model, offline)
    arguments = [sys.executable, "-m", "atlas.serve.resolve", model, *(["--offline"] if offline else [])]
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        resolved = msgspec.json.decode(output, type=Resolved)
    except msgspec.MsgspecError:
        raise AtlasError("model", f"looking for {model!r} ended with code {process.returncode}") from None
    if resolved.error is not None:
        raise AtlasError(*resolved.error)
    return Path(resolved.path)


def resolve_here(model: str, offline: bool) -> Path:
    """The same in this process; blocks."""
    from atlas.weights.fetch import resolve_model

    return resolve_model(model, offline=offline)


def main(arguments: list[str]) -> None:
    """Resolve the model named first; standard output carries the answer and nothing else."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a downloader prints belongs with the log
    try:
        resolved = Resolved(path=str(resolve_here(arguments[0], "--offline" in arguments[1:])))
    except AtlasError as error:
        resolved = Resolved(error=(error.where, error.found, error.accepted, error.fix))
    with answer:
        answer.write(msgspec.json.encode(resolved))


if __name__ == "__main__":
    main(sys.argv[1:])
