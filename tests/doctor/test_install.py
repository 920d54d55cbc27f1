"""The doctor's checks of the installation, and its report: each can fail, and says what to do."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from atlas.doctor import __main__ as doctor
from atlas.doctor import install, kernels, machine
from atlas.doctor.report import Context, Result
from atlas.errors import AtlasError
from atlas.runtime import core
from tests.doctor.harness import REPOSITORY, context, problem


def test_this_python_and_its_packages_are_fine() -> None:
    assert [r.status for r in install.python(context())] == ["ok"]
    assert [r.status for r in install.packages(context())] == ["ok"]


def test_python_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 4, "final", 0))
    found = problem(install.python(context()))
    assert "3.10.4" in found.found and "needed is 3.11" in found.found and "Python 3.11" in found.remedy


def test_python_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.struct, "calcsize", lambda code: 4)
    assert "64-bit" in problem(install.python(context())).remedy


@pytest.mark.parametrize("version", [None, "0.1"])
def test_a_package_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != "msgspec":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    found = problem(install.packages(context()))
    assert found.remedy == "run `pip install 'msgspec>=0.18'`"
    assert found.found == ("msgspec is not installed" if version is None else "msgspec 0.1, needed is >=0.18")


def test_code_and_distribution_of_different_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "__version__", "9.9.9")
    found = problem(install.packages(context()))
    assert "the code that runs is 9.9.9" in found.found and "outside the checkout" in found.remedy


def test_distribution_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert problem(install.packages(context())).remedy == "run `pip install .`"


def test_extension_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AtlasError("atlas._core", "does not load (version `GLIBC_2.38' not found)")

    monkeypatch.setattr(core, "extension", fail)
    broken = context()
    found = problem(install.extension(broken))
    assert "GLIBC_2.38" in found.found and "--force-reinstall" in found.remedy
    for check in (machine.device, machine.instruction_sets, kernels.kernel_sets):
        assert [r.status for r in check(broken)] == ["skipped"], check
    assert [r.status for r in kernels.model(context(model="smollm2-135m"))] == ["skipped"]


def run_copy(folder: Path, *arguments: str, packages: bool, extension: str = "") -> subprocess.CompletedProcess[str]:
    """Run the doctor from a copy of the package without its extension, with or without installed packages."""
    source = Path(doctor.__file__).parents[1]
    shutil.copytree(source, folder / "atlas", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if extension:
        (folder / "atlas" / "_core.py").write_text(extension)
    paths = [str(folder), sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")]
    paths += [sysconfig.get_path("purelib")] if packages else []
    code = f"import sys, runpy; sys.path[:] = {paths!r}; runpy.run_module('atlas.doctor', run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_doctor_works_where_nothing_is_installed(tmp_path: Path) -> None:
    done = run_copy(tmp_path, packages=False)
    assert done.returncode == 1 and not done.stderr
    assert "the distribution atlas-infer is not installed here" in done.stdout
    assert re.search(r"problem +extension", done.stdout)
    assert "checks of machine and kernels need a package" in done.stdout


def test_extension_of_another_version(tmp_path: Path) -> None:
    done = run_copy(tmp_path, packages=True, extension="CORE_ABI, STEP_VERSION = 99, 98\n")
    assert done.returncode == 1
    assert "core ABI 99, step version 98" in done.stdout and "are from different versions" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "found", "remedy"),
    [
        ("ATLAS_TARGET_HWW", "h200", "ATLAS_TARGET_HWW is not a variable of Atlas", "did you mean ATLAS_TARGET_HW?"),
        ("ATLAS_1234567", "1", "ATLAS_1234567 is not", "known are ATLAS_TARGET_HW"),
        ("ATLAS_LOG_LEVEL", "loud", "ATLAS_LOG_LEVEL is 'loud'", "set it to debug"),
        ("ATLAS_EMBED", "zz", "ATLAS_EMBED is wrong: 'zz'", "accepted: cubin: machine code"),
        ("ATLAS_CUDA_COMPILER", "zz", "ATLAS_CUDA_COMPILER is wrong: 'zz'", "accepted: unset, 'nvrtc', 'nvcc' or"),
        (
            "ATLAS_CUDA_COMPILER",
            "/absent/nvcc",
            "wrong: /absent/nvcc could not be run",
            "accepted: the path of an nvcc",
        ),
        ("XDG_CACHE_HOME", "cache", "relative and therefore ignored", "absolute"),
        ("ATLAS_TARGET_HW", "h20", "unknown name 'h20'", "h200"),
    ],
)
def test_wrong_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str, found: str, remedy: str) -> None:
    monkeypatch.setenv(name, value)
    result = problem(install.variables(context(environment={name: value})))
    assert found in result.found and remedy in result.remedy


def test_right_variables() -> None:
    given = {"ATLAS_TARGET_HW": "cpu", "ATLAS_LOG_LEVEL": "debug", "HOME": "/"}
    results = install.variables(context(environment=given))
    if "h200" not in str(results):  # an install with CUDA targets differs from cpu alone
        assert [(r.status, r.found) for r in results] == [("ok", "ATLAS_TARGET_HW=cpu, ATLAS_LOG_LEVEL=debug")]


@pytest.mark.parametrize("compiler", ["", "nvrtc"])
def test_no_compiler_wheels_are_needed_here(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    install.toolchain._find.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setenv("ATLAS_CUDA_COMPILER", compiler)
    given = {"ATLAS_CUDA_COMPILER": compiler, "ATLAS_EMBED": "both"}
    results = install.variables(context(environment=given))
    assert [(r.status, r.found) for r in results] == [("ok", f"ATLAS_CUDA_COMPILER={compiler}, ATLAS_EMBED=both")]


def test_every_variable_in_the_sources_is_known_and_every_known_one_is_used() -> None:
    files = [*REPOSITORY.glob("atlas/**/*.py"), *REPOSITORY.glob("csrc/**/*.cpp"), REPOSITORY / "build_targets.py"]
    if not (REPOSITORY / "csrc").is_dir():
        pytest.skip("needs a source checkout")
    used: set[str] = set()
    for file in files:
        if file.parent.name != "doctor":
            used |= set(re.findall(r'"(ATLAS_[A-Z0-9_]*[A-Z0-9])"', file.read_text()))
    assert used == set(install.VARIABLES)


def test_a_check_that_breaks_is_a_problem_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: Context) -> list[Result]:
        raise RuntimeError("oh")

    monkeypatch.setattr(doctor, "checks", lambda: [broken, install.python])
    results = doctor.run(context())
    assert problem(results).found == "the check itself failed: RuntimeError: oh"
    assert results[-1].check == "python"


def test_report_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result("disk", "ok", "fine"), Result("memory", "problem", "little", "buy some")]
    monkeypatch.setattr(doctor, "run", lambda context: results)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "ok       disk    fine",
        "problem  memory  little",
        "                 -> buy some",
        "1 problem",
    ]
    monkeypatch.setattr(doctor, "run", lambda context: results[:1])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problem found"


def test_a_problem_always_has_a_remedy() -> None:
    with pytest.raises(AssertionError, match="without a remedy"):
        Result("x", "problem", "y")
