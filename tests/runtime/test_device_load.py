"""Rows that a GPU packs: what the host copies for it, laid out by `load_rows`, is what the host would have packed."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import CheckpointError
from atlas.models.family import WeightSource
from atlas.runtime import core, device_load, load_program, loader, memory_plan, weight_runs
from atlas.runtime.backend import BoundProgram
from atlas.runtime.program import Buffer, Recorder
from atlas.runtime.reference import ReferenceBackend
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import Limits
from atlas.runtime.uploads import Uploads
from atlas.targets import formats
from atlas.targets.status import closure
from atlas.weights import Checkpoint, open_checkpoint
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import QuantizedArray, Scheme, to_rows
from atlas.weights.quantizers import quantize_rows
from tests import tiny_model


class Tensors:
    """Stands for a checkpoint: bf16 tensors by name."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.tensors = {
            name: SimpleNamespace(name=name, file="f", dtype="BF16", scheme=None, shape=array.shape)
            for name, array in arrays.items()
        }

    def read(self, name: str, rows: slice | None = None) -> Any:
        return self.arrays[name][rows if rows is not None else slice(None)]

    def read_into(self, name: str, rows: slice, pieces: Any) -> None:
        Checkpoint.read_into(self, name, rows, pieces)  # type: ignore[arg-type]

    def place(self, name: str) -> None:
        """In no file."""


def in_a_file(folder: Path, **arrays: Any) -> Checkpoint:
    """Such a checkpoint, whose first tensor begins at an odd byte."""
    header, data = {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"odd"
    for name, array in arrays.items():
        places = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": places}
        data += array.tobytes()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return open_checkpoint(folder)


def kernels(dtype: str, k: int) -> dict[str, Any]:
    return {load_program.key(dtype, k).name(): SimpleNamespace(layouts={"out": "tiles"})}


def runs_of(checkpoint: Any, layout: str, k: int, names: list[str], most_rows: int = 0) -> list[weight_runs.Run]:
    rows = [checkpoint.tensors[name].shape[0] for name in names]
    buffer = Buffer("w", "bf16", (sum(rows), k), "weight")
    source, chosen = WeightSource(tuple(names), tuple(rows)), LAYOUTS[layout]
    spans = weight_runs.spans((sum(rows), k), chosen, most_rows)
    return [weight_runs.Run(buffer, source, chosen, 0, first, found) for first, found in spans]


@pytest.mark.parametrize("layout", ["tiles", "tiles_paired"])
@pytest.mark.parametrize("inner", [64, 192, 320])
def test_copied_rows_in_tiles_are_the_packed_run(layout: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 200
    monkeypatch.setattr(weight_runs, "RUN_BYTES", 4 * k * 256)
    rng = np.random.default_rng()
    checkpoint = Tensors(
        gate=rng.standard_normal((inner, k)).astype(ml_dtypes.bfloat16),
        up=rng.standard_normal((inner, k)).astype(ml_dtypes.bfloat16),
    )
    runs = runs_of(checkpoint, layout, k, ["gate", "up"])
    assert len(runs) > 1 or inner == 64
    for run in runs:
        assert run.raw(checkpoint, kernels("bf16", k), 8192)  # type: ignore[arg-type]
        rows = np.empty((run.rows, k), ml_dtypes.bfloat16)
        run.copy(checkpoint, rows.view(np.uint8))  # type: ignore[arg-type]
        packed = run.pack(checkpoint)  # type: ignore[arg-type]
        np.testing.assert_array_equal(
            LAYOUTS["tiles"].pack(rows, "bf16").view(np.uint8).reshape(-1), packed.view(np.uint8).reshape(-1)
        )


@pytest.mark.parametrize("layout", ["tiles", "tiles_paired", "frag4_paired"])
def test_the_core_reads_what_would_be_copied(layout: str, tmp_path: Path) -> None:
    k = 200
    rng = np.random.default_rng()
    checkpoint = in_a_file(
        tmp_path,
        gate=rng.standard_normal((320, k)).astype(ml_dtypes.bfloat16),
        up=rng.standard_normal((320, k)).astype(ml_dtypes.bfloat16),
    )
    reader = core.extension().FileReader(2)
    runs = runs_of(checkpoint, layout, k, ["gate", "up"], 300)
    assert len(runs) == 3
    for run in runs:
        read, copied = (np.full(run.raw_bytes + 1, 255, np.uint8) for _ in range(2))
        assert reader.wait(reader.read(read, run.parts(checkpoint)))
        run.copy(checkpoint, copied[:-1].reshape(run.rows, -1))
        assert np.array_equal(read, copied)
    reader.close()


def test_rows_that_lie_in_no_file_as_they_are_read_have_no_parts(tmp_path: Path) -> None:
    """Nor have those of a paired layout whose tensors begin within a group of rows."""
    arrays = {name: np.zeros((rows, 64), ml_dtypes.bfloat16) for name, rows in (("a", 12), ("b", 52), ("c", 64))}
    (run,) = runs_of(Tensors(**arrays), "tiles", 64, ["c"])
    assert run.parts(Tensors(**arrays)) == []  # type: ignore[arg-type]
    checkpoint = in_a_file(tmp_path, **arrays)
    for layout, names, parts in (("tiles", "abc", 3), ("tiles_paired", "abc", 0), ("tiles_paired", "cc", 2)):
        (run,) = runs_of(checkpoint, layout, 64, list(names))
        assert len(run.parts(checkpoint)) == parts


def test_what_the_device_does_not_make_is_packed_by_the_host() -> None:
    rng = np.random.default_rng()
    checkpoint = Tensors(a=rng.standard_normal((96, 64)).astype(ml_dtypes.bfloat16), b=np.zeros((96, 64), np.float16))
    checkpoint.tensors["b"].dtype = "F16"
    known = kernels("bf16", 64)
    (run,) = runs_of(checkpoint, "tiles", 64, ["a"])
    assert run.raw(checkpoint, known, 8192)  # type: ignore[arg-type]
    assert run.padded
    assert not run.raw(checkpoint, {}, 8192), "no kernel"  # type: ignore[arg-type]
    assert not run.raw(checkpoint, known, 95), "more rows than a step has"  # type: ignore[arg-type]
    for layout, names in (("tiles", ["b"]), ("row_major", ["a"]), ("tiles_paired", ["a", "a"])):
        assert not any(run.raw(checkpoint, known, 8192) for run in runs_of(checkpoint, layout, 64, names))  # type: ignore[arg-type]


class Gpu(ReferenceBackend):
    """Stands for a GPU whose weights are row-major: runs load_rows' reference on what the load program points to."""

    name = "cuda"
    launches = 0

    def load(self, program: BoundProgram) -> int:
        self.program = program
        return 0

    def run_on(self, handle: int, index: int, operands: Any) -> None:
        self.launches += 1
        launch = self.program.program.launches[index]
        dtypes, rows, k = dict(launch.key.dtypes), self._symbols["n_rows"], int(dict(launch.key.constants)["k"])
        arrays = {}
        for operand, offset in zip(launch.op.operands, operands, strict=True):
            if offset is None:
                assert operand.name not in dtypes
                continue
            dtype, shape = dtypes[operand.name], (1,) if operand.name == "fault" else (rows, k)
            arrays[operand.name] = LAYOUTS["row_major"].unpack(
                self._bytes(offset, formats.nbytes(dtype, shape)), shape, dtype
            )
        launch.op.reference(arrays, {"rows": rows}, {"k": k})


@pytest.mark.parametrize("stored", ["in a file", "elsewhere"])
@pytest.mark.parametrize("dtype", ["bf16", "f8", "nvfp4", "i4g32b"])
def test_a_gpu_makes_what_the_host_would(
    dtype: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many runs, more than there are slots; and what is not finite is named, unless it stays what it is."""
    k, rows = 72, 700
    monkeypatch.setattr(loader, "READ_BYTES", 2 * k * 32)
    monkeypatch.setattr(device_load, "SLOTS", 3)
    rng = np.random.default_rng()
    arrays = {
        "a": rng.standard_normal((rows - 130, k)).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((130, k)).astype(ml_dtypes.bfloat16),
    }

    def loaded(cut: int = 0) -> Any:
        """The weight's bytes. cut: what the file loses once it is open."""
        checkpoint: Any = Tensors(**arrays) if stored == "elsewhere" else in_a_file(tmp_path, **arrays)
        if cut:
            file = tmp_path / "model.safetensors"
            os.truncate(file, file.stat().st_size - cut)
        r = Recorder()
        r.begin("forward")
        for name, type_, shape, kind in (
            ("x", "f8g128" if dtype == "f8" else "bf16", ("n_rows", k), "workspace"),
            ("w", dtype, (rows, k), "weight"),
            ("out", "f32", ("n_rows", rows), "workspace"),
        ):
            r.buffer(name, type_, shape, kind)
        r.launch("linear", "linear", {"x": "x", "weight": "w", "out": "out"}, {"rows": "n_rows"}, {"n": rows, "k": k})
        r.begin("sample")
        programs, limits = r.finish(), Limits(64, 1, 1, 1, 1, 1)
        plan = memory_plan.plan(programs, limits, {})
        known = {load_program.key(dtype, k).name(): SimpleNamespace(layouts={})}
        bound = BoundProgram(programs.forward, programs.buffers, plan, limits, known)  # type: ignore[arg-type]
        gpu = Gpu()
        gpu.allocate(plan.total)
        source = WeightSource(("a", "b"), (rows - 130, 130))
        assert loader.load(checkpoint, gpu, bound, {"w": source}, {"w": "row_major"}) == plan.sizes["w"]
        assert gpu.launches == 22, "runs of 32 rows, none packed by the host"
        written = np.empty(formats.nbytes(dtype, (rows, k)), np.uint8)
        gpu.read(plan.offsets["w"], written)
        return written

    joined = np.concatenate([arrays["a"], arrays["b"]])
    expected = joined if dtype == "bf16" else to_rows(quantize_rows(joined.astype(np.float32), dtype), dtype)
    assert loaded().tobytes() == expected.tobytes()
    if stored == "in a file":
        with pytest.raises(CheckpointError, match=r"model.safetensors.*: the file ends within tensor b"):
            loaded(cut=1)
    arrays["b"][101, 5] = np.nan
    if dtype == "bf16":
        assert np.isnan(loaded().view(ml_dtypes.bfloat16).reshape(rows, k)[rows - 29, 5])
    else:
        with pytest.raises(
            CheckpointError,
            match=r"tensor b of (f|model.safetensors): nan at row 101, column 5; accepted: finite values",
        ):
            loaded()


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 16])
def test_rows_arrive_where_no_launch_reads_any_more(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run, the copy waits for the launch that had its slot, and its launch for the copy."""
    monkeypatch.setattr(device_load, "SLOTS", slots)
    log: list[tuple[str, int]] = []

    class Device(Gpu):
        def order_uploads(self) -> None:
            log.append(("uploads wait", 0))

        def order_runs(self) -> None:
            log.append(("runs wait", 0))

        def upload(self, offset: int, data: memoryview) -> int:
            log.append(("upload", offset))
            return 0

        def run_on(self, handle: int, index: int, operands: Any) -> None:
            log.append(("run", operands[1]))
            assert operands[0] == [offset for what, offset in log if what == "upload"][-1]

    plan = memory_plan.MemoryPlan({"step.header": 1 << 20}, {}, {"workspace": (0, 1 << 20)}, (1 << 20) + 4096, ())
    known = kernels("bf16", 64)
    bound = BoundProgram(None, {"w": Buffer("w", "bf16", (9, 64), "weight")}, plan, None, known)  # type: ignore[arg-type]
    gpu = Device()
    gpu.allocate(plan.total)
    device, uploads = device_load.DeviceLoad(gpu, bound, ["w"], 4096), Uploads(gpu, 1, 4096)
    launches = [100 * i for i in range(41)]
    for launch in launches:
        slot = uploads.take()
        slot.view(4096)
        device.send(uploads, slot, load_program.Rows("bf16", 64, launch, 0))
    places = [offset for what, offset in log if what == "upload"]
    assert len(set(places)) == slots and len(places) == 41
    assert [launch for what, launch in log if what == "run"] == launches
    for i, launch in enumerate(launches):
        copied = [at for at, (what, _) in enumerate(log) if what == "upload"][i]
        launched = log.index(("run", launch))
        assert ("runs wait", 0) in log[copied:launched]
        if i >= slots:
            assert places[i - slots] == places[i]
            assert ("uploads wait", 0) in log[log.index(("run", launches[i - slots])) : copied]
    assert log.count(("uploads wait", 0)) <= 41 // max(1, slots // 2), "not for each run, where there are some slots"


@pytest.mark.parametrize("format", ["f8", "i4g32b", "nvfp4"])
def test_the_host_names_what_is_not_finite_by_its_row_in_the_tensor(format: str) -> None:
    checkpoint = Tensors(a=np.ones((96, 64), ml_dtypes.bfloat16), b=np.ones((96, 64), ml_dtypes.bfloat16))
    checkpoint.arrays["b"][77, 3] = -np.inf
    buffer, source = Buffer("w", format, (192, 64), "weight"), WeightSource(("a", "b"), (96, 96))
    run = weight_runs.Run(buffer, source, LAYOUTS["row_major"], 0, 128, [slice(128, 192)])
    with pytest.raises(CheckpointError, match="tensor b of f: -inf at row 77, column 3; accepted: finite values"):
        run.pack(checkpoint)  # type: ignore[arg-type]


def test_a_stored_scale_that_is_not_finite_is_named() -> None:
    checkpoint = Tensors(a=np.ones((96, 256), np.float32))
    checkpoint.tensors["a"].scheme = Scheme("e4m3", (1, 0), "f32")
    scales = np.ones((96, 1), np.float32)
    scales[70] = np.nan
    whole = QuantizedArray("e4m3", np.ones((96, 256), ml_dtypes.float8_e4m3fn), scales, (1, 256))
    checkpoint.read_quantized = lambda name, rows: whole.rows(rows.start, rows.stop)  # type: ignore[attr-defined]
    buffer = Buffer("w", "f8", (96, 256), "weight")
    run = weight_runs.Run(buffer, WeightSource(("a",), (96,)), LAYOUTS["row_major"], 0, 64, [slice(64, 96)])
    with pytest.raises(CheckpointError, match="f: tensor a has a scale that is not finite in row 70; accepted"):
        run.pack(checkpoint)  # type: ignore[arg-type]


def test_a_poisoned_workspace_leaves_arriving_rows_alone(tmp_path: Path) -> None:
    """They lie in the workspace while the load program's steps begin."""
    with open_checkpoint(tiny_model.write(tmp_path)) as checkpoint:
        forward = Runner.load(checkpoint, RunnerOptions(backend="reference", quant="f32"))._bound
    assert core._uses_workspace(forward)
    buffers = {"w": Buffer("w", "f8", (9, 64), "weight")}
    forward = dataclasses.replace(forward, buffers=buffers, kernels=kernels("f8", 64))
    bound, launches = load_program.bind(forward, buffers, forward.plan.regions["workspace"][0])
    assert len(bound.program.launches) == len(launches) == 1
    assert not core._uses_workspace(bound)


def test_the_build_compiles_what_loading_runs() -> None:
    from atlas.targets.resolution import facts
    from tests.contract.harness import KERNELS

    for quant, dtype in (("bf16", "bf16"), ("fp8", "f8")):
        keys = closure(facts(KERNELS)["llama-3-8b"], quant)
        assert load_program.key(dtype, 4096) in keys and load_program.key(dtype, 14336) in keys
