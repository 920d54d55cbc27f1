"""TLS: whether the files of `--ssl-certfile` and `--ssl-keyfile` fit, asked before anything slow happens."""

from __future__ import annotations

import ssl

from atlas.config import ServeConfig
from atlas.errors import ConfigError


def check_tls(config: ServeConfig) -> None:
    """Raises ConfigError naming the flag whose file is missing, is none, or does not fit the other."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile", "given without a certificate", fix="give --ssl-certfile too")
        return
    for flag, name in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if name is None:
            continue
        try:
            with open(name, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(flag, f"{name}: {error.strerror}", "a readable PEM file") from None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password of its own OpenSSL would ask for one at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        files = f"{config.ssl_certfile} and {config.ssl_keyfile or 'the key in it'}"
        accepted = "a certificate chain and its own private key, both PEM, the key not encrypted"
        raise ConfigError("--ssl-certfile, --ssl-keyfile", f"{files}: {error}", accepted) from None
