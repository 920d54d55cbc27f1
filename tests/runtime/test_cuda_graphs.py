"""Graphs, fences, copies beside the runs, and what a step may not do, on the fake driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiny_model
from tests.runtime.fake_cuda import kernel_pack, program, run

ROOT = Path(__file__).parents[2]

CAPTURED = """
handle = backend.load([launch(), launch(kernel="other", pdl=True)])

def capture():
    for rows in (32, 8):
        backend.capture(handle, 0, header(rows, PHASE_DECODE))

def played(rows, phase=PHASE_DECODE, offset=0, launches=2):
    backend.begin_step(offset, step(rows, phase), 64)
    backend.run(handle, 0, launches)
    return value()
"""


def with_model(tmp_path: Path) -> str:
    """Code after which `runner` has a whole model on the fake driver."""
    model = tiny_model.write(tmp_path / "model")
    path = kernel_pack(model, tmp_path / "kernels.atlaspack")
    return f"""
    sys.path.insert(0, {str(ROOT)!r})
    from pathlib import Path
    from tests.models.run import greedy, load

    runner = load(Path({str(model)!r}), "cuda", "bf16", kernel_packs=({str(path)!r},), kv_memory_bytes=1 << 20)
    """


def calls(log: Path, *names: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if line in names]


def test_a_step_replays_the_least_graph_that_holds_it(fake_driver: Path, tmp_path: Path) -> None:
    """Grids are the graph's, dims the step's own; the edge of programmatic launch is kept."""
    log, made = tmp_path / "log", tmp_path / "calls"
    code = "capture()\nprint([played(rows) for rows in (1, 8, 9, 32)])"
    status, output = program(fake_driver, CAPTURED, code, FAKE_CUDA_LOG=str(log), FAKE_CUDA_CALLS=str(made))
    assert (status, output) == (0, "[1, 8, 9, 32]\n")
    both = [["store_dim 4 3 1 64 0", "other 4 3 1 64 0 pdl=1"], ["store_dim 16 3 1 64 0", "other 16 3 1 64 0 pdl=1"]]
    lines = [line for line in log.read_text().splitlines() if "attribute" not in line]
    assert lines == both[0] * 2 + both[1] * 2
    assert len(calls(made, "cuGraphLaunch")) == 4
    assert len(calls(made, "cuLaunchKernelEx")) == 4  # two launches recorded twice, none since
    assert len(calls(made, "cuGraphUpload")) == 2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("played(33)", "more rows than any graph"),
        ("played(8, PHASE_PREFILL)", "another phase"),
        ("played(8, offset=128)", "another place of the step block"),
        ("played(8, launches=1)", "a part of the program"),
    ],
)
def test_what_no_graph_holds_is_launched(fake_driver: Path, tmp_path: Path, call: str, why: str) -> None:
    made = tmp_path / "calls"
    status, output = program(fake_driver, CAPTURED, f"capture()\nprint({call})", FAKE_CUDA_CALLS=str(made))
    assert (status, output.strip()) == (0, call[7:].split(",")[0].rstrip(")")), why
    assert not calls(made, "cuGraphLaunch"), why


def test_atlas_sync_uses_no_graphs(fake_driver: Path, tmp_path: Path) -> None:
    made = tmp_path / "calls"
    code = "capture()\nprint(played(8))"
    status, output = program(fake_driver, CAPTURED, code, FAKE_CUDA_CALLS=str(made), ATLAS_SYNC="1")
    assert (status, output) == (0, "8\n")
    assert not calls(made, "cuGraphLaunch", "cuStreamBeginCapture_v2")


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ("cuGraphInstantiateWithFlags=2", "graph of program 0 for the step header [32 0 0 0 0 0 0 0 0 0 0 0 0 0 1] "),
        ("cuGraphUpload=2", "cannot be made ready: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("cuStreamBeginCapture_v2=900", "graph of program 0 for the step header"),
        ("cuLaunchKernelEx=701", "launch layers.0.test of op rms_norm (kernel store_dim) failed with grid 16 x 3 x 1"),
        ("cuGraphLaunch=719", "replaying the graph of program 0"),
    ],
)
def test_a_graph_that_fails(fake_driver: Path, tmp_path: Path, fail: str, expected: str) -> None:
    made = tmp_path / "calls"
    code = "attempt(capture)\nattempt(lambda: played(8))"
    status, output = program(fake_driver, CAPTURED, code, FAKE_CUDA_FAIL=fail, FAKE_CUDA_CALLS=str(made))
    assert status == 3
    assert expected in output
    ended, started = (calls(made, name) for name in ("cuStreamEndCapture", "cuStreamBeginCapture_v2"))
    assert len(ended) == len(started) - ("BeginCapture" in fail)
    assert len(calls(made, "cuGraphDestroy")) == len(ended)


def test_a_step_waits_for_nothing_until_its_fence(fake_driver: Path) -> None:
    """The device of FAKE_CUDA_LAZY works when it is waited for: until then nothing has arrived."""
    code = """
    handle = backend.load([launch()])
    block, token = backend.staging(64), backend.staging(4)
    block[:] = step(7)
    backend.begin_step(0, block, 64)
    backend.run(handle, 0, 1)
    backend.read_later(512, token)
    ticket = backend.fence()
    print(struct.unpack("i", token)[0], backend.passed(ticket))
    backend.wait(ticket)
    print(struct.unpack("i", token)[0], backend.passed(ticket))
    """
    assert program(fake_driver, code, FAKE_CUDA_LAZY="1") == (0, "0 False\n7 True\n")


@pytest.mark.parametrize("order", [{}, {"FAKE_CUDA_BACKWARD": "1"}], ids=["forward", "backward"])
@pytest.mark.parametrize("places", [1, 2, 3])
def test_steps_in_flight_keep_apart(fake_driver: Path, order: dict[str, str], places: int) -> None:
    """Five steps in flight, whose blocks and results have so many places on the device. The fake driver lets every
    stream run as far ahead as events allow: a missing one gives a step the rows of another."""
    code = f"""
    places, count = {places}, 5
    handles = [backend.load([launch(operands=[512 + 4 * i])]) for i in range(places)]
    blocks, results = [backend.staging(64) for _ in range(count)], [backend.staging(4) for _ in range(count)]

    def submit(n):
        slot, place = n % count, n % places
        blocks[slot][:] = step(100 + n, PHASE_DECODE)
        backend.begin_step(64 * place, blocks[slot], 64)
        backend.run(handles[place], 0, 1)
        backend.read_later(512 + 4 * place, results[slot])
        return backend.fence()

    found = []
    for first in range(0, 20, count):
        for ticket in [submit(n) for n in range(first, first + count)]:
            backend.wait(ticket)
        found += [struct.unpack("i", result)[0] for result in results]
    print(found == list(range(100, 120)), found)
    """
    status, output = program(fake_driver, code, FAKE_CUDA_LAZY="1", **order)
    assert status == 0
    assert output.startswith("True"), output


@pytest.mark.parametrize("order", [{}, {"FAKE_CUDA_BACKWARD": "1"}], ids=["forward", "backward"])
@pytest.mark.parametrize("places", [1, 2])
def test_what_is_delivered_to_a_step_reaches_that_step(fake_driver: Path, order: dict[str, str], places: int) -> None:
    """As masks are (Runner.submit), behind the step's block and into the same place; here over a word of the header,
    which the kernel reads. A missing order gives a step what was meant for another."""
    code = f"""
    places, count = {places}, 5
    handles = [backend.load([launch(operands=[512 + 4 * i], dims=[2])]) for i in range(places)]
    blocks, masks, results = ([backend.staging(64) for _ in range(count)] for _ in range(3))
    backend.begin_step(64 * (places - 1), step(1), 64)  # as a warm-up does: no step is the first

    def submit(n):
        slot, place = n % count, n % places
        blocks[slot][:] = step(100 + n, PHASE_DECODE)
        blocks[slot][8:12] = struct.pack("i", 1)  # no launch over nothing
        masks[slot][:4] = struct.pack("i", 200 + n)
        backend.begin_step(64 * place, blocks[slot], 64)
        if places == 1:
            backend.order_uploads()
        backend.upload(64 * place + 8, masks[slot][:4])
        backend.order_runs()
        backend.run(handles[place], 0, 1)
        backend.read_later(512 + 4 * place, results[slot][:4])
        return backend.fence()

    found = []
    for first in range(0, 20, count):
        for ticket in [submit(n) for n in range(first, first + count)]:
            backend.wait(ticket)
        found += [struct.unpack("i", result[:4])[0] for result in results]
    print(found == list(range(200, 220)), found)
    """
    status, output = program(fake_driver, code, FAKE_CUDA_LAZY="1", **order)
    assert status == 0
    assert output.startswith("True"), output


def test_pinned_memory_is_given_back(fake_driver: Path, tmp_path: Path) -> None:
    made = tmp_path / "calls"
    code = """
    memory = backend.staging(64)
    backend.release(memory)
    try:
        memory[0]
    except ValueError as error:
        print(error)
    """
    status, output = program(fake_driver, code, FAKE_CUDA_CALLS=str(made))
    assert (status, output) == (0, "operation forbidden on released memoryview object\n")
    assert len(calls(made, "cuMemFreeHost")) == 1


def test_fences_outlive_their_events(fake_driver: Path) -> None:
    """There are more tickets than events; one that was never given is refused."""
    code = """
    tickets = [backend.fence() for _ in range(200)]
    for ticket in tickets:
        backend.wait(ticket)
    upload = backend.upload(512, struct.pack("i", 5))
    backend.wait(upload)
    print(len({*tickets, upload}), value())
    for wrong in (tickets[-1] + 3, upload + 3, -1):
        try:
            backend.wait(wrong)
        except DeviceError as error:
            print(error)
    """
    status, output = program(fake_driver, code)
    assert status == 0
    assert output.splitlines()[0] == "201 5"
    assert len(re.findall("fence 200 was never set; the last is 199|fence 1 was never set|no fence -1", output)) == 3


def test_uploads_and_runs_wait_for_each_other_on_the_device(fake_driver: Path, tmp_path: Path) -> None:
    made = tmp_path / "calls"
    code = """
    backend.order_runs()
    backend.order_uploads()
    """
    assert program(fake_driver, code, FAKE_CUDA_CALLS=str(made))[0] == 0
    ordered = calls(made, "cuEventRecord", "cuStreamWaitEvent", "cuEventSynchronize")
    assert ordered == ["cuEventRecord", "cuStreamWaitEvent"] * 2


def test_times_are_of_the_device(fake_driver: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
    handle = backend.load([launch(), launch(kernel="other")])
    backend.begin_step(0, step(3), 64)
    print(backend.run_timed(handle, 0, 2), backend.run_seconds(handle, 0, 2, 3), value())
    """
    status, output = program(fake_driver, code, FAKE_CUDA_LOG=str(log))
    assert (status, output) == (0, "[0.0005, 0.0005] 0.00125 3\n")  # an event takes 0.00025 there
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["store_dim", "other"] * 4


def test_after_ready_nothing_is_allocated_or_loaded(fake_driver: Path, tmp_path: Path) -> None:
    """A whole model: the driver's calls from the first step after ready on."""
    made = tmp_path / "calls"
    code = """
    ready = sum(1 for _ in open(os.environ["FAKE_CUDA_CALLS"]))
    tokens = greedy(runner, [[1, 2, 3], [4, 5]], 20, 2)
    print(*map(len, tokens), *open(os.environ["FAKE_CUDA_CALLS"]).read().split()[ready:])
    """
    status, output = run(fake_driver, with_model(tmp_path), code, FAKE_CUDA_CALLS=str(made))
    assert status == 0, output
    assert output.startswith("20 20 cu")
    allowed = {
        "cuCtxSetCurrent",
        "cuEventQuery",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuGraphLaunch",
        "cuLaunchKernelEx",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
    }
    assert set(output.split()[2:]) <= allowed


def test_no_request_makes_the_host_wait_for_more_than_a_step(fake_driver: Path, tmp_path: Path) -> None:
    """Masks, biases and penalties are copied in the order of the steps: nothing drains the device; graphs replay."""
    made = tmp_path / "calls"
    code = """
    from atlas.engine.engine import Engine
    from atlas.engine.messages import SamplingParams

    assert runner.ahead == 1
    ready = sum(1 for _ in open(os.environ["FAKE_CUDA_CALLS"]))
    engine = Engine(runner)
    for name, given in {
        "mask": dict(min_tokens=20, stop_token_ids=(7, 8)),
        "bias": dict(logit_bias={5: 2.0}),
        "penalties": dict(frequency_penalty=0.5),
        "plain": dict(),
    }.items():
        engine.add(name, [1, 2, 3], SamplingParams(max_tokens=20, **given))
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
    made = open(os.environ["FAKE_CUDA_CALLS"]).read().split()[ready:]
    print(engine.steps, made.count("cuStreamSynchronize"), made.count("cuGraphLaunch"))
    """
    status, output = run(fake_driver, with_model(tmp_path), code, FAKE_CUDA_CALLS=str(made))
    assert status == 0, output
    assert output == "20 0 38\n", "a prompt's step and 19 of generated tokens, of two graphs each"


def test_a_grammar_keeps_the_host_a_step_ahead(fake_driver: Path, tmp_path: Path) -> None:
    """Its mask is copied between the two graphs of its step, whose first begins before the last step's tokens are
    known; nothing drains the device. The fake driver's kernels leave token 0, which is all that the grammar has."""
    made = tmp_path / "calls"
    code = """
    from atlas.engine.engine import Engine
    from atlas.engine.messages import SamplingParams
    from atlas.engine.sampling import Grammar
    from tests.engine.grammar_model import compiler

    engine = Engine(runner, compiler())
    engine.add("g", [1, 2, 3], SamplingParams(max_tokens=30, grammar=Grammar("lark", "start: <[0]>{20}")))
    engine.add("plain", [1, 2, 3], SamplingParams(max_tokens=25))
    reasons, begins, begin = {}, [], runner.begin
    runner.begin = lambda *given: (begins.append(len(engine._submitted)), begin(*given))[1]
    while not engine.scheduler.running:
        engine.step()  # until it is compiled
    ready = sum(1 for _ in open(os.environ["FAKE_CUDA_CALLS"]))
    del begins[:]
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    made = open(os.environ["FAKE_CUDA_CALLS"]).read().split()[ready:]
    assert set(begins[1:]) == {1}, begins  # steps in flight when one with a mask begins, but for the prompt's
    first = made.index("cuGraphLaunch")
    between = made[first + 1 : made.index("cuGraphLaunch", first + 1)]
    waits = made.count("cuStreamSynchronize")
    print(sorted(reasons.items()), waits, "cuEventSynchronize" in between, "cuMemcpyHtoDAsync_v2" in between)
    """
    status, output = run(fake_driver, with_model(tmp_path), code, FAKE_CUDA_CALLS=str(made))
    assert status == 0, output
    assert output == "[('g', 'stop'), ('plain', 'length')] 0 True True\n"


@pytest.mark.parametrize(
    ("change", "given", "asked"),
    [
        ("", "", "sample"),
        ("", "logprobs=True", "adjust_logits sample logprobs"),
        ("runner.block.logit_adjust[1] = 1", "", "adjust_logits sample logprobs"),
    ],
)
def test_a_step_makes_the_launches_that_its_rows_ask_for(
    fake_driver: Path, tmp_path: Path, change: str, given: str, asked: str
) -> None:
    log = tmp_path / "log"
    code = f"""
    from atlas.debug import profile

    profile.fill_step(runner, 2, 1, 0)
    {change or "pass"}
    ready = sum(1 for _ in open(os.environ["FAKE_CUDA_LOG"]))
    runner.collect(runner.submit({given}))
    symbols = {{one.symbol: kernel.op for kernel in runner.choice.kernel_set.kernels for one in kernel.variants}}
    made = [symbols[line.split()[0]] for line in open(os.environ["FAKE_CUDA_LOG"]).read().splitlines()[ready:]]
    print(*made[made.index("adjust_logits" if "adjust_logits" in made else "sample") :])
    """
    status, output = run(fake_driver, with_model(tmp_path), code, FAKE_CUDA_LOG=str(log))
    assert status == 0, output
    assert output.splitlines()[-1] == asked, output


def test_a_profile_says_what_each_launch_adds_to_the_step(fake_driver: Path, tmp_path: Path) -> None:
    """A kernel of the fake driver takes 0.5 ms, whatever runs beside it, and an event 0.25."""
    code = """
    from atlas.debug import profile

    profile.fill_step(runner, 1, 1, 0)
    found = profile.profile(runner, 2)
    count = sum(work.launches for work in found.work)
    alike = sum(abs(work.seconds - work.added) < 1e-9 for work in found.work)
    print(round(1e6 * (found.step_seconds - 5e-4 * count)), alike - len(found.work))
    print("added us" in profile.table(found, {}))
    """
    # All but the first kind, which begins after an event.
    assert run(fake_driver, with_model(tmp_path), code) == (0, "250 -1\nTrue\n")


@pytest.mark.parametrize(
    ("nbytes", "fail", "calls"),
    [
        (5 << 20, "", ["cuMemHostRegister_v2", "cuMemHostUnregister"]),
        (5 << 20, "cuMemHostRegister_v2=801", ["cuMemHostRegister_v2", "cuMemHostAlloc", "cuMemFreeHost"]),
        (4096, "", ["cuMemHostAlloc", "cuMemFreeHost"]),
    ],
)
def test_much_pinned_memory_is_of_huge_pages(
    fake_driver: Path, tmp_path: Path, nbytes: int, fail: str, calls: list[str]
) -> None:
    """Where the driver takes them; all of it can be written, and is given back."""
    code = f"""
    import ctypes
    def mapped():
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in open("/proc/self/maps")]
        return any(begin <= address < end for begin, end in spans)
    memory = backend.staging({nbytes})
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert mapped()
    assert len(memory) == {nbytes} and not any(memory[::4096])
    memory[:] = bytes([7]) * {nbytes}
    upload = backend.upload(0, memory[-1024:])
    backend.wait(upload)
    copy = bytearray(1024)
    backend.read(0, copy)
    assert copy == bytes([7]) * 1024
    backend.release(memory)
    assert not mapped() or {nbytes} == 4096
    """
    made = tmp_path / "calls"
    assert program(fake_driver, code, FAKE_CUDA_FAIL=fail, FAKE_CUDA_CALLS=str(made)) == (0, "")
    assert [call for call in made.read_text().split() if "Host" in call] == calls
