"""The CUDA driver layer and backend on a machine without a GPU, against a fake libcuda.so.1 that fails
as told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.fake_cuda import program, run


def test_devices_are_listed(fake_driver: Path) -> None:
    status, output = run(fake_driver, "print(_core.cuda_devices())", FAKE_CUDA_DEVICES="2")
    assert status == 0
    assert "'name': 'Fake GPU 1'" in output
    assert "'compute_capability': (9, 0)" in output
    assert "'multiprocessors': 132, 'shared_memory_per_block': 232448, 'l2_bytes': 52428800" in output
    assert "'cooperative_launch': True, 'cluster_launch': True" in output


def test_no_driver(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")  # found first, and useless, wherever this runs
    status, output = run(tmp_path, "attempt(_core.cuda_devices)")
    assert status == 3
    assert "no NVIDIA driver: libcuda.so.1 could not be opened" in output
    assert "install the NVIDIA driver" in output


def test_driver_too_old(fake_driver: Path) -> None:
    status, output = run(fake_driver, "attempt(_core.cuda_devices)", FAKE_CUDA_VERSION="12020")
    assert status == 3
    assert "too old: it supports CUDA 12.2, needed is CUDA 12.4" in output


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, "before fork(): start this process by spawn"),
        (34, "stub for linking"),
        (100, "check `nvidia-smi`"),
        (802, "fabricmanager"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803): said by the fake driver; the kernel module and libcuda.so.1"),
        (804, "cuda-compat"),
        (999, "nvidia-modprobe -u"),
        (46, "check that `nvidia-smi` works"),
    ],
)
def test_driver_does_not_start(fake_driver: Path, code: int, expected: str) -> None:
    status, output = run(fake_driver, "attempt(lambda: _core.cuda_backend(0))", FAKE_CUDA_FAIL=f"cuInit={code}")
    assert status == 3
    assert expected in output
    assert len(output.splitlines()) == 1


def test_devices_hidden_by_the_environment(fake_driver: Path) -> None:
    hidden = {"FAKE_CUDA_FAIL": "cuInit=100", "CUDA_VISIBLE_DEVICES": ""}
    status, output = run(fake_driver, "attempt(_core.cuda_devices)", **hidden)
    assert status == 3
    assert 'CUDA_VISIBLE_DEVICES is ""' in output


def test_no_such_device(fake_driver: Path) -> None:
    status, output = run(fake_driver, "attempt(lambda: _core.cuda_backend(7))", FAKE_CUDA_DEVICES="2")
    assert status == 3
    assert "there is no CUDA device 7; this process sees: 0 (Fake GPU 0), 1 (Fake GPU 1)" in output


def test_nothing_is_opened_at_import(fake_driver: Path) -> None:
    status, output = run(fake_driver, "print('imported')", FAKE_CUDA_FAIL="cuInit=803", FAKE_CUDA_VERSION="1")
    assert (status, output.strip()) == (0, "imported")


def test_forked_child_is_told_at_once(fake_driver: Path) -> None:
    code = """
    backend = _core.cuda_backend(0)
    backend.allocate(64)
    child = os.fork()
    if child == 0:
        for call in (_core.cuda_devices, backend.synchronize, lambda: _core.cuda_backend(0)):
            try:
                call()
            except DeviceError as error:
                print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """
    status, output = run(fake_driver, code)
    assert status == 0
    assert output.count("cannot be used in its forked child") == 3


def test_a_program_runs(fake_driver: Path, tmp_path: Path) -> None:
    """Grids follow the header, arguments are addresses into arena and header, launches of no rows are left out."""
    code = """
    handle = backend.load([launch(), launch(kernel="other", grid=[[-1, 1, 5], [-1, 1, 1], [-1, 1, 1]])])
    for n_rows in (9, 0):
        backend.begin_step(0, step(n_rows), 64)
        backend.run(handle, 0, 2)
    backend.begin_step(128, step(6), 64)
    backend.run(handle, 0, 1)
    result = bytearray(4)
    backend.read(512, result)
    print(struct.unpack("i", result)[0], backend.describe())
    """
    log = tmp_path / "launches"
    status, output = program(fake_driver, code, FAKE_CUDA_LOG=str(log))
    assert status == 0
    assert output.startswith("6 Fake GPU 0 (CUDA device 0, compute capability 9.0, 8.00 GiB, driver CUDA 12.8)")
    assert log.read_text().splitlines() == [
        "store_dim 6 3 1 64 0",
        "other 5 1 1 64 0",
        "store_dim 4 3 1 64 0",
    ]


@pytest.mark.parametrize(
    ("code", "fail", "expected"),
    [
        (
            "backend.load([launch(kernel='absent')])",
            "",
            "launch layers.0.test of op rms_norm (kernel absent) is not in device image 0",
        ),
        ("backend.load([launch(image=1)])", "", "no device image 1, 1 are loaded"),
        ("backend.load([launch(block=512)])", "", "512 threads per block, possible are 1 to 256"),
        ("backend.load([launch(operands=[2048])])", "", "an operand at byte 2048 is outside the arena of 1024"),
        ("backend.load([launch(dims=[16])])", "", "no header word 16"),
        ("backend.load([launch(shared=100000)])", "cuFuncSetAttribute=1", "100000 bytes of shared memory"),
        ("backend.run(backend.load([launch()]), 0, 1)", "", "run() before begin_step()"),
        (
            "h = backend.load([launch()]); backend.begin_step(0, step(1), 64); backend.run(h, 0, 1)",
            "cuLaunchKernelEx=701",
            "launch layers.0.test of op rms_norm (kernel store_dim) failed with grid 2 x 3 x 1, block 64, cluster 1, "
            "0 bytes of shared memory, dims [1], operands at arena bytes [512]: CUDA_ERROR_FAKE (701)",
        ),
        ("", "cuMemAlloc_v2=2", "the arena needs 0.00 GiB, free are 1.00 GiB of 8.00 GiB"),
        ("", "cuLibraryLoadData=209", "another architecture than compute capability 9.0"),
        ("backend.synchronize()", "cuStreamSynchronize=700", "set ATLAS_SYNC=1"),
        ("backend.begin_step(0, bytes(64), 64)", "", "step block: version 0"),
    ],
)
def test_failures_name_what_failed(fake_driver: Path, code: str, fail: str, expected: str) -> None:
    variables = {"FAKE_CUDA_FAIL": fail} if fail else {}
    status, output = program(fake_driver, f"attempt(lambda: exec({code!r}))", **variables)
    assert status == 3
    assert expected in output


def test_atlas_sync_names_the_launch(fake_driver: Path) -> None:
    code = """
    handle = backend.load([launch()])
    backend.begin_step(0, step(1), 64)
    os.environ["FAKE_CUDA_FAIL"] = "cuStreamSynchronize=700"
    attempt(lambda: backend.run(handle, 0, 1))
    """
    status, output = program(fake_driver, code, ATLAS_SYNC="1")
    assert status == 3
    assert "launch layers.0.test of op rms_norm (kernel store_dim) failed" in output
