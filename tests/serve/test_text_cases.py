"""Texts that are known exactly: characters in several tokens, lists of end ids, stop strings, templates that use all
that templates may use. Each streamed and in one piece."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.serve.in_process import Server, joined, make_model
from tests.serve.serve_harness import EOS, EOT, ids_of

YO: list[dict[str, Any]] = [{"role": "user", "content": "yo"}]
TEXT = "Hi 😀é漢!"
RICH = (
    "{{ bos_token }}"
    "{% for m in messages %}{% if loop.index0 >= 3 %}{% break %}{% endif %}"
    "{% if m.role == 'tool' and loop.first %}{{ raise_exception('a tool message cannot come first') }}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}<|assistant|>{{ m.content }}{% endgeneration %}"
    "{% else %}<|user|>{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{{ strftime_now('%Y') }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(make_model(tmp_path_factory.mktemp("model") / "tiny"))


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def both(server: Server, **fields: Any) -> tuple[str, str, int]:
    """Content, finish reason and tokens of an answer, which are the same streamed."""
    whole = await server.chat(messages=YO, **fields)
    chunks = await server.stream(messages=YO, stream_options={"include_usage": True}, **fields)
    choice = whole["choices"][0]
    assert joined(chunks) == choice and chunks[-1]["usage"] == whole["usage"]
    return choice["message"]["content"], choice["finish_reason"], whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("group", [1, 2, 5, 100])
def test_characters_in_several_tokens_and_each_end_id(server: Server, group: int) -> None:
    async def main() -> None:
        length = len(TEXT.encode())
        for end in (EOS, EOT):  # the second is only in generation_config.json
            server.say_text(1, TEXT, group=group, end=end)
            assert await both(server, seed=1) == (TEXT, "stop", length + 1)
            fields: dict[str, Any] = {"seed": 1, "ignore_eos": True, "max_tokens": length + 1}
            assert await both(server, **fields) == (TEXT, "length", length + 1)
        for limit in range(1, length + 1):
            content, reason, tokens = await both(server, seed=1, max_tokens=limit)
            whole = TEXT.encode()[:limit].decode(errors="ignore")
            assert (reason, tokens) == ("length", limit)
            assert content in (whole, whole + "\ufffd"), "at most one character is broken off"

    run(main)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("group", [1, 5, 100])
def test_stop_strings(server: Server, group: int, include: bool) -> None:
    """Nothing behind one is shown, no part of one leaks, and what only began like one is not lost."""
    text = "abcDEFGHIJklm"

    async def main() -> None:
        server.say_text(1, text, group=group)
        for stops, found in [
            (["DEFGHIJ"], "DEFGHIJ"),
            (["EFX"], None),
            (["m"], "m"),
            (["lmX"], None),
            (["a"], "a"),
            (["GHI", "DE"], "DE"),
            (["DEFGHIJklmn", "klm"], "klm"),
            (["bcD", "cD"], "bcD"),
        ]:
            expected = text if found is None else text[: text.index(found)] + (found if include else "")
            tokens = len(text) + 1 if found is None else text.index(found) + len(found)
            fields: dict[str, Any] = {"seed": 1, "stop": stops, "include_stop_str_in_output": include}
            assert await both(server, **fields) == (expected, "stop", tokens), stops

    run(main)


def test_a_template_that_uses_all_there_is(tmp_path: Path) -> None:
    server = Server(make_model(tmp_path / "rich", chat_template=RICH))

    async def main() -> None:
        server.say_text(1, "ok")
        messages = [*YO, {"role": "assistant", "content": "a"}, *YO, {"role": "user", "content": "broken off"}]
        answer = await server.chat(messages=messages, seed=1)
        year = ids_of(str(datetime.datetime.now().year))
        yo = [4, *ids_of("yo"), EOT]
        expected = [1, *yo, 5, *ids_of("a"), EOT, *yo, *year, 5]
        assert server.engine.submitted[-1][0] == expected  # one BOS: the template's own
        assert answer["usage"]["prompt_tokens"] == len(expected)
        response = await server.post(messages=[{"role": "tool", "content": "x"}])
        error = response.json()["error"]
        assert response.status_code == 400 and "a tool message cannot come first" in error["message"]

    run(main)
