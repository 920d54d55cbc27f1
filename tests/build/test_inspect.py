"""The walk over PTX: what a kernel reads and writes, and that nothing can be cut out of one unseen."""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import NamedTuple

import pytest

from atlas.build import cuda, inspect, kernel_job
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.targets import target as targets
from atlas.targets.hardware import walk
from tests.build.conftest import KERNELS

CUDA_OPS = [op for op in OPS if (KERNELS / "cuda" / f"{op}.cu").exists()]


class Instance(NamedTuple):
    """A compiled kernel. unread: inputs that its file declares unread."""

    symbol: str
    ptx: str
    unread: tuple[str, ...]


def kernel(body: str, parameters: int = 2) -> str:
    names = ",\n".join(f"\t.param .u64 .ptr .align 1 k_param_{i}" for i in range(parameters))
    return f"//\n.version 8.8\n.target sm_90a\n.visible .entry k(\n{names}\n)\n.maxntid 32, 1, 1\n{{\n{body}\n}}\n"


def access(body: str, parameters: int = 2) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = inspect.access(kernel(body, parameters), "k")
    return found.reads, found.writes


LOADS = """
	.reg .b64 	%rd<9>;
	ld.param.u64 	%rd1, [k_param_0];
	ld.param.u64 	%rd2, [k_param_1];
"""


@pytest.mark.parametrize(
    ("body", "reads", "writes"),
    [
        ("ld.global.f32 %f1, [%rd1];", (0,), ()),
        ("st.global.f32 [%rd2+4], %f1;", (), (1,)),
        (
            "cvta.to.global.u64 %rd3, %rd1;\nadd.s64 %rd4, %rd3, %rd9;\n"
            "ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd4+16];",
            (0,),
            (),
        ),
        ("mad.lo.s64 %rd3, %rd8, 4, %rd1;\nmov.u64 %rd4, %rd3;\n@%p1 ld.global.u16 %rs1, [%rd4];", (0,), ()),
        ("selp.b64 %rd3, %rd1, %rd2, %p1;\nst.global.v2.u32 [%rd3], {%r1, %r2};", (), (0, 1)),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", (0,), ()),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], %r2;", (), (1,)),
        ("atom.global.add.u32 %r1, [%rd1], 1;\nred.global.add.f32 [%rd2], %f1;", (0,), (0, 1)),
        # A loop: the register that is stored through gets its value later in the text.
        ("$L1:\nst.global.f32 [%rd5], %f1;\nadd.s64 %rd5, %rd2, 4;\n@%p1 bra $L1;", (), (1,)),
        # A scope with a label, as inline assembly leaves them.
        ("{\n$L2: ld.global.f32 %f1, [%rd1];\n}", (0,), ()),
        # Compared, not used: an address that nothing goes through.
        ("setp.eq.s64 %p1, %rd1, %rd2;", (), ()),
        # The value loaded is data, not the pointer.
        ("ld.global.u64 %rd3, [%rd1];\nst.global.u64 [%rd2], %rd3;", (0,), (1,)),
        # Shared memory is nobody's operand.
        ("ld.shared.f32 %f1, [%r1];\nst.shared.f32 [%r2], %f1;", (), ()),
        # Out of sight: into local memory or a function, where anything may happen with it.
        ("st.local.u64 [%rd8], %rd1;", (0,), (0,)),
        ("{\n.param .b64 p0;\nst.param.b64 [p0+0], %rd2;\ncall.uni f, (p0);\n}", (1,), (1,)),
    ],
)
def test_what_reaches_loads_and_stores(body: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
    assert access(LOADS + body) == (reads, writes)


def test_a_parameter_read_through_its_address() -> None:
    body = "mov.b64 %rd1, k_param_1;\nld.param.u64 %rd2, [%rd1];\nld.global.f32 %f1, [%rd2];"
    assert access(body) == ((1,), ())


def test_comments_are_not_code() -> None:
    assert access(LOADS + "// ld.global.f32 %f1, [%rd1];\n/* st.global.f32 [%rd2], %f1; */\nret;") == ((), ())


def test_another_symbol() -> None:
    with pytest.raises(BuildError, match="kernel other: is not in its PTX"):
        inspect.access(kernel("ret;"), "other")


@pytest.mark.parametrize(
    ("reads", "writes", "given", "message"),
    [
        ((1,), (3,), None, "here: never reads its input x; accepted: a load through every input's pointer; an empty"),
        ((0, 1, 2), (), None, "here: never writes its output out; accepted: a store through every output's pointer"),
        ((0, 1), (3,), None, "here: never reads its input bias"),
        ((0, 1), (3,), ("x", "weight", "bias", "out"), "here: never reads its input bias"),
        ((0, 1), (3,), ("x", "weight", "out"), ""),
        ((0,), (3,), ("x", "weight", "out"), "here: never reads its input weight"),
    ],
)
def test_what_is_missing_is_named(
    reads: tuple[int, ...], writes: tuple[int, ...], given: tuple[str, ...] | None, message: str
) -> None:
    """An optional operand that the instance is compiled without need not be there."""
    with pytest.raises(BuildError, match=message) if message else contextlib.nullcontext():
        inspect.check(OPS["linear"], reads, writes, (), "here", given)


def test_parameters_are_what_a_launch_passes() -> None:
    """residual_linear: its operands and dims, two constants as floats, scratch; each change of the list is named."""
    op, arguments = OPS["residual_linear"], ("eps", "scale")
    pointers = [".u64 .ptr .align 1"] * (len(op.operands) + len(op.dims))
    right = [*pointers, ".f32", ".f32"]

    def check(types: list[str], scratch: bool) -> None:
        names = ",\n".join(f"\t.param {each} k_param_{i}" for i, each in enumerate(types))
        inspect.check_parameters(
            op, arguments, f".visible .entry k(\n{names}\n)\n{{ ret; }}\n", "here", scratch=scratch
        )

    check(right, scratch=False)
    check([*right, ".u64"], scratch=False)
    check([*right, ".u64 .ptr .align 1"], scratch=True)
    wrong = {
        "an operand less": right[1:],
        "a dim more": [*pointers, *right],
        "an int for a float": [*pointers, ".u32", ".f32"],
        "a pointer for a float": [*pointers, ".u64", ".f32"],
        "an argument less": right[:-1],
        "an argument before the dims": [*pointers[1:], ".f32", ".u64", ".f32"],
        "a struct": [*right[:-1], ".align 8 .b8"],
        "nothing": [],
    }
    for case, types in wrong.items():
        with pytest.raises(BuildError, match=r"here: takes \(.*float eps, float scale"):
            check(types, scratch=False)
            pytest.fail(case)
    with pytest.raises(BuildError, match="pointer scratch"):
        check(right, scratch=True)


def test_an_output_in_place_need_not_be_read() -> None:
    inspect.check(OPS["logprobs"], (0, 1, 2, 3), (4, 5, 6, 7), (), "here")


@pytest.fixture(scope="module")
def compiled(wheels: None) -> dict[str, Instance]:
    """Every op that has a CUDA kernel: a case of its contract test with all optional operands."""
    target = targets.Target(walk(KERNELS)["h200"], targets.ANY_MODEL, "contract", {})
    result = {}
    for op in CUDA_OPS:
        cases = importlib.import_module(f"tests.contract.test_{op}").CASES
        key = max(cases, key=lambda case: len(case.optional)).key()
        job = kernel_job.plan(KERNELS, target, key, "sm_90a", ("decode",))[0]
        ptx = cuda.compile_kernel(job.path.name, job.source, job.headers, "sm_90a").ptx.decode()
        result[op] = Instance(job.symbol, ptx, job.declared.unread)
    return result


@pytest.mark.cuda_toolchain
@pytest.mark.usefixtures("wheels")
class TestRealKernels:
    @pytest.mark.parametrize("op", CUDA_OPS)
    def test_every_operand_is_seen(self, op: str, compiled: dict[str, Instance]) -> None:
        symbol, ptx, unread = compiled[op]
        found = inspect.access(ptx, symbol)
        inspect.check(OPS[op], found.reads, found.writes, unread, op)
        # And no more than is there: nothing is stored through an input.
        inputs = {i for i, operand in enumerate(OPS[op].operands) if operand.mode == "in"}
        assert not inputs & set(found.writes)

    @pytest.mark.parametrize("op", CUDA_OPS)
    def test_a_kernel_without_its_stores_is_caught(self, op: str, compiled: dict[str, Instance]) -> None:
        symbol, ptx, unread = compiled[op]
        cut = re.sub(r"(?m)^.*\b(st\.global|cp\.async\.bulk\.global).*$", "", ptx)
        found = inspect.access(cut, symbol)
        with pytest.raises(BuildError, match="never writes its output"):
            inspect.check(OPS[op], found.reads, found.writes, unread, op)

    @pytest.mark.parametrize("op", CUDA_OPS)
    def test_a_kernel_without_its_loads_is_caught(self, op: str, compiled: dict[str, Instance]) -> None:
        symbol, ptx, unread = compiled[op]
        cut = re.sub(r"(?m)^.*\b(ld\.global|cp\.async\.c).*$", "", ptx)
        found = inspect.access(cut, symbol)
        with pytest.raises(BuildError, match="never reads its input"):
            inspect.check(OPS[op], found.reads, found.writes, unread, op)

    @pytest.mark.parametrize("op", CUDA_OPS)
    def test_each_parameter_alone_is_missed(self, op: str, compiled: dict[str, Instance]) -> None:
        """Cut one operand's pointer off at a time: the error names that operand."""
        symbol, ptx, unread = compiled[op]
        for index, operand in enumerate(OPS[op].operands):
            if operand.name in unread:
                continue
            cut = ptx.replace(f"[{symbol}_param_{index}]", f"[{symbol}_elsewhere]")
            assert cut != ptx
            found = inspect.access(cut, symbol)
            with pytest.raises(BuildError, match=f"put {operand.name}; accepted"):
                inspect.check(OPS[op], found.reads, found.writes, unread, op)
