"""The doctor's checks of the machine: each can fail, and says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atlas.build.manifest import Manifest
from atlas.doctor import machine
from atlas.doctor.report import Result
from atlas.runtime import core
from tests.doctor.harness import REPOSITORY, context, cuda_set, problem


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the fake libcuda.so.1."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    folder = tmp_path_factory.mktemp("fake_driver")
    source = REPOSITORY / "tests" / "csrc" / "fake_libcuda.c"
    command = [compiler, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", folder / "libcuda.so.1", source]
    subprocess.run(command, check=True)
    return folder


def device_lines(driver: Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of the checks of device and kernel sets, in a process that finds `driver`."""
    code = (
        "import sys; from atlas.doctor import __main__ as d, kernels, machine; "
        "from atlas.doctor.report import Context; "
        "c = Context(environment={}); r = machine.device(c) + kernels.kernel_sets(c); "
        "print(d.text(r)); sys.exit(any(x.status == 'problem' for x in r))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment |= {"LD_LIBRARY_PATH": str(driver), **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("variables", "found", "remedy"),
    [
        ({"FAKE_CUDA_FAIL": "cuInit=803"}, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "different driver versions"),
        ({"FAKE_CUDA_FAIL": "cuInit=804"}, "(804)", "cuda-compat"),
        ({"FAKE_CUDA_FAIL": "cuInit=999"}, "(999)", "nvidia-modprobe"),
        ({"FAKE_CUDA_VERSION": "12020"}, "supports CUDA 12.2, needed is CUDA 12.4", "update the driver"),
    ],
)
def test_driver_faults(fake_driver: Path, variables: dict[str, str], found: str, remedy: str) -> None:
    status, output = device_lines(fake_driver, **variables)
    lines = output.splitlines()
    assert status == 1
    assert lines[1].startswith("problem  device") and found in lines[1]
    assert lines[2].strip().startswith("-> ") and remedy in lines[2]


@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_no_gpu_is_no_problem_for_a_cpu_install(fake_driver: Path, variables: dict[str, str]) -> None:
    status, output = device_lines(fake_driver, FAKE_CUDA_FAIL="cuInit=100", **variables)
    if "h200" not in output:
        assert status == 0
    assert "no GPU" in output or "no NVIDIA GPU" in output


def test_a_gpu_is_described_and_what_would_serve_it(fake_driver: Path) -> None:
    status, output = device_lines(fake_driver)
    assert "0: Fake GPU 0, compute capability 9.0, 132 multiprocessors, 8.59 GB, driver CUDA 12.8" in output
    if "h200/" not in output:
        assert status == 0 and "no kernels for Fake GPU 0 (compute capability 9.0)" in output
        assert "-> ATLAS_TARGET_HW=h200 ATLAS_TARGET_MODEL=NAME " in output


def test_cuda_kernels_without_a_gpu_are_a_problem() -> None:
    gpu_install = context(manifest=Manifest((cuda_set(),), (), "test"), devices=([], "no NVIDIA driver: x; install it"))
    found = problem(machine.device(gpu_install))
    assert (found.found, found.remedy) == ("no NVIDIA driver: x", "install it")


def levels(*states: tuple[str, bool, str, str]) -> SimpleNamespace:
    """An extension whose levels are (name, compiled, obstacle, failure)."""
    keys = ("name", "compiled", "obstacle", "failure")
    return SimpleNamespace(
        cpu_level_report=lambda: [dict(zip(keys, state, strict=True)) for state in states],
        cpu_backend=lambda threads: SimpleNamespace(describe=lambda: "cpu, linear at avx2, 1 threads"),
    )


def test_every_level_of_this_machine_is_told() -> None:
    found = machine.instruction_sets(context())
    assert [result.status for result in found] == ["ok"]
    for level in core.extension().cpu_levels():
        assert f"{level} passes its self-test" in found[0].found


def test_a_level_that_fails_its_self_test() -> None:
    known = levels(("avx512", True, "", "linear gives 0"), ("avx2", True, "", ""), ("amx", True, "needs AMX-TILE", ""))
    results = machine.instruction_sets(context(extension=(known, "")))
    assert problem(results).found == "avx512 fails its self-test and is not used: linear gives 0"
    assert results[1].found == "chosen: linear at avx2 (avx2 passes its self-test; amx needs AMX-TILE)"


def test_no_level_is_usable() -> None:
    known = levels(("avx512", True, "needs AVX2", ""), ("portable", False, "", ""))
    found = problem(machine.instruction_sets(context(extension=(known, ""))))
    assert "no level of this install" in found.found and "--no-binary" in found.remedy
    assert "avx512 needs AVX2; portable has no kernels in this install" in found.found


def test_threads_under_a_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    found = problem(machine.threads(context(cgroup=tmp_path)))
    assert "cgroup limit 0.5" in found.found and "at least one core" in found.remedy
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert "1 threads" in machine.threads(context(cgroup=tmp_path))[0].found


def test_memory_nodes() -> None:
    def found(nodes: list[int], obstacle: str) -> Result:
        known = SimpleNamespace(memory_nodes=lambda: nodes, interleave_obstacle=lambda: obstacle)
        return machine.memory_nodes(context(extension=(known, "")))[0]

    assert found([0], "").found == "one: all memory is equally near"
    assert (found([0, 1], "").status, found([0, 1], "").found[-28:]) == ("ok", "weights are spread over them")
    refused = found([0, 1], "Operation not permitted")
    assert refused.status == "note" and "Operation not permitted" in refused.found and "CAP_SYS_NICE" in refused.remedy
    assert machine.memory_nodes(context())[0].status in ("ok", "note")


def test_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 4000000 kB\n")
    assert machine.memory(context(meminfo=meminfo, cgroup=tmp_path))[0] == Result("memory", "ok", "4.10 GB available")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{900 << 20}\n")
    found = problem(machine.memory(context(meminfo=meminfo, cgroup=tmp_path)))
    assert found.found == "0.13 GB available" and "raise the container's limit" in found.remedy
    assert machine.memory(context(meminfo=tmp_path / "absent"))[0].status == "note"


def test_a_good_cache(cache: Path) -> None:
    (cache / "models" / "file").write_bytes(bytes(20_000_000))
    result = machine.storage(context())[0]
    assert result.status == "ok" and "(models 0.02 GB)" in result.found


def test_a_cache_that_is_not_there_yet(cache: Path) -> None:
    shutil.rmtree(cache)
    assert "made when it is needed" in machine.storage(context())[0].found


def test_a_cache_that_others_can_write(cache: Path) -> None:
    (cache / "models").chmod(0o777)
    found = problem(machine.storage(context()))
    assert found.remedy == f"chmod 700 {cache / 'models'}" and "can be written by others" in found.found


def test_packs_that_others_can_read_are_refused_as_by_the_loader(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packs = cache / "packs"
    packs.mkdir()
    packs.chmod(0o755)
    found = problem(machine.storage(context()))
    assert found.found == f"the cache {packs} has mode 0755: not used, accepted is 0700 (chmod 700 it)"
    assert found.remedy == f"chmod 700 {packs}" and not capfd.readouterr().err
    packs.chmod(0o700)
    assert [r.status for r in machine.storage(context())] == ["ok"]


@pytest.mark.parametrize("below", ["", "deeper"])
@pytest.mark.parametrize("kind", ["not a directory", "a symbolic link to no directory"])
def test_a_cache_home_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, below: str) -> None:
    home = tmp_path / "home"
    if kind == "not a directory":
        home.write_text("")
    else:
        home.symlink_to(tmp_path / "absent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / below))
    found = problem(machine.storage(context()))
    assert found.found == f"{home} is {kind}, so {home / below / 'atlas'} cannot be made"
    assert found.remedy == f"remove it (rm {home}), or set XDG_CACHE_HOME to a folder of your own"


def test_a_cache_home_that_is_a_link_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert [r.status for r in machine.storage(context())] == ["ok"]


def test_a_cache_of_somebody_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    found = problem(machine.storage(context()))
    assert "belongs to user id" in found.found and "XDG_CACHE_HOME" in found.remedy


def test_a_cache_that_is_a_link(cache: Path, tmp_path: Path) -> None:
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    assert "is not a plain directory" in problem(machine.storage(context())).found


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(cache)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in problem(machine.storage(context())).found


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    found = problem(machine.storage(context()))
    assert "0.01 GB free" in found.found and "another disk" in found.remedy


def test_no_folder_for_temporary_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "tempdir", str(cache / "absent"))
    assert "TMPDIR" in problem(machine.storage(context())).remedy
