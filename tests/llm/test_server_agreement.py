"""The same model, prompt and seed give the same text in this process and from the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from atlas.llm import LLM, SamplingParams
from tests.serve.serve_harness import environment, eventually, free_port


def test_llm_and_server_agree(llm: LLM, model: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "atlas.serve", str(model), "--quant", "f32", "--backend", "cpu", "--max-seqs", "8"]
    with (tmp_path / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env={**environment(), "TMPDIR": str(tmp_path)}
        )
    url = f"http://127.0.0.1:{port}"
    try:

        def healthy() -> bool:
            assert server.poll() is None, (tmp_path / "log.txt").read_text()
            try:
                return httpx.get(url + "/health").status_code == 200
            except httpx.TransportError:
                return False

        eventually(healthy, 60)
        talk = [{"role": "user", "content": "Say something, <|user|>."}]
        for fields in (
            {"temperature": 0, "max_tokens": 30},
            {"temperature": 1.0, "seed": 5, "max_tokens": 30},
            {
                "n": 3,
                "seed": 9,
                "max_tokens": 20,
                "min_tokens": 10,
                "min_p": 0.01,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "logit_bias": {"80": 3.0, "2": 50.0},
                "include_stop_str_in_output": True,
                "stop": ["I"],
            },
            {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": -3, "max_tokens": 60, "stop": ["a", "\u0004"]},
        ):
            params = SamplingParams(**fields)  # type: ignore[arg-type]
            body = httpx.post(url + "/v1/completions", json={"prompt": "Once", **fields}, timeout=30).json()
            ours = llm.generate("Once", params)[0].outputs
            assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
                (output.text, output.finish_reason) for output in ours
            ]
            assert sum(len(output.token_ids) for output in ours) == body["usage"]["completion_tokens"]
            body = httpx.post(url + "/v1/chat/completions", json={"messages": talk, **fields}, timeout=30).json()
            (result,) = llm.chat(talk, params)
            assert [output.text for output in result.outputs] == [c["message"]["content"] for c in body["choices"]]
            assert len(result.prompt_token_ids) == body["usage"]["prompt_tokens"]
        told = {"prompt": "Once", "temperature": 0, "max_tokens": 8, "logprobs": 2}
        body = httpx.post(url + "/v1/completions", json=told, timeout=30).json()["choices"][0]["logprobs"]
        (result,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=8, logprobs=2))
        output = result.outputs[0]
        assert output.logprobs is not None
        ours_told = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        assert body["token_logprobs"] == ours_told
    finally:
        server.kill()
        server.wait(10)
