"""The examples at /docs and /openapi.json are what a server answers with 200, as they stand there."""

from __future__ import annotations

import html
import re
import shlex
from typing import Any

import httpx
import pytest
from serve_harness import RunningServer, Start

from atlas.serve.routes import ENDPOINTS

KEY = "k" * 32


def commands(page: str) -> dict[str, list[str]]:
    """The words of each endpoint's command, as a shell makes them of what a reader copies."""
    found = {}
    for name, text in re.findall(r'<details id="(\w+)">.*?<h4>Example</h4>\s*<pre>(.*?)</pre>', page, re.DOTALL):
        found[name] = shlex.split(html.unescape(text))
    return found


def asked(words: list[str], **variables: str) -> httpx.Response:
    """What curl would do."""
    words = [re.sub(r"\$([A-Z_]+)", lambda name: variables[name[1]], word) for word in words]
    assert words.pop(0) == "curl"
    method, headers, body, url = "", {}, None, ""
    while words:
        match words.pop(0):
            case "-X":
                method = words.pop(0)
            case "-H":
                name, value = words.pop(0).split(": ")
                headers[name] = value
            case "-d":
                body = words.pop(0)
            case other:
                url = other
    return httpx.request(method or ("GET" if body is None else "POST"), url, headers=headers, content=body)


@pytest.mark.parametrize("flags", [(), ("--api-key", KEY, "--strict-fields", "--served-model-name", "it's a/model")])
def test_every_example_is_answered(start: Start, flags: tuple[str, ...]) -> None:
    server: RunningServer = start(*flags).wait_ready()
    headers = {"Authorization": f"Bearer {KEY}"} if flags else {}
    found = commands(server.http.get("/docs", headers=headers).text)
    document: dict[str, Any] = server.http.get("/openapi.json", headers=headers).json()
    operations = {one["operationId"]: one for methods in document["paths"].values() for one in methods.values()}
    assert found.keys() == operations.keys() and len(found) == len(ENDPOINTS)
    for name, words in found.items():
        content = operations[name].get("requestBody", {}).get("content", {}).get("application/json")
        assert (content is not None) == ("-d" in words) and (content is None or content["example"])
        background = httpx.post(
            f"{server.url}/v1/responses", json={"input": "x", "background": True}, headers=headers
        ).json()
        answer = asked(words, ATLAS_API_KEY=KEY, RESPONSE_ID=background["id"])
        assert answer.status_code == 200, (words, answer.text)
        assert "x-atlas-ignored-fields" not in answer.headers
