"""Tuning: the measuring side on the CPU backend, and what becomes of its result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.build import compile as build
from atlas.build import kernel_file, knobs, manifest, tune
from atlas.build.manifest import KernelEntry
from atlas.errors import BuildError
from atlas.runtime import core
from atlas.runtime.program import KernelKey
from atlas.runtime.reference import ReferenceBackend
from atlas.targets import target as targets
from atlas.targets.formats import FORMATS

ROWS = {"1": 0.5, "3": 0.5}

KEYS = [
    KernelKey("linear", (("x", "bf16"), ("weight", "bf16"), ("out", "f32")), (("n", 48), ("k", 40))),
    KernelKey("rms_norm", (("x", "f32"), ("weight", "f32"), ("out", "bf16")), (("hidden", 72), ("eps", 1e-5))),
    KernelKey("gated_activation", (("gate_up", "f32"), ("out", "bf16")), (("intermediate", 40), ("activation", 0))),
    KernelKey(
        "paged_attention",
        (
            *(("q", "bf16"), ("k_cache", "bf16"), ("v_cache", "bf16"), ("row_position", "i32"), ("row_seq", "i32")),
            *(("block_table", "i32"), ("out", "bf16")),
        ),
        (("n_heads", 2), ("n_kv_heads", 1), ("head_dim", 16), ("window", 0), ("scale", 0.25)),
    ),
    KernelKey(
        "sample",
        (
            *(("logits", "f32"), ("adjusted", "f32"), ("adjust", "i32"), ("temperature", "f32"), ("top_k", "i32")),
            *(("top_p", "f32"), ("min_p", "f32"), ("seed", "i64"), ("position", "i32"), ("slot", "i32")),
            *(("token", "i32"), ("last_token", "i32"), ("token_count", "i32")),
        ),
        (("vocab", 300),),
    ),
]


def case(key: KernelKey, variants: int = 2) -> dict[str, Any]:
    return {
        "kernel": key.name(),
        "phase": "",
        "max_rows": 0,
        "rows": ROWS,
        "op": key.op,
        "dtypes": [list(pair) for pair in key.dtypes],
        "constants": [list(pair) for pair in key.constants],
        "declared": {},
        "untuned_from": "declared",
        "same_bits": True,
        "variants": [{"entry": f"{key.name()}__v{i}", "knobs": {"TILE": i}, "estimate": 1.0} for i in range(variants)],
    }


def document(*cases: dict[str, Any]) -> dict[str, Any]:
    target = {"hw": "h200", "model": "smollm2-135m", "quant": "bf16", "arch": "sm_90a"}
    return json.loads(json.dumps({"target": target, "commit": "abc", "cases": list(cases)}))


def cpu_kernels() -> dict[str, KernelEntry]:
    known, _ = core.embedded()
    return {kernel.name: kernel for s in known.sets if s.kind == "cpu" for kernel in s.kernels}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    from atlas.build import tune_bench, tune_inputs, tune_measure

    monkeypatch.setattr(tune_bench, "CACHE_BYTES", 1 << 16)
    monkeypatch.setattr(tune_bench, "LAUNCHES", 4)
    monkeypatch.setattr(tune_bench, "COPIES", 4)
    monkeypatch.setattr(tune_measure, "SECONDS", 1e-4)
    monkeypatch.setattr(tune_bench, "CONTEXT", 64)
    monkeypatch.setattr(tune_inputs, "CONTEXT", 64)
    return tune_measure


def test_every_tunable_op_is_checked_and_timed(quick: Any, tmp_path: Path) -> None:
    known = cpu_kernels()
    cases = [case(key) for key in KEYS]
    entries = {v["entry"]: known[key.signature()] for key, c in zip(KEYS, cases, strict=True) for v in c["variants"]}
    result = quick.run_cases(core.cpu_backend(2), document(*cases), entries, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [c["op"] for c in result["cases"]] == [key.op for key in KEYS]
    for done in result["cases"]:
        assert done["wrong"] == []
        assert len(done["variants"]) == 2
        for variant in done["variants"]:
            assert variant["same_bits"] and variant["error_over_tolerance"] <= 1.0
            assert all(variant["us"][rows] > 0 for rows in ROWS)
        assert done["untuned"]["score"] == 1.0
        assert done["winner"]["score"] <= 1.0


def test_what_a_run_changes_is_put_back_before_the_next(quick: Any, tmp_path: Path) -> None:
    """residual_rms_norm adds to its residual: runs of 3 rows and of 1 must begin with the same."""
    key = KernelKey(
        "residual_rms_norm",
        (("x", "bf16"), ("residual", "f32"), ("weight", "f32"), ("out", "bf16")),
        (("hidden", 72), ("eps", 1e-5), ("scale", 1.0)),
    )
    one = case(key)
    entries = {v["entry"]: KernelEntry(v["entry"], key.op, key.op, {}) for v in one["variants"]}
    backend = ReferenceBackend()
    backend.capture = lambda *given: None  # type: ignore[method-assign]
    result = quick.run_cases(backend, document(one), entries, tmp_path / "result.json")
    assert result["failed"] == []
    (done,) = result["cases"]
    assert done["wrong"] == [] and all(v["same_bits"] and v["error_over_tolerance"] == 0 for v in done["variants"])


def test_a_wrong_variant_is_no_winner(quick: Any, tmp_path: Path) -> None:
    """The second variant does nothing: its output stays poisoned."""
    known, one = cpu_kernels(), case(KEYS[0])
    entries = {variant["entry"]: known[KEYS[0].signature()] for variant in one["variants"]}
    backend = core.cpu_backend(2)
    real = backend.run

    def run(handle: int, begin: int, end: int) -> None:
        if handle == 0:  # the first variant's program
            real(handle, begin, end)

    backend.run = run  # type: ignore[method-assign]
    result = quick.run_cases(backend, document(one), entries, tmp_path / "result.json")
    (done,) = result["cases"]
    assert len(done["variants"]) == 1 and done["winner"] == done["untuned"]
    assert [w["knobs"] for w in done["wrong"]] == [{"TILE": 1}]
    assert "times its tolerance from the reference" in done["wrong"][0]["error"]


def result_for(winner: dict[str, int], arch: str = "sm_90a") -> dict[str, Any]:
    key = KernelKey("linear", (("x", "bf16"), ("weight", "bf16"), ("out", "f32")), (("n", 960), ("k", 576)))
    untuned = {"knobs": {}, "us": {"1": 9.0, "512": 20.0}, "score": 1.0}
    done = {
        **case(key),
        "untuned": untuned,
        "winner": {"knobs": winner, "us": {"1": 4.5, "512": 18.25}, "score": 0.55},
    }
    target = {"hw": "h200", "model": "smollm2-135m", "quant": "bf16", "arch": arch}
    return {"what": "tuning", "target": target, "device": "NVIDIA H200", "date": "2026-01-02", "commit": "abc"} | {
        "cases": [done]
    }


GOOD = {"SIDES": 1, "TILE_M": 16, "TILE_N": 32, "WARPS": 4, "STAGES": 6}


def test_winners_are_written_with_their_figures_and_used(tree: Path) -> None:
    file = tune.apply(tree, result_for(GOOD))
    assert file == tree / "h200/smollm2-135m/bf16/tuning.toml"
    text = file.read_text()
    assert "[linear.linear_x_bf16_weight_bf16_out_f32__n960__k576]\n# NVIDIA H200, 2026-01-02, commit abc\n" in text
    assert "# tuned         4.50    18.25   0.550\n# untuned       9.00    20.00   1.000\n" in text
    wanted = {"ATLAS_TARGET_HW": "h200", "ATLAS_TARGET_MODEL": "smollm2-135m", "ATLAS_TARGET_QUANT": "bf16"}
    target = next(t for t in targets.select(tree, wanted).targets if t.hardware.name == "h200")
    tuned = tune.key_of(result_for(GOOD)["cases"][0])
    declared = kernel_file.declaration(targets.resolve(target, "linear", dtypes=dict(tuned.dtypes)))
    assert knobs.choose(declared, tuned, target) == knobs.Chosen(GOOD, "tuned")
    other = dataclasses.replace(tuned, constants=(("n", 576), ("k", 576)))
    assert knobs.choose(declared, other, target).source == "cost model"
    assert tune.apply(tree, result_for(GOOD)).read_text() == text  # and again, unchanged


def test_applying_keeps_other_kernels_tables(tree: Path) -> None:
    folder = tree / "h200/smollm2-135m/bf16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.toml").write_text("[gated_activation]\n# by hand\nTILE = 128\n")
    text = tune.apply(tree, result_for(GOOD)).read_text()
    assert "[gated_activation]\n# by hand\nTILE = 128\n" in text and "[linear.linear_x_bf16" in text


def test_a_result_of_other_code_is_refused(tree: Path) -> None:
    with pytest.raises(BuildError, match="was measured with sm_80 code; accepted: sm_90a: time on h200"):
        tune.apply(tree, result_for(GOOD, "sm_80"))


@pytest.mark.parametrize(
    ("winner", "message"),
    [
        ({**GOOD, "TILE_N": 48}, "breaks the rule TILE_N % "),
        ({"TILE_M": 16}, "other knobs than the kernel has; tune again"),
    ],
)
def test_a_stale_result_is_refused(tree: Path, winner: dict[str, int], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        tune.apply(tree, result_for(winner))


def test_measuring_needs_no_kernel_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device there is an installation without one."""
    measured: list[tuple[Path, Path, int]] = []
    monkeypatch.setattr(tune, "_measure", lambda *given: measured.append(given))
    monkeypatch.setattr(tune, "kernels_root", lambda: pytest.fail("looked for the tree"))
    assert tune.main(["--measure", str(tmp_path), "--out", str(tmp_path / "result.json"), "--device", "1"]) == 0
    assert measured == [(tmp_path, tmp_path / "result.json", 1)]


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--hw", "h200"]) == 1
    assert "--model: missing; accepted: a name: tuning is for one target" in capsys.readouterr().err
    assert tune.main(["--measure", str(tmp_path)]) == 1
    assert "--measure: no --out; accepted: --out FILE for the result" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{}")
    assert tune.main(["--apply", str(tmp_path / "x.json")]) == 1
    assert "is no tuning result ('what'); accepted: a file that tune --measure wrote" in capsys.readouterr().err
    assert tune.main(["--hw", "h200", "--model", "*", "--quant", "bf16", "--prepare", str(tmp_path)]) == 1
    assert "accepted: exactly one" in capsys.readouterr().err


@pytest.mark.cuda_toolchain
@pytest.mark.usefixtures("wheels")
def test_prepare_compiles_every_legal_variant(tree: Path, tmp_path: Path, gpu_targets: Any) -> None:
    (target,) = gpu_targets(tree)
    folder = tmp_path / "out"
    summary = tune.prepare(tree, target, folder, 2, ("rms_norm", "sample"))
    assert summary.startswith("6 variants of 2 kernels for sm_90a in ")
    cases = json.loads((folder / "cases.json").read_text())
    known, images = manifest.from_json(
        (folder / "manifest.json").read_text(), (folder / "images.bin").read_bytes(), "here"
    )
    entries = {kernel.name: kernel for kernel in known.sets[0].kernels}
    assert [c["op"] for c in cases["cases"]] == ["rms_norm", "sample"]
    for one in cases["cases"]:
        key = tune.key_of(one)
        assert key.name() == one["kernel"] and key in build.closure(target)
        assert one["variants"][0]["knobs"] == one["declared"]  # the untuned choice comes first
        for variant in one["variants"]:
            entry = entries[variant["entry"]]
            (compiled,) = entry.variants
            assert (entry.op, compiled.knobs) == (one["op"], variant["knobs"])
            assert images[compiled.image][:4] == b"\x7fELF"
    assert {v["knobs"]["THREADS"] for v in cases["cases"][1]["variants"]} == {512, 256}
    assert cases["target"] == {"hw": "h200", "model": "smollm2-135m", "quant": "bf16", "arch": "sm_90a"}
    with pytest.raises(BuildError, match=r"no kernel has \[knobs.choices\]"):
        tune.prepare(tree, target, folder, 2, ("residual_add",))


def test_the_whole_command_measures_and_writes(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(root: Path, target: Any, folder: Path, *_: Any) -> str:
        assert (root, target.name) == (tree, "h200/smollm2-135m/bf16")
        return f"prepared {folder.is_dir()}"

    def measure(folder: Path, out: Path, device: int) -> None:
        assert device == 3
        out.write_text(json.dumps(result_for(GOOD)))

    monkeypatch.setattr(tune, "kernels_root", lambda: tree)
    monkeypatch.setattr(tune, "prepare", prepare)
    monkeypatch.setattr(tune, "_measure", measure)
    assert tune.main(["--hw", "h200", "--model", "smollm2-135m", "--quant", "bf16", "--device", "3"]) == 0
    file = tree / "h200/smollm2-135m/bf16/tuning.toml"
    assert capsys.readouterr().out == f"atlas: prepared True\natlas: wrote {file}\n"
    assert "TILE_N = 32" in file.read_text()


def test_a_variant_that_spills_is_left_out(tree: Path, tmp_path: Path, gpu_targets: Any, counting: Any) -> None:
    """But not the untuned one, which a build would compile."""
    (target,) = gpu_targets(tree)
    declared = kernel_file.declaration(tree / "cuda/rms_norm.cu")
    compile_kernel = counting.compile

    def spilling(name: str, source: str, headers: Any, arch: str) -> Any:
        compiled = compile_kernel(name, source, headers, arch)
        return dataclasses.replace(compiled, spills=16 * ("THREADS = 1024;" in headers["atlas/instance.h"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atlas.build.cuda.compile_kernel", spilling)
        summary = tune.prepare(tree, target, tmp_path / "out", 1, ("rms_norm",))
    assert summary.startswith(f"{len(declared.choices['THREADS']) - 1} variants of 1 kernels")
    assert summary.endswith("; 1 failed a check")


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "i8g32f"])
def test_inputs_in_every_format(format: str) -> None:
    """Finite, of the size asked for, and no row of zeros: what is multiplied costs what real weights cost."""
    from atlas.build import tune_inputs
    from atlas.weights.layouts import LAYOUTS

    n, k = 300, 576
    raw = np.full(FORMATS[format].nbytes((n, k)), 0xFF, np.uint8)
    weight = LAYOUTS["row_major"].unpack(raw, (n, k), format)
    key = KernelKey("linear", (("x", "bf16"), ("weight", format), ("out", "f32")), (("n", n), ("k", k)))
    arrays = {"x": np.zeros((4, k), np.float32), "weight": weight}
    tune_inputs.inputs(key, arrays, 3, np.random.default_rng())
    values = weight.astype(np.float32)
    assert np.isfinite(values).all() and (np.abs(values).max(1) > 0).all()
    assert 0.2 < values.std() * k**0.5 < 5
    assert arrays["x"][:3].all() and not arrays["x"][3:].any()
