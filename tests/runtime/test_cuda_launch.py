"""How the CUDA backend chooses and launches kernels, on the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.fake_cuda import program

VARIANTS = """
def made_for(kernel, phase, max_rows):
    return variant(kernel=kernel, phase=phase, max_rows=max_rows, grid=[[-1, 1, max_rows or 999]] + [[-1, 1, 1]] * 2)

handle = backend.load([launch(variants=[
    made_for("other", 2, 16), made_for("other", 2, 8), made_for("store_dim", 1, 0), made_for("store_dim", 2, 256),
])])

def launched(rows, phase):
    backend.begin_step(0, step(rows, phase), 64)
    backend.run(handle, 0, 1)
"""


def launches(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "attribute" not in line]


def test_the_least_variant_of_the_phase_that_holds_the_rows_is_launched(fake_driver: Path, tmp_path: Path) -> None:
    code = """
    for rows in (1, 8, 9, 16, 17, 256):
        launched(rows, PHASE_DECODE)
    for rows in (1, 4096):
        launched(rows, PHASE_PREFILL)
    """
    log = tmp_path / "log"
    assert program(fake_driver, VARIANTS, code, FAKE_CUDA_LOG=str(log))[0] == 0
    names = ["other 8", "other 8", "other 16", "other 16", "store_dim 256", "store_dim 256"]
    names += ["store_dim 999", "store_dim 999"]
    assert [" ".join(line.split()[:2]) for line in launches(log)] == names


ONE_PHASE = """
grid = [[-1, 1, 7], [-1, 1, 1], [-1, 1, 1]]
handle = backend.load([
    launch(phase=1, grid=grid), launch(phase=2, kernel="other", grid=grid), launch(grid=[[-1, 1, 9], *grid[1:]]),
])

def launched(rows, phase):
    backend.begin_step(0, step(rows, phase), 64)
    backend.run(handle, 0, 3)
"""


@pytest.mark.parametrize("variables", [{}, {"ATLAS_SYNC": "1"}], ids=["", "ATLAS_SYNC"])
def test_a_launch_of_one_phase_is_left_out_of_the_other(
    fake_driver: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    """Launched one by one and replayed alike, as the graph is recorded for a step of a phase."""
    code = """
    launched(3, PHASE_PREFILL)
    launched(3, PHASE_DECODE)
    for phase in (PHASE_DECODE, PHASE_PREFILL):
        backend.capture(handle, 0, header(8, phase))
    launched(8, PHASE_PREFILL)
    launched(8, PHASE_DECODE)
    """
    log = tmp_path / "log"
    status, output = program(fake_driver, ONE_PHASE, code, FAKE_CUDA_LOG=str(log), **variables)
    assert status == 0, output
    prefill, decode = ["store_dim 7", "store_dim 9"], ["other 7", "store_dim 9"]
    assert [" ".join(line.split()[:2]) for line in launches(log)] == 2 * (prefill + decode)


def test_a_launch_of_no_rows_is_left_out_though_its_grid_is_constant(fake_driver: Path, tmp_path: Path) -> None:
    code = "launched(0, PHASE_DECODE)\nlaunched(1, PHASE_DECODE)\n"
    log = tmp_path / "log"
    assert program(fake_driver, ONE_PHASE, code, FAKE_CUDA_LOG=str(log))[0] == 0
    assert [" ".join(line.split()[:2]) for line in launches(log)] == ["other 7", "store_dim 9"]


def test_what_is_left_out_takes_no_time(fake_driver: Path) -> None:
    """A kernel of the fake driver takes 0.5 ms."""
    code = """
    backend.begin_step(0, step(3, PHASE_DECODE), 64)
    print([round(1e6 * seconds) for seconds in backend.run_timed(handle, 0, 3)])
    print([round(1e6 * backend.run_seconds(handle, 0, end, 1)) for end in (1, 2, 3)])
    """
    status, output = program(fake_driver, ONE_PHASE, code)
    assert status == 0, output
    alone, growing = output.splitlines()
    assert alone == "[0, 500, 500]"
    first, second, third = eval(growing)
    assert (second - first, third - second) == (500, 500)


def test_rows_that_no_variant_holds(fake_driver: Path) -> None:
    status, output = program(fake_driver, VARIANTS, "attempt(lambda: launched(257, PHASE_DECODE))")
    assert status == 3
    assert (
        "launch layers.0.test of op rms_norm has no kernel for 257 rows in phase decode; there are: decode up to 8, "
        "decode up to 16, decode up to 256, prefill" in output
    )


def test_attributes(fake_driver: Path, tmp_path: Path) -> None:
    """Every launch carries what its variant declares; clusters above 8 blocks are allowed where declared only."""
    code = """
    grid = [[0, 4, 16], [-1, 1, 1], [-1, 1, 1]]
    handle = backend.load([
        launch(),
        launch(pdl=True, cluster=4, grid=grid, shared=100000),
        launch(kernel="other", cluster=16, grid=grid),
        launch(cooperative=True, grid=[[-1, 1, 132], [-1, 1, 1], [-1, 1, 1]]),
    ])
    backend.begin_step(0, step(5), 64)
    backend.run(handle, 0, 4)
    """
    log = tmp_path / "log"
    assert program(fake_driver, code, FAKE_CUDA_LOG=str(log))[0] == 0
    assert log.read_text().splitlines() == [
        "store_dim: attribute 8 = 100000",
        "store_dim: attribute 9 = 100",
        "other: attribute 14 = 1",
        "store_dim 4 3 1 64 0",
        "store_dim 32 1 1 64 100000 pdl=1 cluster=4",
        "other 32 1 1 64 0 cluster=16",
        "store_dim 132 1 1 64 0 cooperative=1",
    ]


@pytest.mark.parametrize(
    ("record", "variables", "expected"),
    [
        (
            "launch(cluster=4)",
            {},
            "launch layers.0.test of op rms_norm (kernel store_dim): clusters of 4 blocks do not divide a grid of 2",
        ),
        (
            "launch(cluster=2)",
            {"FAKE_CUDA_OCCUPANCY": "0"},
            "no cluster of 2 blocks with 0 bytes of shared memory each fits on Fake GPU 0",
        ),
        ("launch(cluster=2)", {"FAKE_CUDA_CLUSTERS": "0"}, "Fake GPU 0 (compute capability 9.0) has no clusters"),
        (
            "launch(cooperative=True)",
            {},
            "that is cooperative or has scratch may not depend on a dim",
        ),
        (
            "launch(cooperative=True, grid=[[-1, 1, 133], [-1, 1, 1], [-1, 1, 1]])",
            {},
            "its 133 blocks wait for one another, and Fake GPU 0 holds 132 at once; build for this device's",
        ),
        (
            "launch(scratch=768, grid=[[-1, 1, 200], [-1, 1, 1], [-1, 1, 1]])",
            {},
            "its 200 blocks wait for one another, and Fake GPU 0 holds 132 at once; build for this device's",
        ),
        (
            "launch(scratch=768, cluster=2, grid=[[-1, 1, 132], [-1, 1, 1], [-1, 1, 1]])",
            {},
            "its 132 blocks in clusters of 2 wait for one another, and Fake GPU 0 holds 2 at once; build for",
        ),
        ("launch(row_dim=1)", {}, "launch layers.0.test of op rms_norm: no dim 1"),
        ("launch(variants=[variant(), variant(kernel='absent')])", {}, "(kernel absent) is not in device image 0"),
    ],
)
def test_what_cannot_be_launched_is_refused_at_load(
    fake_driver: Path, record: str, variables: dict[str, str], expected: str
) -> None:
    status, output = program(fake_driver, f"attempt(lambda: backend.load([{record}]))", **variables)
    assert status == 3
    assert expected in output


def test_scratch_comes_after_the_dims(fake_driver: Path) -> None:
    """Of `store_dim` with no operand the scratch is its second argument; here it holds what the dim would."""
    code = """
    handle = backend.load([launch(operands=[512], dims=[], row_dim=-1, grid=[[-1, 1, 1]] * 3, scratch=768)])
    backend.write(768, struct.pack("i", 77))
    backend.begin_step(0, step(3), 64)
    backend.run(handle, 0, 1)
    print(value())
    attempt(lambda: backend.load([launch(scratch=2048, grid=[[-1, 1, 1]] * 3)]))
    """
    status, output = program(fake_driver, code)
    assert status == 3
    assert output.startswith("77\n")
    assert "(kernel store_dim): scratch at byte 2048 is outside the arena of 1024" in output


def test_constants_come_between_dims_and_scratch(fake_driver: Path) -> None:
    """Of `store_constant` with an operand and a dim the constant is the third argument. Launches of one kernel have
    constants of their own, launched one by one and replayed alike."""
    code = """
    def made_with(operand, *words):
        return launch(operands=[operand], arguments=list(words), kernel="store_constant", scratch=768,
                      grid=[[-1, 1, 1]] * 3)

    handle = backend.load([made_with(512, 5, 6), made_with(600, 0x3F800000), made_with(768)])
    for replayed in (False, True):
        if replayed:
            backend.capture(handle, 0, header(8, PHASE_DECODE))
        backend.begin_step(0, step(3, PHASE_DECODE), 64)
        backend.run(handle, 0, 2)
        print(value(512), value(600) == 0x3F800000)
        backend.fill(512, 0, 92)
    """
    assert program(fake_driver, code) == (0, "5 True\n5 True\n")


def test_a_launch_without_variants_is_no_launch(fake_driver: Path) -> None:
    code = """
    try:
        backend.load([{**launch(), "variants": []}])
    except ValueError as error:
        print(error)
    """
    assert program(fake_driver, code) == (0, "launch layers.0.test has no variant\n")


def test_a_launch_runs_on_other_operands(fake_driver: Path) -> None:
    code = """
    handle = backend.load([launch(), launch(operands=[600])])
    backend.begin_step(0, step(7), 64)
    backend.run_on(handle, 0, [768])
    print(value(512), value(768), value(600))
    backend.begin_step(0, step(9), 64)
    backend.run(handle, 0, 2)
    print(value(512), value(768), value(600))
    for operands in ([], [768, 0], [1025]):
        try:
            backend.run_on(handle, 0, operands)
        except DeviceError as error:
            print(error)
    backend.run(handle, 0, 1)
    """
    status, text = program(fake_driver, code)
    assert status == 0
    assert text.splitlines() == [
        "0 7 0",
        "0 9 9",
        "device: launch layers.0.test takes 1 operands, given are 0",
        "device: launch layers.0.test takes 1 operands, given are 2",
        "device: launch layers.0.test of op rms_norm: an operand at byte 1025 is outside the arena of 1024",
    ]
