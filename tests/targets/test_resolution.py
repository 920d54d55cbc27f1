"""Which file of a kernel tree serves an op: by example, and as properties of generated trees."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import BuildError
from atlas.targets.hardware import walk
from atlas.targets.resolution import MissingKernel, Target, find, resolve, tuning
from atlas.targets.target import select

HARDWARE = ["leaf", "middle", "base"]
"""Each inherits from the next."""
LEVELS = [f"{h}{suffix}" for h in HARDWARE for suffix in ("/model/bf16", "/model", "")]
"""Every folder that target leaf/model/bf16 looks in, nearest first; and folders that belong to others:"""
FOREIGN = ["leaf/model/fp8", "leaf/else", "leaf/else/bf16", "middle/model/fp8", "stranger", "stranger/model/bf16"]
KERNEL_OPS = ["linear", "gated_activation", "sample"]

placements = st.dictionaries(st.sampled_from(KERNEL_OPS), st.sets(st.sampled_from(LEVELS + FOREIGN)), min_size=1)


def build(root: Path, placed: dict[str, set[str]]) -> Target:
    """The tree with an op's file in every folder given, and the target leaf/model/bf16 in it."""
    for name in [*HARDWARE, "stranger"]:
        (root / name).mkdir()
        parent = HARDWARE[HARDWARE.index(name) + 1] if name in HARDWARE[:-1] else ""
        (root / name / "HARDWARE.toml").write_text(
            f'name = "{name}"\nkind = "cuda"\ndescription = "d"\nabstract = true\n'
            + (f'inherits = "{parent}"\n' if parent else "")
        )
    for op, folders in placed.items():
        for folder in folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{op}.cu").write_text("")
    return Target(walk(root)["leaf"], "model", "bf16", {})


@settings(max_examples=150, deadline=None)
@given(placements)
def test_the_nearest_file_wins_and_a_missing_op_names_where_it_was_sought(placed: dict[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = build(root, placed)
        for op in KERNEL_OPS:
            nearest = next((level for level in LEVELS if level in placed.get(op, set())), None)
            if nearest:
                assert resolve(target, op) == root / nearest / f"{op}.cu"
                continue
            with pytest.raises(MissingKernel) as caught:
                resolve(target, op)
            assert caught.value.where == f"op {op}" and "target leaf/model/bf16" in caught.value.found
            assert caught.value.accepted == f"{op}.cu in " + ", ".join(str(root / level) for level in LEVELS)


@settings(max_examples=100, deadline=None)
@given(placements, st.sampled_from(KERNEL_OPS), st.sampled_from(LEVELS))
def test_an_override_changes_its_own_op_and_drops_no_other(placed: dict[str, set[str]], op: str, level: str) -> None:
    def served(placements: dict[str, set[str]]) -> dict[str, str | None]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            target = build(root, placements)
            result: dict[str, str | None] = {}
            for name in KERNEL_OPS:
                try:
                    result[name] = resolve(target, name).parent.relative_to(root).as_posix()
                except MissingKernel:
                    result[name] = None
            return result

    before, after = served(placed), served({**placed, op: placed.get(op, set()) | {level}})
    assert {k: v for k, v in before.items() if k != op} == {k: v for k, v in after.items() if k != op}
    earlier = before[op]
    assert after[op] == (level if earlier is None else min(level, earlier, key=LEVELS.index))


@settings(max_examples=60, deadline=None)
@given(placements, st.sampled_from(KERNEL_OPS), st.sampled_from(LEVELS))
def test_two_claims_fail_unless_a_nearer_file_wins(placed: dict[str, set[str]], op: str, level: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = build(root, {**placed, op: placed.get(op, set()) | {level}})
        (root / level / f"{op}.cpp").write_text("")
        nearer = [other for other in LEVELS[: LEVELS.index(level)] if other in placed.get(op, set())]
        if nearer:
            assert resolve(target, op) == root / nearer[0] / f"{op}.cu"
            return
        with pytest.raises(BuildError) as caught:
            resolve(target, op)
        assert not isinstance(caught.value, MissingKernel)
        assert str(caught.value) == (
            f"op {op}: claimed by {root / level / op}.cpp and {root / level / op}.cu; "
            "accepted: one file at each level; remove one"
        )


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(LEVELS), st.dictionaries(st.sampled_from("ABC"), st.integers(0, 9))))
def test_tuning_merges_and_the_nearest_value_of_each_knob_applies(stated: dict[str, dict[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = build(root, {})
        for level, knobs in stated.items():
            (root / level).mkdir(parents=True, exist_ok=True)
            lines = [f"{knob} = {value}" for knob, value in knobs.items()]
            (root / level / "tuning.toml").write_text("\n".join(["[linear]", *lines, "[gated_activation]", "D = 1"]))
        wanted = {
            knob: next(stated[level][knob] for level in LEVELS if knob in stated.get(level, {}))
            for knob in "ABC"
            if any(knob in knobs for knobs in stated.values())
        }
        assert tuning(target, "linear") == wanted
        assert tuning(target, "gated_activation") == ({"D": 1} if stated else {}) and tuning(target, "sample") == {}


def test_each_level_says_what_it_is_to_the_target(tree: Path) -> None:
    small = next(t for t in select(tree, {"ATLAS_TARGET_HW": "card"}).targets if t.name == "card/small/bf16")
    assert find(small, "linear")[1].why == "inherited from base"
    for level, why in [
        ("base/small", "this model, inherited from base"),
        ("card", "this hardware"),
        ("card/small", "this model"),
        ("card/small/bf16", "this model and quant"),
    ]:
        (tree / level).mkdir(exist_ok=True)
        (tree / level / "linear.cu").write_text("")
        assert find(small, "linear")[1].why == why
    cpu = select(tree, {"ATLAS_TARGET_HW": "cpu"}).targets[0]
    assert find(cpu, "linear")[1].why == "this hardware"


def test_tuning_that_is_not_a_table_names_the_file(tree: Path) -> None:
    card = select(tree, {"ATLAS_TARGET_HW": "card"}).targets[-1]
    (tree / "card" / "tuning.toml").write_text("linear = 3\n")
    with pytest.raises(BuildError, match=r"card/tuning.toml: linear is 3; accepted: a table \[linear\] of knobs"):
        tuning(card, "linear")
    (tree / "card" / "tuning.toml").write_text("[linear\n")
    with pytest.raises(BuildError, match="card/tuning.toml: not valid TOML"):
        tuning(card, "linear")


def placed(root: Path, *names: str, **texts: str) -> Target:
    """Target leaf/model/bf16 of a tree with empty files, and with files that say what they serve."""
    target = build(root, {})
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(texts.get(Path(name).name.split(".")[1], ""))
    return target


def test_the_nearest_file_of_a_phase_wins(tmp_path: Path) -> None:
    """A nearer <op>.cu serves both phases, a nearer <op>.decode.cu only its own."""
    target = placed(
        tmp_path, "base/linear.cu", "middle/linear.decode.cu", "leaf/model/sample.cu", "base/sample.decode.cu"
    )
    assert resolve(target, "linear", "prefill") == tmp_path / "base/linear.cu"
    assert resolve(target, "linear", "decode") == tmp_path / "middle/linear.decode.cu"
    assert {resolve(target, "sample", phase).parent.name for phase in ("prefill", "decode")} == {"model"}


def test_two_claims_of_one_phase_are_refused(tmp_path: Path) -> None:
    target = placed(tmp_path, "leaf/linear.cu", "leaf/linear.decode.cu")
    assert resolve(target, "linear", "prefill") == tmp_path / "leaf/linear.cu"
    with pytest.raises(
        BuildError, match="op linear: claimed by .*linear.cu and .*linear.decode.cu; accepted: one file"
    ):
        resolve(target, "linear", "decode")


def test_a_phase_without_a_file_is_named(tmp_path: Path) -> None:
    target = placed(tmp_path, "base/linear.decode.cu")
    with pytest.raises(MissingKernel) as caught:
        resolve(target, "linear", "prefill", {"x": "bf16"})
    assert "no kernel for the prefill phase of x bf16 for target leaf/model/bf16, only linear.decode.cu" in str(
        caught.value
    )
    assert "accepted: linear.cu or linear.prefill.cu in " in str(caught.value)


def test_a_file_serves_the_types_that_it_names(tmp_path: Path) -> None:
    """What it does not serve is served by the next level; two files of one level share the types out."""
    only = "/* atlas\n[serves]\nweight = {}\n*/\n"
    names = ("base/linear.cu", "leaf/linear.decode.cu", "leaf/linear.w4.decode.cu")
    target = placed(tmp_path, *names, decode=only.format(["bf16"]), w4=only.format(["i4g32", "i4g32z"]))
    for weight, name in (("f32", names[0]), ("bf16", names[1]), ("i4g32z", names[2])):
        assert resolve(target, "linear", "decode", {"x": "bf16", "weight": weight}) == tmp_path / name
    assert resolve(target, "linear", "prefill", {"weight": "bf16"}) == tmp_path / names[0]
    (tmp_path / names[2]).write_text(only.format(["bf16"]))
    with pytest.raises(BuildError, match="claimed by"):
        resolve(target, "linear", "decode", {"weight": "bf16"})


def test_a_file_serves_the_constants_that_it_names(tmp_path: Path) -> None:
    """A rule may hold for one type alone, of whose elements it knows the size; 0 of a block format."""
    names = ("base/linear.cu", "leaf/linear.decode.cu")
    rule = "n % 128 * (1 - min(1, size_weight)) == 0"
    target = placed(tmp_path, *names, decode=f'/* atlas\n[serves]\nwhere = ["k >= 64", "{rule}"]\n*/\n')
    for weight, n, k, name in (
        ("bf16", 64, 64, names[1]),
        ("bf16", 128, 32, names[0]),
        ("f8g128", 128, 64, names[1]),
        ("f8g128", 64, 64, names[0]),
    ):
        found = resolve(target, "linear", "decode", {"weight": weight}, {"n": n, "k": k})
        assert found == tmp_path / name, (weight, n, k)
    assert resolve(target, "linear", "decode", {"weight": "f8g128"}) == tmp_path / names[1], "some constants"
    (tmp_path / names[0]).unlink()
    with pytest.raises(MissingKernel):
        resolve(target, "linear", "decode", {"weight": "bf16"}, {"n": 64, "k": 8})
