"""llama.cpp on one GGUF, through llama-cpp-python's bare C interface: a peer of bench/cpu_smollm2.py.

Run by an interpreter that has llama-cpp-python: `python bench/peers/llama_decode.py MODEL.gguf THREADS`. Prints JSON
with seconds of each repeat of a decode loop (llama_decode alone, no sampling), of a prompt, and of a step of
eight sequences.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np

TOKENS, PROMPT, SEQUENCES, REPEATS = 128, 512, 8, 5


def main(path: str, threads: int) -> None:
    quiet = api.llama_log_callback(lambda *_: None)  # kept: the library calls it as long as it lives
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.use_extra_bufts = False  # the AMX buffer type crashes on models as narrow as this one
    model = api.llama_model_load_from_file(path.encode(), model_params)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 512, 512, SEQUENCES
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1  # faster than without on every case here
    context = api.llama_init_from_model(model, params)
    memory = api.llama_get_memory(context)
    rng = np.random.default_rng(0)

    def decode(tokens: list[tuple[int, int, int]], logits: str) -> None:
        """Decode (token, position, sequence) triples; logits of all of them or the last."""
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits == "all" or i == len(tokens) - 1
        if api.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        api.llama_synchronize(context)
        api.llama_batch_free(batch)

    def prompt(n: int, sequence: int = 0) -> None:
        decode([(int(t), i, sequence) for i, t in enumerate(rng.integers(5, vocab, n))], "last")

    def timed(setup, work) -> list[float]:  # type: ignore[no-untyped-def]
        seconds = []
        for _ in range(REPEATS + 1):
            api.llama_memory_clear(memory, True)
            setup()
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]

    tokens = [int(t) for t in rng.integers(5, vocab, TOKENS)]
    result = {
        "version": llama_cpp.__version__,
        "decode": timed(lambda: prompt(32), lambda: [decode([(t, 32 + i, 0)], "all") for i, t in enumerate(tokens)]),
        "prefill": timed(lambda: None, lambda: prompt(PROMPT)),
        "decode_8": timed(
            lambda: [prompt(32, s) for s in range(SEQUENCES)],
            lambda: [
                decode([(t, 32 + i, s) for s in range(SEQUENCES)], "all") for i, t in enumerate(tokens[: TOKENS // 4])
            ],
        ),
        "tokens": TOKENS,
        "prompt": PROMPT,
        "sequences": SEQUENCES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
