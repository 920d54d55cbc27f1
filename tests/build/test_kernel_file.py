"""Declarations of kernel files: geometry, and errors that name file and key."""

from pathlib import Path

import pytest

from atlas.build import kernel_file
from atlas.build.geometry import Axis, Geometry
from atlas.build.kernel_file import cpu_signatures, declaration
from atlas.errors import BuildError

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def write(folder: Path, body: str, name: str = "linear.cu") -> Path:
    path = folder / name
    path.write_text(f"/* atlas\n{body}*/\n")
    return path


def test_the_table_of_keys_is_what_is_accepted() -> None:
    """Authors of kernels read the table at the top of the module; what they may write is `_TABLES`."""
    told: dict[str, list[str]] = {}
    for line in (kernel_file.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in ("table", "---"):
            told.setdefault(cells[0], []).extend(cells[1].split(", "))
    # Keys of "knobs.choices" and names in capitals are the author's own.
    assert {table: sorted(keys) for table, keys in told.items() if keys[0].islower() and table != "knobs"} == {
        table: sorted(keys) for table, keys in kernel_file._TABLES.items() if keys is not None
    }
    assert told["knobs"] == ["NAME", "legal"] and told["knobs.choices"] == ["NAME"]
    assert {table for table, keys in kernel_file._TABLES.items() if keys is None} <= set(told)


def test_geometry_is_evaluated_with_constants_and_knobs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[launch]\ngrid = ["ceil_div(rows, TILE_M)", "ceil_div(n, TILE_N) * 2", "3 * rows"]\n'
        'block = "32 * WARPS"\nshared = "TILE_M * k * 2"\n[limits]\nspills = 8\n'
        '[knobs]\nTILE_M = 16\nTILE_N = 64\nWARPS = 4\n[layouts]\nweight = "panel16"\n',
    )
    declared = declaration(path)
    found = declared.geometry({"n": 960, "k": 576}, declared.knobs({}))
    assert found == Geometry((Axis(0, 16, 1), Axis(-1, 1, 30), Axis(0, 1, 3)), 128, 16 * 576 * 2, 1)
    assert (declared.spills, declared.layouts) == (8, {"weight": "panel16"})
    assert declared.geometry({"n": 960, "k": 576}, {**declared.knobs({}), "TILE_M": 32}).grid[0] == Axis(0, 32, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[lunch]\n", r"unknown table \[lunch\]; accepted: launch"),
        ("[launch]\ngird = 1\n", r"unknown key 'gird' in \[launch\]; accepted: grid"),
        ("[launch]\ngrid = [1, 1]\n", "grid is .*three expressions"),
        ("[knobs]\nTILE = 1.5\n", "knob TILE is 1.5; accepted: an integer or an expression"),
        ('[layouts]\nwieght = "x"\n', "names 'wieght'; accepted: x, weight, bias, out"),
        ("[launch\n", "not valid TOML"),
        ("[limits]\nspills = 1.5\n", r"\[limits\] spills is 1.5; accepted: bytes"),
        ('[limits]\nseconds = "long"\n', r"\[limits\] seconds is 'long'; accepted: a number of seconds"),
        ('[limits]\nunread = ["out"]\n', r"\[limits\] unread names 'out'; accepted: x, weight"),
        ("[levels]\nalso = 1\n", r"\[levels\] also is 1; accepted: a list of levels"),
        ("[limits]\nsame_bits = 1\n", r"\[limits\] same_bits is 1; accepted: true or false"),
        ("[knobs]\nA = 1\n[knobs.choices]\nB = [1]\n", r"\[knobs.choices\] names 'B'; accepted: A"),
        ("[knobs]\nA = 1\n[knobs.choices]\nA = [2, 4]\n", "choices of A are .2, 4.; accepted: .* its value 1"),
        ("[knobs]\nA = 1\n[knobs.choices]\nA = 1\n", "choices of A are 1; accepted: a list of integers"),
        ('[knobs]\nA = 1\nlegal = "A < 2"\n', "legal is 'A < 2'; accepted: a list of comparisons"),
        ('[knobs]\nA = 1\nlegal = ["A"]\n', r"legal has 'A'; accepted: a comparison of two integer expressions"),
        ('[knobs]\nA = 1\nlegal = ["1 < A < 3"]\n', "legal has '1 < A < 3'"),
        ("[launch]\npdl = 1\n", r"\[launch\] pdl is 1; accepted: true or false"),
        ('[launch]\narguments = "n"\n', r"\[launch\] arguments is 'n'; accepted: a list of n, k"),
        ('[launch]\narguments = ["n", "n"]\n', "accepted: a list of n, k, each once"),
        ('[launch]\narguments = ["m"]\n', r"\[launch\] arguments is \['m'\]; accepted: a list of n, k"),
        ("[rows]\nup_to = 8\n", r"\[rows\] up_to is 8; accepted: ascending numbers of rows; the last may be 0"),
        ("[rows]\nup_to = [16, 8]\n", r"up_to is \[16, 8\]"),
        ("[rows]\nup_to = [0, 8]\n", r"up_to is \[0, 8\]"),
        ('[serves]\nwieght = ["f32"]\n', r"\[serves\] names 'wieght'; accepted: x, weight, bias, out, where"),
        ('[serves]\nwhere = "n > 1"\n', r"\[serves\] where is 'n > 1'; accepted: a list of comparisons"),
        ('[serves]\nwhere = ["n"]\n', r"\[serves\] where has 'n'; accepted: a comparison of two integer expressions"),
        ('[serves]\nweight = "f32"\n', r"\[serves\] weight is 'f32'; accepted: a list of element types"),
        ("[layouts]\nweight = 1\n", r"\[layouts\] weight is 1; accepted: a layout, or a table: dtype = layout"),
        ('[cost]\nlaunch = "1"\nbytes = "1"\n', r"\[cost\] has launch, bytes; accepted: launch alone"),
        ('[cost]\nbytse = "1"\n', r"unknown key 'bytse' in \[cost\]; accepted: bytes, flops, trips, steps, memory"),
    ],
)
def test_a_wrong_declaration_names_file_and_key(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        declaration(write(tmp_path, body))
    assert "linear.cu" in str(caught.value)


def test_a_file_like_another_has_what_it_does_not_state_itself(tmp_path: Path) -> None:
    write(
        tmp_path,
        '[launch]\nblock = 64\nshared = "A * 2"\n[serves]\nweight = ["bf16"]\n[limits]\nspills = 8\n'
        '[knobs]\nA = 4\nB = "A + 1"\nC = 1\n[knobs.choices]\nA = [4, 8]\nC = [1, 2]\n[layouts]\nx = "tiles"\n',
    )
    own = '[serves]\nout = ["f32"]\n[limits]\nspills = 16\n[layouts]\nout = "tiles"\n'
    own += "[knobs]\nA = 8\n[knobs.choices]\nC = [1, 4]\n"
    path = write(tmp_path, f'like = "linear.cu"\n{own}', "normed_linear.cu")
    declared = declaration(path)
    assert (declared.op, declared.block, declared.spills) == ("normed_linear", 64, 16)
    assert declared.knobs({}) == {"A": 8, "B": 9, "C": 1}
    assert declared.choices == {"A": (4, 8), "C": (1, 4)}
    assert declared.geometry({}, declared.knobs({})).shared == 16
    assert declared.layouts == {"x": "tiles", "out": "tiles"}
    assert kernel_file.serves(path, {"weight": "bf16", "out": "f32"})
    assert not kernel_file.serves(path, {"weight": "f8", "out": "f32"})
    assert not kernel_file.serves(path, {"weight": "bf16", "out": "bf16"})


@pytest.mark.parametrize("like", ['"nowhere.cu"', '"../linear.cu"', '"rms_norm.cu"', '"normed_linear.cu"', "1"])
def test_a_file_is_like_one_beside_it_that_is_like_none(tmp_path: Path, like: str) -> None:
    write(tmp_path, "[knobs]\nA = 1\n")
    write(tmp_path, 'like = "linear.cu"\n', "normed_linear.cu")
    (tmp_path / "rms_norm.cu").write_text("// no declaration\n")
    folder = tmp_path / "below"
    folder.mkdir()
    path = write(tmp_path if "/" not in like else folder, f"like = {like}\n", "residual_linear.cu")
    with pytest.raises(BuildError, match=r"residual_linear.cu: like is .*; accepted: a kernel file beside it"):
        declaration(path)


@pytest.mark.parametrize("grid", ["ceil_div(rows, TILE)", "ceil_div(n, TILE)"])
def test_a_grid_that_divides_by_zero_is_refused(tmp_path: Path, grid: str) -> None:
    declared = declaration(write(tmp_path, f'[launch]\ngrid = ["{grid}", 1, 1]\n[knobs]\nTILE = 0\n'))
    with pytest.raises(BuildError, match="linear.cu: .*ceil_div.* divides by "):
        declared.geometry({"n": 1, "k": 1}, declared.knobs({}))


def test_rules_of_legality_are_comparisons(tmp_path: Path) -> None:
    declared = declaration(
        write(tmp_path, '[knobs]\nA = 8\nlegal = ["A % 4 == 0", "A * n <= shared_memory_per_block"]\n')
    )
    facts = {"n": 10, "shared_memory_per_block": 100}
    assert declared.violated({**facts, "A": 8}) is None
    assert declared.violated({**facts, "A": 6}) == "A % 4 == 0"
    assert declared.violated({**facts, "A": 12}) == "A * n <= shared_memory_per_block"


@pytest.mark.parametrize("grid", ["rows * rows", "rows + 1", "ceil_div(rows + 1, 2)", "unknown", "rows / 2"])
def test_an_axis_that_the_core_cannot_compute_is_refused(tmp_path: Path, grid: str) -> None:
    declared = declaration(write(tmp_path, f'[launch]\ngrid = ["{grid}", 1, 1]\n'))
    with pytest.raises(BuildError):
        declared.geometry({"n": 1, "k": 1}, {})


def test_variants_phase_and_launch_attributes(tmp_path: Path) -> None:
    body = '[launch]\ngrid = ["rows * CLUSTER", 1, 1]\ncluster = "CLUSTER"\nblock = "max_rows * 32"\npdl = true\n'
    body += "[rows]\nup_to = [8, 16, 0]\n[knobs]\nCLUSTER = 4\n"
    declared = declaration(write(tmp_path, body, "linear.w4.decode.cu"))
    assert (declared.op, declared.phase, declared.bounds, declared.pdl) == ("linear", "decode", (8, 16, 0), True)
    assert declared.geometry({"max_rows": 8}, declared.knobs({})) == Geometry(
        (Axis(0, 1, 4), Axis(-1, 1, 1), Axis(-1, 1, 1)), 256, 0, 4
    )
    plain = declaration(write(tmp_path, "", "linear.cu"))
    assert (plain.phase, plain.bounds, plain.pdl, plain.cluster) == ("", (0,), False, 1)


def test_knobs_and_scratch_may_be_expressions(tmp_path: Path) -> None:
    """Of constants, the hardware, the variant's bound, and knobs above."""
    body = '[launch]\ngrid = ["multiprocessors", 1, 1]\nblock = "WARPS * 32"\n'
    body += '[scratch]\nbytes = "multiprocessors * TILE"\n'
    body += '[knobs]\nTILE = "min(n, max_rows)"\nWARPS = "TILE // 8"\n'
    declared = declaration(write(tmp_path, body))
    names = {"n": 100, "max_rows": 64, "multiprocessors": 10}
    assert declared.knobs(names) == {"TILE": 64, "WARPS": 8}
    found = declared.geometry(names, declared.knobs(names))
    assert (found.grid[0], found.block, found.scratch) == (Axis(-1, 1, 10), 256, 640)
    with pytest.raises(BuildError, match="linear.cu: unknown name 'WARPS' in 'WARPS'"):
        declaration(write(tmp_path, '[knobs]\nTILE = "WARPS"\nWARPS = 1\n')).knobs({})


def test_layouts_by_dtype_and_by_role(tmp_path: Path) -> None:
    body = (
        '[layouts]\nx = "operand"\nweight = { bf16 = "tiles", i4g32 = "frag4", other = "row_major" }\nout = "tiles"\n'
    )
    declared = declaration(write(tmp_path, body))
    dtypes = {"x": "bf16", "weight": "i4g32"}
    assert declared.layouts_of(dtypes, {"operand": "tiles"}) == {"x": "tiles", "weight": "frag4"}
    assert declared.layouts_of({"weight": "f32"}, {}) == {}
    with pytest.raises(BuildError, match=r"\[layouts\] x is 'operand'; accepted: row_major, .*frag4_paired, feed"):
        declared.layouts_of(dtypes, {"feed": "tiles"})
    body = '[layouts]\nweight = { bf16 = "tiles" }\n'
    with pytest.raises(BuildError, match=r"\[layouts\] weight has none for f32; accepted: bf16"):
        declaration(write(tmp_path, body)).layouts_of({"weight": "f32"}, {})


def test_a_file_for_no_op_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no op is called 'linaer'.*nearest: linear"):
        declaration(write(tmp_path, "", "linaer.cu"))


def test_a_device_kernel_without_declaration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "linear.cu"
    path.write_text("// nothing\n")
    with pytest.raises(BuildError, match="has no '/\\* atlas' declaration"):
        declaration(path)


def test_cpu_signatures_belong_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "linear.cpp"
    path.write_text('ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.out_f32", f);\nATLAS_CPU_KERNEL(\n    "linear.a", g);\n')
    assert cpu_signatures(path) == ["linear.x_f32.weight_f32.out_f32", "linear.a"]
    path.write_text('ATLAS_CPU_KERNEL("rms_norm.out_f32", f);\n')
    with pytest.raises(BuildError, match="registers 'rms_norm.out_f32'; accepted: signatures of op linear"):
        cpu_signatures(path)


def test_every_kernel_of_the_tree_declares_itself() -> None:
    files = [*KERNELS.glob("*/*.cu"), *KERNELS.glob("*/*.cpp")]
    assert {path.name.split(".")[0] for path in files} == {declaration(path).op for path in files} and len(files) >= 20
