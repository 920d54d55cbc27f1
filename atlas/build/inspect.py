"""Does a kernel read its inputs and write its outputs? A walk over its PTX, without a device.

Registers are followed from `ld.param` through address arithmetic to loads and stores. The walk takes
every instruction as reachable and adds up whatever a register may hold anywhere in the kernel, so it
may credit a kernel with too much, never with too little: what it misses, the kernel does not do. It
catches a kernel whose body was lost (an empty template branch, an early return, a deleted store),
which compiles without complaint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from atlas.errors import BuildError
from atlas.ops.op import Op

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_STATEMENT = re.compile(r"(?:@!?%[\w$]+\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_NO_POINTER = re.compile(r"(?:bra|ret|setp|bar)\b.*|.*\.(?:f16|f16x2|bf16|bf16x2|f32|f64|b16|u16|s16|pred)")
"""Opcodes that leave no pointer and no half of one, unless they load or store."""
_LABEL = re.compile(r"^[\s{}]*(?:[\w$]+:(?!:)[\s{}]*)*")
_REGISTER = re.compile(r"%[\w$]+")
_KINDS = {
    "u64": "pointer",
    "s64": "pointer",
    "b64": "pointer",
    "u32": "int",
    "s32": "int",
    "b32": "int",
    "f32": "float",
}
"""Types of parameters in PTX. A pointer is a number of 64 bits there."""
_BRACE = re.compile(r"[{}]")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Access:
    """Indices of an entry's parameters whose value reaches a load's or a store's address."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    opcode: str
    target: tuple[str, ...]
    sources: tuple[str, ...]
    brackets: tuple[str, ...]


def access(ptx: str, symbol: str) -> Access:
    """What the kernel `symbol` in `ptx` does with its parameters. Raises BuildError if it is not there."""
    text = _COMMENT.sub("", ptx)
    match = next((m for m in _ENTRY.finditer(text) if m.group(1) == symbol), None)
    if match is None:
        raise BuildError(f"kernel {symbol}", "is not in its PTX", "one function declared as ATLAS_KERNEL(arguments)")
    parameters = {name: i for i, name in enumerate(re.findall(r"([\w$]+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", match.group(2)))}
    program = list(_instructions(_body(text, match.end())))
    holds: dict[str, frozenset[int]] = {}
    moves = [instruction for instruction in program if _moves(instruction)]
    while _spread(moves, parameters, holds):
        pass
    reads: set[int] = set()
    writes: set[int] = set()
    for instruction in program:
        if not instruction.brackets and not instruction.opcode.startswith("st."):
            continue
        at = [
            frozenset().union(*(holds.get(r, frozenset()) for r in _REGISTER.findall(b))) for b in instruction.brackets
        ]
        read, write = _roles(instruction.opcode, at)
        reads |= read
        writes |= write
        if instruction.opcode.startswith("st.") and not instruction.opcode.startswith("st.global"):
            # A pointer that goes to memory or into a call is out of sight: it may be used for anything.
            escaped = frozenset().union(*(holds.get(r, frozenset()) for r in instruction.sources))
            reads |= escaped
            writes |= escaped
    return Access(tuple(sorted(reads)), tuple(sorted(writes)))


def check(
    op: Op,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    unread: tuple[str, ...],
    where: str,
    given: Collection[str] | None = None,
) -> None:
    """Hold what a kernel does with its operands against the op's contract.

    Args:
        unread: inputs that this kernel declares it needs not (`[limits] unread`).
        given: operands of the instance, where it is compiled without optional ones; None means all.

    Raises:
        BuildError: an input that no load, or an output that no store reaches.
    """
    for index, operand in enumerate(op.operands):
        if given is not None and operand.name not in given:
            continue
        if operand.mode == "in" and index not in reads and operand.name not in unread:
            raise BuildError(
                where,
                f"never reads its input {operand.name}",
                "a load through every input's pointer",
                "an empty kernel? If the input is not needed, declare it: [limits] unread",
            )
        if operand.mode != "in" and index not in writes:
            raise BuildError(
                where,
                f"never writes its output {operand.name}",
                "a store through every output's pointer",
                "an empty kernel?",
            )


def check_parameters(op: Op, arguments: Sequence[str], ptx: str, where: str, *, scratch: bool) -> None:
    """Hold the list of a kernel's parameters to what a launch passes: it passes words by their place, unnamed.

    Args:
        arguments: constants that the kernel declares as arguments, in order (`[launch] arguments`).
        scratch: the launch has scratch memory, whose address comes last.

    Raises:
        BuildError: a parameter too many, missing, or of another type than what stands at its place.
    """
    expected = [(operand.name, "pointer") for operand in op.operands] + [(dim, "pointer") for dim in op.dims]
    expected += [(name, "float" if name in op.float_constants else "int") for name in arguments]
    match = _ENTRY.search(_COMMENT.sub("", ptx))
    types = [] if match is None else re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", match.group(2))
    found = [_KINDS.get(each, each) for each in types]
    if len(found) == len(expected) + 1 or scratch:
        expected.append(("scratch", "pointer"))
    if found != [kind for _, kind in expected]:
        raise BuildError(
            where,
            f"takes ({', '.join(found)})",
            f"({', '.join(f'{kind} {name}' for name, kind in expected)})",
            "operands, dims, [launch] arguments and scratch, in this order",
        )


def _body(text: str, start: int) -> str:
    """The text between the braces of the function whose header ends at `start`."""
    begin = text.index("{", start)
    depth = 0
    for brace in _BRACE.finditer(text, begin):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[begin + 1 : brace.start()]
    return text[begin + 1 :]


def _instructions(body: str) -> Iterator[_Instruction]:
    for statement in body.split(";"):
        match = _STATEMENT.fullmatch(_LABEL.sub("", statement).rstrip())
        if not match:
            continue  # a directive (.reg, .shared) or nothing
        opcode, operands = match.groups()
        memory = "[" in operands
        if not memory and _NO_POINTER.fullmatch(opcode):
            continue
        brackets = tuple(_BRACKET.findall(operands)) if memory else ()
        first, rest = _split_first(operands)
        if opcode.startswith(("st.", "red.", "cp.", "bar", "bra", "ret", "stmatrix", "prefetch", "mbarrier", "fence")):
            target, sources = (), tuple(_REGISTER.findall(_BRACKET.sub("", operands)))
        else:
            target = tuple(_REGISTER.findall(first))
            sources = tuple(_REGISTER.findall(_BRACKET.sub("", rest)))
        yield _Instruction(opcode, target, sources, brackets)
        if opcode.startswith("mov") and not sources:
            # mov %rd, parameter: the address of a parameter, read later through the register.
            yield _Instruction("ld.param", target, (), (rest.strip(),))


def _split_first(operands: str) -> tuple[str, str]:
    """The first operand, a register or a vector in braces, and the rest."""
    if operands.startswith("{"):
        end = operands.find("}") + 1
        return operands[:end], operands[end:]
    first, _, rest = operands.partition(",")
    return first, rest


def _moves(instruction: _Instruction) -> bool:
    """Whether its target may hold a pointer: what comes from memory, and a comparison, is none of ours."""
    opcode = instruction.opcode
    if not instruction.target:
        return False
    return opcode.startswith("ld.param") or not opcode.startswith(("ld", "atom", "setp", "call", "tex", "shfl"))


def _spread(moves: list[_Instruction], parameters: dict[str, int], holds: dict[str, frozenset[int]]) -> bool:
    """One pass: what each instruction's sources hold, its target may hold. True if anything was new."""
    grew = False
    for instruction in moves:
        new: frozenset[int] = frozenset()
        if instruction.opcode.startswith("ld.param"):
            for bracket in instruction.brackets:
                name = re.split(r"[+\s]", bracket.strip())[0]
                if name in parameters:
                    new |= {parameters[name]}
                new = new.union(*(holds.get(r, frozenset()) for r in _REGISTER.findall(bracket)))
        else:
            for register in instruction.sources:
                if held := holds.get(register):
                    new |= held
        if not new:
            continue
        for register in instruction.target:
            known = holds.get(register, frozenset())
            if not new <= known:
                holds[register] = known | new
                grew = True
    return grew


def _roles(opcode: str, at: list[frozenset[int]]) -> tuple[frozenset[int], frozenset[int]]:
    """Parameters that an instruction loads from and stores to, given what its addresses hold."""
    everything: frozenset[int] = frozenset().union(*at)
    nothing: frozenset[int] = frozenset()
    if opcode.startswith("ld.param"):
        return nothing, nothing
    if opcode.startswith(("ld", "wmma.load", "tex")):
        return everything, nothing
    if opcode.startswith(("st", "red.", "wmma.store", "multimem.st", "multimem.red")):
        return nothing, everything
    if opcode.startswith("atom"):
        return everything, everything
    if opcode.startswith(("cp.async", "cp.reduce")) and at:
        # cp [to], [from, ...]; bulk tensor copies store as cp.async.bulk.tensor.global.shared [map], [from].
        return nothing.union(*at[1:]), at[0]
    return nothing, nothing
