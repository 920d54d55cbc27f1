"""Grammars that are compiled: faults, aborts, and what is kept."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atlas.engine import grammar as grammar_module
from atlas.engine.sampling import Grammar
from tests import tiny_model
from tests.engine import grammar_model
from tests.engine.grammar_model import byte_ids, make, text_of
from tests.engine.grammar_requests import finish, params, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


class _Panic(BaseException):
    """As faults of libraries in Rust arrive: no Exception."""


@pytest.mark.parametrize("fault", [_Panic("the library gave up"), MemoryError(), KeyError("model"), ValueError("no")])
def test_a_fault_of_the_compiler_is_the_request_s_own(
    model: Path, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model)
    compiler = engine._compiler
    assert compiler is not None
    lease = compiler.lease

    def broken(grammar: Grammar, user: object) -> Any:
        if grammar.text == "b":
            raise fault
        return lease(grammar, user)

    monkeypatch.setattr(compiler, "lease", broken)
    outputs = run(engine, broken=params("regex", "b"), right=params("regex", "a"), free=params(max_tokens=3))
    assert outputs["broken"].finish_reason == "error" and type(fault).__name__ in (outputs["broken"].error or "")
    assert text_of(outputs["right"].token_ids) == "a" and len(outputs["free"].token_ids) == 3


def test_an_aborted_request_leaves_no_grammar_to_compile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask and go away do not keep the others' grammars waiting."""
    engine = make(model)
    compiler, compiled, gate = engine._compiler, list[str](), threading.Event()
    assert compiler is not None
    lease = compiler.lease

    def slow(grammar: Grammar, user: object) -> Any:
        compiled.append(grammar.text)
        gate.wait(10)
        return lease(grammar, user)

    monkeypatch.setattr(compiler, "lease", slow)
    for n in range(20):
        engine.add(str(n), [1], params("regex", f"a{{{n + 1}}}"))
        engine.abort(str(n))
    engine.add("last", [1], params("regex", "b"))
    gate.set()
    assert text_of(finish(engine)["last"].token_ids) == "b"
    assert len(compiled) <= 3, "two threads had begun"


class User:
    """Somebody who uses a matcher."""


def test_users_of_a_grammar_have_lexers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share one wait for each other in every step; whoever comes later finds those of users who are gone."""
    monkeypatch.setattr(grammar_module, "_SECONDS", 60.0)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    grammar, users = Grammar("regex", "[a-f]{3}"), [User() for _ in range(20)]
    leases = [compiler.lease(grammar, user) for user in users]
    lexers = {lexer for _, lexer in leases}
    assert len(lexers) == 20 and compiler.lease(Grammar("regex", "x"), users[0])[1] not in lexers
    for n, (matcher, _) in enumerate(leases):
        for byte in byte_ids(f"{n:03x}".translate(str.maketrans("0123456789", "abcdefabcd"))):
            assert matcher.try_consume_tokens([byte]) == 1, "each goes its own way"
    del users, leases
    first, second = User(), User()
    found = {compiler.lease(grammar, user)[1] for user in (first, second)}
    assert len(found) == 2 and found < lexers, "no other was made"


def test_lexers_of_all_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LEXERS", 5)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    users = [User() for _ in range(12)]
    for text in ("a", "b", "c"):
        shared = Counter(compiler.lease(Grammar("regex", text), user)[1] for user in users)
        assert sorted(shared.values()) == [2, 2, 2, 3, 3]
    assert [grammar.text for grammar in compiler._cache] == ["b", "c"]
    assert compiler._cached_characters == 10


def test_lexers_of_a_grammar_are_bounded_by_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes when there are as many as may be shares one with as few as possible."""
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    users = [User() for _ in range(20)]
    monkeypatch.setattr(grammar_module, "_SECONDS", 0.0)
    assert len({compiler.lease(Grammar("regex", "[a-f]{3}"), user)[1] for user in users}) == 1
    monkeypatch.setattr(grammar_module, "_SECONDS", 60.0)
    monkeypatch.setattr(grammar_module, "CACHED_CHARACTERS", 20 * 40)
    shared = Counter(compiler.lease(Grammar("regex", "(ab|cd|ef){2} and so on"), user)[1] for user in users)
    assert 2 <= len(shared) < 20 and max(shared.values()) - min(shared.values()) <= 1
    assert compiler._cached_characters <= 20 * 40


def test_what_is_kept_of_grammars_is_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "CACHED_CHARACTERS", 40)
    compiler = grammar_module.Compiler(lambda: grammar_model.compiler().tokenizer)
    for text in ("a" * 10, "b" * 10, "a" * 10, "c" * 25):
        compiler.matcher(Grammar("regex", text))
    assert [grammar.text for grammar in compiler._cache] == ["a" * 10, "c" * 25]
    assert compiler._cached_characters == 35


def test_a_lexer_is_free_when_its_sequence_has_ended(model: Path) -> None:
    """At once: nothing of a sequence waits for Python to look for cycles."""
    gc.disable()
    try:
        engine, grammar = make(model), Grammar("regex", "[a-c]{4}zz")
        assert engine._compiler is not None
        for seed in range(4):
            run(engine, x=params("regex", grammar.text, seed=seed))
        ((_, _, users),) = engine._compiler._cache[grammar].lexers
        assert not users
    finally:
        gc.enable()
