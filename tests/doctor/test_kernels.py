"""The doctor's checks of kernel sets: each can fail, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas.build.manifest import Manifest
from atlas.doctor import kernels
from atlas.errors import BuildError
from atlas.runtime import core
from tests import tiny_model
from tests.doctor.harness import H200, context, cuda_set, problem


def test_damaged_kernel_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise BuildError("atlas._core", "image 0 does not match its hash")

    monkeypatch.setattr(core, "embedded", damaged)
    found = problem(kernels.kernel_sets(context()))
    assert "image 0 does not match its hash" in found.found and "install again" in found.remedy


def test_no_kernel_sets() -> None:
    assert problem(kernels.kernel_sets(context(manifest=Manifest((), (), "")))).found == "this install holds none"


def test_a_pack_that_cannot_be_used(tmp_path: Path) -> None:
    pack = tmp_path / "bad.pack"
    pack.write_bytes(b"nonsense")
    found = problem(kernels.kernel_sets(context(kernel_packs=[str(pack)])))
    assert str(pack) in found.found and "python -m atlas.build" in found.remedy


def test_kernels_for_another_gpu_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Manifest((cuda_set("sm_121a", (12, 1)),), (), "test")
    monkeypatch.setattr(core, "embedded", lambda: (other, []))
    results = kernels.kernel_sets(context(devices=([H200], "")))
    assert problem(results).remedy.startswith("ATLAS_TARGET_HW=h200 ATLAS_TARGET_MODEL=NAME ")
    assert "12.1" in results[0].found
    l40s = {**H200, "name": "NVIDIA X", "compute_capability": (5, 2)}
    results = kernels.kernel_sets(context(devices=([l40s], "")))
    assert (results[-1].status, results[-1].check) == ("note", "kernel sets")
    assert "no hardware directory fits it" in results[-1].found


def test_model_by_its_public_facts_downloads_nothing(cache: Path) -> None:
    result = kernels.model(context(model="SmolLM2-135M", devices=([], "no NVIDIA driver; install it")))[0]
    assert result.status == "ok", result
    assert "its files are not on this machine) would run on cpu/*/bf16: no GPU: no NVIDIA driver" in result.found
    assert "weights take 0.27 GB" in result.found
    assert not list((cache / "models").iterdir())


def test_model_in_a_folder(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "model")
    result = kernels.model(context(model=str(folder), quant="f32", backend="cpu"))[0]
    assert result.status == "ok" and "would run on cpu/*/f32: asked for" in result.found
    result = kernels.model(context(model=str(folder), backend="cpu"))[0]
    assert "cpu/*/bf16: asked for; bf16 is nearest to how the checkpoint is stored" in result.found


@pytest.mark.parametrize(
    ("changes", "found", "remedy"),
    [
        ({"model": "smolm2"}, "is no file, directory or known model", "smollm2-135m"),
        ({"model": "smollm2-135m", "backend": "cuda"}, "no GPU: none here", "--backend cpu"),
        ({"model": "smollm2-135m", "quant": "int3", "backend": "cpu"}, "no kernel set for quant int3", "cpu/*/bf16"),
    ],
)
def test_model_that_cannot_run(changes: dict[str, str], found: str, remedy: str) -> None:
    result = problem(kernels.model(context(devices=([], "none here"), **changes)))
    assert found in result.found and remedy in result.remedy


def test_model_of_an_unknown_family(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "model", architectures=["NobodysForCausalLM"])
    result = problem(kernels.model(context(model=str(folder))))
    assert "NobodysForCausalLM" in result.found and "LlamaForCausalLM" in result.remedy


def test_model_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 200000 kB\n")
    small = context(model="smollm2-135m", quant="bf16", backend="cpu", meminfo=tmp_path / "meminfo")
    result = problem(kernels.model(small))
    assert "weights take 0.27 GB of 0.20 GB" in result.found and "--quant" in result.remedy
