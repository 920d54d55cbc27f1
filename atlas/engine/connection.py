"""The API process's end of the socket: messages of the engine, each handed over as soon as it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from atlas.engine import messages


class EngineConnection(asyncio.Protocol):
    """A protocol and no stream: every token passes here, and a stream's reader is a task more that wakes up for it."""

    def __init__(
        self,
        opened: Callable[[EngineConnection], None],
        receive: Callable[[messages.FromEngine], None],
        ended: Callable[[str | None], None],
    ) -> None:
        """Called when it stands, with each message, and when it is over: with the engine's fault, or None if it closed
        the connection."""
        self._opened, self._receive, self._ended = opened, receive, ended
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()  # of a message that is not whole
        self._needed = 0  # so many bytes make it whole, or tell how many do

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(None)

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._received += data[self._read(data) :]
            return
        self._received += data
        if len(self._received) >= self._needed:
            del self._received[: self._read(self._received)]

    def write(self, frame: bytes) -> None:
        """Send, now or as soon as the engine reads. After the end nothing happens."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """End it. Nothing more is called."""
        self._ended = _nothing
        if self._transport is not None:
            self._transport.close()

    def _read(self, data: bytes | bytearray) -> int:
        """Hand over all messages that are whole. Returns where the next one begins."""
        begin, header = 0, messages.LENGTH.size
        with memoryview(data) as view:
            while len(data) - begin >= header:
                (length,) = messages.LENGTH.unpack_from(view, begin)
                if length > messages.MAX_MESSAGE_BYTES:
                    self._fail(f"broken protocol: a message of {length} bytes")
                    return len(data)
                end = begin + header + length
                self._needed = end - begin
                if end > len(data):
                    return begin
                with view[begin + header : end] as body:
                    try:
                        message = messages.decode_from_engine(body)
                    except msgspec.MsgspecError as error:
                        self._fail(f"broken protocol: {error}")
                        return len(data)
                self._receive(message)
                begin = end
        self._needed = header
        return begin

    def _fail(self, fault: str | None) -> None:
        ended = self._ended
        self.close()
        ended(fault)


def _nothing(_: str | None) -> None:
    return
