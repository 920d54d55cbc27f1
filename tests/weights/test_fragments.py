"""Layout of 4-bit weights for wgmma: where each code and scale stands, counted out one by one, and back again."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import BuildError
from atlas.runtime import weight_runs
from atlas.targets.formats import FORMATS
from atlas.weights import fragments
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import concatenate
from tests.weights.test_quantized import random_array

FOUR_BIT = ("i4g32", "i4g32b", "i4g32z", "i4g32m", "nvfp4")


def word_code(word: int, register: int, element: int, name: str) -> int:
    """The code of a register's half in a word, by what the device does with the word."""
    if name == "i4g32b":
        if register >= 2:
            word = (word & 0xFF00FF00) >> 8 | (word & 0x00FF00FF) << 8
        half = word * 16 ** (register % 2) >> 16 * element & 0x8070
        m = half >> 4 & 7
        return 8 - m - 1 if half >> 15 else 8 + m
    if name != "nvfp4":
        return word >> (16 * element + 4 * register) & 15
    if register == 3:
        moved = (word & 0x001B001B) * (2**3 + 2**8 + 2**14) & 0xFFFFFFFF
    else:
        moved = (word >> 3 * register | word << (32 - 3 * register)) & 0xFFFFFFFF
    half = (moved & 0x81C081C0) >> 16 * element & 0xFFFF
    return half >> 15 << 3 | half >> 6 & 7


@pytest.mark.parametrize("name", FOUR_BIT)
@pytest.mark.parametrize("n, k", [(128, 64), (130, 576), (70, 100)])
def test_every_code_and_scale_is_where_a_thread_looks_for_it(name: str, n: int, k: int) -> None:
    """A thread's registers, decoded with the device's shifts and masks, beside the matrix."""
    rng = np.random.default_rng()
    format = FORMATS[name]
    array = random_array(name, n, k, format.group)
    stored = array.to_format(name)
    packed = fragments.pack(array, format)
    tiles, tile_bytes = -(-k // 64), fragments.tile_bytes(format)
    assert packed.shape == (-(-n // 128), fragments.block_bytes(format, k))
    expected = np.zeros((len(packed) * 128, tiles * 64), np.float32)
    expected[:n, :k] = array.dequantize()
    for _ in range(300):
        block, tile, thread, step = (int(rng.integers(x)) for x in (len(packed), tiles, 256, 4))
        body = packed[block, tile * tile_bytes : (tile + 1) * tile_bytes]
        word = int(body[:4096].view(np.uint32)[4 * thread + step])
        g, t = thread % 32 // 4, thread % 4
        for register in range(4):
            i, c = register % 2, register // 2
            row = 128 * block + thread // 32 * 16 + g + 8 * i
            group = 16 * step // format.group
            for element in range(2):
                column = 64 * tile + 16 * step + 8 * c + 2 * t + element
                code = word_code(word, register, element, name)
                at, per_tile = (thread // 4 * 2 + i) * (64 // format.group) + group, 64 // format.group
                if name == "nvfp4":
                    four = int(body[4096:].view(np.uint32)[at // 4])
                    if step >= 2:
                        four = (four << 8 | four >> 24) & 0xFFFFFFFF
                    bits = np.uint16(four >> 16 * (step % 2) & 0x0FF0 | 0x7000)
                    scale = float(bits.view(ml_dtypes.bfloat16)) * 2.0**-107
                    row_scale = packed[block, tiles * tile_bytes :].view(np.float32)[row % 128]
                    magnitude = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1.0 if code & 8 else 1.0)
                    value = np.float32(magnitude) * (np.float32(scale) * row_scale)
                else:
                    kind = ml_dtypes.bfloat16 if format.scale == "bf16" else np.float16
                    size = 128 * per_tile
                    scale = body[4096 : 4096 + 2 * size].view(kind).astype(np.float32)[at]
                    more = body[4096 + 2 * size :]
                    zero = int(more[at]) if format.zero else format.bias
                    value = np.float32(code - zero) * scale
                    if format.minimum:
                        value += more.view(np.float16).astype(np.float32)[at]
                # Columns past k meet rows' zeros.
                assert column >= k or value == expected[row, column], (row, column)
    back = fragments.unpack(packed, n, k, format)
    np.testing.assert_array_equal(back.astype(np.float32), array.dequantize())
    np.testing.assert_array_equal(back.quantized().codes, stored.codes[:, :k])


@pytest.mark.parametrize("name", FOUR_BIT)
@pytest.mark.parametrize("inner", [64, 96, 200])
def test_pairs_of_gate_and_up_rows_meet_in_a_lane(name: str, inner: int) -> None:
    """The packed form is that of the matrix with its rows rearranged by hand."""
    format = FORMATS[name]
    array = random_array(name, 2 * inner, 72, format.group)
    order = fragments.paired_rows(2 * inner)
    blocks = -(-inner // 64)
    assert len(order) == 128 * blocks
    for row, source in enumerate(order):
        block, rest = divmod(row, 128)
        unit, inside = divmod(rest, 16)
        number = 64 * block + 8 * unit + inside % 8
        assert source == (number + (inner if inside >= 8 else 0) if number < inner else -1)
    packed = LAYOUTS["frag4_paired"].pack(array, name)
    assert packed.nbytes == LAYOUTS["frag4_paired"].nbytes((2 * inner, 72), name)
    by_hand = fragments.unpack(packed, 128 * blocks, 72, format).astype(np.float32)
    values = np.concatenate([array.dequantize(), np.zeros((1, 72), np.float32)])
    np.testing.assert_array_equal(by_hand, values[order])
    back = LAYOUTS["frag4_paired"].unpack(packed, (2 * inner, 72), name)
    np.testing.assert_array_equal(back.astype(np.float32), array.dequantize())


@pytest.mark.parametrize("name", FOUR_BIT)
def test_runs_of_rows_are_packed_by_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loader does it: whole granules, of a paired layout half of them from each half."""
    monkeypatch.setattr(weight_runs, "RUN_BYTES", 1)
    array = random_array(name, 400, 96, FORMATS[name].group)
    for layout in (LAYOUTS["frag4"], LAYOUTS["frag4_paired"]):
        whole = layout.pack(array, name).reshape(-1)
        for stored, spans in weight_runs.spans((400, 96), layout):
            part = layout.pack(concatenate([array.to_format(name).rows(s.start, s.stop) for s in spans]), name)
            at = layout.nbytes((stored, 96), name)
            np.testing.assert_array_equal(part.reshape(-1), whole[at : at + part.nbytes])


@pytest.mark.parametrize("name", ["i4g32", "i4g32b", "i4g32z", "i4g32m"])
def test_a_scale_that_is_not_a_number_is_read_back(name: str) -> None:
    """As a device leaves it of a row that is not finite: the group is NaN, and no other."""
    format = FORMATS[name]
    array = random_array(name, 20, 128, format.group)
    stored = array.to_format(name)
    packed = fragments.pack(array, format)
    broken = packed.reshape(1, -1).copy()
    scales = broken[:, 4096 : 4096 + 512].view(np.uint16)  # of the first tile
    scales[0, 2 * 2 * 3] = 0x7FFF  # row 3, its first group
    values = fragments.unpack(broken, 20, 128, format).astype(np.float32)
    wrong = np.isnan(values)
    assert wrong[3, :32].all() and wrong.sum() == 32
    np.testing.assert_array_equal(values[~wrong], stored.dequantize()[:, :128][~wrong])


def test_every_e4m3_scale_has_a_byte() -> None:
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored = fragments.scale_bytes(scales)
    assert len(set(stored.tolist())) == 127
    np.testing.assert_array_equal(fragments.scale_values(stored), scales)


def test_what_the_layout_does_not_hold_is_refused() -> None:
    with pytest.raises(BuildError, match=r"frag4: format i4g32f; accepted: i4g32, i4g32b, i4g32z, i4g32m, nvfp4"):
        LAYOUTS["frag4"].pack(random_array("i4g32f", 4, 64), "i4g32f")
    with pytest.raises(BuildError, match="plain elements of float32"):
        LAYOUTS["frag4"].pack(np.zeros((4, 64), np.float32), "i4g32")
    array = random_array("i4g32z", 4, 64)
    assert array.zeros is not None
    array.zeros[2, 1] = 128
    with pytest.raises(BuildError, match="a zero point of 128"):
        fragments.pack(array, FORMATS["i4g32z"])
    array = random_array("i4g32b", 4, 64, 32)
    array.scales[0, 0] = 2.0**30
    with pytest.raises(BuildError, match=r"a scale of 1\.07374e\+09"):
        fragments.pack(array, FORMATS["i4g32b"])
