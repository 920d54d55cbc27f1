"""Seconds from the start of a process to its first token, in this process: run by bench/h200_dense.py.

    python -m bench.first_token FOLDER QUANT STARTED [PACK]

STARTED: `time.time()` of the parent right before it started this process. Prints one line of JSON, with
the rate of the weights stage and of reads alone: the same bytes by as many threads into pinned memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas.runtime.backend import Backend
    from atlas.weights import Checkpoint


def read_alone(checkpoint: Checkpoint, backend: Backend) -> tuple[int, float]:
    """Bytes of all tensors, and the seconds in which threads read them into a ring of pinned memory."""
    from atlas.runtime import core, loader

    places = [place for name in checkpoint.tensors if (place := checkpoint.place(name))]
    sizes = [checkpoint.read(name).nbytes for name in checkpoint.tensors if checkpoint.place(name)]
    slots = [backend.staging(loader.READ_BYTES) for _ in range(loader.AHEAD)]
    reader = core.extension().FileReader(loader.threads())
    tickets: list[int] = []
    started = time.perf_counter()
    for (file, offset), size in zip(places, sizes, strict=True):
        for at in range(0, size, loader.READ_BYTES):
            if len(tickets) >= len(slots):
                reader.wait(tickets[-len(slots)])
            count = min(loader.READ_BYTES, size - at)
            slot = slots[len(tickets) % len(slots)]
            tickets.append(reader.read(slot, [(file, offset + at, 0, count, count, count)]))
    for ticket in tickets[-len(slots) :]:
        reader.wait(ticket)
    seconds = time.perf_counter() - started
    reader.close()
    for slot in slots:
        backend.release(slot)
    return sum(sizes), seconds


def main() -> None:
    folder, quant, started, *packs = sys.argv[1:]
    python = time.time()
    from atlas.runtime.extension import start_driver

    start_driver("cuda")
    from atlas.engine.engine import Engine
    from atlas.engine.messages import SamplingParams
    from atlas.runtime import core
    from atlas.runtime.runner import Runner, RunnerOptions
    from atlas.weights import open_checkpoint

    imported = time.time()
    devices = core.extension().cuda_devices()
    device = time.time()
    options = RunnerOptions(
        backend="cuda", quant=quant, max_context=2048, kv_memory_bytes=8 << 30, kernel_packs=tuple(packs)
    )
    with open_checkpoint(Path(folder)) as checkpoint:
        runner = Runner.load(checkpoint, options)
    ready = time.time()
    engine = Engine(runner)
    engine.add("first", list(range(128)), SamplingParams(max_tokens=1, temperature=0.0))
    while engine.busy:
        engine.step()
    first = time.time()
    with open_checkpoint(Path(folder)) as checkpoint:
        nbytes, reading = read_alone(checkpoint, runner.backend)
    ledger = dict(runner.ledger)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(
        json.dumps(
            {
                "device": devices[0]["name"],
                "python_s": round(python - float(started), 3),
                "import_s": round(imported - python, 3),
                "import_to_device_s": round(device - python, 3),
                "load_s": round(ready - device, 3),
                "first_token_s": round(first - float(started), 3),
                "ledger": {name: round(seconds, 3) for name, seconds in ledger.items()},
                "weights_gb_per_s": round(nbytes / ledger["weights"] / 1e9, 1),
                "reads_alone_gb_per_s": round(nbytes / reading / 1e9, 1),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "anonymous_mb_at_end": int(status["RssAnon"].split()[0]) >> 10,
            }
        )
    )


if __name__ == "__main__":
    main()
