"""What an install downloads, for which machine, and what a build for another machine would compile."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

import build_targets
from atlas import __version__
from atlas.build.toolchain import CUDA_REQUIREMENTS
from tests.install.harness import REPOSITORY, script

PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
AARCH64 = {"platform_machine": "aarch64", "sys_platform": "linux", "platform_system": "Linux", "extra": ""}


class Base:
    """scikit-build-core's hooks, as far as requirements go."""

    def requires(self, config_settings: Any) -> list[str]:
        return ["ninja>=1.5"]

    get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = requires


@pytest.fixture
def build_requirements(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hooks' requirements for a value of ATLAS_TARGET_HW."""

    def requirements(hardware: str, kind: str) -> list[str]:
        monkeypatch.setattr(build_targets, "_scikit_build", Base)
        for name in ("ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT", "ATLAS_CUDA_COMPILER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("ATLAS_TARGET_HW", hardware)
        found: list[str] = getattr(build_targets, f"get_requires_for_build_{kind}")(None)
        return found

    return requirements


@pytest.mark.parametrize("kind", ["wheel", "editable", "sdist"])
def test_a_cpu_build_needs_no_cuda_wheel(build_requirements: Any, kind: str) -> None:
    assert build_requirements("cpu", kind) == ["ninja>=1.5"]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_cuda_build_needs_the_compilers_and_an_sdist_does_not(build_requirements: Any, kind: str) -> None:
    assert build_requirements("h200", kind) == ["ninja>=1.5", *CUDA_REQUIREMENTS]
    assert build_requirements("h200", "sdist") == ["ninja>=1.5"]


def test_an_unknown_target_stops_the_install_with_the_nearest_name(build_requirements: Any) -> None:
    with pytest.raises(SystemExit, match="unknown name 'h20'.*h200"):
        build_requirements("h20", "wheel")


def test_what_a_build_cannot_do_without_is_named(build_requirements: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    with pytest.raises(SystemExit, match=r"headers are not installed \(/nowhere/Python.h\).*apt install"):
        build_requirements("cpu", "wheel")
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(SystemExit, match=r"no C\+\+17 compiler \(no-such-compiler\).*apt install"):
        build_requirements("cpu", "wheel")
    assert build_requirements("cpu", "sdist")


def test_the_run_time_needs_nothing_of_cuda() -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires("atlas-infer") or []]
    always = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert always == {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert not [name for name in always if name.startswith("nvidia")]


def test_the_build_extra_is_the_toolchain() -> None:
    extra = [Requirement(text) for text in PYPROJECT["project"]["optional-dependencies"]["build"]]
    assert {f"{r.name}{r.specifier}" for r in extra} == {str(Requirement(text)) for text in CUDA_REQUIREMENTS}


def test_the_compilers_are_needed_on_aarch64_as_on_x86_64() -> None:
    """A sdist installs the same way on a GB10 machine, which is aarch64."""
    extra = [Requirement(text) for text in PYPROJECT["project"]["optional-dependencies"]["build"]]
    assert all(r.marker is not None and r.marker.evaluate(AARCH64) for r in extra)
    assert all(Requirement(text).marker is None for text in CUDA_REQUIREMENTS)
    dependencies = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    assert all(r.marker is None or r.marker.evaluate(AARCH64) for r in dependencies)


def test_an_aarch64_build_compiles_what_aarch64_has(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's side of the build under another machine: levels and their flags, and the same kernel sets."""
    monkeypatch.setenv("ATLAS_TARGET_HW", "cpu")
    written = {}
    for machine in ("aarch64", "x86_64"):
        build_targets.generate(tmp_path / machine, machine, 1)
        written[machine] = (tmp_path / machine / "targets.cmake").read_text()
    assert re.search(r"set\(ATLAS_CPU_LEVELS (i8mm )?portable\)", written["aarch64"])
    assert "x86" not in written["aarch64"]
    assert re.search(r"set\(ATLAS_CPU_LEVELS (amx )?(avx512vnni )?avx512 avx2 portable\)", written["x86_64"])
    for file in ("manifest.json", "images.bin"):
        assert (tmp_path / "aarch64" / file).read_bytes() == (tmp_path / "x86_64" / file).read_bytes()


def test_one_version_for_every_target() -> None:
    """A local version (+h200) could not be published, and pip would take it for newer."""
    assert PYPROJECT["project"]["version"] == __version__ == importlib.metadata.version("atlas-infer")
    assert "+" not in __version__


def test_uv_rebuilds_when_variables_or_tree_change() -> None:
    keys = PYPROJECT["tool"]["uv"]["cache-keys"]
    variables = {key["env"] for key in keys if "env" in key}
    files = {key["file"] for key in keys if "file" in key}
    assert {"ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT"} <= variables
    assert {"pyproject.toml", "CMakeLists.txt", "build_targets.py"} <= files
    for folder in ("csrc", "kernels", "atlas"):
        assert f"{folder}/**/*" in files


# ---- wheel tags and sizes ------------------------------------------------------------------------

SYMBOLS = """
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.34) pthread_create
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.4)  __stack_chk_fail
0000000000000000      DF *UND*\t0000000000000000 (GLIBCXX_3.4.29) _ZNSt7__cxx11
0000000000001000 g    DF .text\t0000000000000010  GLIBC_9.99   defined_here
"""


def test_what_symbols_need() -> None:
    glibc = script("glibc")
    assert glibc.needed(SYMBOLS) == {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}
    with pytest.raises(ValueError, match="unversioned symbol of glibc 2.38: __isoc23_strtol"):
        glibc.needed("0000000000000000  w   DF *UND*\t0000000000000000  __isoc23_strtol")


@pytest.mark.parametrize(
    ("tag", "fault"),
    [
        ("linux_x86_64", ""),
        ("manylinux_2_39_x86_64", ""),
        ("manylinux_2_28_x86_64", "needs GLIBC_2.34, the tag manylinux_2_28_x86_64 promises 2.28"),
        ("manylinux2014_x86_64.manylinux_2_17_x86_64", "promises 2.17"),
        ("manylinux_2_34_aarch64", ""),
    ],
)
def test_a_tag_that_promises_an_older_system_than_is_needed(tag: str, fault: str) -> None:
    found = script("glibc").broken_promise(tag, SYMBOLS)
    assert fault in found and bool(found) == bool(fault)


def test_a_tag_is_held_to_libstdcxx_too() -> None:
    found = script("glibc").broken_promise("manylinux_2_28_x86_64", SYMBOLS.replace("2.34", "2.17"))
    assert found == "needs GLIBCXX_3.4.29, the tag manylinux_2_28_x86_64 promises 3.4.24"


def test_the_environment_stays_small(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = script("sizes")
    assert sizes.environment() == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert re.search(r"MB  numpy \d", output) and re.search(r"MB  atlas-infer \d", output)
    assert "pytest" not in output and f"in all, of at most {sizes.ENVIRONMENT_LIMIT_MB}" in output


def test_a_wheel_that_is_too_large(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = script("sizes")
    wheel = tmp_path / "a-1-py3-none-any.whl"
    wheel.write_bytes(bytes(9_000_000))
    assert sizes.wheels([str(wheel)]) == 0
    wheel.write_bytes(bytes(11_000_000))
    assert sizes.wheels([str(wheel)]) == 1


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF")
def test_the_extension_of_this_install_loads_what_it_needs() -> None:
    """The local tag linux_* promises nothing; whatever this machine built, this machine has."""
    import subprocess

    from atlas.runtime import core

    file = core.extension().__file__
    symbols = subprocess.run(["objdump", "-T", file], check=True, capture_output=True, text=True).stdout
    needed = script("glibc").needed(symbols)["GLIBC"]
    assert needed <= tuple(map(int, platform.libc_ver()[1].split(".")))
