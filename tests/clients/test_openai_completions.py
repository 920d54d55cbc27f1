"""Text completions and models through the official `openai` client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from atlas.tokenizer import Tokenizer
from tests.clients.asking import CAPITAL, GREEDY
from tests.serve.real_server import MODEL

PROMPT = "The capital of France is"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, **options})


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].text
    return text


def test_a_text_is_continued(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = complete(client)
    assert text_of(answer).startswith(" Paris") and (answer.object, answer.model) == ("text_completion", MODEL)
    ids = tokenizer.encode(PROMPT, add_special_tokens=True)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
    assert text_of(complete(client, ids)) == text_of(answer)


def test_a_batch_is_its_prompts_one_by_one(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "One, two, three,", "A lighthouse keeper is"]
    alone = [text_of(complete(client, prompt)) for prompt in prompts]
    batch = complete(client, prompts)
    assert [(c.index, c.text) for c in batch.choices] == list(enumerate(alone))
    ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    assert [c.text for c in complete(client, ids).choices] == alone
    assert batch.usage.prompt_tokens == sum(map(len, ids))
    parts = dict.fromkeys(range(3), "")
    for chunk in complete(client, prompts, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == dict(enumerate(alone))


def test_echo_gives_the_prompt_back(client: openai.OpenAI) -> None:
    assert text_of(complete(client, echo=True)) == PROMPT + text_of(complete(client))
    scored = complete(client, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert scored.text == PROMPT and "".join(scored.logprobs.tokens) == PROMPT
    assert scored.logprobs.token_logprobs[0] is None and all(x < 0 for x in scored.logprobs.token_logprobs[1:])


def test_generated_and_scored_log_probabilities_agree(client: openai.OpenAI) -> None:
    """What the model thought when it chose a token is what it thinks of it in a prompt."""
    made = complete(client, logprobs=3, max_tokens=10).choices[0]
    text = PROMPT + made.text
    scored = complete(client, text, echo=True, max_tokens=0, logprobs=3).choices[0].logprobs
    assert scored.tokens[-10:] == made.logprobs.tokens
    assert scored.token_logprobs[-10:] == pytest.approx(made.logprobs.token_logprobs, abs=0.05)
    offsets = scored.text_offset
    assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True)] == scored.tokens
    for token, own, tops in zip(
        made.logprobs.tokens, made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True
    ):
        assert tops[token] == own == max(tops.values()) and len(tops) == 3
        assert sum(math.exp(value) for value in tops.values()) <= 1 + 1e-5


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=2).choices[0]
    chunks = list(complete(client, logprobs=2, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.text
    tokens = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.tokens]
    assert tokens == whole.logprobs.tokens
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12 and len({chunk.id for chunk in chunks}) == 1


def test_n_stop_and_seed(client: openai.OpenAI) -> None:
    drawn = complete(client, n=3, temperature=1.0, seed=9)
    again = complete(client, n=3, temperature=1.0, seed=9)
    texts = [choice.text for choice in drawn.choices]
    assert len(set(texts)) == 3 and texts == [choice.text for choice in again.choices]
    text = text_of(complete(client))
    assert text_of(complete(client, stop=[text[10:14]])) == text[: text.index(text[10:14])]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", [], "prompt"),
        ("prompt", "", "prompt"),
        ("prompt", [[5], []], "prompt[1]"),
        ("prompt", [5, -1], "prompt[1]"),
        ("prompt", [5, 2**40], "prompt[1]"),
        ("prompt", [5, "x"], "prompt[1]"),
        ("prompt", {"text": "x"}, "prompt"),
        ("logprobs", 1000, "logprobs"),
        ("suffix", "the end", "suffix"),
        ("max_tokens", -1, "max_tokens"),
    ],
)
def test_a_bad_value_names_its_field(client: openai.OpenAI, field: str, value: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{field: value})
    assert caught.value.param == param and param.split("[")[0] in str(caught.value)


def test_the_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model") and model.created > 1_700_000_000
    assert client.models.retrieve(MODEL) == model
    assert model.max_model_len == 1024  # type: ignore[attr-defined]


def test_chat_is_a_completion_of_its_template(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The prompt of a chat, written here by hand as the model's card describes it."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    question = CAPITAL[0]["content"]
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = []
    for piece in text.replace("<|im_start|>", "\0\1\0").replace("<|im_end|>", "\0\2\0").split("\0"):
        ids += [ord(piece)] if piece in ("\1", "\2") else tokenizer.encode(piece, add_special_tokens=False)
    chat = client.chat.completions.create(messages=CAPITAL, **GREEDY)
    answer = complete(client, ids)
    assert text_of(answer) == chat.choices[0].message.content
    assert answer.usage.prompt_tokens == chat.usage.prompt_tokens
