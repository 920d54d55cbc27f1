"""The text of a special token in a grammar is text: no mask offers the token for it, and its name means the token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from atlas.engine.grammar import Compiler, tokenizer_of
from atlas.engine.sampling import Grammar
from atlas.errors import RequestError
from atlas.weights import open_checkpoint
from tests.serve.serve_harness import make_checkpoint

Read = tuple[Tokenizer, Compiler, list[str], int]


def _read(document: str, end: int) -> Read:
    library = Tokenizer.from_str(document)
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    return library, Compiler(lambda: tokenizer_of(document, [end])), special, end


@pytest.fixture(scope="module", params=["bytes", "smollm2", "unigram"])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Read:
    if request.param == "bytes":
        folder = make_checkpoint(tmp_path_factory.mktemp("special") / "tiny")
        return _read((folder / "tokenizer.json").read_text(), 2)
    if request.param == "smollm2":
        with open_checkpoint(smollm2_path) as checkpoint:
            return _read(checkpoint.tokenizer_files().tokenizer_json, 2)
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((chr(c), -1.0) for c in range(32, 127)), ("s>", -0.5)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    library = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _read(library.to_str(), 2)


def written(read: Read, grammar: Grammar) -> list[int]:
    """Tokens that the grammar allows, one of them at each place, up to where nothing but the end is left."""
    _, compiler, _, end = read
    matcher = compiler.matcher(grammar)
    rng = np.random.default_rng(len(grammar.text))
    tokens: list[int] = []
    while not matcher.is_stopped():
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        token = int(rng.choice(allowed))
        if token == end and matcher.is_accepting():
            return tokens
        assert matcher.consume_token(token), f"{token} was offered and is not taken: {matcher.get_error()}"
        tokens.append(token)
        assert len(tokens) < 200
    assert not matcher.is_error()
    return tokens


def test_it_is_written_as_text(read: Read) -> None:
    library, _, special, _ = read
    for text in special[:4]:
        for expected in (text, f"a{text}b", text + text):
            quoted, escaped = json.dumps(expected), re.escape(expected)
            grammars = {
                Grammar("choice", json.dumps([expected])): expected,
                Grammar("regex", escaped): expected,
                Grammar("lark", f"start: {quoted}"): expected,
                Grammar("gbnf", f"root ::= {quoted}"): expected,
                Grammar("json_schema", json.dumps({"const": expected})): quoted,
                Grammar("json_schema", json.dumps({"enum": [expected], "title": text})): quoted,
            }
            for grammar, whole in grammars.items():
                tokens = written(read, grammar)
                ids = {library.token_to_id(name) for name in special}
                assert not ids & {*tokens}, grammar
                assert library.decode(tokens, skip_special_tokens=True).replace(" ", "") == whole.replace(" ", "")


def test_its_name_in_a_lark_grammar_means_the_token(read: Read) -> None:
    library, compiler, special, end = read
    for name in special[1:4]:
        index = library.token_to_id(name)
        if index == end or re.search(r"[\s\[]", name[1:-1]):
            continue
        text = f'start: "<x>" {name} /[a-z<>]/ "// <x>" // {name}\n'
        tokens = written(read, Grammar("lark", text))
        assert tokens.count(index) == 1
        assert re.fullmatch("<x>[a-z<>]// <x>", library.decode([token for token in tokens if token != index]))
    with pytest.raises(RequestError, match="<nobody>"):
        compiler.matcher(Grammar("lark", "start: <nobody>"))
