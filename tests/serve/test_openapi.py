"""The OpenAPI document is valid, complete and true, and /docs shows all of it."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
import schemathesis
from serve_harness import RunningServer, Start

from atlas.serve.access.auth import OPEN_PATHS
from atlas.serve.reference import docs_page
from atlas.serve.reference.openapi import document
from atlas.serve.reference.tables import say
from atlas.serve.routes import ENDPOINTS
from atlas.text.messages import TextPart

DOCUMENT = document(ENDPOINTS)
YO = [{"role": "user", "content": "yo"}]


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def closed(found: dict[str, Any]) -> dict[str, Any]:
    """The document with objects of answers that may have no other fields than theirs."""
    found = json.loads(json.dumps(found))
    read = set()
    todo = [
        ref for methods in found["paths"].values() for op in methods.values() for ref in refs(op.get("requestBody"))
    ]
    while todo:
        if (ref := todo.pop()) not in read:
            read.add(ref)
            todo += refs(found["components"]["schemas"][ref.rsplit("/", 1)[1]])
    for name, component in found["components"]["schemas"].items():
        if f"#/components/schemas/{name}" not in read and component.get("type") == "object":
            component.setdefault("additionalProperties", False)
    return found


CLOSED = closed(DOCUMENT)


def conforms(method: str, path: str, status: int, media: str, value: Any) -> None:
    """Raises jsonschema.ValidationError unless an answer is what the document says."""
    response = CLOSED["paths"][path][method]["responses"][str(status)]
    if "$ref" in response:
        response = CLOSED["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    schema = {**response["content"][media]["schema"], "components": CLOSED["components"]}
    if media == "text/event-stream":
        jsonschema.validate({"data": json.dumps(value)}, schema, cls=jsonschema.Draft202012Validator)
        (data,) = [one for one in schema["properties"]["data"]["anyOf"] if "contentSchema" in one]
        schema = {**data["contentSchema"], "components": CLOSED["components"]}
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_the_document_is_valid(keyed: bool, strict: bool) -> None:
    found = document(ENDPOINTS, keyed=keyed, strict=strict)
    schemathesis.openapi.from_dict(found).validate()
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for ref in refs(found):
        value: Any = found
        for step in ref.removeprefix("#/").split("/"):
            value = value[step]
    ids = [op["operationId"] for methods in found["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids)) == len(ENDPOINTS)


def test_the_check_of_validity_can_fail() -> None:
    broken = json.loads(json.dumps(DOCUMENT))
    broken["paths"]["/health"]["get"]["responses"]["200"] = {"content": 3}
    with pytest.raises(Exception, match="description"):
        schemathesis.openapi.from_dict(broken).validate()


def test_what_needs_a_key_says_so() -> None:
    found = document(ENDPOINTS, keyed=True)
    assert set(found["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    for path, methods in found["paths"].items():
        for operation in methods.values():
            is_open = path in OPEN_PATHS
            assert ("security" in operation, "401" in operation["responses"]) == (not is_open, not is_open), path
    assert "securitySchemes" not in DOCUMENT["components"]
    assert "401" not in DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]


def test_strict_bodies() -> None:
    schemas = document(ENDPOINTS, strict=True)["components"]["schemas"]
    for name in ("ChatRequest", "StreamOptions", "ChatMessage"):
        assert schemas[name]["additionalProperties"] is False
        assert "additionalProperties" not in DOCUMENT["components"]["schemas"][name]


def test_what_the_server_answers_is_what_it_says(shared: RunningServer) -> None:
    for path in ("/health", "/health/live", "/version", "/server_info", "/v1/models", "/openapi.json"):
        conforms("get", path, 200, "application/json", shared.http.get(path).json())
    conforms("get", "/v1/models/{model}", 200, "application/json", shared.http.get("/v1/models/tiny").json())
    conforms("get", "/v1/models/{model}", 404, "application/json", shared.http.get("/v1/models/no").json())
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": YO}),
        ("/v1/chat/completions", {"messages": YO, "n": 2, "seed": 60}),
        ("/v1/completions", {"prompt": ["a", [65]], "echo": True}),
    ]
    for path, body in bodies:
        conforms("post", path, 200, "application/json", shared.http.post(path, json=body).json())
        for options in (None, {"include_usage": True}):
            stream = shared.http.post(path, json={**body, "stream": True, "stream_options": options})
            events = re.findall(r"data: (\{.*)", stream.text)
            assert len(events) > 2
            for event in events:
                conforms("post", path, 200, "text/event-stream", json.loads(event))
    for path in ("/v1/chat/completions", "/v1/completions"):
        for content, status in ((b"{}", 400), (b"[", 400), (b'{"model": "x", "messages": [], "prompt": "a"}', 404)):
            answer = shared.http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == status
            conforms("post", path, status, "application/json", answer.json())
        conforms("post", path, 415, "application/json", shared.http.post(path, content=b"{}").json())


def test_what_a_body_may_leave_out() -> None:
    """The tag of a struct that is the only one at its place may be left out, and then it is not required."""
    schema = {"$ref": "#/components/schemas/TextPart", "components": DOCUMENT["components"]}
    for part, valid in (
        ({"text": "a"}, True),
        ({"text": "a", "type": "text"}, True),
        ({"text": "a", "type": "x"}, False),
    ):
        found = jsonschema.Draft202012Validator(schema).is_valid(part)
        assert found is valid
        try:
            msgspec.convert(part, TextPart)
        except msgspec.ValidationError:
            assert not valid


def test_all_methods_of_a_path_are_allowed_there(shared: RunningServer) -> None:
    for path, methods in DOCUMENT["paths"].items():
        answer = shared.http.request("TRACE", re.sub(r"\{\w+\}", "x", path))
        assert answer.status_code == 405
        expected = {method.upper() for method in methods} | ({"HEAD"} if "get" in methods else set())
        assert set(answer.headers["allow"].split(", ")) == expected


def test_the_server_serves_the_document(shared: RunningServer) -> None:
    name = shared.http.get("/v1/models").json()["data"][0]["id"]
    assert shared.http.get("/openapi.json").json() == json.loads(json.dumps(document(ENDPOINTS, model=name)))


def test_with_keys_the_document_needs_one_too(start: Start) -> None:
    server = start("--api-key", "k" * 32, "--strict-fields").wait_ready()
    for path in ("/openapi.json", "/docs"):
        assert server.http.get(path).status_code == 401
        answer = server.http.get(path, headers={"authorization": "Bearer " + "k" * 32})
        assert answer.status_code == 200
        assert ("bearer" if path == "/openapi.json" else "x-api-key") in answer.text


class Page(html.parser.HTMLParser):
    """What a browser would see: all tags, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "action"):
                self.links.append(value or "")
            elif name == "id":
                self.ids.add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_needs_nothing_else(shared: RunningServer) -> None:
    answer = shared.http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = Page()
    page.feed(answer.text)
    assert not page.tags & {"script", "link", "img", "iframe", "form"} and "url(" not in answer.text
    for link in page.links:
        assert link == "openapi.json" or (link[0] == "#" and link[1:] in page.ids), link
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert path in page.text and operation["summary"] in page.text
    for name, component in DOCUMENT["components"]["schemas"].items():
        assert name in page.ids
        for field in component.get("properties", {}).values():
            assert field.get("description", "") in page.text


def test_nothing_in_the_page_is_taken_for_html() -> None:
    hostile = json.loads(json.dumps(DOCUMENT).replace("The served model's name.", "<script>alert(1)</script>"))
    assert "<script>" not in docs_page.page(hostile, "http://<script>")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 0}, "integer from 0"),
        ({"type": "number", "minimum": 0.01, "maximum": 2.0}, "number from 0.01 to 2"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "string or list of strings"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/X"}, "minItems": 1}, "list of X, at least 1"),
        ({"enum": ["a", "b", None]}, '"a" or "b"'),
        ({"enum": [None]}, "null"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({}, "any value"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert say(schema) == words
