"""Damages checkpoints at random and loads them: `python -m tests.weights.fuzz --seconds 600`.

Every case copies a small valid checkpoint, changes some of its bytes, JSON values, sizes or files, and opens it,
reads all tensors, and loads it into the reference backend. Allowed are success and an `AtlasError` that names a file
or field; anything else is printed with the case's number, and `--case NUMBER --seed SEED` runs it again. The process
limits its own memory, so that a size that is believed before it is checked fails too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

MEMORY = 1 << 30
"""Address space that the process may take beyond what its imports took: 1 GiB."""
CASE_SECONDS = 20

INTERESTING: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 31, 128, 1 << 15, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 1 << 70),
    *(0.0, -1.5, 1e-30, 1e308, float("nan"), float("inf"), 1e400),
    *("", "x", "F32", "BF16", "F8_E4M3", "I32", "../../etc/passwd", "\ud800", "a" * 5000, "re:(", "re:.*", "gptq"),
    *([], {}, [[]], [0], [1 << 40], [-1, 4], ["Linear"], {"a": 1}, [[[[[[[[]]]]]]]]),
]

Random = random.Random


def corpus(folder: Path) -> list[Path]:
    """Valid checkpoints of every layout and file type, as folders."""
    from gguf import GGMLQuantizationType as Q

    from atlas.ops import OPS
    from tests import family_models, tiny_model
    from tests.weights import gguf_files, quantized_files, test_gguf_families

    config = {**tiny_model.CONFIG, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 40}
    config |= {"intermediate_size": 96}
    tensors = tiny_model.tensors(config, 0)
    made = []
    for layout in quantized_files.LAYOUTS:
        quantized_files.write_model(folder / layout, layout, config, tensors, 0)
        made.append(folder / layout)
    plain = folder / "plain"
    quantized_files.write(plain, tensors, config)
    shards = folder / "shards"
    shards.mkdir()
    (shards / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, part in enumerate((dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])), 1):
        whole = quantized_files.write(folder / f"part{number}", part, config)
        file = f"model-0000{number}-of-00002.safetensors"
        (whole / "model.safetensors").rename(shards / file)
        weight_map |= dict.fromkeys(part, file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    made += [plain, shards]
    for case, (family, _) in family_models.CASES.items():
        if family != "moe" or "moe_route" in OPS:
            made.append(family_models.write(folder / case, case))
    # Small blocks are all of the types: large ones would be mostly payload.
    gguf_files.HIDDEN = gguf_files.FFN = 64
    gguf_files.HEADS, gguf_files.KV_HEADS, gguf_files.HEAD_DIM = 2, 1, 32
    for kind in (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0, Q.F16, Q.F32):
        target = folder / f"gguf-{kind.name}"
        target.mkdir()
        gguf_files.write(target / "m.gguf", tensors=gguf_files.with_types((kind,)))
        made.append(target)
    for case in ("phi3-long", "gemma3", "granite", "qwen3"):
        target = folder / f"gguf-{case}"
        target.mkdir()
        stated = {**family_models.config(case), **test_gguf_families.CASES.get(case, {})}
        family = family_models.CASES[case][0]
        test_gguf_families.convert(target / "m.gguf", stated, family_models.tensors(stated, 0), family)
        made.append(target)
    split = folder / "gguf-split"
    split.mkdir()
    gguf_files.write(split / "m.gguf", split=4)
    made.append(split)
    return made


# ---- damage -----------------------------------------------------------------------------------------------


def mutate_json(rng: Random, value: Any) -> Any:
    """The value with one entry, at any depth, replaced, removed, added or copied to another place."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in entries:
            places.append((node, key))
            walk(child)

    walk(value)
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(INTERESTING))
    node, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice([str(key) + "x", "", "quantization_config", "rope_scaling"])] = copy.deepcopy(
            rng.choice(INTERESTING)
        )
    elif kind == 2:
        other, at = rng.choice(places)
        node[key] = json.loads(json.dumps(other[at])) if other is not node or at != key else 0
    elif kind == 3 and isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] += rng.choice([-1, 1, 8, -8, 64, 1 << 20])
    else:
        node[key] = copy.deepcopy(rng.choice(INTERESTING))
    return value


def damage_json(rng: Random, path: Path) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = mutate_json(rng, value)
        if not isinstance(value, (dict, list)):
            break
    path.write_text(json.dumps(value))


def damage_safetensors_header(rng: Random, path: Path) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2, 3))):
        header = mutate_json(rng, header)
        if not isinstance(header, dict):
            break
    text = json.dumps(header).encode()
    stated = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1))
    path.write_bytes(struct.pack("<Q", stated) + text + raw[8 + length :])


SAME_SIZE = [["F32", "I32", "U32"], ["F16", "BF16", "I16"], ["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"]]


def damage_tensors(rng: Random, path: Path) -> None:
    """Other tensors in a file that is valid in itself: renamed, dropped, of another type or shape, other values."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    tensors = {
        name: (entry["dtype"], list(entry["shape"]), raw[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        name = rng.choice(sorted(tensors))
        dtype, shape, data = tensors[name]
        kind = rng.randrange(8)
        if kind == 0 and len(tensors) > 1:
            del tensors[name]
        elif kind == 1:
            owner, piece = name.rpartition(".")[0], rng.choice(sorted(tensors)).rpartition(".")[2]
            tensors[f"{owner}.{piece}"] = tensors.pop(name)
        elif kind == 2:
            tensors[name.replace("layers.0", "layers.1")] = tensors[name]
        elif kind == 3:
            tensors[name] = (rng.choice(next((same for same in SAME_SIZE if dtype in same), [dtype])), shape, data)
        elif kind == 4:
            rng.shuffle(shape)
            tensors[name] = (dtype, rng.choice((shape, [1, *shape], [*shape, 1])), data)
        elif kind == 5 and shape and shape[0] > 1:
            keep = rng.choice((shape[0] // 2, shape[0] - 1))
            tensors[name] = (dtype, [keep, *shape[1:]], data[: len(data) // shape[0] * keep])
        elif kind == 6:
            tensors[name] = (dtype, shape, rng.randbytes(len(data)))
        else:
            tensors[name] = (dtype, shape, rng.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * len(data))
    entries, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def damage_bytes(rng: Random, path: Path) -> None:
    """Flips, overwrites and moves bytes: mostly among the first, where headers are."""
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not raw:
            break
        reach = len(raw) if rng.random() < 0.3 else min(len(raw), rng.choice((32, 512, 4096)))
        at = rng.randrange(reach)
        kind = rng.randrange(6)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            number = rng.choice((0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1))
            raw[at : at + 8] = struct.pack("<Q", number)
        elif kind == 3:
            del raw[at : at + rng.choice((1, 8, 100))]
        elif kind == 4:
            raw[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        else:
            other = rng.randrange(len(raw))
            raw[at : at + 16] = raw[other : other + 16]
    if rng.random() < 0.15:
        del raw[rng.randrange(len(raw) + 1) :]
    path.write_bytes(raw)


def damage_files(rng: Random, path: Path) -> None:
    """A file gone, empty, doubled, or a directory in its place."""
    kind = rng.randrange(4)
    content = path.read_bytes()
    path.unlink()
    if kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        path.write_bytes(content * 2)
    elif kind == 3:
        path.mkdir()


def damage(rng: Random, folder: Path) -> None:
    for _ in range(rng.choice((1, 1, 1, 2))):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            return
        path = rng.choice(files)
        ways: list[Callable[[Random, Path], None]] = [damage_bytes]
        if path.suffix == ".json":
            ways = [damage_json] * 6 + ways
        elif path.suffix == ".safetensors":
            ways = [damage_tensors] * 8 + [damage_safetensors_header] * 2 + ways
        try:
            rng.choice([*ways * 4, damage_files])(rng, path)
        except (ValueError, KeyError, TypeError, AttributeError):  # damaged before, so that it is no such file any more
            damage_bytes(rng, path)


# ---- one case ---------------------------------------------------------------------------------------------


def exercise(rng: Random, folder: Path) -> str:
    """Open, read and load; "loaded" or the error. Raises whatever is not an AtlasError."""
    from atlas.errors import AtlasError
    from atlas.runtime.runner import Runner, RunnerOptions
    from atlas.weights import open_checkpoint

    try:
        with open_checkpoint(folder) as checkpoint:
            checkpoint.digest()
            for name, info in checkpoint.tensors.items():
                with contextlib.suppress(AtlasError):
                    assert checkpoint.read(name).shape == info.shape
                    if info.shape:
                        rows = slice(rng.randrange(info.shape[0] + 1), info.shape[0])
                        checkpoint.read(name, rows)
                        if info.scheme is not None:
                            checkpoint.read_quantized(name, rows).dequantize()
            with contextlib.suppress(AtlasError):
                checkpoint.tokenizer_files()
            options = RunnerOptions(
                "reference", "f32", max_context=16, max_seqs=1, max_rows=16, kv_memory_bytes=1 << 20
            )
            Runner.load(checkpoint, options)
    except AtlasError as error:
        if not error.where or not error.found:
            raise
        return str(error)
    return "loaded"


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {CASE_SECONDS} s")


def run_case(seed: int, number: int, models: list[Path], work: Path) -> str:
    rng = Random(f"{seed} {number}")
    folder = work / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(rng.choice(models), folder)
    damage(rng, folder)
    signal.alarm(CASE_SECONDS)
    try:
        return exercise(rng, folder)
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--case", type=int, help="run only this one")
    arguments = parser.parse_args()
    # Warnings and NumPy's remarks on odd values are not what is looked for here.
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        work = Path(folder)
        (work / "corpus").mkdir()
        models = corpus(work / "corpus")
        import numpy as np

        np.seterr(all="ignore")
        for model in models:  # also brings every module in before memory is limited
            shutil.copytree(model, work / "case")
            outcome = exercise(Random(0), work / "case")
            assert outcome == "loaded", f"{model.name}: {outcome}"
            shutil.rmtree(work / "case")
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        begin, number, loaded = time.monotonic(), arguments.case or 0, 0
        while time.monotonic() < begin + arguments.seconds:
            try:
                loaded += run_case(arguments.seed, number, models, work) == "loaded"
            except Exception:
                traceback.print_exc()
                print(f"case {number} failed: python -m tests.weights.fuzz --seed {arguments.seed} --case {number}")
                return 1
            if arguments.case is not None:
                break
            number += 1
            if number % 500 == 0:
                shutil.rmtree(work / "cache", ignore_errors=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"seed {arguments.seed}: {number} cases, {loaded} loaded all the same, the others refused; peak {peak} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
