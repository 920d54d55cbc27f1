"""What strange web pages must not do: DNS rebinding, posts across sites, reading answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from asgi import Answer, Headers, Inner, ask, nothing_more, scope_of
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_harness import ANSWER, RunningServer, Start, behaviour
from starlette.types import Message, Receive, Scope, Send

from atlas.api_keys import digest
from atlas.errors import ConfigError
from atlas.serve.access.auth import Auth
from atlas.serve.access.guard import Guard, parse_authority, parse_origin

JSON = ("content-type", "application/json")
LOCAL = ("127.0.0.1", "127.0.0.1")
CHAT = "/v1/chat/completions"
YO = {"messages": [{"role": "user", "content": "yo"}]}


def send_to(
    headers: Headers,
    *,
    method: str = "POST",
    path: str = "/v1/x",
    scheme: str = "http",
    bound: Sequence[str] = LOCAL,
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> tuple[Answer, bool]:
    """The answer, and whether the request got through."""
    inner = Inner()
    answer = asyncio.run(ask(Guard(inner, bound, hosts, origins), method, path, headers, scheme))
    return answer, bool(inner.scopes)


# ---- Host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "localhost.",
        "localhost.:80",
        "127.0.0.1",
        "127.0.0.1:65535",
        "127.8.9.1",
        "[::1]",
        "[::1]:8000",
        "[0:0::1]",
        "[::ffff:127.0.0.1]:80",
        "localhost:",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert send_to([("Host", host), JSON]) == (Answer(200, {}, b"in"), True)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil-localhost",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "[2001:db8::1]",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "1.2.3.4:8000",
        "xlocalhost",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/v1/x"), ("OPTIONS", "/v1/x")])
def test_other_names(host: str, method: str, path: str) -> None:
    answer, through = send_to([("Host", host), JSON], method=method, path=path)
    assert answer.status == 403 and not through
    error = answer.error()
    assert (error["code"], error["type"], error["param"]) == ("host_not_allowed", "permission_error", "host")
    assert error["message"].startswith("host: ") and "--allowed-host" in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Host", "")],
        [("Host", "local host")],
        [("Host", "localhost/x")],
        [("Host", "user@localhost")],
        [("Host", "localhost:65536")],
        [("Host", "localhost:80x")],
        [("Host", "localhost:8000:8000")],
        [("Host", "::1")],
        [("Host", "[::1")],
        [("Host", "[::1]evil")],
        [("Host", "[:::1]")],
        [("Host", "[127.0.0.1]x")],
        [("Host", "localhost, evil.example")],
        [("Host", ".")],
        [("Host", ".localhost")],
        [("Host", b"localh\xc3\xb6st")],
        [("Host", b"\xff")],
        [("Host", "localhost\u0661")],
        [("Host", "a" * 300)],
        [("Host", "localhost"), ("Host", "localhost")],
        [("Host", "evil.example"), ("Host", "localhost")],
    ],
)
def test_hosts_that_are_none(headers: list[tuple[str, str | bytes]]) -> None:
    if headers and headers[0][1] == "localhost\u0661":
        headers = [("Host", "localhost:8\u0661".encode())]
    answer, through = send_to([*headers, JSON])
    assert answer.status == 400 and not through
    assert answer.error()["code"] in ("invalid_host", "repeated_header") and answer.error()["param"] == "host"
    assert "host: " in answer.error()["message"] and len(answer.body) < 400


@pytest.mark.parametrize("header", ["X-Forwarded-Host", "Forwarded", "X-Host", "X-Original-Host"])
def test_what_a_client_says_of_proxies_decides_nothing(header: str) -> None:
    assert send_to([("Host", "evil.example"), (header, "localhost"), JSON])[0].status == 403
    assert send_to([("Host", "localhost"), (header, "evil.example"), JSON])[0].status == 200


def test_the_bound_host_is_a_name() -> None:
    bound = ("GPU1.lan", "10.1.2.3")
    for host in ("gpu1.lan", "GPU1.LAN:80", "gpu1.lan.", "10.1.2.3:8000", "localhost"):
        assert send_to([("Host", host), JSON], bound=bound)[1], host
    for host in ("gpu1", "x.gpu1.lan", "10.1.2.4"):
        assert not send_to([("Host", host), JSON], bound=bound)[1], host
    assert send_to([("Host", "[2001:DB8::0:1]:80"), JSON], bound=("2001:db8::1", "2001:db8::1"))[1]


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_who_listens_everywhere_has_every_address_but_not_every_name(bound: str) -> None:
    for host in ("10.0.0.1:8000", "[2001:db8::1]", "localhost", "192.168.0.7"):
        assert send_to([("Host", host), JSON], bound=(bound, bound))[1], host
    for host in ("gpu1.lan", "evil.example", "10.0.0.1.evil.example"):
        assert send_to([("Host", host), JSON], bound=(bound, bound))[0].status == 403, host


def test_allowed_hosts() -> None:
    hosts = ["API.example.com", "*.lan", "2001:db8::7", "10.0.0.9", "compose_name"]
    for host in ("api.example.com:443", "a.lan", "a.b.LAN:80", "[2001:db8::7]", "10.0.0.9:1", "compose_name:8000"):
        assert send_to([("Host", host), JSON], hosts=hosts)[1], host
    for host in ("example.com", "x.api.example.com", "lan", "evillan", "a.lan.evil", "[2001:db8::8]"):
        assert send_to([("Host", host), JSON], hosts=hosts)[0].status == 403, host
    assert send_to([("Host", "anything.example"), JSON], hosts=["*"])[1]
    assert send_to([JSON], hosts=["*"])[0].status == 400


@pytest.mark.parametrize(
    "host", ["", "http://a.example", "a.example:80", "a.example/", "a b", "*x", "*.", "**", "[::1]:80", "a.example:"]
)
def test_allowed_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-host: .*accepted: ") as error:
        Guard(Inner(), LOCAL, [host])
    assert repr(host) in str(error.value)


def test_authorities() -> None:
    assert parse_authority("A.example.:080") == ("a.example", 80)
    assert parse_authority("[::FFFF:1.2.3.4]:1") == ("1.2.3.4", 1)
    assert parse_authority("[FE80::0:1]") == ("fe80::1", None)
    for text in ("a.example\n", "a.example:80\n", "[::1]\n", "", ":", ":80", "[]", "a:99999"):
        assert parse_authority(text) is None, text
    assert parse_origin("HTTPS://A.example:443") == ("https", ("a.example", None))
    assert parse_origin("http://a.example:443") == ("http", ("a.example", 443))
    for text in ("null", "", "a.example", "http://", "http://a.example/", "http://a.example\n", "://a", "http:a"):
        assert parse_origin(text) is None, text


# ---- Origin --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://evil.example:8000",
        "null",
        "NULL",
        "",
        "http://localhost",
        "http://localhost:3000",
        "http://localhost:8000.evil.example",
        "http://localhost:8000@evil.example",
        "http://127.0.0.1:8000",
        "file://",
        "chrome-extension://abcdef",
        "ftp://localhost:8000",
        "http://localhost:8000/",
        "localhost:8000",
        "*",
        "http://localhost:8000 http://evil.example",
        "http://localhost:8000, http://evil.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_strange_pages(origin: str, method: str) -> None:
    for origins in ([], ["https://app.example"]):
        headers = [("Host", "localhost:8000"), ("Origin", origin), JSON]
        answer, through = send_to(headers, method=method, origins=origins)
        assert answer.status == 403 and not through
        error = answer.error()
        assert (error["code"], error["param"]) == ("origin_not_allowed", "origin")
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "origin", "scheme"),
    [
        ("localhost:8000", "http://localhost:8000", "http"),
        ("LOCALHOST:8000", "http://localhost:8000", "http"),
        ("localhost", "http://localhost", "http"),
        ("localhost:80", "http://localhost", "http"),
        ("localhost", "http://localhost:80", "http"),
        ("[::1]:8000", "http://[::1]:8000", "http"),
        ("localhost", "https://localhost", "https"),
        ("localhost:443", "https://localhost", "https"),
        # A proxy that ended TLS and left the Host as it was.
        ("localhost", "https://localhost", "http"),
    ],
)
def test_the_servers_own_pages(host: str, origin: str, scheme: str) -> None:
    assert send_to([("Host", host), ("Origin", origin), JSON], scheme=scheme)[1]


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", "http://localhost"),
        ("localhost:443", "https://localhost:80"),
        ("localhost:8443", "https://localhost"),
    ],
)
def test_pages_of_another_port_or_less_safe(host: str, origin: str) -> None:
    assert send_to([("Host", host), ("Origin", origin), JSON], scheme="https")[0].status == 403


def test_forwarded_headers_make_no_page_ours() -> None:
    headers = [("Host", "localhost"), ("Origin", "https://evil.example"), ("X-Forwarded-Host", "evil.example"), JSON]
    assert send_to([*headers, ("X-Forwarded-Proto", "https")])[0].status == 403


def test_a_repeated_origin() -> None:
    headers = [("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "https://evil.example"), JSON]
    assert send_to(headers)[0].error()["code"] == "repeated_header"


# ---- CORS ----------------------------------------------------------------------------------------

APP = "https://app.example"
ASKS = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization,content-type")]


def test_cors_is_off_by_default() -> None:
    answer, _ = send_to([("Host", "localhost"), ("Origin", "http://localhost"), JSON])
    assert answer.status == 200 and not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_page() -> None:
    headers = [("Host", "localhost"), ("Origin", APP)]
    preflight, through = send_to([*headers, *ASKS], method="OPTIONS", origins=["HTTPS://App.example:443"])
    assert preflight.status == 200 and not through  # asked without a key, so never shown to the inner layers
    assert preflight.headers["access-control-allow-origin"] == APP
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    answer, through = send_to([*headers, JSON], origins=[APP])
    assert through and answer.headers["access-control-allow-origin"] == APP
    assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
    assert "Origin" in answer.headers["vary"]
    # It may read what it did wrong, too.
    wrong, through = send_to([*headers, ("content-type", "text/plain")], origins=[APP])
    assert wrong.status == 415 and not through and wrong.headers["access-control-allow-origin"] == APP
    forbidden, _ = send_to([*headers, ("Access-Control-Request-Method", "PUT")], method="OPTIONS", origins=[APP])
    assert forbidden.status == 400


@pytest.mark.parametrize("origin", ["vscode-webview://abc", "app://obsidian.md", "http://[::1]:3000"])
def test_origins_of_other_kinds(origin: str) -> None:
    answer, through = send_to([("Host", "localhost"), ("Origin", origin), JSON], origins=[origin])
    assert through and answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "file://"])
def test_every_page(origin: str) -> None:
    headers = [("Host", "localhost"), ("Origin", origin)]
    answer, through = send_to([*headers, JSON], origins=["*"])
    assert through and answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    # No name of this server's: still rebinding.
    assert send_to([("Host", "evil.example"), ("Origin", origin), JSON], origins=["*"])[0].status == 403


@pytest.mark.parametrize("origin", ["", "null", "app.example", "https://app.example/", "https://*.example", "https://"])
def test_origins_that_are_none(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin") as error:
        Guard(Inner(), LOCAL, (), [origin])
    assert repr(origin) in str(error.value)


# ---- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonx",
        "application/json, text/plain",
        "text/plain; application/json",
        "application/x-ndjson",
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "post"])
def test_bodies_that_a_form_can_send(kind: str | None, method: str) -> None:
    headers = [("Host", "localhost")] + ([] if kind is None else [("Content-Type", kind)])
    for announced in (("Content-Length", "2"), ("Transfer-Encoding", "chunked")):
        answer, through = send_to([*headers, announced], method=method)
        assert answer.status == 415 and not through
        assert answer.error()["code"] == "unsupported_media_type" and "application/json" in answer.error()["message"]


@pytest.mark.parametrize("length", [[], [("Content-Length", "0")]])
def test_without_a_body_nothing_is_declared(length: list[tuple[str, str]]) -> None:
    """OpenAI's client for Node sends no Content-Type, then. Whoever declares something has to declare JSON."""
    headers = [("Host", "localhost"), *length]
    assert send_to(headers, method="POST")[1]
    answer, through = send_to([*headers, ("Content-Type", "text/plain")], method="POST")
    assert answer.status == 415 and not through
    strange, through = send_to([*headers, ("Origin", "https://evil.example")], method="POST")
    assert strange.status == 403 and not through


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_json(kind: str) -> None:
    assert send_to([("Host", "localhost"), ("content-type", kind)])[1]


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
def test_no_body_no_type(method: str) -> None:
    assert send_to([("Host", "localhost")], method=method)[1]


def test_two_types_of_one_body() -> None:
    headers = [("Host", "localhost"), JSON, ("content-type", "text/plain")]
    answer, through = send_to(headers)
    assert answer.error()["code"] == "repeated_header" and not through


def test_anthropics_paths_get_anthropics_errors() -> None:
    answer, _ = send_to([("Host", "evil.example"), JSON], path="/v1/messages")
    body = msgspec.json.decode(answer.body)
    assert (body["type"], body["error"]["type"]) == ("error", "permission_error")
    answer, _ = send_to([("Host", "localhost"), ("Content-Length", "2")], path="/v1/messages")
    assert msgspec.json.decode(answer.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("origins", [[], [APP]])
def test_a_stream_passes_piece_by_piece(origins: list[str]) -> None:
    """No layer may hold an event back until the next one is there."""

    async def main() -> None:
        go, seen = asyncio.Event(), asyncio.Queue[Message]()

        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await go.wait()
            await send({"type": "http.response.body", "body": b"last"})

        headers = [("Host", "localhost"), JSON] + [("Origin", origin) for origin in origins]
        guard = Guard(inner, LOCAL, (), origins)
        task = asyncio.create_task(guard(scope_of("POST", "/v1/x", headers), nothing_more(), seen.put))
        async with asyncio.timeout(2):
            assert (await seen.get())["type"] == "http.response.start"
            assert (await seen.get())["body"] == b"first"
            assert not task.done()
            go.set()
            assert (await seen.get())["body"] == b"last"
            await task

    asyncio.run(main())


HEADER = st.one_of(
    st.binary(max_size=40),
    st.text("localhst127.0[]:@/%#?\\\t -", max_size=24).map(str.encode),
    st.sampled_from([b"localhost", b"http://localhost", b"application/json", b"Bearer sk-one", b"null", b""]),
)


@settings(max_examples=400, deadline=None)
@given(host=HEADER, origin=st.none() | HEADER, kind=HEADER, key=HEADER, path=st.sampled_from([CHAT, "/v1/messages"]))
def test_any_bytes_get_an_answer(host: bytes, origin: bytes | None, kind: bytes, key: bytes, path: str) -> None:
    inner = Inner()
    app = Guard(Auth(inner, [digest(b"sk-one")]), LOCAL)
    headers = [("host", host), ("content-type", kind), ("authorization", key)]
    headers += [] if origin is None else [("origin", origin)]
    answer = asyncio.run(ask(app, "POST", path, headers))
    assert answer.status in (200, 400, 401, 403, 415)
    if answer.status == 200:
        assert key.split() == [b"Bearer", b"sk-one"]
        assert urlsplit("//" + host.decode()).hostname in ("localhost", "127.0.0.1", "::1") or host.startswith(b"127.")
        assert origin is None or urlsplit(origin.decode()).hostname == urlsplit("//" + host.decode()).hostname
        assert kind.lower().partition(b";")[0].strip() == b"application/json"
    else:
        assert not inner.scopes and msgspec.json.decode(answer.body)["error"]["message"]


# ---- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def for_pages(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("pages")
    flags = ("--api-key", "sk-one", "--cors-origin", APP, "--allowed-host", "api.example")
    server = RunningServer(folder, {"default": behaviour(ANSWER)}, checkpoint, *flags)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def test_a_page_uses_a_server_that_wants_a_key(for_pages: RunningServer) -> None:
    preflight = for_pages.http.options(CHAT, headers=[("origin", APP), *ASKS])
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == APP
    headers = {"origin": APP, "authorization": "Bearer sk-one", "host": "api.example"}
    answer = for_pages.http.post(CHAT, json=YO, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert answer.headers["access-control-allow-origin"] == APP
    no_key = for_pages.http.post(CHAT, json=YO, headers={"origin": APP})
    assert no_key.status_code == 401 and no_key.headers["access-control-allow-origin"] == APP
    strange = {"origin": "https://evil.example", "authorization": "Bearer sk-one"}
    assert for_pages.http.post(CHAT, json=YO, headers=strange).status_code == 403
    assert for_pages.http.options(CHAT, headers=[("origin", "https://evil.example"), *ASKS]).status_code == 403


def test_rebinding_and_forms_on_the_default_server(shared: RunningServer) -> None:
    def submitted() -> int:
        return len(shared.events("submit"))

    before = submitted()
    for headers in ({"host": f"evil.example:{shared.port}"}, {"origin": "https://evil.example"}, {"origin": "null"}):
        assert shared.http.post(CHAT, json=YO, headers=headers).status_code == 403
        assert shared.http.get("/v1/models", headers=headers).status_code == 403
    form = shared.http.post(CHAT, content=msgspec.json.encode(YO), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert submitted() == before
    # uvicorn would take these for the connection's own.
    own = {"origin": shared.url, "x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.1"}
    assert shared.http.post(CHAT, json=YO, headers=own).status_code == 200


def test_a_wrong_setting_is_told_at_start(start: Start) -> None:
    server = start("--cors-origin", "https://app.example/path")
    assert server.process.wait(10) == 2
    assert "--cors-origin" in server.output.read_text() and "Traceback" not in server.output.read_text()
    assert server.events() == []
