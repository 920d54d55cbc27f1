"""HARDWARE.toml files: fields, inheritance, and what the kernel tree itself must keep to."""

import re
from pathlib import Path

import pytest

from atlas.errors import BuildError
from atlas.targets.hardware import FIELDS, fields_table, walk
from atlas.targets.quant import QUANTS

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

FULL = """
name = "card"
kind = "cuda"
description = "a card"
arch = "sm_90a"
compute_capability = [9, 0]
multiprocessors = 132
shared_memory_per_block = 232448
quants = ["bf16"]
"""


def write(root: Path, name: str, text: str) -> None:
    (root / name).mkdir(exist_ok=True)
    (root / name / "HARDWARE.toml").write_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("multiprocesors = 3", "unknown key 'multiprocesors'; accepted: name, .*; nearest: multiprocessors"),
        ('inherits = "crad"', "inherits 'crad'; accepted: card; nearest: card"),
        ('inherits = "card"', "inherits 'card': a circle; accepted: a chain that ends; drop one"),
        ("kind = ", "not valid TOML"),
        ("device_names = 'x'", "device_names is 'x'; accepted: a list: patterns of device names"),
        ("device_names = [3]", r"device_names is \[3\]; accepted: patterns"),
        ("abstract = 1", "abstract is 1; accepted: true or false: true: only to inherit from"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "card", FULL + text + "\n")
    with pytest.raises(BuildError, match=f"card/HARDWARE.toml: {message}"):
        walk(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('name = "h200"', "name is 'h200'; accepted: 'card', the directory's name"),
        ('kind = "rocm"', "kind is 'rocm'; accepted: `cpu` or `cuda`"),
        ("multiprocessors = true", "multiprocessors is True; accepted: an integer"),
        ("multiprocessors = 0", "multiprocessors is 0; accepted: more than 0"),
        ("shared_memory_per_block = -1", "shared_memory_per_block is -1; accepted: more than 0"),
        ("compute_capability = [9]", r"compute_capability is \[9\]; accepted: \[major, minor\]"),
        ("compute_capability = [9.0, 0]", r"compute_capability is \[9.0, 0\]"),
        (
            "compute_capability = [9, 1]",
            "arch is 'sm_90a'; accepted: code for its compute_capability; sm_90a code runs",
        ),
        ('arch = "compute_90a"', "arch is 'compute_90a'; accepted: code for its compute_capability"),
        ('arch = "hopper"', "'hopper' is not an architecture name"),
        ('quants = ["bf61"]', "quants names 'bf61'; accepted: .*; nearest: bf16"),
        ("levels = [3]", "level 3; accepted: name, machine"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, line: str, message: str) -> None:
    key = line.split(" = ")[0]
    rest = [old for old in FULL.splitlines() if not old.startswith(f"{key} = ")]
    write(tmp_path, "card", "\n".join([*rest, line]))
    with pytest.raises(BuildError, match=message):
        walk(tmp_path)


@pytest.mark.parametrize("key", [name for name, field in FIELDS.items() if "cuda" in field.required])
def test_a_missing_field_is_named(tmp_path: Path, key: str) -> None:
    write(tmp_path, "card", "\n".join(line for line in FULL.splitlines() if not line.startswith(f"{key} = ")))
    with pytest.raises(BuildError, match=f"{key} is (missing|None)"):
        walk(tmp_path)


def test_a_child_states_only_what_differs(tmp_path: Path) -> None:
    write(tmp_path, "card", FULL + "device_names = ['*Card*']\nabstract = true\n")
    write(tmp_path, "child", 'name = "child"\ndescription = "c"\ninherits = "card"\n')
    write(tmp_path, "grand", 'name = "grand"\ndescription = "g"\ninherits = "child"\nmultiprocessors = 78\n')
    hardware = walk(tmp_path)
    child, grand = hardware["child"], hardware["grand"]
    assert (child.kind, child.arch, child.multiprocessors, child.quants) == ("cuda", "sm_90a", 132, ("bf16",))
    # What identifies a directory is its own.
    assert not child.abstract and child.device_names == () and child.description == "c"
    assert grand.multiprocessors == 78 and grand.arch == "sm_90a"
    assert grand.chain == (tmp_path / "grand", tmp_path / "child", tmp_path / "card")


def test_what_results_from_inheritance_is_checked(tmp_path: Path) -> None:
    write(tmp_path, "card", FULL)
    write(tmp_path, "child", 'name = "child"\ndescription = "c"\ninherits = "card"\ncompute_capability = [8, 0]\n')
    with pytest.raises(BuildError, match="child/HARDWARE.toml: arch is 'sm_90a'.*this device is 8.0"):
        walk(tmp_path)
    write(tmp_path, "child", 'name = "child"\ndescription = "c"\ninherits = "card"\nkind = "cpu"\n')
    with pytest.raises(BuildError, match="child/HARDWARE.toml: kind is 'cpu'; accepted: 'cuda', the kind of card"):
        walk(tmp_path)
    write(tmp_path, "child", 'name = "child"\ndescription = "c"\nkind = "cuda"\nabstract = true\n')
    write(tmp_path, "grand", 'name = "grand"\ndescription = "g"\ninherits = "child"\n')
    with pytest.raises(BuildError, match="grand/HARDWARE.toml: quants is missing.*or inherit from hardware that does"):
        walk(tmp_path)


def test_a_circle_of_several_is_found(tmp_path: Path) -> None:
    for name, parent in [("a", "b"), ("b", "c"), ("c", "a")]:
        write(tmp_path, name, f'name = "{name}"\nkind = "cuda"\ndescription = "d"\ninherits = "{parent}"\n')
    with pytest.raises(BuildError, match="c/HARDWARE.toml: inherits 'a': a circle"):
        walk(tmp_path)


def test_the_documented_fields_are_the_fields() -> None:
    text = (KERNELS.parent / "docs" / "adding-hardware.md").read_text()
    assert fields_table() in text, "docs/adding-hardware.md: paste fields_table() over its table"


def test_the_cards_are_what_their_makers_say() -> None:
    """CUDA programming guide, compute capabilities; data sheets for the counts."""
    cards = {
        name: (h.arch, h.compute_capability, h.multiprocessors, h.shared_memory_per_block)
        for name, h in walk(KERNELS).items()
        if h.kind == "cuda" and not h.abstract
    }
    assert cards == {
        "h200": ("sm_90a", (9, 0), 132, 232448),
        "gb10": ("sm_121a", (12, 1), 48, 101376),
        "rtx5090": ("sm_120a", (12, 0), 170, 101376),
        "l40s": ("sm_89", (8, 9), 142, 101376),
        "a100": ("sm_80", (8, 0), 108, 166912),
    }
    assert all(set(h.quants) <= set(QUANTS) for h in walk(KERNELS).values())


def test_no_file_of_the_tree_is_a_link() -> None:
    assert not [path for path in KERNELS.rglob("*") if path.is_symlink()]


_COMMENT = re.compile(r"/\*(?! atlas\n).*?\*/|//[^\n]*", re.DOTALL)
_REGISTERS = re.compile(r"(?m)^#define ATLAS_[DO]\d+ .*$")
"""Lists of an instruction's registers by number."""


def test_no_kernel_holds_a_cards_multiprocessor_count() -> None:
    """A launch that fits one card's count is wrong on the next. Counts that are also sizes (48, 128) cannot be told
    apart, so they are left out; 114 and 78 are other Hopper cards'."""
    counts = {h.multiprocessors for h in walk(KERNELS).values()} - {0, 48, 128} | {114, 78}
    literal = re.compile(rf"(?<![\w.%])({'|'.join(map(str, sorted(counts)))})(?![\w.])")
    sources = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    assert len(sources) > 20 and literal.search("constexpr int blocks = 132;")
    for path in sources:
        found = literal.search(_REGISTERS.sub("", _COMMENT.sub("", path.read_text())))
        assert not found, f"{path} holds {found and found.group()}, a multiprocessor count"
