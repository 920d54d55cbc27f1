"""The listening socket, taken before anything else so that a conflict shows at once."""

from __future__ import annotations

import errno
import logging
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from atlas.errors import ConfigError

logger = logging.getLogger("atlas.serve")

_FIXES = {
    errno.EADDRINUSE: ("--port", "stop what listens there, or choose another with --port"),
    errno.EADDRNOTAVAIL: ("--host", "give an address of this machine, or 0.0.0.0 for all of them"),
    errno.EACCES: ("--port", "ports below 1024 are the system's: choose another, with a proxy in front"),
}
"""Which setting it was that the system refused, and what to do."""


def parse_address(name: str) -> IPv4Address | IPv6Address | None:
    """An IP address; an IPv4 address inside an IPv6 one is the IPv4 address."""
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def is_everywhere(host: str) -> bool:
    """Whether to listen there is to listen on every address of this machine (0.0.0.0, ::)."""
    address = parse_address(host)
    return address is not None and address.is_unspecified


def url_of(host: str, port: int, *, secure: bool = False) -> str:
    """How a client on this machine reaches who listens there; loopback for 0.0.0.0 and ::, which nobody can call."""
    if is_everywhere(host):
        host = "[::1]" if host == "::" else "127.0.0.1"
    elif ":" in host:
        host = f"[{host}]"
    return f"{'https' if secure else 'http'}://{host}:{port}"


def bind(host: str, port: int, *, has_keys: bool = False, insecure: bool = False) -> socket.socket:
    """A listening socket.

    Args:
        has_keys: requests need an API key. Without, only this machine is let in unless `insecure`.

    Raises:
        ConfigError: naming host and port, before anything slow has happened.
    """
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("--host", f"{host}: {error.strerror}", "an address of this machine") from None
    ip = parse_address(str(address[0]))
    if not has_keys and not (ip is not None and ip.is_loopback):
        if not insecure:
            found = f"{host}: other machines can reach it, and there is no API key"
            fix = "name one with --api-key-file or --api-key, listen on 127.0.0.1, or say --insecure"
            raise ConfigError("--host", found, fix=fix)
        logger.warning("--insecure: whoever reaches %s may use this server", where)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Only a listening socket keeps others away: two that are merely bound can share a port.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        flag, fix = _FIXES.get(error.errno or 0, ("--port", ""))
        raise ConfigError(flag, f"cannot listen on {where}: {os.strerror(error.errno or 0)}", fix=fix) from None
    return listener
