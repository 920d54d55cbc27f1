"""GGUF checkpoints, against files that `gguf.GGUFWriter` writes and values that `gguf.quants` computes."""

from __future__ import annotations

import logging
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.errors import CheckpointError
from atlas.weights import gguf as atlas_gguf
from atlas.weights import open_checkpoint
from atlas.weights.gguf_header import read_header

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 40

ROUND_TRIP = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atlas" / "gguf"


def converter_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order in GGUF, written out row by row: rotated pairs (i, i + half) become neighbours."""
    head_dim = weight.shape[0] // heads
    half = head_dim // 2
    order = [h * head_dim + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def hf_weights() -> dict[str, np.ndarray]:
    """GGUF stem -> float32 weight in Hugging Face row order."""
    rng = np.random.default_rng(3)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}

FIELDS: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "context_length": lambda w: w.add_context_length(128),
    "embedding_length": lambda w: w.add_embedding_length(HIDDEN),
    "block_count": lambda w: w.add_block_count(1),
    "feed_forward_length": lambda w: w.add_feed_forward_length(FFN),
    "attention.head_count": lambda w: w.add_head_count(HEADS),
    "attention.head_count_kv": lambda w: w.add_head_count_kv(KV_HEADS),
    "attention.layer_norm_rms_epsilon": lambda w: w.add_layer_norm_rms_eps(1e-5),
    "rope.freq_base": lambda w: w.add_rope_freq_base(50000.0),
    "rope.dimension_count": lambda w: w.add_rope_dimension_count(HEAD_DIM),
}
TOKENS = ["<s>", "</s>", *(chr(ord("a") + index) for index in range(26)), "ab", "Ġ"]


def write(
    path: Path,
    *,
    without: tuple[str, ...] = (),
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: dict[str, tuple[np.ndarray, Q | None]] | None = None,
    architecture: str = "llama",
    split: int = 0,
) -> Path:
    """A small Llama GGUF. tensors: full GGUF name -> (array as stored, type); by default float32 weights."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for name, add in FIELDS.items():
        if name not in without:
            add(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}")
    extra(writer)
    if tensors is None:
        tensors = {f"{stem}.weight": (stored(stem, weight), None) for stem, weight in hf_weights().items()}
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(stem: str, weight: np.ndarray) -> np.ndarray:
    """A weight as the converter stores it."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stem.rpartition(".")[2])
    return converter_permute(weight, heads) if heads else weight


def with_types(types: tuple[Q, ...]) -> dict[str, tuple[np.ndarray, Q | None]]:
    """The default weights, matrices quantised to `types` in turn."""
    result: dict[str, tuple[np.ndarray, Q | None]] = {}
    for index, (stem, weight) in enumerate(hf_weights().items()):
        kind = Q.F32 if weight.ndim == 1 else types[index % len(types)]
        array = stored(stem, weight)
        if kind in K_QUANTS:  # The package cannot quantise these, and any bytes are valid blocks.
            block, size = gguf.GGML_QUANT_SIZES[kind]
            blocks = np.random.default_rng(index).integers(0, 256, (*array.shape[:-1], array.shape[-1] // block * size))
            raw = blocks.astype(np.uint8)
            raw[(raw & 0x7C) == 0x7C] ^= 0x40  # keeps the float16 scales finite
            result[f"{stem}.weight"] = raw, kind
        else:
            result[f"{stem}.weight"] = gguf.quants.quantize(array, kind), kind
    return result


# ---- values --------------------------------------------------------------------------------------


def test_float_weights_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    assert set(checkpoint.tensors) == {f"{name}.weight" for name in NAMES.values()}
    for stem, weight in hf_weights().items():
        name = f"{NAMES[stem]}.weight"
        array = checkpoint.read(name)
        assert array.dtype == np.float32 and array.flags.c_contiguous
        assert checkpoint.tensors[name].shape == weight.shape
        np.testing.assert_array_equal(array, weight)


@pytest.mark.parametrize(
    "types", [ROUND_TRIP, K_QUANTS, (Q.F16,), (Q.BF16,)], ids=["blocks", "k-quants", "f16", "bf16"]
)
def test_every_type_is_exact(tmp_path: Path, types: tuple[Q, ...]) -> None:
    every = with_types(types)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    for stem, weight in hf_weights().items():
        array, kind = every[f"{stem}.weight"]
        name = f"{NAMES[stem]}.weight"
        assert kind is not None and checkpoint.tensors[name].dtype == kind.name
        got = checkpoint.read(name)
        expected_type = {Q.F16: np.float16, Q.BF16: ml_dtypes.bfloat16}.get(kind, np.float32)
        assert got.dtype == expected_type and got.shape == weight.shape and got.flags.c_contiguous
        expected = gguf.quants.dequantize(array, kind).reshape(weight.shape)
        # Applying the converter's own permutation again gives the stored order.
        np.testing.assert_array_equal(stored(stem, got.astype(np.float32)), expected)


def test_biases_and_own_lm_head(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    every: dict[str, tuple[np.ndarray, Q | None]] = with_types((Q.F16,))
    every["blk.0.attn_q.bias"] = converter_permute(bias, HEADS), None
    every["output.weight"] = np.ones((VOCAB, HIDDEN), np.float32), None
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True and checkpoint.config["mlp_bias"] is False
    assert "lm_head.weight" in checkpoint.tensors


def test_smollm2_agrees_with_the_package(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    header = read_header(smollm2_path)
    assert header.metadata == {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    assert {
        tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), int(tensor.data_offset))
        for tensor in reader.tensors
    } == {name: (tensor.type, tensor.shape, tensor.offset) for name, tensor in header.tensors.items()}
    stored_tensors = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", 0),
    ):
        tensor = stored_tensors[theirs]
        got = checkpoint.read(ours)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(converter_permute(got, heads) if heads else got, expected)
    assert checkpoint.config["rope_theta"] == 100000.0
    assert len(checkpoint.tensors) == 272


# ---- configuration -------------------------------------------------------------------------------


def test_config_is_spelled_as_hugging_face_does(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,  # not 9.999999747378752e-06, its float32 neighbour
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert checkpoint.generation_config == {"bos_token_id": 0, "eos_token_id": [1]}


def test_absent_optional_fields_have_llama_cpps_defaults(tmp_path: Path) -> None:
    optional = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count")
    config = open_checkpoint(write(tmp_path / "m.gguf", without=optional)).config
    assert (config["num_key_value_heads"], config["rope_theta"], config["head_dim"]) == (HEADS, 10000.0, HEAD_DIM)


@pytest.mark.parametrize(
    "field",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_required_field_is_named(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "m.gguf", without=(field,))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: metadata field llama\.{field} is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("llama.expert_count", 8, gguf.GGUFValueType.UINT32),
        ("llama.attention.sliding_window", 4096, gguf.GGUFValueType.UINT32),
        ("llama.logit_scale", 0.5, gguf.GGUFValueType.FLOAT32),
        ("llama.rope.scaling.type", "spiral", gguf.GGUFValueType.STRING),
        ("llama.attention.value_length", 32, gguf.GGUFValueType.UINT32),
    ],
)
def test_arithmetic_that_is_not_built_is_refused(
    tmp_path: Path, key: str, value: Any, kind: gguf.GGUFValueType
) -> None:
    path = write(tmp_path / "m.gguf", extra=lambda writer: writer.add_key_value(key, value, kind))
    with pytest.raises(CheckpointError, match=f"{key} is '?{value}"):
        open_checkpoint(path)


def test_unknown_field_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(write(tmp_path / "m.gguf", extra=lambda writer: writer.add_uint32("llama.brand_new", 1)))
    assert "llama.brand_new" in caplog.text


def test_wrong_value_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        without=("block_count",),
        extra=lambda writer: writer.add_key_value(
            "llama.block_count", [1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
        ),
    )
    with pytest.raises(CheckpointError, match=r"llama\.block_count is \[1, 2\]; accepted: one integer"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    expected: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        expected["original_max_position_embeddings"] = 32
    assert open_checkpoint(write(tmp_path / "m.gguf", extra=extra)).config["rope_scaling"] == expected


def llama3_factors(factor: float, theta: float, dim: int) -> np.ndarray:
    """As Llama 3's reference code defines them, one frequency at a time."""
    result = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (index / dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama3_factors_become_rope_scaling(tmp_path: Path) -> None:
    every: dict[str, tuple[np.ndarray, Q | None]] = with_types((Q.F16,))
    every["rope_freqs.weight"] = llama3_factors(32.0, 50000.0, HEAD_DIM), None
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors=every))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensors)
    every["rope_freqs.weight"] = every["rope_freqs.weight"][0] * np.float32(1.01), None
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_checkpoint(write(tmp_path / "n.gguf", tensors=every))


def test_unknown_architecture_and_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'nope'; accepted: llama"):
        open_checkpoint(write(tmp_path / "a.gguf", architecture="nope"))
    every = with_types((Q.F16,))
    every["blk.0.attn_sub_norm.weight"] = np.ones(HIDDEN, np.float32), None
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sub_norm\.weight is not known"):
        open_checkpoint(write(tmp_path / "b.gguf", tensors=every))


# ---- damaged and hostile files -------------------------------------------------------------------


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    header = read_header(tmp_path / "m.gguf").data_start
    cut = tmp_path / "cut.gguf"
    lengths = [*range(0, header, 37), header - 1, header, (header + len(whole)) // 2, len(whole) - 200]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            open_checkpoint(cut)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_down\.weight ends at byte"):
        open_checkpoint(cut)


def bare(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, fields: int = 0, body: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, fields) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (bare(magic=b"GGML") + bytes(8), "magic b'GGML'"),
        (bare(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (bare(tensors=1 << 50), "tensor count 1125899906842624"),
        (bare(fields=1 << 63), "metadata count"),
        (bare(fields=1, body=struct.pack("<Q", 1 << 62) + bytes(40)), "length 4611686018427387904"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IQ", 8, 1 << 62)), "string of k has length"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61)), "array k has length"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "array k element count"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 99)), "string 0 of k"),
        (
            bare(fields=1, body=string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(64)),
            "value type 9 at depth",
        ),
        (bare(fields=1, body=string(b"k") + struct.pack("<I", 77) + bytes(8)), "value type 77"),
        (bare(fields=1, body=string(b"\xff\xfe") + bytes(16)), "not UTF-8"),
        (bare(fields=2, body=(string(b"k") + struct.pack("<II", 4, 1)) * 2), "k occurs twice"),
        (bare(fields=1, body=string(b"general.alignment") + struct.pack("<II", 4, 0)), r"general\.alignment is 0"),
        (bare(tensors=1, body=entry(b"t", (4,), 999, 0)), "type 999"),
        (bare(tensors=1, body=entry(b"t", (33,), 2, 0)), "whole Q4_0 blocks"),
        (bare(tensors=1, body=entry(b"t", (0,), 0, 0)), r"dimensions \[0\]"),
        (bare(tensors=1, body=entry(b"t", (1,) * 5, 0, 0)), "5 dimensions"),
        (bare(tensors=1, body=entry(b"t", (1 << 62, 1 << 62), 0, 0)), "tensor t ends at byte"),
        (bare(tensors=1, body=entry(b"t", (4,), 0, 8) + bytes(99)), "offset 8; accepted: multiples of 32"),
        (bare(tensors=2, body=entry(b"t", (4,), 0, 0) + entry(b"u", (4,), 0, 0) + bytes(99)), "t and u overlap"),
        (bare(tensors=2, body=entry(b"t", (4,), 0, 0) * 2 + bytes(99)), "t occurs twice"),
    ],
)
def test_hostile_headers_are_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: .*{message}"):
        open_checkpoint(path)
    assert time.perf_counter() - begin < 1


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors: dict[str, tuple[np.ndarray, Q | None]] = {"output_norm.weight": (np.ones(HIDDEN, np.float32), None)}
    return write(tmp_path_factory.mktemp("small") / "m.gguf", tensors=tensors).read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_do_worse_than_an_error(tmp_path: Path, small_file: bytes, data: st.DataObject) -> None:
    damaged = bytearray(small_file)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - HIDDEN * 4), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape
        checkpoint.tokenizer_files()
    except CheckpointError as error:
        assert "fuzz.gguf" in str(error)


# ---- split models --------------------------------------------------------------------------------


def test_split_model_opens_from_any_part_and_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write(folder / "model.gguf", split=4)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in (folder, parts[0], parts[2]):
        checkpoint = open_checkpoint(path)
        assert len({info.file for info in checkpoint.tensors.values()}) == 3
        for stem, weight in hf_weights().items():
            np.testing.assert_array_equal(checkpoint.read(f"{NAMES[stem]}.weight"), weight)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: the file is missing"):
        open_checkpoint(folder)


def test_renamed_part_and_two_models_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split=4)
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003.gguf").unlink()
    (tmp_path / "model-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"renamed\.gguf: .*of 3; .*first part under its own name"):
        open_checkpoint(tmp_path)
    write(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models: other\.gguf, renamed\.gguf"):
        open_checkpoint(tmp_path)


# ---- the cache -----------------------------------------------------------------------------------


def forbid_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the header was read although an index is cached")

    monkeypatch.setattr(atlas_gguf, "read_header", refuse)


def test_second_opening_uses_the_index_alone(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", tensors=with_types(ROUND_TRIP))
    first = open_checkpoint(path)
    files = first.tokenizer_files()
    forbid_headers(monkeypatch)
    second = open_checkpoint(path)
    assert (second.config, second.tensors, second.digest()) == (first.config, first.tensors, first.digest())
    assert second.tokenizer_files() == files
    for name in first.tensors:
        np.testing.assert_array_equal(second.read(name), first.read(name))
    folder = cache / first.digest()
    assert {entry.name for entry in folder.iterdir()} == {
        "index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.sha256",
    }
    for level in (cache.parent, cache, folder):
        assert stat.S_IMODE(level.stat().st_mode) == 0o700


def test_smollm2_opens_fast_the_second_time(smollm2_path: Path) -> None:
    def opened() -> float:
        begin = time.perf_counter()
        open_checkpoint(smollm2_path).tokenizer_files()
        return time.perf_counter() - begin

    cold = opened()
    warm = min(opened() for _ in range(3))
    print(f"open SmolLM2: cold {cold:.3f} s, warm {warm:.3f} s")
    assert warm < 0.3


@pytest.mark.parametrize("change", ["content", "copy"])
def test_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path)
    if change == "content":
        write(path, without=("rope.freq_base",))
        second = open_checkpoint(path)
        assert second.config["rope_theta"] == 10000.0
        assert second.digest() != first.digest()
    else:
        (tmp_path / "n.gguf").write_bytes(path.read_bytes())
        assert open_checkpoint(tmp_path / "n.gguf").digest() == first.digest()


def test_changed_weight_changes_the_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path).digest()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(path).digest() != first


@pytest.mark.parametrize(
    "victim", ["index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.sha256", "seen"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_damaged_cache_is_made_again(tmp_path: Path, cache: Path, victim: str, damage: str) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path)
    files = first.tokenizer_files()
    file = next((cache / "seen").iterdir()) if victim == "seen" else cache / first.digest() / victim
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(
        {
            "cut": good[:middle],
            "flip": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "empty": b"",
            "other": b'{"sha256": "", "body": {}}',
        }[damage]
    )
    again = open_checkpoint(path)
    assert (again.config, again.tensors, again.digest()) == (first.config, first.tensors, first.digest())
    assert again.tokenizer_files() == files
    assert file.read_bytes() == good


def test_cache_of_somebody_else_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.gguf")
    expected = open_checkpoint(path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(path)
    assert "not to you: not used" in caplog.text
    assert checkpoint.config == expected.config
    assert checkpoint.tokenizer_files() == expected.tokenizer_files()


def test_cache_that_others_can_write_is_ignored(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.gguf")
    open_checkpoint(path)
    cache.chmod(0o777)
    open_checkpoint(path).tokenizer_files()
    assert "can be written by others: not used" in caplog.text


def test_no_cache_folder_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    assert open_checkpoint(write(tmp_path / "m.gguf")).tokenizer_files().source.endswith("m.gguf")
    assert "no cache in" in caplog.text
