"""Seconds from the start of a process to its first token, in this process: run by bench/h200_dense.py.

    python -m bench.first_token FOLDER QUANT STARTED [PACK]

STARTED: `time.time()` of the parent right before it started this process. Prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


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
                "ledger": {name: round(seconds, 3) for name, seconds in runner.ledger},
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "anonymous_mb_at_end": int(status["RssAnon"].split()[0]) >> 10,
            }
        )
    )


if __name__ == "__main__":
    main()
