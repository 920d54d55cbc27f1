"""A GGUF with part of a model's vocabulary: real layers, for a machine to which few megabytes can be carried.

    python -m bench.cut_vocabulary gemma-3-270m --out FOLDER/cut.gguf

Keeps the rows of the token table that the text and the prompts of bench/real_weights.py use, and as many others, and
all the rest of the file as it is. Beside it stands FOLDER/cut.ids.npz with text and prompts in the new ids, which
`bench.real_weights oracle --model FOLDER/cut.gguf` takes instead of a tokenizer's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from atlas.weights.fetch import resolve_model
from bench import real_weights

TABLES = ("token_embd.weight", "output.weight")
LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def cut(source: Path, out: Path) -> int:
    """Write the file; how many ids it keeps."""
    windows, prompts = real_weights.texts(source)
    reader = gguf.GGUFReader(source)
    vocab = len(reader.fields[LISTS[0]].data)
    used = np.unique(np.concatenate([windows.ravel(), *prompts]))
    others = np.setdiff1d(np.arange(vocab), used)[:: max(1, (vocab - len(used)) // len(used))]
    keep = np.sort(np.concatenate([used, others]))
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "tokenizer.ggml.merges"):
            continue
        value = field.contents()
        if name in LISTS:
            value = [value[i] for i in keep]
        elif name.endswith("_token_id"):
            value = int(min(np.searchsorted(keep, value), len(keep) - 1))
        elif name.endswith(".vocab_size"):
            value = len(keep)
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        data = tensor.data[keep] if tensor.name in TABLES else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lengths = [len(prompt) for prompt in prompts]
    new = [np.searchsorted(keep, part).astype(np.int32) for part in (windows, np.concatenate(prompts))]
    np.savez_compressed(out.with_suffix(".ids.npz"), windows=new[0], prompts=new[1], lengths=lengths)
    return len(keep)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a name of the catalogue")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    print(f"{given.out}: {cut(resolve_model(given.model, offline=False), given.out)} ids")
