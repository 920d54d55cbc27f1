"""Every way to install Atlas, each tried for real: `pytest -m install`. Most builds share one tree, and with it what
is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from atlas import __version__
from atlas.build.toolchain import CUDA_REQUIREMENTS
from tests.install.harness import Environment, copy_tree, run, script

pytestmark = [pytest.mark.install, pytest.mark.timeout(1200)]

CPU = ["cpu/*/f32", "cpu/*/bf16"]
H200 = {"ATLAS_TARGET_HW": "h200", "ATLAS_TARGET_MODEL": "smollm2-135m", "ATLAS_TARGET_QUANT": "bf16"}
H200_SET = "h200/smollm2-135m/bf16"

BUILD_REQUIREMENTS = ("scikit-build-core", "pybind11", "ninja", "cmake")

STRAY = ("atlas/_core.cpython-39-x86_64-linux-gnu.so", "atlas/serve/.mypy_cache/x.json", "atlas/__pycache__/old.pyc")
STRAY_KERNELS = ("kernels/cpu/__pycache__/old.pyc", "kernels/cpu/.linear.cpp.swp")

SECONDS_OF_A_CPU_INSTALL = 180
"""Upper limit of a default install on two cores, dependencies apart."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree outside git, with files that must go nowhere."""
    folder = copy_tree(tmp_path_factory.mktemp("tree") / "source")
    for name in (*STRAY, *STRAY_KERNELS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("stray")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment.make(tmp_path_factory.mktemp("environment") / "venv")
    made.pip("install", "--quiet", "build", "uv", cwd=made.folder)
    return made


def kernel_files(folder: Path) -> set[str]:
    """Files of a kernel tree, without what must not travel."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts and path.name[0] != "."}


def check_wheel(wheel: Path, tree: Path) -> None:
    """What a wheel must hold, and nothing beside it."""
    names = zipfile.ZipFile(wheel).namelist()
    tag = wheel.stem.split("-")[-3]
    extensions = [name for name in names if name.endswith(".so")]
    assert len(extensions) == 1 and f"_core.cpython-{tag.removeprefix('cp')}" in extensions[0], extensions
    assert "atlas/_targets.json" in names
    prefix = "atlas/_kernels/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == kernel_files(tree / "kernels")
    others = [n for n in names if not n.startswith(prefix) and ".dist-info/" not in n and n not in extensions]
    assert {name for name in others if not name.endswith(".py")} == {"atlas/_targets.json"}
    sources = {path.relative_to(tree).as_posix() for path in (tree / "atlas").rglob("*.py")}
    assert {name for name in others if name.endswith(".py")} == sources
    assert script("sizes").wheels([str(wheel)]) == 0
    assert script("glibc").check(wheel) == ""


def stray(names: Iterable[str]) -> list[str]:
    marks = ("__pycache__", "_cache/", ".swp", ".so", "CMakeFiles", ".git")
    return [name for name in names if any(mark in name for mark in marks)]


def test_two_selections_in_one_tree(tree: Path, environment: Environment) -> None:
    started = time.monotonic()
    environment.pip("install", "--no-deps", ".", cwd=tree, ATLAS_TARGET_HW="cpu")
    assert time.monotonic() - started < SECONDS_OF_A_CPU_INSTALL
    first = environment.holds()
    assert first["sets"] == first["targets"] == CPU
    assert first["images"] == 0

    environment.pip("install", "--no-deps", ".", cwd=tree, **H200)
    second = environment.holds()
    assert second["sets"] == second["targets"] == [*CPU, H200_SET]
    assert second["images"] > 10_000
    assert second["record"]["selection"] == H200
    assert second["kernels"].endswith("site-packages/atlas/_kernels")
    output = run([environment.folder / "bin" / "atlas", "--version"], environment.folder)
    assert output.rstrip().endswith(f"({', '.join([*CPU, H200_SET])})")


def test_editable(tree: Path, environment: Environment) -> None:
    environment.pip("install", "--no-deps", "-e", ".", cwd=tree, ATLAS_TARGET_HW="cpu")
    held = environment.holds()
    assert held["sets"] == CPU and Path(held["kernels"]) == tree / "kernels"

    module = tree / "atlas" / "edited.py"
    module.write_text("ANSWER = 1\n")
    ask = [environment.python, "-c", "import atlas.edited; print(atlas.edited.ANSWER, atlas.edited.__file__)"]
    assert run(ask, environment.folder).split() == ["1", str(module)]
    module.write_text("ANSWER = 22\n")
    assert run(ask, environment.folder).split() == ["22", str(module)]
    module.unlink()

    environment.pip("install", "--quiet", *BUILD_REQUIREMENTS, cwd=tree)
    kernel = tree / "kernels" / "cpu" / "residual_add.cpp"
    original = kernel.read_text()
    # Static: the file is compiled once per instruction-set level.
    edit = '\n__attribute__((used)) static const char edited[] = "kernel was edited";\n'
    kernel.write_text(original + edit)
    try:
        path = os.pathsep.join([str(environment.folder / "bin"), os.environ["PATH"]])
        run([environment.python, "build_targets.py", "--build"], tree, ATLAS_TARGET_HW="cpu", PATH=path)
        held = environment.holds()
        assert b"kernel was edited" in Path(held["extension"]).read_bytes()
        assert held["targets"] == held["sets"] == CPU
    finally:
        kernel.write_text(original)


def test_without_build_isolation(tree: Path, environment: Environment) -> None:
    environment.pip("install", "--quiet", *BUILD_REQUIREMENTS, cwd=tree)
    environment.pip("install", "--no-build-isolation", "--no-deps", ".", cwd=tree, ATLAS_TARGET_HW="cpu")
    assert environment.holds()["sets"] == CPU
    # A CUDA target without its compilers says which wheels are missing.
    command = [environment.python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "."]
    done = subprocess.run(command, cwd=tree, env={**os.environ, **H200}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the wheel nvidia-cuda-nvrtc-cu12 is not installed" in done.stdout + done.stderr
    assert environment.holds()["sets"] == CPU


def test_wheel_with_a_build_tag(tree: Path, environment: Environment, tmp_path: Path) -> None:
    """How CI tells the wheels of several targets apart, which all have one version."""
    tag = "1_h200_smollm2_135m_bf16"
    options = ["--no-deps", "--no-build-isolation", "--config-settings", f"wheel.build-tag={tag}", "-w", tmp_path]
    environment.pip("install", "--quiet", *BUILD_REQUIREMENTS, cwd=tree)
    environment.pip("wheel", *options, ".", cwd=tree, ATLAS_TARGET_HW="cpu")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"atlas_infer-{__version__}-{tag}-cp")
    check_wheel(wheel, tree)
    environment.pip("install", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    assert environment.holds()["sets"] == CPU


def test_uv_builds_again_for_other_variables(tree: Path, environment: Environment, tmp_path: Path) -> None:
    uv = environment.folder / "bin" / "uv"
    command = [uv, "pip", "install", "--python", environment.python, "--no-deps", "."]
    for model in ("smollm2-135m", "llama-3.2-1b"):
        variables = {"ATLAS_TARGET_HW": "cpu", "ATLAS_TARGET_MODEL": model, "UV_CACHE_DIR": str(tmp_path)}
        run(command, tree, **variables)
        assert environment.holds()["record"]["selection"]["ATLAS_TARGET_MODEL"] == model


def test_sdist_and_a_wheel_from_it(tree: Path, environment: Environment, tmp_path: Path) -> None:
    run([environment.python, "-m", "build", "--sdist", "--outdir", tmp_path, "."], tree, ATLAS_TARGET_HW="cpu")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert not stray(names)
    assert {f"kernels/{name}" for name in kernel_files(tree / "kernels")} <= set(names)
    assert {"CMakeLists.txt", "build_targets.py", "csrc/bindings.cpp", "atlas/__init__.py", "LICENSE"} <= set(names)
    assert not [name for name in names if name.split("/")[0] in ("tests", "docs", "bench", ".ci", ".github", "build")]

    environment.pip("wheel", "--no-deps", "--no-cache-dir", "-w", tmp_path, sdist, cwd=tmp_path, ATLAS_TARGET_HW="cpu")
    (wheel,) = tmp_path.glob("*.whl")
    check_wheel(wheel, tree)
    environment.pip("install", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    held = environment.holds()
    assert held["sets"] == CPU and held["kernels"].endswith("site-packages/atlas/_kernels")


def python312() -> str:
    """A Python 3.12 of this machine, on PATH or of pyenv."""
    found = [shutil.which("python3.12"), *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))]
    for candidate in filter(None, found):
        works = subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
        if works:
            return candidate
    pytest.skip("no Python 3.12 on this machine")


def test_wheel_for_python_3_12(tree: Path, tmp_path: Path) -> None:
    """Built where there is no GPU; that it runs on a machine with one is checked there."""
    environment = Environment.make(tmp_path / "venv", python312())
    environment.pip("wheel", "--no-deps", "-w", tmp_path, ".", cwd=tree, **H200)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp312-cp312-" in wheel.name
    check_wheel(wheel, tree)
    environment.pip("install", "--no-deps", wheel, cwd=tmp_path)
    assert environment.holds()["sets"] == [*CPU, H200_SET]


def test_the_compilers_exist_for_aarch64(tmp_path: Path) -> None:
    """pip finds every compiler wheel for a GB10 machine; nothing is installed."""
    platforms = [f"--platform=manylinux{version}_aarch64" for version in ("2014", "_2_17", "_2_27", "_2_28", "_2_34")]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", f"--target={tmp_path}"]
    command = [sys.executable, "-m", "pip", "install", *options, *platforms, *CUDA_REQUIREMENTS]
    output = run(command, tmp_path)
    for requirement in CUDA_REQUIREMENTS:
        name = requirement.partition(">")[0]
        assert f"{name}-12.9" in output
