"""Checks that need transformers in float32: `pip install '.[test,oracle]'`, `pytest -m oracle`.

They make the committed oracle again and compare it, compare whole logits instead of the stored part,
and try fresh random models of every option of the family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.weights.fetch import resolve_model
from tests.models import run
from tests.models.test_smollm2 import MAX_ABS, ORACLE, REL_L2, REL_L2_BF16, relative_l2
from tests.oracle import make_tiny_oracle
from tests.oracle.make_smollm2_oracle import greedy, load_model, logits_of
from tests.oracle.prompts import COLUMNS, LOGIT_PROMPTS

pytestmark = pytest.mark.oracle

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="session")
def smollm2_torch() -> Any:
    """Loading a GGUF takes transformers 20-60 s: once per run."""
    pytest.importorskip("transformers", reason="needs the oracle extra")
    return load_model(resolve_model("smollm2-135m", offline=False))


def test_the_committed_oracle_is_what_transformers_says(smollm2_torch: Any) -> None:
    with np.load(ORACLE) as stored:
        for name in LOGIT_PROMPTS:
            logits = logits_of(smollm2_torch, stored[f"{name}.ids"].tolist())
            columns = np.linspace(0, logits.shape[1] - 1, COLUMNS).astype(np.int64)
            assert np.abs(logits[:, columns] - stored[f"{name}.columns"]).max() < 2e-3, name
            assert np.abs(logits[-1] - stored[f"{name}.last"]).max() < 2e-3, name
        for i in (0, 7, 19):
            tokens, gaps = greedy(smollm2_torch, stored[f"greedy.{i}.ids"].tolist(), 16)
            assert tokens == stored[f"greedy.{i}.tokens"][:16].tolist()
            assert np.allclose(gaps, stored[f"greedy.{i}.gap"][:16], atol=2e-3)


@pytest.mark.parametrize(("quant", "bounds"), [("f32", (MAX_ABS, REL_L2)), ("bf16", (np.inf, REL_L2_BF16))])
def test_whole_logits_of_smollm2(smollm2_torch: Any, quant: str, bounds: tuple[float, float]) -> None:
    """Every logit at every position of all prompts, the longest of 1,000 tokens."""
    runner = run.load(resolve_model("smollm2-135m", offline=False), "cpu", quant, max_context=1024)
    with np.load(ORACLE) as stored:
        for name in LOGIT_PROMPTS:
            ids = stored[f"{name}.ids"].tolist()
            expected, actual = logits_of(smollm2_torch, ids), run.logits(runner, ids)
            largest, relative = float(np.abs(actual - expected).max()), relative_l2(actual, expected)
            print(f"{quant} {name}: {len(ids)} tokens, max abs {largest:.2e}, relative L2 {relative:.2e}")
            assert largest <= bounds[0] and relative <= bounds[1]


def test_the_committed_tiny_oracle_is_what_transformers_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the oracle extra")
    transformers = pytest.importorskip("transformers", reason="needs the oracle extra")
    with np.load(make_tiny_oracle.ORACLE) as stored:
        for variant in make_tiny_oracle.VARIANTS:
            folder = make_tiny_oracle.checkpoint(tmp_path / variant, variant)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            logits = logits_of(model, make_tiny_oracle.ids(320))[list(make_tiny_oracle.ROWS)]
            assert np.abs(logits - stored[f"{variant}.logits"]).max() < 1e-4, variant


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mqa": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "wide-heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "narrow-vocabulary": {"vocab_size": 77},
    "eps": {"rms_norm_eps": 1e-3},
    "rope-base": {"rope_theta": 500000.0},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope-llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def random_llama(folder: Path, changes: dict[str, Any], seed: int) -> tuple[Any, Path]:
    """A random Llama of transformers, saved as transformers saves it."""
    torch = pytest.importorskip("torch", reason="needs the oracle extra")
    transformers = pytest.importorskip("transformers", reason="needs the oracle extra")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 128,
            "intermediate_size": 176,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "max_position_embeddings": 256,
            "initializer_range": 0.08,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_random_models(tmp_path: Path, variant: str) -> None:
    """Teacher-forced logits on `cpu` and `reference`, in chunks that cut KV blocks."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    model, folder = random_llama(tmp_path / "model", VARIANTS[variant], seed)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, 100).tolist()
    expected = logits_of(model, ids)
    for backend in ("cpu", "reference"):
        for quant, bound in (("f32", REL_L2), ("bf16", REL_L2_BF16)):
            runner = run.load(folder, backend, quant)
            actual = run.logits(runner, ids, chunk=37)
            relative = relative_l2(actual, expected)
            print(f"{variant} {backend} {quant}: relative L2 {relative:.2e}")
            assert relative <= bound, f"{backend} {quant}"
            assert quant == "bf16" or np.abs(actual - expected).max() <= MAX_ABS


def test_wrong_readings_would_be_seen(tmp_path: Path) -> None:
    """The bounds above tell right from wrong: ignoring a rope scheme or reading the wrong head is far off."""
    model, folder = random_llama(tmp_path / "model", VARIANTS["rope-llama3"], 1)
    ids = np.random.default_rng(1).integers(0, 320, 100).tolist()
    expected = logits_of(model, ids)
    config = json.loads((folder / "config.json").read_text())
    for field in ("rope_scaling", "rope_parameters"):
        if field in config:
            config[field] = {"rope_type": "default", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert relative_l2(run.logits(run.load(folder, "cpu", "f32"), ids), expected) > 10 * REL_L2_BF16


def test_perplexity_of_the_fixed_text(smollm2_torch: Any) -> None:
    """The first 700 tokens in windows that overlap: each token's likelihood is the one that transformers gives it."""
    from atlas.llm import LLM

    text = (Path(__file__).resolve().parents[2] / "bench" / "texts" / "time_machine.txt").read_text()
    window, stride = 256, 128
    with LLM(resolve_model("smollm2-135m", offline=False), backend="cpu", quant="f32", max_context=window) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=True)[:700]
        found = llm.perplexity(ids, window, stride)
    expected = np.full(len(ids), np.nan)
    for begin in range(0, len(ids) - window + stride, stride):
        part = ids[begin : begin + window]
        logits = logits_of(smollm2_torch, part).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        for row, token in enumerate(part[1:]):
            if np.isnan(expected[begin + row + 1]):  # the first window that holds a token scores it
                expected[begin + row + 1] = -log_p[row, token]
    assert np.abs(found.token_nll - expected[1:]).max() < 5e-3
    assert abs(found.nll - expected[1:].mean()) < 1e-4
