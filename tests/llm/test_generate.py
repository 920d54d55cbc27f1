"""LLM.generate and LLM.chat: results, streams, stops, errors, and what is left behind."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams as EngineParams
from atlas.errors import AtlasError, CheckpointError, ConfigError, RequestError
from atlas.llm import LLM, RequestOutput, SamplingParams
from atlas.presets import library, presets
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.targets.tree import kernels_root
from atlas.weights import open_checkpoint
from tests import tiny_model
from tests.llm.conftest import make_model
from tests.presets import templates
from tests.serve.serve_harness import eventually

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, max_tokens=40, seed=7, ignore_eos=True)


def idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


def joined(llm: LLM, prompts: Any, params: Any) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    """What a stream amounts to."""
    result: dict[tuple[int, int], tuple[str, list[int], str | None]] = {}
    for delta in llm.generate(prompts, params, stream=True):
        text, ids, reason = result.get((delta.prompt_index, delta.index), ("", [], None))
        assert reason is None, "something came after the finish reason"
        result[delta.prompt_index, delta.index] = (text + delta.text, ids + delta.token_ids, delta.finish_reason)
    return result


def whole(results: list[RequestOutput]) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    return {
        (place, output.index): (output.text, output.token_ids, output.finish_reason)
        for place, result in enumerate(results)
        for output in result.outputs
    }


def test_what_is_loaded_can_be_seen(llm: LLM) -> None:
    assert repr(llm) == f"LLM({llm.model!r}: cpu/*/f32, context {llm.max_context})"


def test_tokens_are_those_of_the_engine(llm: LLM, model: Path) -> None:
    """The same requests, stepped by hand on the NumPy backend."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(7, 263, n).tolist() for n in (1, 5, 40, 17, 90, 3, 33, 64, 16, 15)]
    with open_checkpoint(model) as checkpoint:
        engine = Engine(Runner.load(checkpoint, RunnerOptions(backend="reference", quant="f32", max_seqs=4)))
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, EngineParams(max_tokens=24))
    expected: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            expected.setdefault(output.request_id, []).extend(output.token_ids)
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [result.outputs[0].token_ids for result in results] == [expected[str(i)] for i in range(len(prompts))]
    for result in results:
        text = llm.tokenizer.decode(result.outputs[0].token_ids)
        assert result.outputs[0].text == text and result.outputs[0].finish_reason == "length"
        assert 0 < result.metrics.time_to_first_token <= result.metrics.seconds
    assert idle(llm)


def test_a_text_is_encoded_as_the_tokenizer_does(llm: LLM) -> None:
    (result,) = llm.generate("a\u00e9", GREEDY)
    assert result.prompt == "a\u00e9" and result.prompt_token_ids == [1, 7 + 0x61, 7 + 0xC3, 7 + 0xA9]
    (same,) = llm.generate(result.prompt_token_ids, GREEDY)
    assert same.prompt is None and same.outputs == result.outputs
    (same,) = llm.generate(np.array(result.prompt_token_ids), GREEDY)
    assert same.outputs == result.outputs
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("params", [GREEDY, HOT, SamplingParams(n=3, seed=1, max_tokens=30, stop=["\u0003", "b"])])
def test_a_stream_amounts_to_the_whole(llm: LLM, params: SamplingParams) -> None:
    """A random model writes bytes that are no UTF-8, so characters are cut everywhere."""
    prompts = ["Hello", "a", [50, 60, 70, 80]]
    expected = whole(llm.generate(prompts, params))
    assert joined(llm, prompts, params) == expected and len(expected) == 3 * params.n
    assert len({tuple(ids) for _, ids, _ in expected.values()}) == len(expected) or params is GREEDY


def test_a_stop_string_ends_the_text_and_never_leaks(llm: LLM) -> None:
    """Every stop that can be cut out of the answer: text before its first place, the request gone from the engine."""
    free = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(range(7 + 128, 320), -100.0))
    text = llm.generate("x", free)[0].outputs[0].text
    for begin in range(0, len(text) - 4, 3):
        stop = text[begin : begin + 3]
        params = SamplingParams(
            seed=3, max_tokens=40, ignore_eos=True, stop=[stop, "never there"], logit_bias=free.logit_bias
        )
        (result,) = llm.generate("x", params)
        output = result.outputs[0]
        assert (output.text, output.finish_reason) == (text[: text.index(stop)], "stop")
        kept = llm.generate("x", msgspec.structs.replace(params, include_stop_str_in_output=True))[0].outputs[0]
        assert kept.text == output.text + stop and kept.token_ids == output.token_ids
        deltas = [delta.text for delta in llm.generate("x", params, stream=True)]
        assert "".join(deltas) == output.text
        assert len(output.token_ids) == len(joined(llm, "x", params)[0, 0][1]) < 40
    assert idle(llm)


def test_seeds(llm: LLM) -> None:
    """A seed gives the same choices whatever else runs; choices differ among themselves."""
    params = SamplingParams(n=4, seed=5, max_tokens=20, ignore_eos=True)
    alone = llm.generate("seed", params)[0].outputs
    busy = llm.generate(["other", "seed", "third"], [HOT, params, HOT])[1].outputs
    assert busy == alone and len({tuple(output.token_ids) for output in alone}) == 4
    one = llm.generate("seed", SamplingParams(seed=5, max_tokens=20, ignore_eos=True))[0].outputs[0]
    assert one == alone[0]


def test_a_prompt_alone_can_be_scored(llm: LLM) -> None:
    (result,) = llm.generate([[40, 50, 60]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.outputs[0].token_ids == [] and result.outputs[0].finish_reason == "length"
    assert result.prompt_logprobs is not None and [e and set(e) for e in result.prompt_logprobs] == [None, {50}, {60}]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", []], "prompts[1]: 0 tokens; accepted: 1 to 255"),
        (["a", [5] * 256], "prompts[1]: 256 tokens; accepted: 1 to 255"),
        ([[1], [5, 320]], "prompts[1][1]: token id 320; accepted: 0..319"),
        ([[1], [-1]], "prompts[1][0]: token id -1"),
        ([[1], [True]], "prompts[1][0]: a bool"),
        ([[1], [1.5]], "prompts[1][0]: a float"),
        (["a", None], "prompts[1]: a NoneType"),
        (["a", {"prompt": "b"}], "prompts[1]: a dict"),
        (["a", "\ud800"], "prompts[1]: a lone surrogate"),
        ("\ud800", "prompt: a lone surrogate"),
        (7, "prompts: a int"),
        (b"abc", "prompts: a bytes"),
        (["a", b"abc"], "prompts[1]: a bytes"),
        (["a", bytearray(b"abc")], "prompts[1]: a bytearray"),
        (np.array(5), "prompts: a ndarray"),
        ([[5], np.array(5)], "prompts[1]: a ndarray"),
        ("a" * (1 << 20), "prompt: 1048577 tokens"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    before = llm.stats().steps
    for stream in (False, True):
        with pytest.raises(RequestError) as caught:
            llm.generate(prompts, GREEDY, stream=stream)  # type: ignore[call-overload]
        assert message in str(caught.value)
    assert llm.stats().steps == before


def test_bad_parameters_are_named(llm: LLM) -> None:
    for params, message in (
        ([GREEDY], "sampling_params: 1 for 2 prompts"),
        (5, "sampling_params: a int"),
        ({"n": 1}, "sampling_params: a dict"),
        ("greedy", "sampling_params: a str"),
        ([GREEDY, {"n": 1}], r"sampling_params\[1\]: a dict"),
        ([GREEDY, SamplingParams(logit_bias={320: 1.0})], r"sampling_params of prompts\[1\]: logit_bias"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(["a", "b"], params)  # type: ignore[arg-type]


def test_a_stream_that_is_left_frees_everything(llm: LLM) -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    for _ in range(3):
        stream = llm.generate(["a"] * 12, long, stream=True)
        next(iter(stream))
        del stream
        gc.collect()
        assert idle(llm)
    for count, _ in enumerate(llm.generate(["a"] * 12, long, stream=True)):
        if count == 5:
            break
    gc.collect()
    assert idle(llm)
    llm.generate("never begun", long, stream=True)
    assert idle(llm)


def test_ctrl_c_leaves_the_engine_usable(llm: LLM) -> None:
    # A process that a shell started in the background ignores the signal, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = llm.generate("a", GREEDY)[0].outputs
    for delay in (0.02, 0.05, 0.1):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                llm.generate(["a"] * 16, SamplingParams(max_tokens=None, ignore_eos=True))
        timer.join()
        assert eventually(lambda: idle(llm))
        assert llm.generate("a", GREEDY)[0].outputs == expected


def test_a_stream_inside_a_stream(llm: LLM) -> None:
    expected = whole(llm.generate(["a", "b"], HOT))
    inner = [joined(llm, ["a", "b"], HOT) for count, _ in enumerate(llm.generate("c", HOT, stream=True)) if count < 3]
    assert inner == [expected] * 3


def test_chat_is_the_template_and_then_generate(llm: LLM) -> None:
    talk = [
        {"role": "user", "content": " Hi <|eot|> "},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "x"},
    ]
    (result,) = llm.chat(talk, GREEDY)
    eot, user, assistant = 3, 4, 5
    spell = lambda text: [7 + byte for byte in text.encode()]  # noqa: E731
    ids = [1, user, *spell("Hi <|eot|>"), eot, assistant, *spell("Yo"), eot, user, *spell("x"), eot, assistant]
    assert result.prompt_token_ids == ids, "a user's special token must stay text"
    assert result.prompt == "<s><|user|>Hi <|eot|><|eot|><|assistant|>Yo<|eot|><|user|>x<|eot|><|assistant|>"
    assert result.outputs == llm.generate([ids], GREEDY)[0].outputs
    both = llm.chat([talk, talk[:1]], [GREEDY, HOT])
    assert both[0].outputs == result.outputs and both[1].outputs == llm.chat(talk[:1], HOT)[0].outputs
    text = "".join(delta.text for delta in llm.chat(talk, GREEDY, stream=True))
    assert text == result.outputs[0].text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: empty"),
        ([{"role": "x", "content": "a"}], "messages[0].role: Invalid enum value 'x'"),
        ([{"role": "user"}], "messages[0].content: null or absent"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "tool", "content": "a"}], "a tool message cannot come first"),
        ([[{"role": "user", "content": "a"}], [{"role": "user"}]], "messages[1][0].content: null or absent"),
        ("hello", "messages"),
    ],
)
def test_bad_messages_are_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert message in str(caught.value)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for t in tools or [] %}{{ t.type }}:{{ t.function.name }}{% endfor %}"
        "{{ 'think' if enable_thinking else 'answer' }}{{ messages[0]['content'] }}"
    )
    folder = make_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    talk = [{"role": "user", "content": "q"}]
    with LLM(folder, backend="cpu", quant="f32", max_seqs=2) as llm:
        tools = [{"type": "function", "function": {"name": "f<|eot|>", "parameters": {"type": "object"}}}]
        (result,) = llm.chat(talk, GREEDY, tools=tools, chat_template_kwargs={"enable_thinking": True})
        assert result.prompt == "<s>function:f<|eot|>thinkq" and 3 not in result.prompt_token_ids
        assert llm.chat(talk, GREEDY)[0].prompt == "<s>answerq"
        with pytest.raises(RequestError, match="chat_template_kwargs"):
            llm.chat(talk, GREEDY, chat_template_kwargs={"f": print})
        for tools in ([print], 5, {"a": 1}, ["\ud83d"]):
            with pytest.raises(RequestError, match="^tools: "):
                llm.chat(talk, GREEDY, tools=tools)
        for variables in (5, ["a"], {"a": "\ud83d"}):
            with pytest.raises(RequestError, match="^chat_template_kwargs: "):
                llm.chat(talk, GREEDY, chat_template_kwargs=variables)  # type: ignore[arg-type]


def test_what_the_template_does_not_read_is_refused(llm: LLM, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "q"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match=r"^tools: .*no place for tools.*chat_template=FILE"):
        llm.chat(talk, GREEDY, tools=tools)
    assert llm.chat(talk, GREEDY, tools=[], chat_template_kwargs={})
    for name in ("loud", "messages", "tools", "bos_token", "x" * 99):
        with pytest.raises(RequestError, match=rf"^chat_template_kwargs\.{name[:60]}: .*not read it"):
            llm.chat(talk, GREEDY, chat_template_kwargs={name: True})
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools[0].function.name }}{{ messages[0].content }}{{ '!' if loud else '?' }}")
    model = make_model(tmp_path / "m")
    for given in (file, str(file)):
        with LLM(model, backend="cpu", quant="f32", max_seqs=2, chat_template=given) as own:
            (result,) = own.chat(talk, GREEDY, tools=tools, chat_template_kwargs={"loud": True})
            assert result.prompt == "fq!"
            with pytest.raises(RequestError, match=r"quiet: .*names that it reads: loud"):
                own.chat(talk, GREEDY, tools=tools, chat_template_kwargs={"quiet": True})
    file.write_text("{% if %}")
    for broken in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match="^chat_template: .*accepted: a (file with a )?Jinja2 template"):
            LLM(model, backend="cpu", quant="f32", chat_template=broken)


def test_defaults_are_the_servers_and_follow_the_thinking_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(templates.QWEN3)
    (qwen3,) = (preset for preset in library.read(kernels_root()) if preset.name == "qwen3")
    llama = msgspec.structs.replace(qwen3.match, architectures=("LlamaForCausalLM",))
    monkeypatch.setattr(presets, "_known", lambda: (msgspec.structs.replace(qwen3, match=llama),))
    seen: list[SamplingParams] = []
    answer = LLM._answer

    def spy(self: LLM, prompts: Any, sampling: Any, *rest: Any) -> Any:
        seen.append(self.default_sampling_params if sampling is None else sampling)
        return answer(self, prompts, sampling, *rest)

    monkeypatch.setattr(LLM, "_answer", spy)
    talk = [{"role": "user", "content": "q"}]
    with LLM(folder, backend="cpu", quant="f32", max_seqs=2, max_context=96) as llm:
        for kwargs in (None, {"enable_thinking": True}, {"enable_thinking": False}):
            llm.chat(talk, chat_template_kwargs=kwargs)
        llm.generate("q")
        assert [(p.temperature, p.top_p) for p in seen] == [(0.6, 0.95), (0.6, 0.95), (0.7, 0.8), (0.6, 0.95)]
        llm.default_sampling_params = SamplingParams(max_tokens=1, temperature=0.1)
        llm.chat(talk)
        assert seen[-1].temperature == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq": 3}, "max_seq: unknown option; did you mean max_seqs"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"backend": "gpu"}, "backend: 'gpu'"),
        ({"kv_memory": "lots"}, "kv_memory: 'lots' is not a size"),
        ({"threads": "2"}, "threads"),
        ({"max_context": 10**9}, "max_context"),
        ({"quant": "int3"}, "no kernel set for quant int3"),
        ({"port": 80}, "port: unknown option"),
    ],
)
def test_options_are_checked_as_the_servers_flags_are(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AtlasError) as caught:
        LLM(model, **options)
    assert message in str(caught.value)


def test_a_progress_bar_is_for_terminals(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capfd.readouterr().err
    llm.generate(["a", "b"], GREEDY, progress=False)
    assert capfd.readouterr() == ("", "")


def test_the_models_own_end(tmp_path: Path) -> None:
    """End tokens of generation_config stop a text and are counted, not shown; ignore_eos goes on."""
    with LLM(make_model(tmp_path / "m"), backend="cpu", quant="f32", max_seqs=2) as llm:
        for end in (2, 3):
            params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0})
            output = llm.generate("a", params)[0].outputs[0]
            assert (output.token_ids, output.text, output.finish_reason) == ([end], "", "stop")
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100.0}, ignore_eos=True)
        output = llm.generate("a", params)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == ([2] * 5, "length")
        params = SamplingParams(temperature=0, max_tokens=5, min_tokens=3, logit_bias={2: 100.0})
        output = llm.generate("a", params)[0].outputs[0]
        assert output.token_ids[3] == 2 and 2 not in output.token_ids[:3]


@pytest.mark.parametrize("end", [-1, 320, [3, -1], [[3]], True, 2**70, "x"])
def test_an_end_that_is_no_id_of_the_model_ends_nothing(tmp_path: Path, end: Any) -> None:
    folder = make_model(tmp_path / "m")
    for name in ("config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**document, "eos_token_id": end, "top_k": 2**31}))
    with LLM(folder, backend="cpu", quant="f32", max_seqs=2) as llm:
        output = llm.generate("a", progress=False)[0].outputs[0]
        assert output.finish_reason == "length" or output.token_ids[-1] in (2, 3)
        for allowed in (1, 319):
            params = SamplingParams(temperature=0, max_tokens=3, logit_bias={allowed: 100.0})
            assert llm.generate("a", params)[0].outputs[0].token_ids == [allowed] * 3


def test_log_probabilities_are_those_of_the_logits(llm: LLM) -> None:
    prompt = list(range(40, 75))
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (result,) = llm.generate([prompt], params)
    output = result.outputs[0]
    tokens = prompt + output.token_ids
    logits = llm.logits(tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert output.logprobs is not None and result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
    entries = [*result.prompt_logprobs[1:], *output.logprobs]
    for place, entry in enumerate(entries):
        assert entry is not None
        row, token = expected[place], tokens[place + 1]
        best = np.argsort(-row, kind="stable")[: 2 if place < len(prompt) - 1 else 3]
        assert set(entry) == {token, *best.tolist()}
        for candidate, told in entry.items():
            assert abs(told.logprob - row[candidate]) < 1e-4
            assert told.rank == 1 + int((row > row[candidate]).sum())
    told = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(told))


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    with LLM(tiny_model.write(tmp_path / "m", eos_token_id=5), backend="cpu", quant="f32", max_seqs=2) as llm:
        output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, logit_bias={5: 100.0}))[0].outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([5], "", "stop")
        for call in (
            lambda: llm.generate("a"),
            lambda: llm.chat([]),
            lambda: llm.generate([[1]], SamplingParams(stop="a")),
        ):
            with pytest.raises(CheckpointError, match="tokenizer"):
                call()


def test_what_a_continuation_must_be(llm: LLM) -> None:
    """Of noise; streamed and whole; and what is wrong is found before anything runs."""
    given = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{4}"}, {"json": {"type": "array", "maxItems": 0}}, None]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=20, structured_outputs=wish, n=2)
        for i, wish in enumerate(given)
    ]
    prompts = [[1, 2, 3 + i] for i in range(4)]
    results = llm.generate(prompts, params)
    patterns = ["yes|no", "[0-9]{4}", r"\[\s*\]"]
    for result, pattern in zip(results, patterns, strict=False):
        for output in result.outputs:
            assert re.fullmatch(pattern, output.text) and output.finish_reason == "stop", output
    assert joined(llm, prompts, params) == whole(results)
    with pytest.raises(RequestError, match="structured_outputs: .*regex parse error"):
        llm.generate([1, 2], SamplingParams(structured_outputs={"regex": "a("}))
    assert idle(llm)
