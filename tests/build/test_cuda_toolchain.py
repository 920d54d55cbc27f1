"""The CUDA compiler from wheels: the same bytes everywhere, errors that name the kernel, resources as
ptxas reports them. Tests marked `cuda_toolchain` compile for real; they need the wheels, but no GPU."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atlas
from atlas.build import compile as build
from atlas.build import cuda, kernel_file, ptxas, toolchain
from atlas.build.instance import instance_header
from atlas.build.kernel_cache import Compiled
from atlas.errors import BuildError
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

GATED_ACTIVATION = KernelKey(
    "gated_activation", (("gate_up", "bf16"), ("out", "f32")), (("intermediate", 1000), ("activation", 0))
)

# Text that ptxas 12.9 prints for a kernel that spills, and for one with a device function beside it.
SPILLS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'atlas_sample' for 'sm_90a'
ptxas info    : Function properties for atlas_sample
    80 bytes stack frame, 84 bytes spill stores, 88 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 80 bytes cumulative stack size, 520 bytes smem
ptxas info    : Compile time = 290.104 ms
"""
TWO_FUNCTIONS = """\
ptxas info    : Function properties for helper
    0 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'atlas_k' for 'sm_121a'
ptxas info    : Function properties for atlas_k
    16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 16 bytes cumulative stack size
"""


@pytest.fixture
def forget_toolchain() -> Iterator[None]:
    toolchain._find.cache_clear()
    yield
    toolchain._find.cache_clear()


def compile_gated_activation(source: str | None = None, arch: str = "sm_90a") -> Compiled:
    path = KERNELS / "cuda" / "gated_activation.cu"
    declared = kernel_file.declaration(path)
    launch = {"block": declared.geometry(dict(GATED_ACTIVATION.constants), declared.knobs({})).block}
    headers = {f"atlas/{file.name}": file.read_text() for file in (KERNELS / "cuda/include/atlas").glob("*.cuh")}
    headers[cuda.INSTANCE_HEADER] = instance_header(
        GATED_ACTIVATION, "atlas_gated_activation", declared.knobs({}), launch, {}
    )
    return cuda.compile_kernel(path.name, source or path.read_text(), headers, arch)


def test_resources_are_read_from_ptxas_output() -> None:
    assert ptxas.parse_resources(SPILLS) == ptxas.Resources(64, 84, 88, 80, 520)
    assert ptxas.parse_resources(TWO_FUNCTIONS) == ptxas.Resources(40, 8, 4, 16, 0)


def test_output_without_resources_is_an_error() -> None:
    with pytest.raises(BuildError, match="names no registers\nsomething else"):
        ptxas.parse_resources("something else")


def test_a_missing_wheel_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, forget_toolchain: None) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    with pytest.raises(BuildError) as caught:
        toolchain.find()
    assert "the wheel nvidia-cuda-nvrtc-cu12 is not installed" in str(caught.value)
    assert "run: pip install 'nvidia-cuda-nvrtc-cu12>=" in str(caught.value)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(BuildError, match=r"'sm_70' is not an architecture .* sm_90a"):
        toolchain.check_arch("sm_70")


def test_the_instance_header_specialises() -> None:
    key = KernelKey("rms_norm", (("x", "f32"), ("weight", "f32"), ("out", "bf16")), (("hidden", 576), ("eps", 1e-5)))
    launch = {"block": 128, "max_rows": 8, "cluster": 4, "phase": 2}
    lines = instance_header(key, "atlas_rms", {"THREADS": 128}, launch, {"out": "tiles"}).splitlines()
    for line in (
        "constexpr int hidden = 576;",
        "constexpr float eps = 1e-05f;",
        "constexpr int THREADS = 128;",
        "using out = __nv_bfloat16;",
        "constexpr int block = 128;",
        "constexpr int max_rows = 8;",
        "constexpr int cluster = 4;",
        "constexpr int phase = 2;",
        'constexpr char out[] = "bf16";',
        "#define ATLAS_TYPE_OUT_BF16 1",
        "#define ATLAS_LAYOUT_OUT_TILES 1",
        '#define ATLAS_KERNEL extern "C" __global__ void __launch_bounds__(128, 1) atlas_rms',
    ):
        assert line in lines


def test_an_optional_operand_is_a_compile_time_fact() -> None:
    operands = (("x", "bf16"), ("weight", "bf16"), ("bias", "f32"), ("out", "f32"))
    for given, fact in ((operands, "true"), ((*operands[:2], operands[3]), "false")):
        lines = instance_header(
            KernelKey("linear", given, (("n", 8), ("k", 8))), "k", {}, {"block": 32}, {}
        ).splitlines()
        assert f"constexpr bool HAS_BIAS = {fact};" in lines and "using bias = float;" in lines


def test_an_unknown_element_type_is_named() -> None:
    key = KernelKey("gated_activation", (("gate_up", "fp8"), ("out", "f32")), (("intermediate", 8),))
    with pytest.raises(BuildError, match=r"kernel gated_activation: operand gate_up is 'fp8'"):
        instance_header(key, "k", {}, {"block": 32}, {})


@pytest.mark.cuda_toolchain
@pytest.mark.usefixtures("wheels")
class TestCompiler:
    def test_the_same_bytes_twice_and_from_another_folder(self, tmp_path: Path) -> None:
        first = compile_gated_activation()
        assert first == compile_gated_activation()
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        code += "from tests.build.test_cuda_toolchain import compile_gated_activation\nimport hashlib\n"
        code += "print(hashlib.sha256(compile_gated_activation().image).hexdigest())"
        environment = {**os.environ, "PYTHONPATH": str(Path(atlas.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == hashlib.sha256(first.image).hexdigest()

    def test_no_path_of_this_machine_is_in_the_image(self) -> None:
        image = compile_gated_activation().image
        for path in (Path.cwd(), toolchain.wheels().ptxas.parents[2], KERNELS):
            assert str(path).encode() not in image

    def test_a_syntax_error_names_kernel_and_line(self) -> None:
        with pytest.raises(BuildError) as caught:
            compile_gated_activation('#include "atlas/instance.h"\nATLAS_KERNEL(int* x) { x[0] = ; }\n')
        assert "kernel gated_activation.cu" in str(caught.value)
        assert "gated_activation.cu(2): error" in str(caught.value)

    def test_a_warning_is_an_error(self) -> None:
        with pytest.raises(BuildError, match=r"kernel gated_activation\.cu: compiles with warnings"):
            compile_gated_activation('#include "atlas/instance.h"\nATLAS_KERNEL(int* x) { int unused; x[0] = 1; }\n')

    def test_a_source_without_a_kernel(self) -> None:
        with pytest.raises(BuildError, match=r"kernel gated_activation\.cu: defines no kernel"):
            compile_gated_activation('#include "atlas/instance.h"\n')

    def test_a_missing_header_is_named(self) -> None:
        with pytest.raises(BuildError, match=r"atlas/nowhere\.cuh"):
            compile_gated_activation('#include "atlas/nowhere.cuh"\n')

    @pytest.mark.parametrize("arch", toolchain.ARCHITECTURES)
    def test_every_architecture_compiles(self, arch: str) -> None:
        assert compile_gated_activation(arch=arch).image.startswith(b"\x7fELF")

    @pytest.mark.parametrize(
        ("hardware", "ops", "local"),
        # The h200 folds norms, RoPE and the append into products. The head is held to few registers and declares what
        # that spills.
        [("h200", 19, {"normed_logits"}), ("gb10", 13, set())],
    )
    def test_every_op_of_the_real_model_compiles_without_undeclared_local_memory(
        self, hardware: str, ops: int, local: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        wanted = {"ATLAS_TARGET_HW": hardware, "ATLAS_TARGET_MODEL": "smollm2-135m", "ATLAS_TARGET_QUANT": "bf16"}
        selected = targets.select(KERNELS, wanted).targets
        target = next(target for target in selected if target.hardware.name == hardware)
        keys = build.closure(target)
        assert len({key.op for key in keys}) == ops  # an op that no model records yet is no part of it
        kernels = build.compile_keys(KERNELS, target, keys, target.hardware.arch, 2, build.ImageBlob())
        spilling = {k.name.partition("_x_")[0] for k in kernels for v in k.variants if v.spills or v.stack}
        assert spilling == local
