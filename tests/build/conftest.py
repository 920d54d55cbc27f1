"""What build tests share: a skip without the compiler wheels, a copied kernel tree, a compiler that counts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from atlas.build import cuda, toolchain
from atlas.build.kernel_cache import Compiled
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.targets import target as targets
from atlas.targets.target import Target

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture(scope="session")
def wheels() -> None:
    """Skips where the compiler is not installed."""
    try:
        toolchain.wheels()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel tree to change, and a cache of its own: without what was tuned, and without kernels and
    layouts that one card has for itself, so that every GPU target has those of the shared lineage."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("tuning.toml"))
    for file in copy.glob("h200/*.cu"):
        file.unlink()
    facts = copy / "h200/HARDWARE.toml"
    facts.write_text("".join(line for line in facts.read_text().splitlines(True) if not line.startswith("layouts")))
    return copy


@pytest.fixture
def gpu_targets() -> Callable[..., list[Target]]:
    """gpu_targets(tree, hw, model): GPU targets in bf16."""

    def select(tree: Path, hw: str = "h200", model: str = "smollm2-135m") -> list[Target]:
        wanted = {"ATLAS_TARGET_HW": hw, "ATLAS_TARGET_MODEL": model, "ATLAS_TARGET_QUANT": "bf16"}
        return [target for target in targets.select(tree, wanted).targets if target.hardware.kind == "cuda"]

    return select


class CountingCompiler:
    """Stands in for the compiler: returns bytes made from what it was given, and counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.facts: dict[str, int | float | tuple[int, ...]] = {}

    def compile(self, name: str, source: str, headers: Mapping[str, str], arch: str) -> Compiled:
        self.calls.append(name)
        op = OPS[name.split(".")[0]]
        operands = op.operands
        image = f"{arch}{len(source)}{headers[cuda.INSTANCE_HEADER]}".encode()
        facts = {
            "registers": 32,
            "spills": 0,
            "stack": 0,
            "static_shared": 0,
            "reads": tuple(i for i, operand in enumerate(operands) if operand.mode == "in"),
            "writes": tuple(i for i, operand in enumerate(operands) if operand.mode != "in"),
            "seconds": 0.1,
        }
        # Pointers to the operands and dims, integers, scratch: what a launch of the shared lineage's files passes.
        declared = re.findall(r"(?m)^arguments = \[(.*)\]", source)
        passed = [".u64"] * len((*operands, *op.dims)) + [".u32"] * sum(names.count('"') // 2 for names in declared)
        passed += [".u64"] * len(re.findall(r"(?m)^scratch = ", source))
        ptx = f".entry k({', '.join(f'.param {kind} p{i}' for i, kind in enumerate(passed))}) {{ ret; }}".encode()
        return Compiled(image=image, ptx=ptx, **{**facts, **self.facts})  # type: ignore[arg-type]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    compiler = CountingCompiler()
    monkeypatch.setattr(cuda, "compile_kernel", compiler.compile)
    monkeypatch.setattr(cuda, "compiler_version", lambda: "counting 1.0")
    return compiler
