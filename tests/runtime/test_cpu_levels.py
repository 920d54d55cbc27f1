"""Instruction-set levels of the CPU: which are known, chosen, and refused for what they compute."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

import build_targets
from atlas.build import kernel_file
from atlas.errors import BuildError
from atlas.runtime import core
from atlas.targets.hardware import walk

MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
CPU = walk(build_targets.KERNELS)["cpu"]
FILES = sorted((build_targets.KERNELS / "cpu").glob("*.cpp"))


def test_the_core_knows_the_levels_of_the_tree() -> None:
    """Same names, same order: a level without its test in features.cpp would never be chosen."""
    expected = [level.name for level in CPU.levels if level.machine in (MACHINE, "any")]
    assert [level["name"] for level in core.extension().cpu_level_report()] == expected


def test_every_level_here_passes_its_self_test_or_says_what_the_machine_lacks() -> None:
    for level in core.extension().cpu_level_report():
        assert not level["failure"], level
        assert not level["obstacle"] or level["obstacle"].startswith("needs "), level
    assert core.extension().cpu_levels()[-1] == "portable"


def test_the_self_test_knows_a_kernel_of_every_class() -> None:
    """By its own table: an op of dot products under another signature would go untested without a word."""
    source = (build_targets.ROOT / "csrc" / "cpu" / "self_test.cpp").read_text()
    tested = set(re.findall(r'^    \{"([\w.]+)", test_', source, re.MULTILINE))
    assert tested <= set(core.extension().cpu_kernels())
    asked = {file.stem for file in FILES if kernel_file.declaration(file).also}
    assert asked <= {signature.split(".")[0] for signature in tested}


def test_the_description_names_the_level_of_every_op() -> None:
    """An op that runs below the chosen level is named with the level it runs at."""
    extension = core.extension()
    levels = extension.cpu_levels()
    text = core.cpu_backend(1).describe()
    ops = {signature.split(".")[0] for signature in extension.cpu_kernels()}
    best = {signature.split(".")[0] for signature in extension.cpu_kernels(levels[0])}
    if best == ops:
        assert text == f"cpu, {levels[0]} kernels, 1 threads"
    else:
        for op in best:
            assert op in text.partition(f" at {levels[0]}")[0]
        assert "all else at" in text


@pytest.mark.parametrize(("faults", "found"), [(False, "nan for"), (True, "ends with signal 4")])
def test_a_level_that_computes_something_wrong_is_not_used(faults: bool, found: str) -> None:
    """In a process of its own, in which the best level's kernels are broken before it is considered."""
    best, *others = core.extension().cpu_levels()
    if not others:
        pytest.skip("this machine has one level")
    code = (
        "from atlas.runtime import core; from atlas.doctor import machine; from atlas.doctor.report import Context\n"
        "import logging; logging.basicConfig(format='%(message)s')\n"
        f"core.extension().break_cpu_level({best!r}, {faults})\n"
        "print(core.cpu_backend(1).describe()); core.cpu_backend(1)\n"
        "print([r.found for r in machine.instruction_sets(Context()) if r.status == 'problem'])\n"
        f"core.cpu_backend(1, {best!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    described, told = done.stdout.splitlines()
    assert best not in described and others[0] in described
    assert f"{best} fails its self-test and is not used" in told and found in told
    first_line = done.stderr.splitlines()[0]
    assert first_line.startswith(f"cpu level {best} fails its self-test and is not used: ") and found in first_line
    assert done.stderr.count("is not used") == 1  # said once, although two backends were made
    assert f"cpu level: {best} is not usable here" in done.stderr.splitlines()[-1]


def test_kernel_files_are_compiled_for_a_level_on_request_only_where_they_ask() -> None:
    for machine in ("x86_64", "aarch64"):
        for level, files in build_targets.cpu_levels(CPU, machine, FILES):
            asked = [file for file in FILES if level.name in kernel_file.declaration(file).also]
            assert files == (asked if level.on_request else FILES)


@pytest.mark.parametrize("name", ["avx512", "avx1024"])
def test_a_kernel_file_that_asks_for_a_level_it_cannot_have(tmp_path, name: str) -> None:
    file = tmp_path / "linear.cpp"
    file.write_text(f'/* atlas\n[levels]\nalso = ["{name}"]\n*/\n')
    with pytest.raises(BuildError, match=f"also names '{name}'; accepted: amx, avx512vnni, i8mm"):
        build_targets.cpu_levels(CPU, "x86_64", [file])
