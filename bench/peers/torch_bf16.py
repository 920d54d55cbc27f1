"""PyTorch on the CPU in bf16 with the same weights and shapes: a peer of bench/cpu_smollm2.py for prefill.

Run by an interpreter that has torch and transformers: `python bench/peers/torch_bf16.py CONFIG.json THREADS`, where the
file holds a Llama config.json. Weights are random: the time does not depend on them. Prints one JSON object: seconds of
each repeat of a forward pass over the prompt with the logits of its last token.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers

PROMPT, REPEATS = 512, 5


def main(config_path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**json.loads(Path(config_path).read_text()))
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(5, config.vocab_size, (1, PROMPT))
    seconds = []
    with torch.inference_mode():
        for _ in range(REPEATS + 2):
            begin = time.perf_counter()
            model(ids, logits_to_keep=1)
            seconds.append(time.perf_counter() - begin)
    print(json.dumps({"version": torch.__version__, "prefill": seconds[2:], "prompt": PROMPT}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
