"""Every field that changes which token is chosen, from the request to the text, against probabilities from NumPy.

The model gives the same logits whatever it has read: five letters stand out, so that the distribution of a few tokens
can be written down. Draws have fixed seeds: a test passes or fails the same each time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import tiny_model
from tests.serve.real_server import ServerProcess
from tests.serve.serve_harness import EOS, ids_of, make_checkpoint

VOCABULARY = 320
LETTERS = "ABCDE"
LOGITS = np.full(VOCABULARY, -18.0)
LOGITS[ids_of(LETTERS)] = [1.5, 1.0, 0.5, 0.0, -0.5]
CHOICES, PROMPTS = 128, 16


def write_model(folder: Path) -> Path:
    """A checkpoint whose logits are `LOGITS` everywhere: layers add nothing, every token looks the same."""
    make_checkpoint(folder)
    config = {**tiny_model.CONFIG, "eos_token_id": 2}
    hidden = config["hidden_size"]
    tensors = tiny_model.tensors(config, 0)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
    tensors["model.embed_tokens.weight"][:] = 1
    tensors["model.norm.weight"][:] = 1
    tensors["lm_head.weight"] = np.repeat(LOGITS[:, None] / hidden, hidden, axis=1).astype(np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("exact")
    model = write_model(folder / "letters")
    flags = ("--quant", "f32", "--backend", "cpu", "--max-seqs", "256")
    server = ServerProcess(folder, model, *flags)
    with server.started(60), httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def choices(http: httpx.Client, **body: Any) -> list[Any]:
    answer = http.post("/v1/completions", json={"max_tokens": 1, "seed": 11, **body})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"])


# ---- the reference ---------------------------------------------------------------------------------


def probabilities(fields: dict[str, Any], prompt: list[int], answer: list[int]) -> np.ndarray[Any, Any]:
    """Of the next token: the definitions of the OpenAI API's penalties, and transformers' of the rest."""
    logits = LOGITS.copy()
    for token, bias in fields.get("logit_bias", {}).items():
        logits[int(token)] += bias
    if (penalty := fields.get("repetition_penalty", 1.0)) != 1.0:
        seen = sorted({*prompt, *answer})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token, count in Counter(answer).items():
        logits[token] -= count * fields.get("frequency_penalty", 0.0) + fields.get("presence_penalty", 0.0)
    if len(answer) < fields.get("min_tokens", 0):
        logits[[2, 3, *fields.get("stop_token_ids", [])]] = -np.inf
    logits = logits / fields.get("temperature", 1.0)
    if 0 < (k := fields.get("top_k", 0)) < VOCABULARY:
        logits[logits < np.sort(logits)[-k]] = -np.inf
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    order = np.argsort(-likely, kind="stable")
    before = np.cumsum(likely[order]) - likely[order]
    likely[order[before >= fields.get("top_p", 1.0)]] = 0
    likely[likely < fields.get("min_p", 0.0) * likely.max()] = 0
    result: np.ndarray[Any, Any] = likely / likely.sum()
    return result


def sequences(fields: dict[str, Any], prompt: list[int], length: int) -> dict[str, float]:
    """The probability of each text of `length` letters."""
    result = {}
    for letters in itertools.product(LETTERS, repeat=length):
        answer, chance = ids_of("".join(letters)), 1.0
        for position, token in enumerate(answer):
            chance *= probabilities(fields, prompt, answer[:position])[token]
        if chance > 0:
            result["".join(letters)] = chance
    return result


def chi_square_limit(freedom: int) -> float:
    """What a right distribution exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def compare(found: Counter[str], wanted: dict[str, float]) -> None:
    assert found.keys() <= wanted.keys(), found.keys() - wanted.keys()
    total = found.total()
    common = {text: p for text, p in wanted.items() if p * total >= 5}
    cells = [(found[text], p * total) for text, p in common.items()]
    rest = (total - sum(seen for seen, _ in cells), total - sum(due for _, due in cells))
    if rest[1] >= 1:
        cells.append(rest)
    if len(cells) > 1:
        chi_square = sum((seen - due) ** 2 / due for seen, due in cells)
        assert chi_square <= chi_square_limit(len(cells) - 1), (found, wanted)


# ---- the tests -------------------------------------------------------------------------------------

ONE_TOKEN: list[dict[str, Any]] = [
    {},
    {"top_k": 2},
    {"top_p": 0.4},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.5},
    {"min_p": 0.3},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 0.5, "top_p": 0.8},
    # Temperature first: what min_p compares is flatter then.
    {"temperature": 2.0, "min_p": 0.5},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.4},
    {"logit_bias": {str(ids_of("C")[0]): 2.0, str(ids_of("A")[0]): -100}},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.8},
]

THREE_TOKENS: list[dict[str, Any]] = [
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.8, "presence_penalty": 0.3},
    {"repetition_penalty": 1.5},
    {"min_tokens": 3, "stop_token_ids": ids_of("A")},
    {"temperature": 1.4, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.45},
]


@pytest.mark.parametrize("fields", [*ONE_TOKEN, *THREE_TOKENS], ids=str)
def test_draws_have_the_distribution_that_the_fields_say(http: httpx.Client, fields: dict[str, Any]) -> None:
    length = 3 if fields in THREE_TOKENS else 1
    prompt = [1, *ids_of("xBDx")]
    body = {"temperature": 1.0, **fields, "prompt": [prompt] * PROMPTS, "n": CHOICES, "max_tokens": length}
    found = Counter(choice["text"] for choice in choices(http, **body))
    assert found.total() == PROMPTS * CHOICES
    compare(found, sequences(fields, prompt, length))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 0}, "A"),
        ({"temperature": 1e-7}, "A"),
        ({"temperature": 1e-4}, "A"),
        ({"temperature": 1, "top_k": 1}, "A"),
        ({"temperature": 1, "top_p": 0}, "A"),
        ({"temperature": 1, "min_p": 1}, "A"),
        ({"temperature": 0, "logit_bias": {str(ids_of("E")[0]): 100}}, "E"),
        ({"temperature": 0, "logit_bias": {str(ids_of("A")[0]): -100}}, "B"),
        ({"temperature": 0, "max_tokens": 4, "presence_penalty": 0.9}, "ABAA"),
        ({"temperature": 0, "max_tokens": 5, "frequency_penalty": 0.9}, "ABACB"),
        ({"temperature": 0, "max_tokens": 4, "stop_token_ids": ids_of("A")}, ""),
        ({"temperature": 0, "max_tokens": 4, "stop_token_ids": ids_of("B"), "logit_bias": {str(EOS): 30}}, ""),
        ({"temperature": 0, "max_tokens": 4, "stop": "AA"}, ""),
        ({"temperature": 0, "max_tokens": 4, "stop": "AA", "include_stop_str_in_output": True}, "AA"),
        (
            {"temperature": 0, "max_tokens": 6, "stop": "AA", "min_tokens": 3, "include_stop_str_in_output": True},
            "AAAA",
        ),
    ],
    ids=str,
)
def test_what_is_certain(http: httpx.Client, fields: dict[str, Any], text: str) -> None:
    assert {choice["text"] for choice in choices(http, **fields, prompt="x", n=8)} == {text}


def test_ends(http: httpx.Client) -> None:
    """The model's own end is likeliest by far."""
    body = {"prompt": "x", "max_tokens": 3, "temperature": 1, "logit_bias": {str(EOS): 30}, "logprobs": 0}
    for fields, tokens, reason in (
        ({}, ["</s>"], "stop"),
        ({"ignore_eos": True}, ["</s>"] * 3, "length"),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, ["</s>"], "stop"),
        ({"ignore_eos": True, "stop_token_ids": [EOS], "min_tokens": 1, "temperature": 0}, ["A", "</s>"], "stop"),
        ({"min_tokens": 3, "temperature": 0}, ["A", "A", "A"], "length"),
    ):
        (choice,) = choices(http, **{**body, **fields})
        assert (choice["logprobs"]["tokens"], choice["finish_reason"]) == (tokens, reason), fields


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": -1}, {"top_k": 100000}, {"top_p": 1}, {"min_p": 0}])
def test_values_that_cut_nothing(http: httpx.Client, fields: dict[str, Any]) -> None:
    def texts(**given: Any) -> list[str]:
        return [choice["text"] for choice in choices(http, prompt="x", n=64, temperature=1, **given)]

    assert texts(**fields) == texts() and set(texts()) == set(LETTERS)


def test_log_probabilities_are_the_models_own(http: httpx.Client) -> None:
    raw = LOGITS - np.log(np.exp(LOGITS).sum())
    for fields in ({}, {"temperature": 1e-7}, {"top_p": 0.4}, {"logit_bias": {str(ids_of("E")[0]): 100}}):
        (choice,) = choices(http, prompt="x", logprobs=5, **fields)
        (top,) = choice["logprobs"]["top_logprobs"]
        for letter in LETTERS:
            assert top[letter] == pytest.approx(raw[ids_of(letter)[0]], abs=1e-4)
