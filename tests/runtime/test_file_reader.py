"""The core's threads that read files into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.errors import DeviceError
from atlas.runtime.core import extension


@pytest.fixture
def reader() -> Iterator[Any]:
    reader = extension().FileReader(3)
    yield reader
    reader.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """More than a chunk of 1 MB of random bytes."""
    data = np.random.default_rng().integers(0, 256, 5_000_011, np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd, data
    os.close(fd)


def test_parts_go_where_they_belong(reader: Any, file: tuple[int, np.ndarray[Any, Any]]) -> None:
    """Pieces of any size, also ones that chunks of 1 MB cut, several parts a read and several reads at once."""
    fd, data = file
    rng = np.random.default_rng()
    reads = []
    for _ in range(6):
        parts, first = [], 0
        expected = np.full(12_000_000, 255, np.uint8)
        for _ in range(3):
            piece = int(rng.choice([1_000, 4_096, 65_536, 999_983, 4_000_000]))
            stride = piece + int(rng.integers(0, 2)) * piece // 2
            nbytes = int(rng.integers(1, 3_000_000))
            offset = int(rng.integers(0, len(data) - nbytes))
            for at in range(0, nbytes, piece):
                length = min(piece, nbytes - at)
                to = first + at // piece * stride
                expected[to : to + length] = data[offset + at : offset + at + length]
            parts.append((fd, offset, first, nbytes, piece, stride))
            first += -(-nbytes // piece) * stride
            if first > 7_500_000:
                break
        memory = np.full_like(expected, 255)
        reads.append((reader.read(memory, parts), memory, expected))
    for ticket, memory, expected in reads:
        assert reader.wait(ticket)
        assert np.array_equal(memory, expected)


def test_a_read_that_does_not_come_whole_says_so(reader: Any, file: tuple[int, np.ndarray[Any, Any]]) -> None:
    fd, data = file
    memory = np.zeros(4_000_000, np.uint8)
    good = (fd, 0, 0, 2_000_000, 2_000_000, 2_000_000)
    beyond = (fd, len(data) - 1_999_999, 2_000_000, 2_000_000, 2_000_000, 2_000_000)
    closed = (10_000, 0, 0, 5, 5, 5)
    tickets = [reader.read(memory, parts) for parts in ([good], [good, beyond], [closed], [], [good])]
    assert [reader.wait(ticket) for ticket in tickets] == [True, False, False, True, True]
    with pytest.raises(DeviceError, match=f"no read {tickets[0]} is begun"):
        reader.wait(tickets[0])


@pytest.mark.parametrize(
    "part",
    [
        (-1, 0, 100, 10, 10),  # begins before the file
        (0, -1, 10, 10, 10),
        (0, 91, 10, 10, 10),
        (0, 0, 101, 101, 101),
        (0, 0, 0, 10, 10),
        (0, 0, 30, 10, 9),  # pieces over each other
        (0, 0, 30, 0, 10),
        (0, 1, 30, 10, 45),  # the third piece ends at 101
        (0, 0, 100, 1, 1 << 62),
    ],
)
def test_memory_beside_the_buffer_is_refused(reader: Any, part: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit into the memory"):
        reader.read(np.zeros(100, np.uint8), [(0, *part)])


def test_what_just_fits_is_read(reader: Any, file: tuple[int, np.ndarray[Any, Any]]) -> None:
    fd, data = file
    memory = np.zeros(100, np.uint8)
    assert reader.wait(reader.read(memory, [(fd, 7, 0, 30, 10, 45)]))
    assert np.array_equal(memory[[0, 9, 45, 54, 90, 99]], data[[7, 16, 17, 26, 27, 36]])
    with pytest.raises(BufferError, match="not writable"):
        reader.read(bytes(100), [(fd, 0, 0, 5, 5, 5)])


def test_close_gives_up_what_has_not_begun() -> None:
    """Nor does it leave threads behind."""
    threads = len(os.listdir("/proc/self/task"))
    reader = extension().FileReader(2)
    assert len(os.listdir("/proc/self/task")) == threads + 2
    tickets = [reader.read(np.zeros(8 << 20, np.uint8), [(10_000, 0, 0, 8 << 20, 8 << 20, 8 << 20)]) for _ in range(9)]
    reader.close()
    assert len(os.listdir("/proc/self/task")) == threads
    assert not any(reader.wait(ticket) for ticket in tickets)
    with pytest.raises(DeviceError, match="closed"):
        reader.read(np.zeros(1, np.uint8), [])
    reader.close()
