"""ATLAS_CUDA_COMPILER: an nvcc or a newer NVRTC in place of the pinned wheels."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas.build import cuda, nvrtc, process, toolchain
from atlas.build.kernel_cache import Compiled
from atlas.errors import BuildError
from tests.build.test_cuda_toolchain import compile_gated_activation

NVCC = Path("/usr/local/bin/nvcc")
nvcc_installed = pytest.mark.skipif(not NVCC.exists(), reason=f"no {NVCC}: an installed CUDA toolkit")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    toolchain._find.cache_clear()
    yield
    toolchain._find.cache_clear()


def script(folder: Path, text: str) -> Path:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.cuda_toolchain
@nvcc_installed
class TestNvcc:
    def compile(self, monkeypatch: pytest.MonkeyPatch, source: str | None = None) -> Compiled:
        monkeypatch.setenv(toolchain.VARIABLE, str(NVCC))
        return compile_gated_activation(source)

    def test_a_kernel_compiles_to_the_same_bytes_in_any_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        first = self.compile(monkeypatch)
        assert first.image.startswith(b"\x7fELF") and b".entry atlas_gated_activation" in first.ptx
        assert (first.reads, first.writes) == ((0, 2), (1,)) and first.spills == 0 and first.registers > 8
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert self.compile(monkeypatch) == first
        for path in (b"/tmp", str(tmp_path).encode()):
            assert path not in first.image and path not in first.ptx

    def test_its_version_is_in_manifest_and_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, str(NVCC))
        assert cuda.compiler_version().startswith("nvcc 1")

    def test_it_is_found_on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, "nvcc")
        monkeypatch.setenv("PATH", str(NVCC.parent))
        found = toolchain.find()
        assert isinstance(found, toolchain.Nvcc) and found.path == NVCC

    def test_an_error_names_kernel_line_and_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            BuildError, match=r"kernel gated_activation.cu: nvcc [\d.]+ \(ATLAS_CUDA_COMPILER\) for sm_90a failed"
        ) as caught:
            self.compile(monkeypatch, '#include "atlas/instance.h"\nATLAS_KERNEL(int* x) { x[0] = ; }\n')
        assert "gated_activation.cu(2): error" in str(caught.value)

    def test_a_warning_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BuildError, match="declared but never referenced"):
            self.compile(monkeypatch, '#include "atlas/instance.h"\nATLAS_KERNEL(int* x) { int unused; x[0] = 1; }\n')


class TestChoice:
    def test_an_unknown_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, "clang")
        with pytest.raises(
            BuildError, match="ATLAS_CUDA_COMPILER: 'clang'; accepted: unset, 'nvrtc', 'nvcc' or the path of an nvcc"
        ):
            toolchain.find()

    def test_no_nvcc_on_path(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, "nvcc")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match="ATLAS_CUDA_COMPILER: 'nvcc', and PATH has none; accepted: unset, "):
            toolchain.find()

    def test_a_path_to_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, str(tmp_path / "nvcc"))
        with pytest.raises(
            BuildError, match="ATLAS_CUDA_COMPILER: .*/nvcc could not be run .*accepted: the path of an nvcc"
        ):
            toolchain.find()

    def test_a_program_that_is_no_nvcc(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, str(script(tmp_path, "echo hello")))
        with pytest.raises(BuildError, match="does not say a version when asked --version"):
            toolchain.find()

    def test_the_kernels_options_reach_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        text = f'[ "$1" = --version ] && echo "release 99.1, V99.1.2" && exit\necho "$@" >> {tmp_path}/calls\nexit 3'
        monkeypatch.setenv(toolchain.VARIABLE, str(script(tmp_path, text)))
        with pytest.raises(BuildError, match=r"nvcc 99.1.2 \(ATLAS_CUDA_COMPILER\) for sm_90a failed"):
            compile_gated_activation()
        call = (tmp_path / "calls").read_text()
        for option in (*cuda.OPTIONS, "--gpu-architecture=compute_90a", "--Werror=all-warnings"):
            assert option in call.split()

    def test_nvrtc_itself_needs_the_wheels(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, str(script(tmp_path, 'echo "release 99.1, V99.1.2"')))
        with pytest.raises(BuildError, match="ATLAS_CUDA_COMPILER: .*/nvcc is an nvcc; accepted: unset, or 'nvrtc'"):
            nvrtc.compile("", "x.cu", {}, [])


class TestNewerNvrtc:
    """CUDA 13 wheels: one folder for all parts, found by their metadata."""

    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv(toolchain.VARIABLE, "nvrtc")
        for file in (
            "lib/libnvrtc.so.13",
            "lib/libnvrtc-builtins.so.13.1",
            "bin/ptxas",
            "include/cuda_bf16.h",
            "include/nv/target",
        ):
            path = tmp_path / "nvidia/cu13" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        for part in ("nvrtc", "nvcc", "runtime", "cccl", "crt"):
            self.install(tmp_path, part, "13.1.5")
        return tmp_path

    @staticmethod
    def install(site: Path, part: str, version: str) -> None:
        for old in site.glob(f"nvidia_cuda_{part}-*.dist-info"):
            shutil.rmtree(old)
        folder = site / f"nvidia_cuda_{part}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cuda-{part}\nVersion: {version}\n")

    def test_it_is_found(self, site: Path) -> None:
        found = toolchain.wheels()
        assert found.version == "nvrtc 13.1.5, ptxas 13.1.5"
        assert found.nvrtc == site / "nvidia/cu13/lib/libnvrtc.so.13"
        assert found.ptxas == site / "nvidia/cu13/bin/ptxas"
        assert found.includes == (site / "nvidia/cu13/include",) * 2

    def test_a_missing_part_is_named(self, site: Path) -> None:
        shutil.rmtree(site / "nvidia_cuda_crt-13.1.5.dist-info")
        with pytest.raises(
            BuildError,
            match="ATLAS_CUDA_COMPILER: 'nvrtc' found nvidia-cuda-nvrtc 13.1.5, but not nvidia-cuda-crt; run: pip",
        ):
            toolchain.find()

    def test_an_older_ptxas_cannot_read_its_output(self, site: Path) -> None:
        self.install(site, "nvcc", "13.0.48")
        with pytest.raises(
            BuildError, match="NVRTC 13.1.5 with the older ptxas 13.0.48; .*run: pip install 'nvidia-cuda-nvcc>=13.1.5'"
        ):
            toolchain.find()

    @pytest.mark.cuda_toolchain
    @pytest.mark.usefixtures("wheels")
    def test_without_them_the_pinned_wheels_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(toolchain.VARIABLE, "nvrtc")
        try:
            importlib.metadata.version("nvidia-cuda-nvrtc")
        except importlib.metadata.PackageNotFoundError:
            assert toolchain.wheels().version.startswith("nvrtc 12.9.")
        else:
            assert compile_gated_activation().image.startswith(b"\x7fELF")  # a real newer one: it compiles


def test_processor_time_is_the_childs(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint('done')"
    done = process.run([sys.executable, "-c", busy], tmp_path, "busy")
    assert (done.status, done.log) == (0, "done") and 0.2 <= done.seconds < 5
    idle = process.run([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(4)"], tmp_path, "idle")
    assert idle.status == 4 and idle.seconds < 0.4
    with pytest.raises(BuildError, match="missing: could not be run"):
        process.run([str(tmp_path / "nothing")], tmp_path, "missing")
    assert not os.path.exists(tmp_path / "nothing")


def test_a_compiler_gets_no_flags_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc would take options from there that no cache key knows of."""
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_CCBIN"):
        monkeypatch.setenv(name, "--use_fast_math")
    done = process.run([sys.executable, "-c", "import os; print(sorted(os.environ))"], tmp_path, "environment")
    assert "PATH" in done.log and "NVCC_" not in done.log
