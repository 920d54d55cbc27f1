"""Checks of the installation: Python, packages, the extension, variables."""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import os
import platform
import struct
import sys

from atlas import __version__, installed
from atlas.build import compile as compiler
from atlas.build import toolchain
from atlas.doctor.report import Context, Result
from atlas.errors import BuildError

MINIMUM_PYTHON = (3, 11)

VARIABLES = {
    "ATLAS_TARGET_HW": "build: hardware to build for",
    "ATLAS_TARGET_MODEL": "build: models to build for",
    "ATLAS_TARGET_QUANT": "build: quants to build for",
    "ATLAS_CUDA_COMPILER": "build: another CUDA compiler, `nvcc` or a path",
    "ATLAS_EMBED": "build: what kernel sets hold: cubin, ptx or both",
    "ATLAS_LOG_FORMAT": "engine: text or json, as `--log-format` of the server sets it",
    "ATLAS_LOG_LEVEL": "engine: least serious messages to log",
    "ATLAS_SYNC": "engine, CUDA: wait after each launch, so that an error names it; no graphs are used",
    "ATLAS_POISON": "engine: begin each step with a workspace of NaNs, so that a kernel that reads too much shows",
}
"""Every environment variable that Atlas reads; a test holds it to the sources."""


def python(context: Context) -> list[Result]:
    """The interpreter: version and word size."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{platform.python_implementation()} {version} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < MINIMUM_PYTHON:
        least = ".".join(map(str, MINIMUM_PYTHON))
        return [Result("python", "problem", f"{found}, needed is {least}", f"make an environment with Python {least}")]
    if struct.calcsize("P") != 8:
        return [Result("python", "problem", f"{found}, 32 bits", "use a 64-bit Python")]
    return [Result("python", "ok", found)]


def packages(context: Context) -> list[Result]:
    """Every run-time requirement of this distribution, by its own metadata."""
    try:
        distribution = importlib.metadata.distribution("atlas-infer")
    except importlib.metadata.PackageNotFoundError:
        return [
            Result("packages", "problem", "the distribution atlas-infer is not installed here", "run `pip install .`")
        ]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [Result("packages", "problem", "packaging is not installed", "run `pip install packaging`")]
    results, good = [], []
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        remedy = f"run `pip install '{requirement.name}{requirement.specifier}'`"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            results.append(Result("packages", "problem", f"{requirement.name} is not installed", remedy))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found = f"{requirement.name} {version}, needed is {requirement.specifier}"
            results.append(Result("packages", "problem", found, remedy))
        good.append(f"{requirement.name} {version}")
    if distribution.version != __version__:
        found = f"atlas-infer {distribution.version} is installed, but the code that runs is {__version__}"
        results.append(
            Result("packages", "problem", found, "run `pip install .` here, or start Python outside the checkout")
        )
    return results or [Result("packages", "ok", ", ".join(good))]


def extension(context: Context) -> list[Result]:
    """The compiled core: it loads, and it is of the same version as the Python code."""
    core, reason = context.extension
    if core is None:
        remedy = "install again: `pip install --force-reinstall --no-deps .`, or the wheel for this Python and machine"
        return [Result("extension", "problem", reason, remedy)]
    found = f"{core.__file__}, core ABI {core.CORE_ABI}, step version {core.STEP_VERSION}"
    return [Result("extension", "ok", found)]


def variables(context: Context) -> list[Result]:
    """ATLAS_ variables: unknown ones, those that cannot be right, and those that differ from what is installed."""
    given = {name: value for name, value in context.environment.items() if name.startswith("ATLAS_")}
    results = []
    for name in given:
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.7)
            remedy = f"did you mean {near[0]}?" if near else f"unset it; known are {', '.join(VARIABLES)}"
            results.append(Result("variables", "problem", f"{name} is not a variable of Atlas", remedy))
    level = given.get("ATLAS_LOG_LEVEL", "info")
    if not isinstance(logging.getLevelName(level.upper()), int):
        found = f"ATLAS_LOG_LEVEL is {level!r}"
        results.append(Result("variables", "problem", found, "set it to debug, info, warning or error"))
    for error in _build_variables(context):
        remedy = error.fix or f"accepted: {error.accepted}"
        results.append(Result("variables", "problem", f"{error.where} is wrong: {error.found}", remedy))
    cache = context.environment.get("XDG_CACHE_HOME", "")
    if cache and not os.path.isabs(cache):
        found = f"XDG_CACHE_HOME is {cache!r}, which is relative and therefore ignored"
        results.append(Result("variables", "problem", found, "make it an absolute path"))
    if difference := installed.difference(context.environment):
        found = f"{difference.where}: {difference.found}"
        if difference.accepted:
            found += f"; there is {difference.accepted}"
        results.append(Result("variables", "problem", found, difference.fix or "correct or unset the variable"))
    if results:
        return results
    return [Result("variables", "ok", ", ".join(f"{n}={v}" for n, v in given.items()) or "no ATLAS_ variable is set")]


def _build_variables(context: Context) -> list[BuildError]:
    """What a build would say about the values of ATLAS_EMBED and ATLAS_CUDA_COMPILER."""
    errors = []
    try:
        compiler.embed_choice(context.environment)
    except BuildError as error:
        errors.append(error)
    if context.environment.get(toolchain.VARIABLE):
        try:
            toolchain.find()  # of this process's environment
        except BuildError as error:
            # Wheels that are missing here are no fault of the value: pip brings its own for a build.
            if error.where == toolchain.VARIABLE:
                errors.append(error)
    return errors
