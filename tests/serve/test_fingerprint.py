"""`system_fingerprint`: the same where answers are the same, another where they may differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from atlas.config import ServeConfig
from atlas.engine.messages import Ready
from atlas.serve.frontend import Frontend
from atlas.serve.lifecycle import fingerprint_of
from tests.serve.serve_harness import RunningServer, make_checkpoint

READY = Ready("cuda", "h200/qwen3/bf16", "a test", 512, 320, [])


def test_it_follows_the_weights_and_the_kernels(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "a")
    shutil.copytree(model, tmp_path / "b")
    other = make_checkpoint(tmp_path / "c")
    save_file({"model.embed_tokens.weight": np.ones((320, 8), np.float32)}, other / "model.safetensors")

    def of(folder: str, ready: Ready = READY, **settings: str) -> str:
        config = ServeConfig(model=str(tmp_path / folder), **settings)  # type: ignore[arg-type]
        return fingerprint_of(config, ready, Frontend.load(tmp_path / folder, config).weights_digest)

    first = of("a")
    assert first == of("a") == of("b"), "a copy under another name is the same model"
    kernels, backend = (msgspec.structs.replace(READY, **{name: "cpu"}) for name in ("kernel_set", "backend"))
    others = {of("c"), of("a", kernels), of("a", backend), of("a", quant="fp8"), of("a", kv_dtype="fp8")}
    assert len({first, *others}) == 6


def test_all_endpoints_tell_the_same(shared: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "yo"}], "seed": 1}
    told = {
        shared.http.post("/v1/chat/completions", json=chat).json()["system_fingerprint"],
        shared.http.post("/v1/completions", json={"prompt": "yo", "seed": 1}).json()["system_fingerprint"],
        shared.http.get("/server_info").json()["fingerprint"],
    }
    assert len(told) == 1 and told.pop().startswith("fp_")
