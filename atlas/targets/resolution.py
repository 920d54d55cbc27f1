"""Which file of the kernel tree serves an op in a target, and which tuning values apply to it.

Levels, nearest first: `<hw>/<model>/<quant>/`, `<hw>/<model>/`, `<hw>/`, then the same three folders of
each hardware it inherits from. The nearest file of an op wins; an override of one op drops no other.

A file serves a phase of a step or both, and all element types and constants or those that it declares
(atlas/build/kernel_file.py): the nearest that serves the launch in the phase wins. Two such files at one level are an
error.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atlas.build import kernel_file
from atlas.errors import BuildError, CheckpointError
from atlas.targets.formats import FORMATS, PUBLISHED
from atlas.targets.hardware import Hardware
from atlas.targets.shape import shape

ANY_MODEL = "*"
"""Model of a target whose kernels take run-time dims: one target per quant serves every model."""

SUFFIXES = {"cpu": ".cpp", "cuda": ".cu"}
"""Kind of hardware -> suffix of its kernel files."""


class MissingKernel(BuildError):
    """No file serves an op in a target: not an error of the tree, but a target without kernels."""


@dataclasses.dataclass(frozen=True)
class Target:
    """(hardware, model, quant). facts: the model's config.json fields; empty for ANY_MODEL.

    stored: weight buffer -> its format or element type in a checkpoint whose kernels the target has besides those that
        every target of the model and quant has.
    """

    hardware: Hardware
    model: str
    quant: str
    facts: Mapping[str, Any] = dataclasses.field(hash=False)
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.hardware.name}/{self.model}/{self.quant}"


@dataclasses.dataclass(frozen=True)
class Level:
    """A folder that kernels are looked up in. `why`: what it is to the target, in words."""

    folder: Path
    why: str


def levels(target: Target) -> Iterator[Level]:
    """Folders of a target, nearest first."""
    own, *inherited = target.hardware.chain
    for directory in (own, *inherited):
        of = "" if directory == own else f", inherited from {directory.name}"
        if target.model != ANY_MODEL:
            yield Level(directory / target.model / target.quant, f"this model and quant{of}")
            yield Level(directory / target.model, f"this model{of}")
        yield Level(directory, f"this hardware{of}" if not of else of.removeprefix(", "))


def find(
    target: Target,
    op: str,
    phase: str = "decode",
    dtypes: Mapping[str, str] | None = None,
    constants: Mapping[str, int | float] | None = None,
) -> tuple[Path, Level]:
    """The file that serves `op` in `target`, and the level it stands at.

    phase: of a step.  dtypes: of the launch's operands.  constants: the launch's.

    Raises:
        MissingKernel: no file at any level.
        BuildError: two files that claim the op at one level.
    """
    suffix = SUFFIXES[target.hardware.kind]
    searched = []
    for level in levels(target):
        found = sorted(path for path in level.folder.glob(f"{op}.*") if path.suffix in SUFFIXES.values())
        claims = [path for path in found if kernel_file.named(path)[1] in ("", phase)]
        claims = [path for path in claims if kernel_file.serves(path, dtypes or {}, constants)]
        if len(claims) > 1:
            raise BuildError(
                f"op {op}", f"claimed by {' and '.join(map(str, claims))}", "one file at each level", "remove one"
            )
        if claims and claims[0].suffix == suffix:
            return claims[0], level
        searched.append(str(level.folder))
    what = f"{op}{suffix}"
    if phases := sorted({path.name for level in levels(target) for path in level.folder.glob(f"{op}.*")}):
        what += f" or {op}.{phase}{suffix}"
        missing = (
            f"no kernel for the {phase} phase of {_types(dtypes)}for target {target.name}, only {', '.join(phases)}"
        )
    else:
        missing = f"no kernel for target {target.name}"
    raise MissingKernel(f"op {op}", missing, f"{what} in {', '.join(searched)}")


def _types(dtypes: Mapping[str, str] | None) -> str:
    return " ".join(f"{operand} {dtype}" for operand, dtype in (dtypes or {}).items()) + " " if dtypes else ""


def resolve(
    target: Target,
    op: str,
    phase: str = "decode",
    dtypes: Mapping[str, str] | None = None,
    constants: Mapping[str, int | float] | None = None,
) -> Path:
    """The file that serves `op` in `target`. Raises as `find` does."""
    return find(target, op, phase, dtypes, constants)[0]


def tuning(target: Target, op: str) -> dict[str, Any]:
    """The table of `op` from `tuning.toml` files: knob values, and tables of knob values by kernel name.

    A level states only what differs from the levels behind it: the nearest value of each knob applies. {} if no
    level states any.

    Raises:
        BuildError: a file that is not TOML, or an op's entry that is no table.
    """
    merged: dict[str, Any] = {}
    for level in levels(target):
        file = level.folder / "tuning.toml"
        if not file.exists():
            continue
        try:
            table = tomllib.loads(file.read_text()).get(op, {})
        except tomllib.TOMLDecodeError as error:
            raise BuildError(str(file), f"not valid TOML: {error}") from None
        if not isinstance(table, dict):
            raise BuildError(str(file), f"{op} is {table!r}", f"a table [{op}] of knobs")
        for key, value in table.items():
            if isinstance(value, dict):
                merged[key] = {**value, **merged.get(key, {})}
            else:
                merged.setdefault(key, value)
    return merged


def facts(root: Path) -> dict[str, dict[str, Any]]:
    """Public facts of every model, `kernels/models/<model>.json`, by model name.

    Raises:
        BuildError: a file that is not JSON, or whose facts give no shape.
    """
    result = {}
    for file in sorted((root / "models").glob("*.json")):
        try:
            document = json.loads(file.read_text())
            if not isinstance(document, dict):
                raise BuildError(str(file), "holds no JSON object", "fields of a config.json, and `source`")
            shape(document)
            published = document.get(PUBLISHED, [])
            if not isinstance(published, list) or not set(map(str, published)) <= FORMATS.keys():
                raise BuildError(str(file), f"{PUBLISHED} is {published!r}", f"a list of {', '.join(FORMATS)}")
        except json.JSONDecodeError as error:
            raise BuildError(str(file), f"not valid JSON: {error}") from None
        except CheckpointError as error:
            raise BuildError(str(file), error.found, error.accepted, error.fix) from None
        result[file.stem] = document
    return result
