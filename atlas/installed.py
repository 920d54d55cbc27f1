"""What this install was built for: `atlas/_targets.json`, written by the build beside the extension.

The version of a wheel is the same for every target (a local version could not be published), so this
file is where its targets stand. It is read without loading the extension. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas import __version__
from atlas.errors import AtlasError

FILE = "_targets.json"
VARIABLES = ("ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT")

_SET_FIELDS = ("hardware", "kind", "model", "quant", "arch", "shape_hash")


def record(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `_targets.json` for a build whose manifest is `manifest`."""
    return {
        "version": __version__,
        "core_abi": manifest["core_abi"],
        "compiler": manifest["compiler"],
        "selection": {name: manifest.get("selection", {}).get(name, "") for name in VARIABLES},
        "targets": [{field: entry[field] for field in _SET_FIELDS} for entry in manifest["sets"]],
    }


def path() -> Path | None:
    """Where `_targets.json` lies: in this package, or, for a source checkout or an editable install, in the
    installed distribution. None where Atlas was never built."""
    here = Path(__file__).with_name(FILE)
    if here.is_file():
        return here
    import importlib.metadata  # brings half the standard library, which nobody else here needs

    try:
        files = importlib.metadata.distribution("atlas-infer").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.as_posix() == f"atlas/{FILE}")
    return next((file for file in found if file.is_file()), None)


def targets() -> list[str] | None:
    """Names (hardware/model/quant) of the targets in this install; None where Atlas was never built.

    Raises:
        AtlasError: the file is damaged.
    """
    file = path()
    if file is None:
        return None
    try:
        entries = json.loads(file.read_text())["targets"]
        return [f"{entry['hardware']}/{entry['model']}/{entry['quant']}" for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AtlasError(str(file), f"cannot be read ({error})", "", "reinstall Atlas") from None


def difference(environment: Mapping[str, str]) -> AtlasError | None:
    """How the ATLAS_TARGET_* variables in `environment` differ from what is installed; None where they agree.

    An unset variable asks for nothing, so it agrees with everything.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not given:
        return None
    asked = " ".join(f"{name}={value}" for name, value in given.items())
    try:
        have = targets()
        if have is None:
            return AtlasError(asked, "Atlas is not built in this environment", fix="run `pip install .`")
        wanted = _selected(given, have)
    except AtlasError as error:
        return error
    fix = "install again with these variables (pip install --no-cache-dir), or unset them"
    if missing := [name for name in wanted if name not in have]:
        return AtlasError(asked, f"selects {', '.join(missing)}, which this install lacks", ", ".join(have), fix)
    if surplus := [name for name in have if name not in wanted]:
        return AtlasError(asked, f"does not select {', '.join(surplus)}, which this install has", "", fix)
    return None


def _selected(given: Mapping[str, str], have: list[str]) -> list[str]:
    """Names of the targets that the variables select. Hardware that is not named is the installed one:
    asking the driver for it here would make a process use a GPU that it has no business with."""
    from atlas.targets import target
    from atlas.targets.tree import kernels_root

    hardware = ",".join(dict.fromkeys(name.split("/")[0] for name in have))
    selection = target.select(kernels_root(), {"ATLAS_TARGET_HW": hardware, **given})
    return [selected.name for selected in selection.targets]


def main(arguments: list[str]) -> None:
    """`python -m atlas.installed MANIFEST OUTPUT`: write the record of a build; CMake calls it."""
    manifest, output = map(Path, arguments)
    text = json.dumps(record(json.loads(manifest.read_text())), indent=1) + "\n"
    if not output.exists() or output.read_text() != text:
        output.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
