"""API keys. Only their SHA-256 digests are kept, from the moment a flag or a file has been read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from atlas.errors import ConfigError

KEY_ACCEPTED = "1 to 512 printable ASCII characters without spaces, such as the output of `openssl rand -hex 32`"

logger = logging.getLogger("atlas.serve")


def digest(key: bytes) -> bytes:
    """What is kept of a key, and what a presented one is compared as."""
    return hashlib.sha256(key).digest()


def name_of(found: bytes) -> str:
    """How a key may be shown: enough to tell keys apart, nothing that helps to guess one."""
    return "key-" + found.hex()[:8]


def digest_keys(raw: object) -> tuple[bytes, ...]:
    """The digests of one or several keys. Raises ValueError, which never quotes a key."""
    keys = [raw] if isinstance(raw, str) else raw
    if not isinstance(keys, Sequence):
        raise ValueError(f"a {type(raw).__name__}")
    found = []
    for position, key in enumerate(keys):
        if not isinstance(key, str):
            raise ValueError(f"number {position + 1} is a {type(key).__name__}")
        if problem := _problem(key):
            raise ValueError(problem if len(keys) == 1 else f"number {position + 1}: {problem}")
        found.append(digest(key.encode()))
    return tuple(found)


def read_key_file(name: str) -> tuple[bytes, ...]:
    """The digests of a file's keys: one a line; empty lines and lines that begin with `#` do not count.

    Raises:
        ConfigError: naming file and line.
    """
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError("--api-key-file", f"{path}: {error.strerror}", "a readable file, one key a line") from None
    except UnicodeDecodeError:
        raise ConfigError("--api-key-file", f"{path}: not UTF-8", f"one key a line: {KEY_ACCEPTED}") from None
    found = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if problem := _problem(key):
            raise ConfigError(f"--api-key-file: {path}, line {number}", problem, KEY_ACCEPTED)
        found.append(digest(key.encode()))
    if not found:
        # An empty file must not open the server to everyone.
        raise ConfigError("--api-key-file", f"{path}: holds no key", f"one key a line: {KEY_ACCEPTED}")
    if mode & 0o007:
        logger.warning("--api-key-file: %s can be read by every user of this machine; chmod o= keeps them out", path)
    return tuple(found)


def load_keys(given: Iterable[bytes], file: str | None) -> frozenset[bytes]:
    """All digests, of `--api-key` and `--api-key-file`. Empty: no key is asked for. Raises ConfigError."""
    return frozenset(given) | frozenset(read_key_file(file) if file is not None else ())


def _problem(key: str) -> str | None:
    if not key:
        return "an empty key"
    if len(key) > 512:
        return f"a key of {len(key)} characters"
    if not all("!" <= character <= "~" for character in key):
        return "a key with a space, a control character or a character outside ASCII"
    return None
