"""The target of a checkpoint: which hardware, model name, quant and configuration a kernel pack is compiled for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atlas.errors import BuildError, CheckpointError, ConfigError
from atlas.models import family_of
from atlas.targets import target as targets
from atlas.targets.formats import PUBLISHED, ROLE_FORMATS
from atlas.targets.hardware import walk
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from atlas.targets.status import closure
from atlas.targets.target import Target

ACCEPTED = "a model directory, a config.json, a GGUF file, a catalogue name, or a model of kernels/models"


class Model(NamedTuple):
    """config.json of a model, a name for it, and where its weights are, if they are there."""

    config: dict[str, Any]
    name: str
    files: Path | None = None


def configuration(model: str, root: Path) -> Model:
    """What the user calls a model.

    Only headers and configuration are read: weights need not be there.

    Raises:
        CheckpointError, ConfigError: nothing usable is there.
    """
    # Imported here: these need NumPy, which errors about hardware need not wait for.
    from atlas.weights import open_checkpoint
    from atlas.weights.catalogue import CATALOGUE
    from atlas.weights.checkpoint import read_json_object
    from atlas.weights.fetch import resolve_model

    path = Path(model).expanduser()
    facts = root / "models" / f"{model.lower()}.json"
    if path.is_dir() and (path / "config.json").is_file():
        files = path if any(path.glob("*.safetensors")) else None
        return Model(read_json_object(path / "config.json", required=True), path.resolve().name, files)
    if path.is_file() and path.suffix == ".json":
        # A config.json is called after its folder, a facts file after itself.
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return Model(read_json_object(path, required=True), name)
    if not path.exists() and "/" not in model and facts.is_file():
        return Model(read_json_object(facts, required=True), facts.stem)
    if not path.exists() and model.lower() in CATALOGUE:
        path = resolve_model(model, offline=False)
    if not path.exists():
        known = sorted({file.stem for file in (root / "models").glob("*.json")} | set(CATALOGUE))
        near = difflib.get_close_matches(model.lower(), known, cutoff=0.4)
        fix = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        raise ConfigError("MODEL", f"{model!r} is no file, directory or known model", ACCEPTED, fix)
    with open_checkpoint(path) as checkpoint:
        return Model(checkpoint.config, path.resolve().name.removesuffix(".gguf"), path)


def stored_formats(files: Path, quant: str) -> dict[str, str]:
    """Weight buffer -> the format or element type that it gets on a GPU, for those that the recipe leaves to the
    checkpoint. Only headers are read. Raises CheckpointError, ConfigError."""
    from atlas.runtime import headers, weight_formats
    from atlas.weights import open_checkpoint

    found: dict[str, str] = {}
    with open_checkpoint(files) as checkpoint:
        family = family_of(checkpoint.config)
        config = headers.untied(checkpoint, family.configure(checkpoint.config, Shard()), family)
        chosen = weight_formats.chooser(checkpoint, family.weights(config, checkpoint.tensors))

        def note(name: str, role: str) -> str:
            format = chosen(name, role)
            if role in ROLE_FORMATS:
                found[name] = format
            return format

        family.record(config, recipe(quant), note)
    return found


def checkpoint_target(root: Path, config: Mapping[str, Any], name: str, hardware: str, quant: str) -> Target:
    """The target for a configuration called `name`.

    A model of the kernel tree with the same kernels gives the target its name: kernels and tuning of that
    model then serve its fine-tunes too, and their packs are the same bytes.

    Raises:
        BuildError: hardware or quant that there are no kernels for.  CheckpointError: an unsupported model.
    """
    known = {h.name: h for h in walk(root).values() if not h.abstract and h.kind == "cuda"}
    if hardware == "cpu":
        raise BuildError(
            "--hw", "'cpu' needs no pack", ", ".join(known), "its kernels are host code, and in every installation"
        )
    if hardware not in known:
        near = difflib.get_close_matches(hardware, known, n=1, cutoff=0.3)
        raise BuildError(
            "--hw", f"unknown hardware {hardware!r}", ", ".join(known), f"nearest: {near[0]}" if near else ""
        )
    if quant not in known[hardware].quants:
        raise BuildError("--quant", f"{hardware} has no {quant} kernels", ", ".join(known[hardware].quants))
    shape_hash = family_of(config).configure(config, Shard()).shape.hash()
    wanted = _closure(config, quant)
    models = targets.models(root)
    for model, facts in models.items():
        if _shape_hash(facts) == shape_hash and _closure(facts, quant) == wanted:
            return Target(known[hardware], model, quant, facts)
    plain = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"
    # Another shape under a known name must not get kernels that were tuned for that name's.
    return Target(known[hardware], f"{plain}-{shape_hash}" if plain in models else plain, quant, config)


def _shape_hash(facts: Mapping[str, Any]) -> str:
    try:
        return family_of(facts).configure(facts, Shard()).shape.hash()
    except CheckpointError:
        return ""  # facts of a family that is not supported yet


def _closure(config: Mapping[str, Any], quant: str) -> set[str]:
    """What a checkpoint's program needs, without kernels for what others of its model are stored in."""
    plain = {name: value for name, value in config.items() if name != PUBLISHED}
    return {key.name() for key in closure(plain, quant)}
