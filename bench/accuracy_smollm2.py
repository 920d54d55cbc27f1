"""Accuracy of SmolLM2-135M in every format that the CPU serves, on the fixed text of bench/texts.

    python -m bench.accuracy_smollm2 --json bench/results/accuracy_smollm2_cpu.json [--formats f32,bf16,int8,int4]

The checkpoint is the catalogue's GGUF, whose matrices were trained in other formats than they are stored in: f32 here
means its stored values exactly, so int4 and int8 rows show what the runtime adds (activations rounded to int8, blocks
imported bit for bit), and bf16 what rounding the dequantised values costs. The rest is `python -m atlas.bench
quant-accuracy`, which takes any model and text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atlas.bench.__main__ import main as bench

TEXT = Path(__file__).with_name("texts") / "time_machine.txt"


def main(argv: Sequence[str]) -> int:
    """The exit code of the command."""
    return bench(["quant-accuracy", "smollm2-135m", "--text", str(TEXT), "--backend", "cpu", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
