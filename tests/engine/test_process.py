"""The engine's end of the socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from atlas.engine import messages
from atlas.engine.__main__ import Channel
from atlas.engine.messages import Abort, SamplingParams, StepOutput, Submit


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def send_all(peer: socket.socket, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=peer.sendall, args=(data,))
    thread.start()
    return thread


def test_everything_that_has_arrived_is_read_between_two_steps(pair: tuple[Channel, socket.socket]) -> None:
    """An abort behind a megabyte of prompts must not wait for as many steps as the socket has fills."""
    channel, peer = pair
    prompts = [Submit(f"r{i}", [7] * 4000, SamplingParams(max_tokens=1)) for i in range(400)]
    sender = send_all(peer, b"".join(map(messages.encode, [*prompts, Abort("r0")])))
    received: list[messages.ToEngine] = []
    calls = 0
    while not received or received[-1] != Abort("r0"):
        received += channel.receive(wait=True)
        calls += 1
        assert calls < 60, f"{len(received)} messages after {calls} reads"
    sender.join(5)
    assert received == [*prompts, Abort("r0")]


def test_messages_cut_anywhere_arrive_whole(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    data = messages.encode(Abort("a")) + messages.encode(Abort("b"))
    received: list[messages.ToEngine] = []
    for byte in data:
        peer.sendall(bytes([byte]))
        received += channel.receive(wait=False)
    assert received == [Abort("a"), Abort("b")]


def test_a_peer_that_does_not_read_blocks_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    output = StepOutput([messages.SequenceOutput("r", [1] * 1000)])
    for _ in range(2000):
        channel.send(output)
    peer.sendall(messages.encode(Abort("x")))
    assert channel.receive(wait=True) == [Abort("x")]
    expected, got = messages.encode(output) * 2000, bytearray()
    while len(got) < len(expected):
        channel.receive(wait=False)
        got += peer.recv(1 << 20)
    assert got == expected


def test_a_peer_that_is_gone_ends_the_wait(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.close()
    assert channel.receive(wait=True) == [] and channel.closed


def test_a_message_of_absurd_length_is_refused_before_it_is_read(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(messages.LENGTH.pack(1 << 31))
    with pytest.raises(ValueError, match="a message of 2147483648 bytes; accepted: up to"):
        channel.receive(wait=True)
