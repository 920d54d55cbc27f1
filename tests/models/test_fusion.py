"""Fused programs compute what the model's own do, for every family; and what must not be fused is not."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams
from atlas.models import family_of, fusion
from atlas.models.fusion import fused
from atlas.runtime.program import Recorder, StepPrograms
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from tests import family_models
from tests.models import run

NAMES = ("llama-biases", "llama-gelu", "qwen3-biases", "moe-dense-layer", "gemma3", "phi3-window", "granite-biases")
"""One of each family and of what its launches may have: biases, a norm after a block, a residual scale, experts."""


def programs(name: str, quant: str, kind: str, has: fusion.HasKernel = lambda key: False) -> StepPrograms:
    config = family_models.config(name)
    family = family_of(config)
    return fusion.record(family, family.configure(config, Shard()), recipe(quant, "cuda"), kind, has=has)


def ops(found: StepPrograms) -> collections.Counter[str]:
    return collections.Counter(launch.key.op for launch in found.launches())


@pytest.mark.parametrize("quant", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_program_gives_the_same_logits(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit on `reference`, in steps of each phase: a fused op's reference does what the others did."""
    monkeypatch.setattr(fusion, "_norm_in_products", lambda *_, **__: 0)  # moves a division: see the next test
    if name.startswith("moe") and quant in ("fp8", "nvfp4"):
        pytest.skip("experts have no such ops yet")
    folder = family_models.write(tmp_path, name)
    ids = [int(i) for i in np.random.default_rng().integers(0, family_models.VOCAB, 21)]
    together = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    monkeypatch.setattr(fusion, "fused", lambda programs, has: programs)
    apart = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    for phase, chunk in ((PHASE_PREFILL, 32), (PHASE_DECODE, 1), (PHASE_DECODE, 8)):
        expected, found = (run.logits(runner, ids, chunk, phase) for runner in (apart, together))
        assert np.isfinite(expected).all()
        assert expected.tobytes() == found.tobytes(), (phase, chunk)


@pytest.mark.parametrize(("quant", "off"), [("f32", 1e-5), ("bf16", 0.02), ("fp8", 0.15), ("nvfp4", 0.02)])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-biases", "granite-biases"])
def test_norms_in_products_change_roundings_alone(
    name: str, quant: str, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows before they are divided and not after. In steps of prompts that is the last layer's MLP alone."""
    folder = family_models.write(tmp_path, name)
    ids = [int(i) for i in np.random.default_rng().integers(0, family_models.VOCAB, 21)]
    together = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    monkeypatch.setattr(fusion, "_norm_in_products", lambda *_, **__: 0)
    apart = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    made = [launch.key.op for launch in together.forward_program.launches if launch.is_made(PHASE_DECODE)]
    layers = family_models.config(name)["num_hidden_layers"]
    assert made.count("residual_linear") == 2 * layers and made.count("norm_parts") == 2
    assert not {"linear", "gated_linear", "residual_add", "rms_norm", "residual_rms_norm"} & set(made)
    for phase, chunk in ((PHASE_PREFILL, 32), (PHASE_DECODE, 1), (PHASE_DECODE, 8)):
        expected, found = (np.float64(run.logits(runner, ids, chunk, phase)) for runner in (apart, together))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < off, (phase, chunk)


@pytest.mark.parametrize("quant", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-biases", "granite-biases"])
def test_rope_in_products_changes_a_rounding_alone(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of q, k and v between the two, where products are bf16; in f32 not a bit."""
    monkeypatch.setattr(fusion, "_attention", lambda *_: 0)
    folder = family_models.write(tmp_path, name)
    ids = [int(i) for i in np.random.default_rng().integers(0, family_models.VOCAB, 21)]
    together = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    made = [launch.key.op for launch in together.forward_program.launches if launch.is_made(PHASE_DECODE)]
    layers = family_models.config(name)["num_hidden_layers"]
    assert made.count("normed_qkv_append") == layers and made.count("rope_rows") == 1
    assert "rope_kv_append" not in made
    monkeypatch.setattr(fusion, "_appends", lambda *_: [])
    apart = run.load(folder, "reference", quant, max_rows=32, max_seqs=2, programs="cuda")
    for phase, chunk in ((PHASE_PREFILL, 32), (PHASE_DECODE, 1), (PHASE_DECODE, 8)):
        expected, found = (np.float64(run.logits(runner, ids, chunk, phase)) for runner in (apart, together))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        bound = 0.0 if phase == PHASE_PREFILL or quant == "f32" else 0.15 if quant == "fp8" else 0.02
        assert error <= bound, (phase, chunk)


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
@pytest.mark.parametrize("name", [*NAMES, "qwen3"])
def test_a_set_has_the_kernels_of_the_programs_that_are_recorded_for_it(name: str, quant: str) -> None:
    """No rule waits for a kernel that another one leaves unused: then what is loaded would not be what was built."""
    if name.startswith("moe") and quant == "fp8":
        pytest.skip("experts have no such ops yet")
    for lacks in (
        "",
        "rope_attention",
        "normed_qkv_append",
        "residual_linear",
        "normed_linear",
        "norm_parts",
        "normed_logits",
        "sample_largest",
    ):
        built = programs(name, quant, "cuda", lambda key, lacks=lacks: key.op != lacks)  # type: ignore[misc]
        kernels = set(built.closure())
        assert programs(name, quant, "cuda", kernels.__contains__) == built, lacks


def test_turns_of_rows_are_worked_out_once() -> None:
    """Turns are worked out once, before the first layer."""
    found = programs("qwen3", "bf16", "cuda", lambda key: key.op != "rope_attention")
    forward = [(launch.key.op, launch.phase) for launch in found.forward.launches]
    layers = family_models.config("qwen3")["num_hidden_layers"]
    assert forward.count(("rope_rows", "decode")) == 1
    assert forward.count(("normed_qkv_append", "decode")) == forward.count(("rope_kv_append", "prefill")) == layers
    assert forward.index(("rope_rows", "decode")) < forward.index(("normed_qkv_append", "decode"))
    # Gemma's products are normed before they are added: their norms are no parts of products, nor is rope.
    assert "rope_rows" not in ops(programs("gemma3", "bf16", "cuda", lambda key: key.op != "rope_attention"))


def test_attention_of_decode_steps_reads_what_it_appends(tmp_path: Path) -> None:
    """Without rope_attention a decode step attends to nothing new: the logits of the test above would tell."""
    folder = family_models.write(tmp_path, "qwen3")
    runner = run.load(folder, "reference", "bf16", max_rows=32, max_seqs=2, programs="cuda")
    right = run.logits(runner, list(range(9)), 3, PHASE_DECODE)
    for launch in runner.forward_program.launches:
        object.__setattr__(launch, "phase", "prefill" if launch.key.op == "rope_attention" else launch.phase)
    assert run.logits(runner, list(range(9)), 3, PHASE_DECODE).tobytes() != right.tobytes()


@pytest.mark.parametrize(("quant", "off"), [("bf16", 0.01), ("fp8", 0.06)])
def test_greedy_tokens_are_the_same_with_steps_of_one_phase(quant: str, off: float, tmp_path: Path) -> None:
    """Through the engine, which gives a program with launches of one phase no step of mixed rows."""
    folder = family_models.write(tmp_path, "llama-biases")
    rng = np.random.default_rng()
    prompts = [[int(i) for i in rng.integers(3, family_models.VOCAB, length)] for length in (3, 16, 30)]
    apart, together = (run.load(folder, "reference", quant, max_rows=24, programs=kind) for kind in ("cpu", "cuda"))
    assert apart.decode_rows == 0 and together.decode_rows == 24
    tokens = run.greedy(together, prompts, 12, together=3)
    for prompt, found in zip(prompts, tokens, strict=True):
        # A step of other rows sums in another order, and a GPU's products are bf16, which tips roundings to E4M3: what
        # it takes must be among the best of the other's. In 25 runs the worst was 0.0023 and 0.026 off; noise is 0.5.
        logits = run.logits(apart, prompt + found, 24)[len(prompt) - 1 : -1]
        best = logits.max(axis=1)
        assert len(found) == 12 and (best - logits[np.arange(12), found] <= off * np.ptp(logits, axis=1)).all()


def test_requests_of_every_kind_get_their_logits_in_one_batch(tmp_path: Path) -> None:
    """Greedy rows leave no logits; those that are drawn, adjusted or asked for log-probabilities have theirs."""
    folder, found = family_models.write(tmp_path, "llama-biases"), []
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"logit_bias": {5: 2.0}},
        {"frequency_penalty": 0.7},
        {"logprobs": 3},
        {"temperature": 1.0, "seed": 9, "logprobs": 0},
        {"min_tokens": 10, "stop_token_ids": (7, 8)},
        {"prompt_logprobs": 2},
    )
    for programs in ("cpu", "cuda"):
        engine = Engine(run.load(folder, "reference", "f32", max_rows=64, max_seqs=8, programs=programs))
        assert (engine.runner.forward_program.launches[-1].key.op == "normed_logits") == (programs == "cuda")
        tokens: dict[str, list[int]] = {}
        reports: dict[str, list[float]] = {}
        for i, kind in enumerate(kinds):
            engine.add(str(i), [3, 4, 5, 6, 10], SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **kind}))
        while engine.busy:
            for output in engine.step():
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                of_output = [report.logprob for report in (*output.logprobs, *output.prompt_logprobs)]
                reports.setdefault(output.request_id, []).extend(of_output)
        found.append((tokens, reports))
    assert found[0][0] == found[1][0]
    for request, expected in found[0][1].items():
        np.testing.assert_allclose(found[1][1][request], expected, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_fused(name: str) -> None:
    """All sums but the last, which the norm of chosen rows follows; all gated MLPs, but not experts."""
    apart, together = ops(programs(name, "bf16", "cpu")), ops(programs(name, "bf16", "cuda"))
    layers = family_models.config(name)["num_hidden_layers"]
    sparse = apart["moe_mlp"]
    assert together["residual_add"] == 1 and together["residual_rms_norm"] == 2 * layers - 1
    assert together["gated_activation"] == 0 and together["gated_linear"] == layers - sparse
    assert together["rms_norm"] == apart["rms_norm"] - (2 * layers - 1)
    assert together["linear"] == apart["linear"] - (layers - sparse)


def test_buffers_between_the_two_are_gone() -> None:
    apart, together = (programs("llama-biases", "bf16", kind).buffers for kind in ("cpu", "cuda"))
    assert set(apart) - set(together) == {"gate_up", "logits_gate_up"}
    assert [n for n, b in apart.items() if b.kind == "weight"] == [n for n, b in together.items() if b.kind == "weight"]


def test_fp8_rounds_attention_s_rows_and_no_others() -> None:
    found = programs("qwen3", "fp8", "cuda")
    rounded = [launch for launch in found.launches() if launch.key.op == "quantize_rows"]
    assert [dict(launch.operands)["x"] for launch in rounded] == ["attended"] * 3
    by_name = {launch.name: dict(launch.key.dtypes) for launch in found.launches()}
    for name in ("layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"):
        assert (by_name[name]["x"], by_name[name]["weight"]) == ("f8g128", "f8"), name
    assert by_name["lm_head"]["x"] == by_name["lm_head"]["weight"] == "bf16"
    assert by_name["layers.0.gate_up"]["out"] == "f8g128" and by_name["final_norm"]["out"] == "bf16"


def test_a_weight_kept_in_floats_takes_rows_that_are_not_rounded() -> None:
    """As checkpoints do that keep some layers in bf16 among FP8 ones."""
    config = family_models.config("qwen3")
    family = family_of(config)

    def format_of(name: str, role: str) -> str:
        return "bf16" if role == "fp8" and name.startswith("layers.1.") else {"fp8": "f8"}.get(role, role)

    found = fusion.record(family, family.configure(config, Shard()), recipe("fp8", "cuda"), "cuda", format_of)
    by_name = {launch.name: dict(launch.key.dtypes) for launch in found.launches()}
    for layer, types in ((0, ("f8g128", "f8")), (1, ("bf16", "bf16")), (2, ("f8g128", "f8"))):
        for part in ("qkv", "o", "gate_up", "down"):
            found_types = by_name[f"layers.{layer}.{part}"]
            assert (found_types["x"], found_types["weight"]) == types


def test_an_mlp_of_two_formats_is_not_fused() -> None:
    config = family_models.config("qwen3")
    family = family_of(config)
    for kept in ("gate_up", "down"):

        def format_of(name: str, role: str, kept: str = kept) -> str:
            return "bf16" if role == "fp8" and kept in name else {"fp8": "f8"}.get(role, role)

        found = fusion.record(family, family.configure(config, Shard()), recipe("fp8", "cuda"), "cuda", format_of)
        assert "gated_linear" not in ops(found)
        activations = [dict(launch.key.dtypes)["out"] for launch in found.launches() if "activation" in launch.key.op]
        assert set(activations) == {"f8g128" if kept == "gate_up" else "bf16"}


def pair(**changes: Any) -> StepPrograms:
    """A linear and the activation of its product, and what `changes` says differs."""
    r = Recorder()
    for name, dtype, shape in (
        ("x", "bf16", ("n_rows", 64)),
        ("w", "bf16", (32, 64)),
        ("product", "f32", ("n_rows", 32)),
        ("other", "f32", ("n_rows", 32)),
        ("gated", "bf16", ("n_rows", 16)),
        ("again", "bf16", ("n_rows", 16)),
    ):
        r.buffer(name, dtype, shape, "weight" if name == "w" else "workspace")
    r.begin("forward")
    r.launch("linear", "linear", {"x": "x", "weight": "w", "out": "product"}, {"rows": "n_rows"}, {"n": 32, "k": 64})
    for name, out in (("activation", "gated"), *changes.get("more", ())):
        operands = {"gate_up": changes.get("of", "product"), "out": out}
        r.launch("gated_activation", name, operands, {"rows": "n_rows"}, {"intermediate": 16, "activation": 0})
    r.begin("sample")
    return r.finish()


def attention_of(found: StepPrograms) -> list[tuple[str, str, str]]:
    """(op, out, phase) of the launches of attention, in order."""
    return [
        (launch.key.op, dict(launch.operands).get("out", ""), launch.phase)
        for launch in found.launches()
        if launch.key.op in ("quantize_rows", "rope_attention", *ATTENTION)
    ]


ATTENTION = ("rope_kv_append", "paged_attention")
PREFILL = [("rope_kv_append", "", "prefill"), ("paged_attention", "attended", "prefill")]


def test_attention_is_one_launch_in_decode_steps_where_there_is_a_kernel() -> None:
    layers = family_models.config("qwen3")["num_hidden_layers"]
    for quant, expected in (
        ("bf16", [*PREFILL, ("rope_attention", "attended", "decode")]),
        (
            "fp8",
            [
                *PREFILL,
                ("quantize_rows", "attended_f8g128", "prefill"),
                ("rope_attention", "attended_f8g128", "decode"),
            ],
        ),
    ):
        assert attention_of(programs("qwen3", quant, "cuda", lambda key: True)) == layers * expected
        assert "rope_attention" not in ops(programs("qwen3", quant, "cuda"))
        assert "rope_attention" not in ops(programs("qwen3", quant, "cpu", lambda key: True))


def test_without_a_kernel_that_quantises_rows_are_quantised_as_before() -> None:
    layers = family_models.config("qwen3")["num_hidden_layers"]
    found = programs("qwen3", "fp8", "cuda", lambda key: dict(key.dtypes).get("out") == "bf16")
    both = [("rope_attention", "attended", "decode"), ("quantize_rows", "attended_f8g128", "")]
    assert attention_of(found) == layers * [*PREFILL, *both]


def test_attention_rounds_its_rows_in_decode_steps_where_there_is_a_kernel() -> None:
    layers = family_models.config("qwen3")["num_hidden_layers"]
    found = programs("qwen3", "fp8", "cuda", lambda key: key.op == "paged_attention")
    rope, attention = (op for op, _, _ in PREFILL)
    expected = [
        (rope, "", ""),
        (attention, "attended", "prefill"),
        ("quantize_rows", "attended_f8g128", "prefill"),
        (attention, "attended_f8g128", "decode"),
    ]
    assert attention_of(found) == layers * expected
    assert attention_of(programs("qwen3", "bf16", "cuda", lambda key: key.op == "paged_attention")) == layers * [
        (rope, "", ""),
        (attention, "attended", ""),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_or_a_norm_keeps_its_place(name: str) -> None:
    """rope_attention has the operands and constants of the launches for prompts."""
    found = programs(name, "bf16", "cuda", lambda key: True)
    launches = found.launches()
    fused_ones = [launch for launch in launches if launch.key.op == "rope_attention"]
    apart = [launch for launch in launches if launch.phase == "prefill" and launch.key.op in ATTENTION]
    assert len(apart) == 2 * len(fused_ones) == 2 * family_models.config(name)["num_hidden_layers"]
    for one, rope, attention in zip(fused_ones, apart[::2], apart[1::2], strict=True):
        of_both = dict(rope.operands) | dict(attention.operands)
        assert dict(one.operands) == {name: of for name, of in of_both.items() if name not in ("q", "q_out")}
        assert dict(one.key.constants) == dict(rope.key.constants) | dict(attention.key.constants)


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
@pytest.mark.parametrize("phase", [PHASE_PREFILL, PHASE_DECODE])
def test_each_phase_reads_what_it_wrote(phase: int, quant: str) -> None:
    """No launch reads workspace that only the other phase's launches write."""
    has = (lambda key: True, lambda key: key.op != "rope_attention")
    for name, there in itertools.product(("llama-biases", "qwen3", "gemma3", "phi3-window"), has):
        found = programs(name, quant, "cuda", there)
        written = {name for name, buffer in found.buffers.items() if buffer.kind != "workspace"}
        for launch in found.launches():
            if launch.is_made(phase):
                assert not set(launch.reads()) - written, launch.name
                written |= set(launch.writes())


@pytest.mark.parametrize(
    ("change", "fuses"),
    [
        ({}, True),
        ({"rope": {"block_table": "other_table"}}, False),
        ({"attention": {"q": "other_q"}}, False),
        ({"attention": {"k_cache": "other_cache"}}, False),
        ({"reader": "q"}, False),
        ({"reader": "attended"}, True),
        ({"kv": "f32"}, False),
    ],
    ids=str,
)
def test_only_attention_of_the_rows_just_appended_is_fused(change: dict[str, Any], fuses: bool) -> None:
    r = Recorder()
    for name, dtype in (("q", "bf16"), ("other_q", "bf16"), ("attended", "bf16"), ("codes", "f8g128")):
        r.buffer(name, dtype, ("n_rows", 64), "workspace")
    r.buffer("qkv", "f32", ("n_rows", 128), "workspace")
    for name in ("k_cache", "v_cache", "other_cache"):
        r.buffer(name, change.get("kv", "bf16"), ("n_blocks", 2, 16, 16), "state")
    r.buffer("inv_freq", "f32", (1, 8), "weight")
    r.buffer("other_table", "i32", ("n_seqs", "max_blocks"), "workspace")
    where = {
        **{name: f"step.{name}" for name in ("row_position", "row_seq", "block_table")},
        "k_cache": "k_cache",
        "v_cache": "v_cache",
    }
    dims = {"rows": "n_rows", "seqs": "n_seqs", "max_blocks": "max_blocks", "blocks": "n_blocks"}
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    rope = {"qkv": "qkv", "inv_freq": "inv_freq", "seq_rope": "step.seq_rope", "q_out": "q", **where}
    attention = {"q": "q", "out": "attended", **where}
    r.begin("forward")
    constants = {**heads, "rotary_dim": 16, "rope_sets": 1, "eps": 1e-5, "rope_scale": 1.0}
    r.launch("rope_kv_append", "rope", rope | change.get("rope", {}), dims, constants)
    constants = {**heads, "window": 0, "scale": 0.25}
    r.launch("paged_attention", "attention", attention | change.get("attention", {}), dims, constants)
    if reader := change.get("reader"):
        r.launch("quantize_rows", "reader", {"x": reader, "out": "codes"}, {"rows": "n_rows"}, {"k": 64})
        r.launch("quantize_rows", "again", {"x": reader, "out": "codes"}, {"rows": "n_rows"}, {"k": 64})
    r.begin("sample")
    found = attention_of(fused(r.finish(), lambda key: True))
    assert (("rope_attention", "attended", "decode") in found) == fuses
    assert ("rope_attention", "codes", "decode") not in found, "somebody else reads the rows, or no codes are made"
    assert [phase for op, _, phase in found if op == "paged_attention"] == ["prefill" if fuses else ""]


def test_a_product_that_somebody_else_reads_is_kept() -> None:
    assert ops(fused(pair())) == {"gated_linear": 1}
    assert ops(fused(pair(more=(("second", "again"),)))) == {"linear": 1, "gated_activation": 2}
    assert ops(fused(pair(of="other"))) == {"linear": 1, "gated_activation": 1}
