"""Looks for texts that a parser takes wrongly: `python -m tests.parsers.fuzz --seconds 1800`.

Half of the time is Atheris', which changes texts towards code not yet reached, half Hypothesis', which builds them of
the formats' words. What must hold is in `check`. A text that breaks it is kept in a file, and `--case FILE` runs it
again. Atheris ends the process it runs in, so it gets one of its own; where it is not installed, Hypothesis has all
of the time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from atlas.parsers import (
    MARKERS,
    TOOL_FORMATS,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from atlas.parsers.events import joined
from tests.parsers.cases import CASES
from tests.parsers.parsing import parser_of
from tests.parsers.soups import WORDS, soups

FORMATS = ["", *sorted(TOOL_FORMATS)]
MARKER_NAMES = ["", *sorted(MARKERS)]
MEMORY = 4 << 30
"""Address space of the process that Atheris runs in."""
MOST_UNREAD = 700
"""Characters that may be held back between two pieces: the longest white space, a name, and a word that has begun."""


# ---- what must hold -------------------------------------------------------------------------------------------


def check(text: str, format_name: str, markers: str, inside: bool, rng: random.Random) -> list[Event]:
    """Parse a text in one piece, in single characters and in random pieces. Raises AssertionError if a rule is broken.

    The events are the same for every split; calls are well formed; nothing in them is made up; the text for the user
    is text of the model; little is held back between two pieces, so that time is linear; and nothing else is raised.
    """

    def parsed(pieces: list[str]) -> list[Event]:
        parser = parser_of(format_name, markers, inside=inside)
        events: list[Event] = []
        for piece in pieces:
            events += parser.feed(piece)
            assert parser.unread <= MOST_UNREAD, f"{parser.unread} characters are held back"
        return joined(events + parser.finish())

    whole = parsed([text])
    check_events(whole, text)
    assert parsed(list(text)) == whole, "fed in single characters it is another answer"
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == whole, f"cut at {cuts} it is another answer"
    if rng.randrange(512) == 0 and text:
        check_linear(lambda longer: parsed([longer[at : at + 40] for at in range(0, len(longer), 40)]), text)
    return whole


def check_events(events: list[Event], text: str) -> None:
    """The rules that one answer shows."""
    arguments: str | None = None
    calls = 0
    words = []
    for event in events:
        match event:
            case CallBegin():
                assert arguments is None and event.index == calls, "a call begins inside another"
                assert event.name in text or "\\" in text, "a name is made up"
                arguments, calls = "", calls + 1
            case CallArguments():
                assert arguments is not None and event.index == calls - 1, "arguments stand outside their call"
                arguments += event.text
            case CallEnd():
                assert arguments is not None and event.index == calls - 1, "a call ends that has not begun"
                check_arguments(arguments, text, complete=event.complete)
                assert event.complete <= (event.rest == ""), "a whole call has a rest"
                arguments = None
            case Content() | Reasoning():
                assert arguments is None, "text stands inside a call"
                assert event.text, "an empty event"
                words.append(event.text)
    assert arguments is None, "a call has no end"
    characters = iter(text)
    assert all(character in characters for character in "".join(words)), "text for the user is not the model's"


def check_arguments(arguments: str, text: str, *, complete: bool) -> None:
    """Of a whole call they are a JSON object, of a cut one never; and each value stands in the text."""
    try:
        value = _strict(arguments)
    except ValueError:
        value = None
    if not complete:
        assert value is None, "a call that was cut looks like a whole one"
        value = _strict(arguments.rstrip().removesuffix(",") + "}")
    assert isinstance(value, dict), "arguments are no JSON object"
    if "\\u" in text:  # any character may be written so
        return
    for leaf in _leaves(value):
        for piece in re.findall(r"[ !#-.0-\[\]-~]+", leaf):  # without what JSON escapes
            assert piece in text, f"{piece!r} is made up"


def _strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    # Numbers as they are written.
    return json.loads(text, parse_float=str, parse_int=str, parse_constant=refuse)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value


def check_linear(parse: Callable[[str], object], text: str) -> None:
    """Eight times the text takes about eight times as long (of this thread's processor time)."""
    text *= max(1, 16_000 // len(text))

    def seconds(times: int) -> float:
        longer = text * times
        started = time.thread_time()
        parse(longer)
        return time.thread_time() - started

    gc.disable()
    try:
        for _ in range(3):
            if seconds(8) < 20 * seconds(1) + 0.02:
                return
    finally:
        gc.enable()
    raise AssertionError("time is not linear in the text")


# ---- where texts come from --------------------------------------------------------------------------------------


def encode(text: str, format_name: str, markers: str, *, inside: bool) -> bytes:
    """A case as bytes, for `decode` and for Atheris to change."""
    head = bytes([FORMATS.index(format_name), 2 * MARKER_NAMES.index(markers) + inside, 0])
    return head + text.encode()


def decode(data: bytes) -> tuple[str, str, str, bool, random.Random]:
    """The arguments of `check`. Any bytes are a case."""
    head, text = (data[:3] + bytes(3))[:3], data[3:].decode(errors="replace")
    markers = MARKER_NAMES[head[1] // 2 % len(MARKER_NAMES)]
    return text, FORMATS[head[0] % len(FORMATS)], markers, bool(head[1] % 2), random.Random(data)


def with_hypothesis(seconds: float, folder: Path) -> int:
    """Run texts of Hypothesis for this long; how many there were. One that fails is made small and kept."""
    deadline = time.monotonic() + seconds
    count = 0
    failing: list[bytes] = []

    def one(text: str, format_name: str, markers: str, inside: bool) -> None:
        nonlocal count
        count += 1
        if not failing and time.monotonic() > deadline:
            return
        data = encode(text, format_name, markers, inside=inside)
        try:
            check(*decode(data))
        except BaseException:
            failing.append(data)
            raise

    for number in itertools.count(int(time.time())):
        if time.monotonic() > deadline:
            return count
        arranged = settings(
            max_examples=500,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        arguments = given(soups(), st.sampled_from(FORMATS), st.sampled_from(MARKER_NAMES), st.booleans())
        try:
            seed(number)(arranged(arguments(one)))()
        except BaseException:
            if failing:
                (folder / "hypothesis-case").write_bytes(failing[-1])
            raise
    return count


def with_atheris(seconds: float, folder: Path) -> None:
    """Run texts of Atheris for this long, and end the process: with status 0 if nothing was found."""
    import atheris

    for function in gc.get_objects():
        if isinstance(function, FunctionType) and (function.__module__ or "").startswith(("atlas.parsers", "json.")):
            atheris.instrument_func(function)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, case in enumerate(CASES):
        data = encode(case.text, case.format, case.markers, inside=case.inside)
        (corpus / f"case{number}").write_bytes(data)
    escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in sorted(WORDS) if len(word) < 60)
    (folder / "words.dict").write_text("".join(f'"{word}"\n' for word in escaped))
    # libFuzzer's own limit looks at the peak of the process, which at first is that of whoever started it.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    options = ["-max_total_time", int(seconds)], ["-timeout", 20], ["-rss_limit_mb", 0], ["-max_len", 600]
    arguments = [f"{name}={value}" for name, value in options]
    arguments += [f"-dict={folder / 'words.dict'}", f"-artifact_prefix={folder}/", "-print_final_stats=1", str(corpus)]
    atheris.Setup([sys.argv[0], *arguments], lambda data: check(*decode(data)))
    atheris.Fuzz()


def fuzz(seconds: float, folder: Path) -> dict[str, int]:
    """Both, one after the other; how many texts each ran. Raises an error if one finds a fault."""
    counts = {}
    if importlib.util.find_spec("atheris"):
        command = [sys.executable, "-m", "tests.parsers.fuzz", "--atheris", "--folder", str(folder)]
        seconds /= 2
        result = subprocess.run(
            [*command, "--seconds", str(seconds)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + 120,
        )
        executed = re.search(r"number_of_executed_units: (\d+)", result.stderr)
        if result.returncode or executed is None:
            raise RuntimeError(f"status {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}")
        counts["atheris"] = int(executed[1])
    counts["hypothesis"] = with_hypothesis(seconds, folder)
    return counts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=Path, help="run one text that was kept")
    parser.add_argument("--folder", type=Path, help="where texts are kept")
    parser.add_argument("--atheris", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = decode(arguments.case.read_bytes())
        print(*case[:4], sep="\n")
        print(*check(*case), sep="\n")
        return
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="parser-fuzz-"))
    if arguments.atheris:
        with_atheris(arguments.seconds, folder)
    print(f"texts are kept in {folder}")
    print(fuzz(arguments.seconds, folder))


if __name__ == "__main__":
    main()
