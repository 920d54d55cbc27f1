"""quant-accuracy against its definitions, computed from whole logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atlas.bench import accuracy
from atlas.bench.__main__ import main
from atlas.llm import LLM
from atlas.llm.scoring import log_softmax
from tests.llm.conftest import make_model

OPTIONS = {"backend": "cpu", "max_seqs": 8, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("accuracy") / "m")


def test_rows_are_what_their_names_say(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=1)
    text = "".join(chr(97 + n * n % 26) for n in range(200))
    rows = accuracy.subjects(str(model), ["f32", "bf16", "nvfp4"], [str(other), f"{model}@bf16"])
    found = accuracy.measure(str(model), text, rows, window=256, stride=128, options=OPTIONS)
    assert [row["name"] for row in found["rows"]] == ["f32", "bf16", "nvfp4", "other@f32", "m@bf16"]
    logs = {}
    for name, path, quant in (("f32", model, "f32"), ("bf16", model, "bf16"), ("other@f32", other, "f32")):
        with LLM(path, **OPTIONS, quant=quant) as llm:
            ids = llm.tokenizer.encode(text, add_special_tokens=True)
            logs[name] = log_softmax(llm.logits(ids)[:-1])
    at, targets = np.arange(len(ids) - 1), np.array(ids[1:])
    base = logs["f32"]
    assert found["scored_tokens"] == len(ids) - 1 == 200
    for row in found["rows"]:
        if row["name"] == "nvfp4":
            assert "nvfp4" in row["skipped"]
            continue
        log_p = logs["bf16" if row["name"] == "m@bf16" else row["name"]]
        nll = -log_p[at, targets]
        kl = (np.exp(base) * (base - log_p)).sum(axis=1)
        assert row["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
        change = 100 * (np.exp(nll.mean() + base[at, targets].mean()) - 1)
        assert row["perplexity_change_percent"] == pytest.approx(change, abs=1e-3)
        assert row["kl"] == pytest.approx(kl.mean(), rel=1e-3, abs=1e-6)
        assert row["top1_match"] == pytest.approx((log_p.argmax(1) == base.argmax(1)).mean())
        assert row["kl_interval"][0] <= row["kl"] <= row["kl_interval"][1]
    f32, bf16, _, far, again = found["rows"]
    assert (f32["kl"], f32["top1_match"], f32["perplexity_change_percent"]) == (0.0, 1.0, 0.0)
    assert 0 < bf16["kl"] < 0.01 < far["kl"] and {**bf16, "name": "", "seconds": 0} == {
        **again,
        "name": "",
        "seconds": 0,
    }


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "r.json"
    text.write_text("What a text. " * 30)
    arguments = ["--text", str(text), "--backend", "cpu", "--threads", "1", "--json", str(out)]
    assert main(["quant-accuracy", str(model), *arguments, "--formats", "bf16", "--tokens", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("format") and [line.split()[0] for line in lines[1:]] == ["f32", "bf16"]
    result = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    exact, rounded = (sum(row["weight_bytes"].values()) for row in result["rows"])
    assert rounded < 0.6 * exact and f"{rounded / 1e6:.1f}M" in lines[2]
    assert (result["text_tokens"], result["window"], result["stride"]) == (100, 256, 128)
    assert main(["quant-accuracy", str(model), "--text", str(tmp_path / "absent")]) == 2
    assert main(["quant-accuracy", str(model), *arguments, "--formats", "bf16,int5"]) == 2
    assert main(["quant-accuracy", str(model), *arguments, "--window", "1000"]) == 2
    errors = capsys.readouterr().err
    assert "--text" in errors and "unknown quant 'int5'" in errors and "window: 1000" in errors
