"""The listening socket, taken before anything else so that a conflict shows at once."""

from __future__ import annotations

import errno
import os
import socket

from atlas.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming host and port, before anything slow has happened."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("--host", f"{host}: {error.strerror}", "an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Only a listening socket keeps others away: two that are merely bound can share a port.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        fix = "stop what listens there, or choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError("--port", f"cannot listen on {where}: {os.strerror(error.errno or 0)}", fix=fix) from None
    return listener
