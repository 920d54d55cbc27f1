"""HTTPS: a server with a certificate, and files that are none."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from serve_harness import ANSWER, Start, eventually

from atlas.config import ServeConfig
from atlas.errors import ConfigError
from atlas.serve.access.tls import check_tls


class Files:
    """A certificate of this machine, its key, and another's key."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        mine, others = self.authority.issue_cert("localhost", "127.0.0.1"), self.authority.issue_cert("other.example")
        self.cert, self.key, self.both, self.other_key, self.locked, self.text = (
            str(folder / name) for name in ("cert.pem", "key.pem", "both.pem", "other.pem", "locked.pem", "text.pem")
        )
        mine.cert_chain_pems[0].write_to_path(self.cert)
        mine.private_key_pem.write_to_path(self.key)
        mine.private_key_and_cert_chain_pem.write_to_path(self.both)
        others.private_key_pem.write_to_path(self.other_key)
        Path(self.text).write_text("not PEM")
        key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
        form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
        encrypted = key.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"a password"))
        Path(self.locked).write_bytes(encrypted)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def test_https(start: Start, files: Files) -> None:
    server = start("--ssl-certfile", files.cert, "--ssl-keyfile", files.key)
    eventually(lambda: "curl" in server.output.read_text(), 20)
    assert f"at https://127.0.0.1:{server.port}/v1" in server.output.read_text()
    context = ssl.create_default_context()
    files.authority.configure_trust(context)
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context) as http:
        body = {"messages": [{"role": "user", "content": "yo"}]}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        own = {"origin": f"https://127.0.0.1:{server.port}"}
        assert http.post("/v1/chat/completions", json=body, headers=own).status_code == 200
        unsafe = {"origin": f"http://127.0.0.1:{server.port}"}
        assert http.post("/v1/chat/completions", json=body, headers=unsafe).status_code == 403
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=5)


def test_plain_http_to_it_is_ended_and_harms_nobody(start: Start, files: Files) -> None:
    server = start("--ssl-certfile", files.both)
    context = ssl.create_default_context()
    files.authority.configure_trust(context)
    with httpx.Client(base_url=f"https://localhost:{server.port}", verify=context) as client:

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        eventually(ready, 20)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert plain.recv(1000)[:4] != b"HTTP"  # an alert of TLS, or nothing: there is nobody to say more
                assert plain.recv(1000) == b""
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.output.read_text()


def test_files_that_fit(files: Files) -> None:
    check_tls(ServeConfig())
    check_tls(ServeConfig(ssl_certfile=files.cert, ssl_keyfile=files.key))
    check_tls(ServeConfig(ssl_certfile=files.both))


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        (None, "key", ["--ssl-keyfile", "--ssl-certfile too"]),
        ("cert", None, ["--ssl-certfile", "the key in it"]),
        ("cert", "other_key", ["mismatch"]),
        ("text", "key", ["text.pem"]),
        ("cert", "text", ["text.pem"]),
        ("key", "cert", ["key.pem and "]),
        ("/no/such.pem", "key", ["--ssl-certfile: /no/such.pem: No such file"]),
        ("cert", "/no/such.pem", ["--ssl-keyfile: /no/such.pem: No such file"]),
        ("cert", "locked", ["locked.pem", "not encrypted"]),
    ],
)
def test_files_that_do_not(files: Files, cert: str | None, key: str | None, words: list[str]) -> None:
    def path(name: str | None) -> str | None:
        return getattr(files, name, name) if name else None

    with pytest.raises(ConfigError) as error:
        check_tls(ServeConfig(ssl_certfile=path(cert), ssl_keyfile=path(key)))
    for word in words:
        assert word in str(error.value)


def test_a_wrong_file_is_told_at_start(start: Start, files: Files) -> None:
    server = start("--ssl-certfile", files.cert, "--ssl-keyfile", files.other_key)
    assert server.process.wait(10) == 2
    assert "--ssl-keyfile" in server.output.read_text() and "Traceback" not in server.output.read_text()
