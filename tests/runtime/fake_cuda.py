"""A fake libcuda.so.1 (tests/csrc/fake_libcuda.c), processes that run on it, and kernel packs for it.

Each case runs in a process of its own: a driver is opened once per process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from atlas.build import pack
from atlas.build.compile import ImageBlob
from atlas.build.manifest import KernelEntry, KernelSet, KernelVariant, Manifest
from atlas.models import family_of
from atlas.models.fusion import record
from atlas.ops import OPS
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.weights import open_checkpoint

SOURCE = Path(__file__).parents[1] / "csrc" / "fake_libcuda.c"

PRELUDE = """
import os, struct, sys
from atlas.errors import AtlasError, DeviceError
try:
    from atlas import _core  # a third of the time that the next line takes with NumPy
except ImportError:
    from atlas.runtime.core import extension
    _core = extension()

def attempt(call):
    try:
        return call()
    except AtlasError as error:
        print(error)
        sys.exit(3)
"""

PROGRAM = """
from atlas.runtime.step import HEADER_WORDS, PHASE_DECODE, PHASE_PREFILL, STEP_VERSION

def variant(**changes):
    record = dict(phase=0, max_rows=0, kernel="store_dim", image=0, grid=[[0, 4, 2], [-1, 1, 3], [-1, 1, 1]],
                  block=64, shared=0, cluster=1, pdl=False, cooperative=False, arguments=[], scratch=None)
    return {**record, **changes}

def launch(variants=None, **changes):
    # What is no field of a launch is one of its only variant.
    record = dict(name="layers.0.test", op="rms_norm", phase=0, operands=[512], dims=[1], constants=[], row_dim=0)
    mine = {name: value for name, value in changes.items() if name not in record}
    changes = {name: value for name, value in changes.items() if name in record}
    return {**record, "variants": variants or [variant(**mine)], **changes}

def header(n_rows, phase=0):
    return [STEP_VERSION, n_rows, *[0] * (HEADER_WORDS - 3), phase]

def step(n_rows, phase=0):
    return struct.pack(f"{HEADER_WORDS}i", *header(n_rows, phase))

def value(offset=512):
    result = bytearray(4)
    backend.read(offset, result)
    return struct.unpack("i", result)[0]

backend = attempt(lambda: _core.cuda_backend(0))
attempt(lambda: backend.load_images([b"store_dim store_constant other\\0"]))
attempt(lambda: backend.allocate(1024))
"""
"""A backend with an arena of 1 KB; the kernel `store_dim` writes the step's rows to byte 512."""


def build(folder: Path) -> Path:
    """The folder, which then holds the fake libcuda.so.1."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    target = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", target, SOURCE], check=True)
    return folder


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """Variables for a process on the fake driver, free of those that the tests set."""
    dropped = ("CUDA_VISIBLE_DEVICES", "ATLAS_SYNC", "ATLAS_POISON")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "LD_LIBRARY_PATH": str(folder), **changes}


def run(folder: Path, *code: str, **variables: str) -> tuple[int, str]:
    """Run pieces of code after the prelude; exit status (3: an AtlasError, whose text was printed) and output."""
    done = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, (PRELUDE, *code)))],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, done.stdout


def program(folder: Path, *code: str, **variables: str) -> tuple[int, str]:
    """`run`, with what PROGRAM defines."""
    return run(folder, PROGRAM, *code, **variables)


def kernel_pack(model: Path, path: Path, leave_out: str = "", every: bool = False) -> Path:
    """A pack with a kernel for all that a bf16 model launches, and its file; they compute nothing.

    leave_out: op whose kernels are not in the image.  every: also for what a program does without.
    """
    with open_checkpoint(model) as checkpoint:
        family = family_of(checkpoint.config)
        config = family.configure(checkpoint.config, Shard())
        keys = record(family, config, recipe("bf16", "cuda"), "cuda", has=lambda key: every).closure()
    symbols = {key.name(): f"kernel_{i:03}" for i, key in enumerate(keys)}
    found = [symbols[key.name()] for key in keys if key.op != leave_out]
    blob = ImageBlob()
    ptx = blob.add(b".version 8.8\n.target sm_80\n// " + " ".join(found).encode())
    kernels = tuple(
        KernelEntry(
            name=key.name(),
            op=key.op,
            contract=OPS[key.op].contract_hash(),
            layouts={},
            variants=(KernelVariant(ptx=ptx, symbol=symbols[key.name()], grid=((-1, 1, 1),) * 3, block=32),),
        )
        for key in keys
    )
    kernel_set = KernelSet("h200", "cuda", "test", "bf16", config.shape.hash(), "sm_90a", (9, 0), kernels)
    path.write_bytes(pack.to_bytes(Manifest((kernel_set,), tuple(blob.images), "test"), bytes(blob.data)))
    return path
