"""Kernel pack files: what they are, and that nothing else is taken for one."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.build import manifest as manifests
from atlas.build import pack
from atlas.build.manifest import KernelSet, Manifest
from atlas.errors import BuildError
from tests.fake_packs import PTX, SHAPE, build, cubin, file_of, packed, signed, with_document

VALID = packed(ptx=True)
REBUILD = "run: python -m atlas.build MODEL --hw HW --quant QUANT"


def refusal(data: bytes) -> str:
    with pytest.raises(BuildError) as caught:
        pack.from_bytes(data, "p.atlaspack")
    message = str(caught.value)
    assert message.startswith("p.atlaspack: ") and message.endswith(REBUILD), message
    return message


# ---- the format ---------------------------------------------------------------------------------


def test_a_pack_gives_back_what_was_put_in(tmp_path: Path) -> None:
    manifest, blob = build()
    path = tmp_path / "a.atlaspack"
    pack.write(path, pack.to_bytes(manifest, blob))
    opened = pack.read(path)
    assert opened.manifest == manifest and opened.kernel_set.name == "h200/test-model/bf16"
    assert [bytes(image) for image in opened.images] == [cubin(b"code of gated_activation"), cubin(b"code of rms_norm")]
    assert path.stat().st_mode & 0o777 == 0o644 and os.listdir(tmp_path) == ["a.atlaspack"]


def test_the_same_input_gives_the_same_bytes_on_every_host() -> None:
    assert packed() == packed() != packed(quant="fp8")
    manifest = build()[0].to_json().encode()
    head = b"\x89ATLASK\n" + bytes((1, 0, 0, 0)) + len(manifest).to_bytes(4, "little")
    assert packed().startswith(head + len(packed()).to_bytes(8, "little"))
    assert packed()[64 : 64 + len(manifest)] == manifest and packed().index(cubin()) % 64 == 0


def test_compile_times_do_not_reach_a_pack() -> None:
    assert packed(seconds=1.5) == packed() and b"seconds" not in packed()


def test_a_pack_holds_one_cuda_set_and_no_host_code() -> None:
    cpu = KernelSet("cpu", "cpu", "*", "f32", "*", "", (0, 0), ())
    manifest, blob = build()
    for sets, found in (
        ((cpu,), "cpu/*/f32 (cpu, 0 kernels)"),
        ((), "none"),
        (manifest.sets * 2, "h200/test-model/bf16 (cuda, 2 kernels), h200/test-model/bf16 (cuda, 2 kernels)"),
    ):
        images = manifest.images if sets != (cpu,) else ()
        with pytest.raises(BuildError) as caught:
            pack.to_bytes(Manifest(sets, images, "test"), blob if images else b"")
        assert f"sets: {found}; accepted: one CUDA kernel set" in str(caught.value)


def test_a_pack_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no/p.atlaspack: cannot be written .No such file or directory.; accepted: a"):
        pack.write(tmp_path / "no" / "p.atlaspack", VALID)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "cannot be read (No such file or directory)"),
        (lambda p: p.mkdir(), "cannot be read (Is a directory); accepted: a kernel pack (.atlaspack)"),
        (os.mkfifo, "not a regular file; accepted: a kernel pack (.atlaspack)"),
        (lambda p: p.touch(), "not a kernel pack: begins with nothing; accepted: 89 41 54"),
        (lambda p: os.truncate(os.open(p, os.O_CREAT | os.O_WRONLY), pack.MAX_BYTES + 1), "at most 1073741824 bytes"),
    ],
)
def test_what_is_no_pack_file_is_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "p.atlaspack"
    make(path)
    with pytest.raises(BuildError) as caught:
        pack.read(path, "run: this")
    assert message in str(caught.value) and str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("run: this")


def test_a_path_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(BuildError, match="cannot be read"):
        pack.read(Path("a\0b"))


# ---- refusals, each by its own message -------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"GGUF" + VALID[4:],
            "not a kernel pack: begins with 47 47 55 46 41 53 4b 0a; accepted: 89 41 54 4c 41 53 4b 0a",
        ),
        (VALID.replace(b"\n", b"\r\n"), "not a kernel pack: begins with"),
        (VALID[:40], "cut off: 40 bytes; accepted: a header of 64 bytes"),
        (VALID[:-1], f"cut off: {len(VALID) - 1} bytes; accepted: {len(VALID)} bytes, as its header says"),
        (VALID + b"\0", f"something is appended: {len(VALID) + 1} bytes; accepted: {len(VALID)} bytes"),
        (signed(VALID[:8] + b"\2\0\0\0" + VALID[12:]), "pack format 2; accepted: format 1"),
        (signed(VALID[:12] + b"\0\0\0\0" + VALID[16:]), "a manifest of 0 bytes; accepted: 1.."),
        (signed(VALID[:12] + b"\xff\xff\xff\xff" + VALID[16:]), "a manifest of 4294967295 bytes; accepted: 1.."),
        (VALID[:-1] + b"\1", "damaged: its sha256 is "),
        (file_of(b'{"format": "\xff"}', b""), "the manifest is damaged: byte 12 is not ASCII"),
        (signed(VALID[:-1] + b"\1"), "the manifest is damaged: images[2]: has sha256 "),
    ],
)
def test_a_damaged_file_is_refused(data: bytes, message: str) -> None:
    assert message in refusal(data)


def test_the_suggested_command_can_name_everything() -> None:
    fix = pack.rebuild("/models/my llama", "gb10", "fp8")
    with pytest.raises(BuildError) as caught:
        pack.from_bytes(b"", "p", fix)
    assert str(caught.value).endswith("; run: python -m atlas.build '/models/my llama' --hw gb10 --quant fp8")


@pytest.mark.parametrize("field", ["format", "core_abi"])
@pytest.mark.parametrize("value", [0, 99, "1", None, [1]])
def test_another_abi_or_format_is_refused(field: str, value: Any) -> None:
    manifest, blob = build()
    document = {**json.loads(manifest.to_json()), field: value, "from the future": 1}
    expected = f"manifest format {document['format']!r}, core ABI {document['core_abi']!r}"
    assert f"{expected}; accepted: format {manifests.FORMAT}, core ABI {manifests.CORE_ABI}; run: " in refusal(
        with_document(document, blob)
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (cubin(machine=62), "an ELF file for machine 62, not for a GPU (190)"),
        (b"\x7fELF" + bytes(20), "an ELF file of 24 bytes"),
        (cubin(sections_at=64, sections=1), "its table of sections ends at byte 128 of 64"),
        (cubin(struct.pack("<4xI16xQQ24x", 1, 128, 1), sections_at=64, sections=1), "its section 0 ends at byte 129"),
        (b"MZ\x90\0", "neither ELF nor PTX"),
        (PTX + b"\0\0", "neither ELF nor PTX"),
        (b"#!/bin/sh\n", "neither ELF nor PTX"),
    ],
)
def test_an_image_is_code_for_a_gpu_and_within_its_bounds(image: bytes, message: str) -> None:
    manifest, _ = build()
    document = json.loads(manifest.to_json())
    document["images"] = [{"offset": 0, "size": len(image), "sha256": manifests.hashlib.sha256(image).hexdigest()}]
    for kernel in document["sets"][0]["kernels"]:
        kernel["variants"][0]["image"] = 0
    found = refusal(with_document(document, image))
    assert f"images[0]: {message}" in found and "accepted: a cubin or PTX; a pack holds no host code" in found


@pytest.mark.parametrize("end", [b"", b"\0"])
def test_ptx_is_accepted_as_an_image(end: bytes) -> None:
    manifest, _ = build()
    document = json.loads(manifest.to_json())
    sha256 = manifests.hashlib.sha256(PTX + end).hexdigest()
    document["images"] = [{"offset": 0, "size": len(PTX + end), "sha256": sha256}]
    for kernel in document["sets"][0]["kernels"]:
        kernel["variants"][0] |= {"image": -1, "ptx": 0}
    assert bytes(pack.from_bytes(with_document(document, PTX + end), "p").images[0]) == PTX + end


def test_ptx_and_cubins_do_not_change_places() -> None:
    """PTX in the place of a cubin would be compiled at load unsaid, and read beyond its end."""
    manifest, blob = build(ptx=True)
    document = json.loads(manifest.to_json())
    for kernel in document["sets"][0]["kernels"]:
        (variant,) = kernel["variants"]
        variant["image"], variant["ptx"] = variant["ptx"], variant["image"]
    assert "that kernels name as" in refusal(with_document(document, blob))


# ---- fuzzing -----------------------------------------------------------------------------------------


def test_any_flipped_byte_is_refused() -> None:
    generator = random.Random(1)
    places = [*range(64), *generator.sample(range(64, len(VALID)), 1500)]
    for place in places:
        data = bytearray(VALID)
        data[place] ^= generator.randrange(1, 256)
        with pytest.raises(BuildError, match="^p: "):
            pack.from_bytes(bytes(data), "p")


def test_any_cut_is_refused() -> None:
    for size in (*range(70), *range(70, len(VALID), 101)):
        with pytest.raises(BuildError, match="^p: (cut off|not a kernel pack)"):
            pack.from_bytes(VALID[:size], "p")


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parse(data: bytes) -> None:
    """Either a pack that can be written again, or a BuildError that names the file."""
    try:
        opened = pack.from_bytes(data, "p.atlaspack")
    except BuildError as error:
        assert error.where == "p.atlaspack" and str(error).isascii() and len(str(error)) < 2000
    else:
        assert opened.kernel_set.kind == "cuda" and len(opened.images) == len(opened.manifest.images)
        json.loads(opened.manifest.to_json())


@FUZZ
@given(st.data())
def test_signed_mutations_never_crash_the_parser(data: st.DataObject) -> None:
    """The checksum of each is right, so that the mutation reaches the parser."""
    mutated = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(8, 24), st.integers(64, len(mutated) - 1)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "repeat"]))
        if kind == "set":
            mutated[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            mutated[at:at] = data.draw(
                st.sampled_from([b"[", b"{", b'"', b"-", b"9" * 5000, b"NaN", b"1e999", b"\\u0000"])
            )
        elif kind == "delete":
            del mutated[at : at + data.draw(st.integers(1, 64))]
        else:
            mutated[at:at] = mutated[at : at + data.draw(st.integers(1, 512))]
    if data.draw(st.booleans()):
        mutated[16:24] = len(mutated).to_bytes(8, "little")
    parse(signed(bytes(mutated)))


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([-1, 1 << 31, 1 << 63, 1 << 64, 10**100]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["", "../../etc/passwd", "/root", "a\0b", "x" * 1000, SHAPE, "cuda", "cpu", "*"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value in a document."""
    result = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        result += places(inner, (*path, key))
    return result


@FUZZ
@given(st.data())
def test_any_value_in_any_place_never_crashes_the_parser(data: st.DataObject) -> None:
    manifest, blob = build(ptx=True)
    document = json.loads(manifest.to_json())
    path = data.draw(st.sampled_from(places(document)))
    value = data.draw(JSON)
    if path:
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()) and isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    else:
        document = value
    parse(with_document(document, blob))


@FUZZ
@given(st.binary(max_size=400))
def test_noise_behind_the_magic_never_crashes_the_parser(noise: bytes) -> None:
    parse(signed(pack.MAGIC + noise))


def test_a_hostile_manifest_costs_no_more_memory_than_its_size_allows() -> None:
    kernels = b"[" + b"{}," * 1_000_000 + b"{}]"
    head = (
        f'{{"format":{manifests.FORMAT},"core_abi":{manifests.CORE_ABI},"images":[],"compiler":"","sets":[{{"kernels":'
    )
    text = head.encode() + kernels + b"}]}"
    data = file_of(text, b"")
    tracemalloc.start()
    assert "sets[0]" in refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * len(data), peak / len(data)
