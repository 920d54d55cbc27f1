"""Manifests that a stranger may have written: every field is checked, and the error names it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from atlas.build import manifest as manifests
from atlas.build import strict_json
from atlas.build.manifest import KernelEntry
from atlas.build.strict_json import Malformed
from atlas.errors import BuildError
from tests.fake_packs import build

MANIFEST, BLOB = build()


def refusal(text: str) -> str:
    with pytest.raises(BuildError) as caught:
        manifests.from_json(text, BLOB, "here", "do this")
    message = str(caught.value)
    assert message.startswith("here: the manifest is damaged: ") and message.endswith("; do this"), message
    assert message.isascii() and len(message) < 1000
    return message.removeprefix("here: the manifest is damaged: ")


def changed(path: str, value: Any) -> str:
    """The valid manifest with the value at `path`, e.g. "sets.0.kernels.0.block", replaced."""
    document = json.loads(MANIFEST.to_json())
    holder = document
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        holder = holder[key]
    holder[last] = value
    return json.dumps(document)


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest, images = manifests.from_json(MANIFEST.to_json(), BLOB, "here")
    assert manifest == MANIFEST and manifest.to_json() == MANIFEST.to_json() and len(images) == 2


def test_fields_with_a_default_may_be_absent() -> None:
    document = json.loads(MANIFEST.to_json())
    del document["flags"], document["selection"], document["sets"][0]["kernels"][0]["variants"][0]["ptx"]
    manifest, _ = manifests.from_json(json.dumps(document), BLOB, "here")
    assert (manifest.flags, manifest.selection, manifest.sets[0].kernels[0].variants[0].ptx) == ((), {}, -1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("compiler", 7, "compiler: is 7; accepted: printable ASCII, at most 1024 characters"),
        ("compiler", "x" * 1025, "compiler: is "),
        ("flags", "-O3", "flags: is '-O3'; accepted: a list"),
        ("flags", ["-O3"] * 257, "flags: has 257 items; accepted: 0..256"),
        ("selection", ["x"], "selection: is ['x']; accepted: an object"),
        ("selection", {f"k{i}": "" for i in range(17)}, "selection: has 17 entries; accepted: at most 16"),
        ("selection", {"../x": ""}, "selection, a key,: is '../x'; accepted: letters"),
        ("sets", {}, "sets: is {}; accepted: a list"),
        ("sets.0", [], "sets[0]: is []; accepted: an object"),
        ("sets.0.kind", "rocm", "sets[0].kind: is 'rocm'; accepted: 'cpu' or 'cuda'"),
        ("sets.0.hardware", "../h200", "sets[0].hardware: is '../h200'; accepted: letters, digits"),
        ("sets.0.model", "/etc/passwd", "sets[0].model: is '/etc/passwd'; accepted: '*', or letters"),
        ("sets.0.model", "", "sets[0].model: is ''"),
        ("sets.0.quant", "b\u0000f", "sets[0].quant: is 'b\\x00f'"),
        ("sets.0.shape_hash", "ABCDEF0123456789", "sets[0].shape_hash: is 'ABCDEF0123456789'; accepted: '*' or 16 hex"),
        ("sets.0.arch", "sm_90a; rm", "sets[0].arch: is 'sm_90a; rm'; accepted: a ptxas target"),
        ("sets.0.compute_capability", [9], "sets[0].compute_capability: has 1 items; accepted: 2..2"),
        ("sets.0.compute_capability", [9, -1], "sets[0].compute_capability[1]: is -1; accepted: an integer in 0..99"),
        ("sets.0.kernels", [{}] * 4097, "sets[0].kernels: has 4097 items; accepted: 0..4096"),
        (
            "sets.0.kernels.1.name",
            "gated_activation__hidden576",
            "sets[0].kernels[1].name: 'gated_activation__hidden576' stands twice",
        ),
        (
            "sets.0.kernels.1.variants.0.symbol",
            "sch\u00f6n",
            "sets[0].kernels[1].variants[0].symbol: is 'sch\\xf6n'; accepted: a C identifier",
        ),
        (
            "sets.0.kernels.1.variants.0.symbol",
            "",
            "sets[0].kernels[1].variants[0]: a device kernel without image, symbol or grid",
        ),
        ("sets.0.kernels.1.variants.0.symbol", "k" * 257, "at most 256 characters"),
        ("sets.0.kernels.1.variants.0.image", 2, "sets[0].kernels[1].variants[0].image: is 2; accepted: -1..1"),
        ("sets.0.kernels.1.variants.0.ptx", 65536, "sets[0].kernels[1].variants[0].ptx: is 65536; accepted: -1..1"),
        (
            "sets.0.kernels.1.variants.0.image",
            -1,
            "sets[0].kernels[1].variants[0]: a device kernel without image, symbol or grid",
        ),
        (
            "sets.0.kernels.1.variants.0.image",
            -2,
            "sets[0].kernels[1].variants[0].image: is -2; accepted: an integer in -1..65536",
        ),
        (
            "sets.0.kernels.1.variants.0.image",
            True,
            "sets[0].kernels[1].variants[0].image: is True; accepted: an integer",
        ),
        (
            "sets.0.kernels.1.variants.0.block",
            0,
            "sets[0].kernels[1].variants[0].block: is 0; accepted: an integer in 1..1024",
        ),
        (
            "sets.0.kernels.1.variants.0.block",
            1 << 63,
            "sets[0].kernels[1].variants[0].block: is 9223372036854775808; accepted: an integer",
        ),
        (
            "sets.0.kernels.1.variants.0.shared",
            None,
            "sets[0].kernels[1].variants[0].shared: is None; accepted: an integer in 0..1048576",
        ),
        (
            "sets.0.kernels.1.variants.0.grid",
            [[0, 1]],
            "sets[0].kernels[1].variants[0].grid[0]: is [0, 1]; accepted: a list of 3",
        ),
        (
            "sets.0.kernels.1.variants.0.grid",
            [[0, 0, 1]],
            "sets[0].kernels[1].variants[0].grid[0][1]: is 0; accepted: an integer in 1..",
        ),
        (
            "sets.0.kernels.1.variants.0.grid",
            [[0, 1, 1]] * 4,
            "sets[0].kernels[1].variants[0].grid: has 4 items; accepted: 0..3",
        ),
        ("sets.0.kernels.1.contract", "no", "sets[0].kernels[1].contract: is 'no'; accepted: 16 hex digits"),
        (
            "sets.0.kernels.1.variants.0.source",
            "../../x.cu",
            "sets[0].kernels[1].variants[0].source: is '../../x.cu'; accepted: a path inside",
        ),
        ("sets.0.kernels.1.variants.0.source", "/x.cu", "sets[0].kernels[1].variants[0].source: is '/x.cu'"),
        ("sets.0.kernels.1.layouts", {"x": 1}, "sets[0].kernels[1].layouts.x: is 1; accepted: letters"),
        (
            "sets.0.kernels.1.variants.0.knobs",
            {"T": 1 << 32},
            "sets[0].kernels[1].variants[0].knobs.T: is 4294967296; accepted: an integer",
        ),
        ("sets.0.kernels.1.variants.0.registers", [], "sets[0].kernels[1].variants[0].registers: is []"),
        ("sets.0.kernels.1.variants.0.phase", 3, "variants[0].phase: is 3; accepted: an integer in 0..2"),
        ("sets.0.kernels.1.variants.0.max_rows", -1, "variants[0].max_rows: is -1; accepted: an integer in 0.."),
        ("sets.0.kernels.1.variants.0.cluster", 0, "variants[0].cluster: is 0; accepted: an integer in 1..16"),
        ("sets.0.kernels.1.variants.0.pdl", 1, "variants[0].pdl: is 1; accepted: true or false"),
        ("sets.0.kernels.1.variants", [], "sets[0].kernels[1].variants: has 0 items; accepted: 1 or more of a device"),
        ("images.0.offset", -64, "images[0].offset: is -64; accepted: an integer in 0.."),
        ("images.0.size", 0, "images[0].size: is 0; accepted: an integer in 1.."),
        ("images.0.size", 1 << 31, f"images[0]: ends at byte {1 << 31}; accepted: at most {len(BLOB)}"),
        ("images.1.size", 1 << 31, f"images[1]: ends at byte {128 + (1 << 31)}; accepted: at most {len(BLOB)}"),
        ("images.1.offset", 64, "images[1]: begins at byte 64 inside another image; accepted: 88 or more"),
        ("images.1.offset", 0, "inside another image; accepted: "),
        ("images.1.sha256", "0" * 64, "images[1]: has sha256 "),
        ("images.1.sha256", "zz", "images[1].sha256: is 'zz'; accepted: 64 hex digits"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: Any, message: str) -> None:
    assert message in refusal(changed(path, value))


def test_host_code_has_no_image() -> None:
    document = json.loads(MANIFEST.to_json())
    document["sets"][0]["kind"] = "cpu"
    message = "sets[0].kernels[0].variants: has 1 items; accepted: none of host code"
    assert message in refusal(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[]", "is []; accepted: an object"),
        ("nul", "not JSON"),
        ('{"format": 1, "core_abi": NaN}', "the number 'NaN'; accepted: integers only"),
        ('{"format": 1, "core_abi": -Infinity}', "the number '-Infinity'"),
        ('{"format": 1e999}', "the number '1e999'"),
        ('{"format": 1.0}', "the number '1.0'"),
        ('{"format": ' + "9" * 5000 + "}", "not JSON (Exceeds the limit"),
        ('{"format": 1, "format": 1}', "'format': the key stands twice in one object"),
        ("[" * 100_000, "nested too deep; accepted: at most 10 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ('{"a": ' + "[" * 20 + "]" * 20 + "}", "nested too deep"),
        ('"' + '\\"' * 200_000, "not JSON"),
        ("]", "brackets do not match"),
        ("{\"a\": '[[[[[[[[['}", "brackets do not match"),
    ],
)
def test_what_is_no_manifest_at_all_is_refused(text: str, message: str) -> None:
    assert message in refusal(text)


def test_brackets_inside_strings_do_not_count() -> None:
    assert strict_json.parse('{"a": "[[[[[[[[[[\\"[["}', 1) == {"a": '[[[[[[[[[["[['}


def test_a_missing_and_an_unknown_field_are_named() -> None:
    document = json.loads(MANIFEST.to_json())
    del document["sets"][0]["kernels"][1]["op"]
    assert "sets[0].kernels[1].op: is missing" in refusal(json.dumps(document))
    document = json.loads(MANIFEST.to_json())
    document["images"][0]["path"] = "/x"
    assert "images[0]: has an unknown field 'path'; accepted: offset, size, sha256" in refusal(json.dumps(document))
    assert "has an unknown field 'seconds'" in refusal(changed("sets.0.kernels.0.seconds", 1))


def test_a_field_without_a_check_is_noticed_at_import() -> None:
    with pytest.raises(TypeError, match=re.escape("KernelEntry: every field needs a check: ['contract',")):
        strict_json.record(KernelEntry, {"name": strict_json.integer(0, 1)})


def test_an_error_of_the_document_names_no_field() -> None:
    with pytest.raises(Malformed) as caught:
        strict_json.parse("x", 1)
    assert caught.value.field == ""


def test_variants_stand_in_the_order_in_which_they_are_chosen() -> None:
    document = json.loads(MANIFEST.to_json())
    (one,) = document["sets"][0]["kernels"][1]["variants"]

    for of in (((2, 16), (2, 8)), ((1, 0), (1, 0)), ((2, 0), (2, 8))):
        variants = [{**one, "phase": phase, "max_rows": rows} for phase, rows in of]
        document["sets"][0]["kernels"][1]["variants"] = variants
        assert "accepted: each once, in ascending order" in refusal(json.dumps(document))
    document["sets"][0]["kernels"][1]["variants"] = [
        {**one, "phase": phase, "max_rows": rows} for phase, rows in ((1, 0), (2, 8), (2, 0))
    ]
    manifest, _ = manifests.from_json(json.dumps(document), BLOB, "here")
    assert [(v.phase, v.max_rows) for v in manifest.sets[0].kernels[1].variants] == [(1, 0), (2, 8), (2, 0)]
