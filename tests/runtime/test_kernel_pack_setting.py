"""`--kernel-pack`, from the command line to the device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas.config import EngineConfig, describe, load
from atlas.errors import AtlasError, ConfigError, DeviceError
from atlas.runtime import core, opening
from atlas.runtime.options import RunnerOptions
from atlas.targets.shape import shape
from tests.fake_packs import cubin, packed

SHAPE = shape(json.loads((Path(__file__).resolve().parents[2] / "kernels/models/smollm2-135m.json").read_text()))
H200 = {"index": 0, "name": "NVIDIA H200", "compute_capability": (9, 0)}


def test_the_flag_may_be_given_several_times_and_reaches_the_engine() -> None:
    loaded = load(["--kernel-pack", "a.atlaspack", "--kernel-pack", "/b.atlaspack"])
    assert loaded.config.kernel_pack == ("a.atlaspack", "/b.atlaspack")
    line = next(line for line in describe(loaded.origins).splitlines() if line.startswith("kernel_pack"))
    assert line.split() == ["kernel_pack", "=", "a.atlaspack,", "/b.atlaspack", "(flag)"]
    engine = loaded.config.engine(Path("/m"))
    assert engine.kernel_packs == (str(Path.cwd() / "a.atlaspack"), "/b.atlaspack")
    assert EngineConfig.from_json(engine.to_json()) == engine


def test_unset_and_from_a_file(tmp_path: Path) -> None:
    assert load([]).config.kernel_pack == ()
    line = next(line for line in describe(load([]).origins).splitlines() if line.startswith("kernel_pack"))
    assert line.split() == ["kernel_pack", "=", "unset", "(built-in)"]
    file = tmp_path / "atlas.toml"
    file.write_text('kernel_pack = ["x.atlaspack"]\n')
    assert load(["--config", str(file)]).config.kernel_pack == (str(tmp_path / "x.atlaspack"),)
    file.write_text('kernel_pack = "x.atlaspack"\n')
    with pytest.raises(ConfigError, match="atlas.toml: kernel_pack: 'x.atlaspack'; accepted: a list of texts"):
        load(["--config", str(file)])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_pack_and_a_backend_without_packs_contradict(backend: str) -> None:
    options = RunnerOptions(backend=backend, kernel_packs=("p",))
    with pytest.raises(ConfigError) as caught:
        opening.open_backend(SHAPE, options, "m")
    assert str(caught.value) == (
        f"kernel_pack: given with backend {backend}; accepted: backend auto or cuda; leave one of the two out"
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that loads nothing; returns the images it is given."""
    given: list[Any] = []
    monkeypatch.setattr(opening, "_cuda_devices", lambda backend: ([H200], ""))

    def open_device(images: Any, device: int) -> SimpleNamespace:
        given.extend(bytes(image) for image in images)
        return SimpleNamespace(name=f"cuda:{device}")

    monkeypatch.setattr(core, "cuda_backend", open_device)
    return given


def test_the_images_of_the_pack_reach_the_device(tmp_path: Path, gpu: list[Any]) -> None:
    path = tmp_path / "p.atlaspack"
    path.write_bytes(packed(shape_hash=SHAPE.hash()))
    options = RunnerOptions(kernel_packs=(str(path),))
    backend, choice, kernels = opening.open_backend(SHAPE, options, "m")
    assert (backend.name, choice.source) == ("cuda:0", f"--kernel-pack {path}")
    assert gpu == [cubin(b"code of gated_activation"), cubin(b"code of rms_norm")]
    assert {kernel.op: kernel.variants[0].image for kernel in kernels.values()} == {
        "gated_activation": 0,
        "rms_norm": 1,
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packed(), f"is compiled for shape 0123456789abcdef, not {SHAPE.hash()}"),
        (packed(shape_hash=SHAPE.hash(), arch="sm_90a")[:-1], "cut off: "),
        (packed(shape_hash=SHAPE.hash(), quant="fp8"), "is for quant fp8, not bf16"),
        (packed(shape_hash=SHAPE.hash(), arch="sm_121a", capability=(12, 1)), "and this device is 9.0"),
        (
            packed(shape_hash=SHAPE.hash(), contract="0" * 16),
            "op gated_activation has contract 0000000000000000, accepted: ",
        ),
    ],
)
def test_a_pack_that_does_not_fit_is_refused_with_the_command_that_makes_one(
    data: bytes, message: str, tmp_path: Path, gpu: list[Any]
) -> None:
    path = tmp_path / "p.atlaspack"
    path.write_bytes(data)
    with pytest.raises(AtlasError) as caught:
        opening.open_backend(SHAPE, RunnerOptions(kernel_packs=(str(path),)), "/models/llama")
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert str(caught.value).endswith("; run: python -m atlas.build /models/llama --hw h200 --quant bf16")
    assert gpu == []


def test_a_pack_without_a_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_cuda_devices", lambda backend: ([], "no NVIDIA driver"))
    path = tmp_path / "p.atlaspack"
    path.write_bytes(packed(shape_hash=SHAPE.hash()))
    with pytest.raises(DeviceError, match="h200/test-model/bf16: no GPU: no NVIDIA driver; accepted: "):
        opening.open_backend(SHAPE, RunnerOptions(kernel_packs=(str(path),)), "m")
