"""API keys: which requests get in, what the others are told, and that no key is kept or shown."""

from __future__ import annotations

import asyncio
import hmac
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest
from asgi import Answer, Headers, Inner, ask
from serve_harness import ANSWER, RunningServer, behaviour, environment

from atlas.api_keys import digest, load_keys, name_of, read_key_file
from atlas.config import ServeConfig, describe, load
from atlas.errors import ConfigError
from atlas.serve.access import auth
from atlas.serve.access.auth import ANONYMOUS, CLIENT, STRANGER, Auth
from atlas.serve.app import create_app
from atlas.serve.bind import bind, is_everywhere, url_of
from atlas.serve.service import Service

ONE, TWO = "sk-one", "sk-two"
YO = [{"role": "user", "content": "yo"}]


def get(headers: Headers, path: str = "/v1/models", method: str = "GET") -> tuple[Answer, list[str]]:
    """The answer, and who asked for what got through."""
    inner = Inner()
    answer = asyncio.run(ask(Auth(inner, [digest(ONE.encode()), digest(TWO.encode())]), method, path, headers))
    return answer, [scope[CLIENT] for scope in inner.scopes]


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([("Authorization", f"Bearer {ONE}")], ONE),
        ([("Authorization", f"bearer   {TWO} ")], TWO),
        ([("Authorization", f"BEARER {TWO}")], TWO),
        ([("X-API-Key", ONE)], ONE),
        # A proxy's own credentials, beside the key or with none of ours.
        ([("Authorization", "Basic dTpw"), ("x-api-key", TWO)], TWO),
        ([("Authorization", f"Bearer {TWO}"), ("x-api-key", "wrong")], TWO),
        ([("Authorization", "Bearer wrong"), ("x-api-key", ONE)], ONE),
    ],
)
def test_a_valid_key(headers: Headers, key: str) -> None:
    answer, clients = get(headers)
    assert (answer.status, clients) == (200, [digest(key.encode()).hex()])


@pytest.mark.parametrize(
    ("headers", "code", "words"),
    [
        ([], "missing_api_key", "authorization: missing"),
        ([("Authorization", "")], "invalid_api_key", "Bearer"),
        ([("Authorization", "Bearer")], "missing_api_key", "authorization: an empty key"),
        ([("Authorization", "Bearer ")], "missing_api_key", "authorization: an empty key"),
        ([("x-api-key", "")], "missing_api_key", "x-api-key: an empty key"),
        ([("Authorization", "Bearer secret-guess")], "invalid_api_key", "authorization: not a key"),
        ([("Authorization", f"Bearer {ONE}x")], "invalid_api_key", "not a key"),
        ([("Authorization", f"Bearer {ONE[:-1]}")], "invalid_api_key", "not a key"),
        ([("Authorization", f"Bearer {ONE.upper()}")], "invalid_api_key", "not a key"),
        ([("Authorization", f"Bearer {ONE} {TWO}")], "invalid_api_key", "not a key"),
        ([("Authorization", f"Basic {ONE}")], "invalid_api_key", "scheme Bearer"),
        ([("Authorization", ONE)], "invalid_api_key", "scheme Bearer"),
        ([("Authorization", f"Bearer{ONE}")], "invalid_api_key", "scheme Bearer"),
        ([("x-api-key", f"Bearer {ONE}")], "invalid_api_key", "x-api-key: not a key"),
        ([("x-api-key", b"\xff\xfe\x00")], "invalid_api_key", "x-api-key: not a key"),
        ([("Authorization", b"Bearer sk-\xc3\xb6ne")], "invalid_api_key", "not a key"),
        ([("Authorization", b"\xe2\x82\xac " + ONE.encode())], "invalid_api_key", "scheme Bearer"),
        ([("x-api-key", digest(ONE.encode()))], "invalid_api_key", "not a key"),
        ([("x-api-key", digest(ONE.encode()).hex())], "invalid_api_key", "not a key"),
        ([("Authorization", f"Bearer {ONE}"), ("Authorization", "Bearer x")], "invalid_api_key", "given 2 times"),
        ([("Authorization", "Bearer " + "a" * 100_000)], "invalid_api_key", "not a key"),
        ([("Cookie", f"x-api-key={ONE}")], "missing_api_key", "authorization: missing"),
    ],
)
def test_no_valid_key(headers: Headers, code: str, words: str) -> None:
    answer, clients = get(headers)
    assert answer.status == 401 and clients == []
    error = answer.error()
    assert (error["code"], error["type"]) == (code, "authentication_error")
    assert words in error["message"] and "Bearer KEY" in error["message"]
    assert error["param"] in ("authorization", "x-api-key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "secret-guess" not in answer.body.decode() and len(answer.body) < 500


def test_anthropics_paths_get_anthropics_errors() -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer, _ = get([], path, "POST")
        body = msgspec.json.decode(answer.body)
        assert answer.status == 401 and body["type"] == "error"
        assert body["error"]["type"] == "authentication_error" and "x-api-key" in body["error"]["message"]
    answer, _ = get([], "/v1/messagesx", "POST")
    assert set(msgspec.json.decode(answer.body)) == {"error"}


@pytest.mark.parametrize("path", ["/health", "/health/live"])
def test_probes_need_no_key(path: str) -> None:
    for method in ("GET", "HEAD"):
        answer, clients = get([], path, method)
        assert (answer.status, clients) == (200, [STRANGER])
        answer, clients = get([("x-api-key", "wrong")], path, method)
        assert (answer.status, clients) == (200, [STRANGER])
        answer, clients = get([("x-api-key", ONE)], path, method)
        assert (answer.status, clients) == (200, [digest(ONE.encode()).hex()])
    assert get([], path, "POST")[0].status == 401


class _Dead:
    """An engine that has died, and said of what."""

    state, reason = "dead", "no file /secret/place"


@pytest.mark.parametrize(
    ("keys", "headers", "told"),
    [
        ([], [], True),
        ([ONE], [], False),
        ([ONE], [("x-api-key", "wrong")], False),
        ([ONE], [("x-api-key", ONE)], True),
    ],
)
def test_health_tells_strangers_its_state_only(keys: list[str], headers: list[tuple[str, str]], told: bool) -> None:
    service = Service(ServeConfig())
    app = create_app(service, [digest(key.encode()) for key in keys], ["localhost"])

    def health() -> dict[str, str]:
        answer = asyncio.run(ask(app, "GET", "/health", [("host", "localhost"), *headers]))
        assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
        found: dict[str, str] = msgspec.json.decode(answer.body)
        return found

    service.stage = "finding the model"
    assert health() == {"status": "loading", **({"stage": "finding the model"} if told else {})}
    service.engine = _Dead()  # type: ignore[assignment]
    assert health() == {"status": "dead", **({"reason": _Dead.reason} if told else {})}


@pytest.mark.parametrize("path", ["/", "/health/", "/healthx", "//health", "/metrics", "/server_info", "/v1/../health"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_everything_else_needs_one(path: str, method: str) -> None:
    answer, clients = get([], path, method)
    assert answer.status == 401 and clients == []


def test_without_keys_everyone_gets_in() -> None:
    inner = Inner()
    answer = asyncio.run(ask(Auth(inner, []), headers=[("Authorization", "Bearer anything")]))
    assert answer.status == 200 and inner.scopes[0][CLIENT] == ANONYMOUS


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    class Watched:
        @staticmethod
        def compare_digest(left: bytes, right: bytes) -> bool:
            compared.append((left, right))
            return hmac.compare_digest(left, right)

    monkeypatch.setattr(auth, "hmac", Watched)
    keys = [digest(key.encode()) for key in (ONE, TWO)]
    for presented in (ONE, TWO, "x"):
        compared.clear()
        get([("x-api-key", presented)])
        # Digests of one length, none left out after a match.
        assert compared == [(digest(presented.encode()), key) for key in keys]


def test_no_key_is_kept_or_shown(tmp_path: Path) -> None:
    loaded = load(["--api-key", ONE, "--api-key", TWO])
    assert loaded.config.api_key == (digest(ONE.encode()), digest(TWO.encode()))
    shown = describe(loaded.origins)
    assert name_of(digest(ONE.encode())) in shown and "(flag)" in shown
    file = tmp_path / "atlas.toml"
    file.write_text(f'api_key = ["{TWO}"]')
    from_file = load(["--config", str(file)])
    assert from_file.config.api_key == (digest(TWO.encode()),)
    for text in (shown, repr(loaded), describe(from_file.origins), repr(from_file)):
        assert ONE not in text and TWO not in text


@pytest.mark.parametrize("key", ["", " ", "sk one", "sk-schlüssel", "sk-\tx", "sk-\n", "k" * 513])
def test_keys_that_cannot_be_sent(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key: .*key.*accepted: 1 to 512 printable ASCII") as error:
        load(["--api-key", ONE, "--api-key", key])
    assert "number 2" in str(error.value)
    assert not key.strip() or key not in str(error.value)
    file = tmp_path / "atlas.toml"
    file.write_text(f"api_key = [{msgspec.json.encode(key).decode()}, 3]")
    with pytest.raises(ConfigError, match="api_key: number"):
        load(["--config", str(file)])


def test_a_mistyped_flag_does_not_show_the_key() -> None:
    with pytest.raises(ConfigError, match=r"--api-kei.*did you mean --api-key\?") as error:
        load([f"--api-kei={ONE}"])
    assert ONE not in str(error.value)


def test_the_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{ONE}\r\n  {TWO}  \n")
    file.chmod(0o600)
    assert read_key_file(str(file)) == (digest(ONE.encode()), digest(TWO.encode()))
    assert not caplog.records
    third = digest(b"three")
    assert load_keys((third,), str(file)) == {digest(ONE.encode()), digest(TWO.encode()), third}
    assert load_keys((), None) == frozenset()
    with pytest.raises(ConfigError, match="--api-key-file"):
        load_keys((third,), "")
    file.chmod(0o644)
    read_key_file(str(file))
    assert "every user" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no key"),
        (b"# nothing\n\n", "holds no key"),
        (b"good\nhush bad\n", "line 2: a key with a space"),
        ("hush-ö".encode(), "line 1: a key with"),
        (b"hush\xff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_wrong_key_files(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file") as error:
        read_key_file(str(file))
    assert str(file) in str(error.value) and words in str(error.value)
    assert "hush" not in str(error.value).replace(str(file), "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_other_machines_need_a_key(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"--host.*--api-key-file.*--insecure"):
        bind(host, 0)
    for options in ({"has_keys": True}, {"insecure": True}):
        try:
            bind(host, 0, **options).close()
        except ConfigError as error:  # a machine without IPv6
            assert ":" in host and "API key" not in str(error)
            continue
        assert ("--insecure" in caplog.text) == ("insecure" in options)
        caplog.clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1", "::ffff:127.0.0.1"])
def test_this_machine_needs_none(host: str) -> None:
    try:
        bind(host, 0).close()
    except ConfigError as error:
        assert ":" in host and "API key" not in str(error)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("10.1.2.3", "http://10.1.2.3:80"),
        ("::1", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::ffff:0.0.0.0", "http://127.0.0.1:80"),
    ],
)
def test_the_url_is_one_that_clients_can_call(host: str, url: str) -> None:
    assert url_of(host, 80) == url and url_of(host, 80, secure=True) == url.replace("http", "https")
    assert is_everywhere(host) == (host in ("0.0.0.0", "::", "::ffff:0.0.0.0"))


def test_the_command_refuses_before_anything_slow() -> None:
    command = [sys.executable, "-m", "atlas.serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment(), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --host: 0.0.0.0: other machines") and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RunningServer]:
    """A server with a key in a file and another in a flag."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(ONE)
    flags = ("--api-key-file", str(folder / "keys"), "--api-key", TWO)
    server = RunningServer(folder, {"default": behaviour(ANSWER)}, checkpoint, *flags)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def test_clients_of_a_locked_server(locked: RunningServer) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0, timeout=10)

    for key in (ONE, TWO):
        answer = client(key).chat.completions.create(model="tiny", messages=YO)
        assert answer.choices[0].message.content == ANSWER
        parts = client(key).chat.completions.create(model="tiny", messages=YO, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == ANSWER
    with pytest.raises(openai.AuthenticationError, match="not a key of this server") as error:
        client("sk-three").chat.completions.create(model="tiny", messages=YO)
    assert error.value.code == "invalid_api_key"
    assert locked.health() == 200
    for path in ("/server_info", "/v1/models", "/v1/nothing"):
        assert locked.http.get(path).status_code == 401
        assert locked.http.get(path, headers={"x-api-key": ONE}).status_code in (200, 404)
    output = locked.output.read_text()
    assert "Bearer $ATLAS_API_KEY" in output and ONE not in output and TWO not in output


def test_a_large_body_without_a_key_is_not_taken(locked: RunningServer) -> None:
    answer = locked.http.post("/v1/completions", content=b" " * (8 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 401
    assert locked.health() == 200


def test_an_open_server_says_nothing_of_keys(shared: RunningServer) -> None:
    assert "ATLAS_API_KEY" not in shared.output.read_text()


def test_keys_of_one_name_are_two_clients() -> None:
    """What belongs to a key is not another's whose name is the same by chance."""
    named: dict[str, str] = {}
    for number in range(1_000_000):
        key = f"sk-{number}"
        if (other := named.setdefault(name_of(digest(key.encode())), key)) != key:
            break
    else:
        raise AssertionError("no two names are equal")
    keys = [digest(one.encode()) for one in (key, other)]
    inner = Inner()
    for one in (key, other):
        headers = [("Authorization", f"Bearer {one}")]
        assert asyncio.run(ask(Auth(inner, keys), "GET", "/v1/models", headers)).status == 200
    first, second = (scope[CLIENT] for scope in inner.scopes)
    assert first != second
