"""What a GPU's kernel set serves: formats of common checkpoints out of the box, others with a pack of their own; and no
set is chosen that lacks a kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas.build import __main__ as command
from atlas.build import checkpoint_target, pack
from atlas.build import compile as compiler
from atlas.build.manifest import KernelSet, Manifest
from atlas.errors import BuildError, DeviceError
from atlas.models import family_of
from atlas.runtime import core, kernel_sources, opening, weight_formats
from atlas.runtime.kernel_sources import Source
from atlas.runtime.options import RunnerOptions
from atlas.runtime.recording import Recording
from atlas.targets.shape import Shard
from atlas.targets.status import closure
from atlas.targets.target import Target, facts
from atlas.weights import open_checkpoint
from tests.fake_packs import build, cubin, entry
from tests.tiny_model import CONFIG, tensors
from tests.weights import gguf_files
from tests.weights.quantized_files import write_model

H200 = {"index": 0, "name": "NVIDIA H200", "compute_capability": (9, 0), "total_memory": 1 << 37}

Names = frozenset[str]


def kernels_of(config: Mapping[str, Any], quant: str, stored: Mapping[str, str] | None = None) -> Names:
    return frozenset(key.name() for key in closure(config, quant, stored=stored or {}))


def kernel_set(names: Names, quant: str, shape_hash: str = "") -> KernelSet:
    kernels = tuple(entry("rms_norm", 0, name=name) for name in sorted(names))
    return KernelSet("h200", "cuda", "tiny", quant, shape_hash, "sm_90a", (9, 0), kernels)


def lacks(folder: Path, quant: str, names: Names) -> str:
    with open_checkpoint(folder) as checkpoint:
        family = family_of(checkpoint.config)
        recording = Recording(checkpoint, family, family.configure(checkpoint.config, Shard()))
        return recording.lacks(kernel_set(names, quant))


@pytest.mark.parametrize(
    ("quant", "layout", "missing"),
    [
        ("int4", "gptq", ""),
        ("int4", "gptq-symmetric", ""),  # i4g32, kept exactly in i4g32z
        ("int4", "awq", ""),
        ("int4", "int4-group", ""),
        ("int4", "int4-group-f16", ""),
        ("int4", "int4-zeros", ""),
        ("int4", "gptq-act-order", ""),  # dequantised
        ("fp8", "fp8-tensor", ""),
        ("fp8", "fp8-compressed-channel", ""),
        ("fp8", "fp8-modelopt", ""),
        ("fp8", "fp8-block", "f8g128"),
        ("nvfp4", "nvfp4-modelopt", ""),
        ("nvfp4", "nvfp4-compressed", ""),
    ],
)
def test_what_a_target_of_the_model_serves(quant: str, layout: str, missing: str, tmp_path: Path) -> None:
    """With the kernels that every target has; and with those of a pack for the checkpoint, whatever it stores."""
    write_model(tmp_path, layout, CONFIG, tensors(CONFIG, 1), 2)
    found = lacks(tmp_path, quant, kernels_of(CONFIG, quant))
    assert found == (f"has no kernels for weights in {missing}, as this checkpoint stores them" if missing else "")
    stored = checkpoint_target.stored_formats(tmp_path, quant)
    assert lacks(tmp_path, quant, kernels_of(CONFIG, quant, stored)) == ""


def test_models_that_are_published_in_another_format_have_kernels_for_it() -> None:
    known = facts(Path(compiler.__file__).parents[2] / "kernels")
    assert {"f8", "f8g128"} <= weight_formats.of_kernels(kernels_of(known["qwen3-8b"], "fp8"))
    assert "f8g128" not in weight_formats.of_kernels(kernels_of(known["llama-3-8b"], "fp8"))
    assert weight_formats.of_kernels(kernels_of(known["llama-3-8b"], "int4")) == {"i4g32b", "i4g32z"}
    assert weight_formats.of_kernels(kernels_of(known["llama-3-8b"], "nvfp4")) == {"nvfp4"}
    # The catalogue's checkpoint of it is in Q4_1.
    assert "i4g32m" in weight_formats.of_kernels(kernels_of(known["smollm2-135m"], "int4"))


def test_a_published_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny.json").write_text(json.dumps({**CONFIG, "published_formats": ["fp8"]}))
    with pytest.raises(BuildError, match=r"tiny.json: published_formats is \['fp8'\]; accepted: a list of i8g32, "):
        facts(tmp_path)


def test_a_mixture_within_an_mlp_needs_kernels_of_its_own(tmp_path: Path) -> None:
    """Its two products do not leave and take rows of one type, so that the fused kernel does not fit."""
    write_model(tmp_path, "fp8-tensor", CONFIG, tensors(CONFIG, 1), 2)
    stored = checkpoint_target.stored_formats(tmp_path, "fp8")
    assert stored["layers.0.down.weight"] == "f8"
    mixed = kernels_of(CONFIG, "fp8", {**stored, "layers.0.down.weight": "bf16"})
    assert any(name.startswith("gated_activation") for name in mixed - kernels_of(CONFIG, "fp8"))


@pytest.fixture
def q4_1(tmp_path: Path) -> Path:
    """A GGUF in Q4_1, which few GPU targets have kernels for."""
    types = (gguf_files.Q.Q4_1,)
    return gguf_files.write(tmp_path / "model.gguf", tensors=gguf_files.with_types(types))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 that loads nothing."""
    monkeypatch.setattr(opening, "_cuda_devices", lambda backend: ([H200], ""))
    monkeypatch.setattr(core, "cuda_backend", lambda images, device: None)


def opened(path: Path, monkeypatch: pytest.MonkeyPatch, sets: Mapping[str, KernelSet], **options: Any) -> Any:
    """What is chosen for a checkpoint where these sources have these sets."""
    with open_checkpoint(path) as checkpoint:
        family = family_of(checkpoint.config)
        config = family.configure(checkpoint.config, Shard())
        found = [
            Source(label, Manifest((set_of(names_of, config.shape.hash()),), (), "test"), [memoryview(cubin())])
            for label, names_of in sets.items()
        ]
        monkeypatch.setattr(kernel_sources, "find", lambda *_: iter(found))
        recording = Recording(checkpoint, family, config)
        natural = weight_formats.natural_quants(checkpoint)
        given = RunnerOptions(backend="cuda", **options)
        return opening.open_backend(config.shape, given, str(path), natural, recording.lacks)[1]


def set_of(kernels: KernelSet, shape_hash: str) -> KernelSet:
    return kernel_set(frozenset(kernel.name for kernel in kernels.kernels), kernels.quant, shape_hash)


def test_a_set_that_lacks_a_kernel_is_not_chosen(q4_1: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(q4_1) as checkpoint:
        config = checkpoint.config
    stored = checkpoint_target.stored_formats(q4_1, "int4")
    assert set(stored.values()) == {"i4g32m"}
    plain = kernel_set(kernels_of(config, "int4"), "int4")
    own = kernel_set(kernels_of(config, "int4", stored), "int4")
    bf16 = kernel_set(kernels_of(config, "bf16"), "bf16")
    fix = f"run: python -m atlas.build {q4_1} --hw h200 --quant int4"
    why = "embedded h200/tiny/int4: has no kernels for weights in i4g32m, as this checkpoint stores them"
    # A pack for the checkpoint is found behind the set that does not serve it.
    choice = opened(q4_1, monkeypatch, {"embedded": plain, "cache": own})
    assert (choice.quant, choice.source) == ("int4", "cache") and f"refused: {why}" in choice.reason
    # Without one, the quant that was asked for is an error; one that was not is widened, which is said.
    with pytest.raises(DeviceError) as caught:
        opened(q4_1, monkeypatch, {"embedded": plain, "wheel": bf16}, quant="int4")
    assert why in str(caught.value) and fix in str(caught.value)
    choice = opened(q4_1, monkeypatch, {"embedded": plain, "wheel": bf16})
    assert choice.quant == "bf16" and "to which the checkpoint's int4 is widened" in choice.reason
    with pytest.raises(DeviceError) as caught:
        opened(q4_1, monkeypatch, {"embedded": plain})
    assert why in str(caught.value) and fix in str(caught.value)


def test_a_pack_is_built_for_what_the_checkpoint_stores(
    q4_1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Target] = []

    def fake(root: Path, selected: list[Target], *_: Any) -> tuple[Manifest, bytes]:
        asked.extend(selected)
        return build(quant="int4")

    monkeypatch.setattr(compiler, "build", fake)
    output = tmp_path / f"x{pack.SUFFIX}"
    assert command.main([str(q4_1), "--hw", "h200", "--quant", "int4", "-o", str(output)]) == 0
    formats = weight_formats.of_kernels(key.name() for key in compiler.closure(asked[0]))
    assert formats == {"i4g32b", "i4g32z", "i4g32m"}
