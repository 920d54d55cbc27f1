"""What a row with a grammar costs the host in a step: its mask, and moving on by a token.

    python bench/grammar_masks.py [MODEL[:TOKENS] ...] --json bench/results/grammar_masks.json

With TOKENS, the first so many of the model's vocabulary. Texts are drawn from the grammar at random, which visits more
of it than a model would; times are the processor's, of one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from atlas.bench import machine
from atlas.engine.constraint import Constraint, Masks
from atlas.engine.grammar import Compiler, tokenizer_of
from atlas.engine.sampling import Grammar, SamplingParams
from atlas.tokenizer import end_ids
from atlas.weights import open_checkpoint
from atlas.weights.fetch import resolve_model

WORD = {"type": "string", "maxLength": 30}
CITY = {
    "type": "object",
    "properties": {
        "name": WORD,
        "country": {"enum": ["France", "Japan", "Peru"]},
        "population": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": WORD, "maxItems": 4},
    },
    "required": ["name", "country", "population", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_object": Grammar("json_object"),
    "schema": Grammar("json_schema", json.dumps(CITY)),
    "schema, free text": Grammar(
        "json_schema", json.dumps({"type": "object", "properties": {"text": {"type": "string"}}})
    ),
    "regex": Grammar("regex", "[A-Z][a-z]{2,8}(, [A-Z][a-z]{2,8})*[.]"),
    "choice": Grammar("choice", json.dumps([f"label number {i}" for i in range(100)])),
}
STEPS = 600


def measure(compiler: Compiler, grammar: Grammar, vocab: int) -> dict[str, float]:
    """Medians, means and 99th percentiles in microseconds, of `STEPS` steps."""
    began = time.thread_time()
    compiler.matcher(grammar)
    compiled = time.thread_time() - began
    rng, row, masks = random.Random(1), np.zeros((1, -(-vocab // 32)), np.uint32), Masks()
    mask_times: list[float] = []
    accept_times: list[float] = []
    while len(mask_times) < STEPS:
        constraint = Constraint(SamplingParams(max_tokens=1), compiler.matcher(grammar), compiler.end, vocab)
        while not constraint.finished and len(mask_times) < STEPS:
            began = time.thread_time()
            masks.fill(row, [constraint], vocab)
            mask_times.append(time.thread_time() - began)
            allowed = np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if constraint.finished or constraint.fault or token >= vocab:
                break
            began = time.thread_time()
            assert constraint.accept((token,)) == 1
            accept_times.append(time.thread_time() - began)
    result = {"compile_ms": round(1e3 * compiled, 2)}
    for name, times in (("mask_us", mask_times), ("accept_us", accept_times)):
        result[name] = round(1e6 * float(np.median(times)), 1)
        result[name + "_mean"] = round(1e6 * float(np.mean(times)), 1)
        result[name + "_p99"] = round(1e6 * float(np.quantile(times, 0.99)), 1)
    return result


def document_of(model: str, tokens: int | None) -> tuple[str, list[int]]:
    """A model's tokenizer, or the first `tokens` tokens of it, and the tokens that end a text."""
    with open_checkpoint(resolve_model(model, offline=True)) as checkpoint:
        document = checkpoint.tokenizer_files().tokenizer_json
        ends = end_ids(checkpoint.generation_config, checkpoint.config)
    if tokens is not None:
        whole = json.loads(document)
        # The space of SentencePiece's vocabularies is needed, and may stand last.
        vocab = {token: index for token, index in whole["model"]["vocab"].items() if index < tokens - 1}
        vocab.setdefault("\N{LOWER ONE EIGHTH BLOCK}", tokens - 1)
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in whole["model"]["merges"]]
        whole["model"] |= {
            "vocab": vocab,
            "merges": [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()],
        }
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < tokens]
        document = json.dumps(whole)
    return document, list(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for one in given.models:
        model, _, tokens = one.partition(":")
        document, ends = document_of(model, int(tokens) if tokens else None)
        compiler = Compiler(functools.partial(tokenizer_of, document, ends))
        began = time.process_time()
        vocab = compiler.tokenizer.vocab_size
        seconds = time.process_time() - began
        print(f"{model}: {vocab} tokens, tokenizer in {seconds:.2f} s")
        for name, grammar in GRAMMARS.items():
            found = measure(compiler, grammar, vocab)
            print(f"  {name:12}", *(f"{key} {value}" for key, value in found.items()))
            results.append({"vocab": vocab, "tokenizer_seconds": round(seconds, 2), "grammar": name, **found})
    if given.json is not None:
        about = {
            "what": "python bench/grammar_masks.py",
            "commit": machine.commit(),
            "machine": machine.describe(),
            "llguidance": version("llguidance"),
        }
        given.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
