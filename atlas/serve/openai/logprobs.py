"""Log-probabilities as the OpenAI endpoints and vLLM word them. Numbers are finite or null: strict JSON.

All are of the model's raw logits: log-softmax before penalties, biases, temperature and cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atlas.engine.messages import TokenLogprobs
from atlas.serve.generation import Reported
from atlas.serve.openai.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from atlas.tokenizer import Tokenizer


def chat_logprobs(reported: Sequence[Reported], tokenizer: Tokenizer) -> ChatLogprobs:
    """`choices[].logprobs` of a chat answer."""

    def top(token_id: int, logprob: float) -> ChatTopLogprob:
        data = tokenizer.token_bytes(token_id)
        return ChatTopLogprob(data.decode(errors="replace"), logprob, list(data))

    content = []
    for entry in reported:
        own = top(entry.token.token_id, entry.token.logprob)
        likeliest = [top(*pair) for pair in zip(entry.token.top_ids, entry.token.top_logprobs, strict=True)]
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, likeliest))
    return ChatLogprobs(content)


def completion_logprobs(
    entries: Sequence[tuple[int, TokenLogprobs | None, int]], n_top: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """`choices[].logprobs` of a text completion, of (token id, its log-probabilities if it has any, offset)."""
    return CompletionLogprobs(
        [_text(token_id, tokenizer) for token_id, _, _ in entries],
        [None if report is None else report.logprob for _, report, _ in entries],
        [None if report is None else _top(report, n_top, tokenizer) for _, report, _ in entries],
        [offset for _, _, offset in entries],
    )


def prompt_logprobs(reports: Sequence[TokenLogprobs], n_top: int, tokenizer: Tokenizer) -> PromptLogprobs:
    """`prompt_logprobs`, as in vLLM: for each token of the prompt, id -> what the model thought of it."""
    return [None, *(_by_id(report, n_top, tokenizer) for report in reports)]


def _by_id(report: TokenLogprobs, n_top: int, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(logprob, rank, _text(token_id, tokenizer))
        for token_id, logprob, rank in _likeliest(report, n_top)
    }


def _top(report: TokenLogprobs, n_top: int, tokenizer: Tokenizer) -> dict[str, float | None]:
    result: dict[str, float | None] = {}
    for token_id, logprob, _ in _likeliest(report, n_top):
        result.setdefault(_text(token_id, tokenizer), logprob)  # of two tokens of one text the likelier
    return result


def _likeliest(report: TokenLogprobs, n_top: int) -> Iterator[tuple[int, float, int]]:
    """(id, log-probability, rank) of the n_top likeliest, and of the token itself where it is none of them."""
    for rank, pair in enumerate(zip(report.top_ids[:n_top], report.top_logprobs, strict=False), start=1):
        yield *pair, rank
    if report.token_id not in report.top_ids[:n_top]:
        yield report.token_id, report.logprob, report.rank


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text; one that is no whole characters reads `bytes:\\xf0`, as in the OpenAI API, so that tokens of
    different bytes stay different keys."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
