"""Checks of the machine: device and driver, instruction sets, threads, memory, cache folders and disk."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from atlas.cache import cache_root
from atlas.doctor.report import Context, Result, gigabytes
from atlas.errors import AtlasError
from atlas.runtime import kernel_sources

LEAST_MEMORY = 512 << 20
"""The smallest model of the catalogue with its KV cache fits in this."""

LEAST_DISK = 1 << 30
"""Ten times what fetching the smallest model of the catalogue takes while it is unpacked."""


def device(context: Context) -> list[Result]:
    """GPUs and driver. A machine without one is fine, unless this install holds kernels for a GPU."""
    if context.extension[0] is None:
        return [Result("device", "skipped", "needs the extension")]
    devices, reason = context.devices
    if devices:
        version = _driver_version()
        return [
            Result(
                "device",
                "ok",
                f"{d['index']}: {d['name']}, compute capability {'.'.join(map(str, d['compute_capability']))}, "
                f"{d['multiprocessors']} multiprocessors, {gigabytes(d['total_memory'])}, driver CUDA {version}",
            )
            for d in devices
        ]
    what, _, remedy = reason.partition("; ")
    try:
        manifest = context.manifest
    except AtlasError:
        manifest = None  # told by the check of kernel sets
    needs_gpu = any(s.kind == "cuda" for s in manifest.sets) if manifest else False
    absent = reason.startswith(("no NVIDIA", "the NVIDIA driver reports no device")) or "(100)" in what
    if absent and not needs_gpu:
        return [Result("device", "note", f"no GPU: {what}", "nothing to do for serving on the CPU")]
    return [Result("device", "problem", what, remedy or "check that `nvidia-smi` works on this machine")]


def _driver_version() -> str:
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def instruction_sets(context: Context) -> list[Result]:
    """What each instruction-set level is worth here, and which one each op runs at."""
    core, _ = context.extension
    if core is None:
        return [Result("cpu levels", "skipped", "needs the extension")]
    results, told, usable = [], [], []
    for level in core.cpu_level_report():
        name = level["name"]
        if not level["compiled"]:
            told.append(f"{name} has no kernels in this install")
        elif level["obstacle"]:
            told.append(f"{name} {level['obstacle']}")
        elif level["failure"]:
            found = f"{name} fails its self-test and is not used: {level['failure']}"
            remedy = "report it with this output; the next lower level serves until then"
            results.append(Result("cpu levels", "problem", found, remedy))
        else:
            told.append(f"{name} passes its self-test")
            usable.append(name)
    if not usable:
        remedy = "build on this machine: `pip install --no-cache-dir --no-binary atlas-infer atlas-infer`"
        found = "no level of this install runs on this machine: " + "; ".join(told)
        return [*results, Result("cpu levels", "problem", found, remedy)]
    chosen = core.cpu_backend(1).describe().removeprefix("cpu, ").removesuffix(", 1 threads")
    return [*results, Result("cpu levels", "ok", f"chosen: {chosen} ({'; '.join(told)})")]


def threads(context: Context) -> list[Result]:
    """Cores that this process may use, after affinity and the cgroup's quota."""
    from atlas.runtime import host

    cores, quota = host.allowed_cores(context.cgroup), host.cpu_quota(context.cgroup)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{cores} threads: {os.cpu_count()} cores, {affinity} by affinity, " + (
        f"cgroup limit {quota:g}" if quota is not None else "no cgroup limit"
    )
    if quota is not None and quota < 1:
        remedy = "give this container at least one core (docker run --cpus, limits.cpu): it is paused in every period"
        return [Result("threads", "problem", found, remedy)]
    return [Result("threads", "ok", found)]


def memory_nodes(context: Context) -> list[Result]:
    """Memory nodes of the CPUs in use, and whether an arena can be spread over them."""
    core, _ = context.extension
    if core is None:
        return [Result("memory nodes", "skipped", "needs the extension")]
    nodes = core.memory_nodes()
    if len(nodes) < 2:
        return [Result("memory nodes", "ok", "one: all memory is equally near")]
    found = f"{', '.join(map(str, nodes))} have CPUs of this process"
    if obstacle := core.interleave_obstacle():
        remedy = "give the container CAP_SYS_NICE, or start it with `numactl --interleave=all`"
        return [Result("memory nodes", "note", f"{found}; weights cannot be spread over them: {obstacle}", remedy)]
    return [Result("memory nodes", "ok", f"{found}; weights are spread over them")]


def memory(context: Context) -> list[Result]:
    """Host memory that a model could take now."""
    available = available_memory(context)
    if available is None:
        return [Result("memory", "note", "the system does not tell how much memory is free")]
    if available < LEAST_MEMORY:
        remedy = f"free memory or raise the container's limit: the smallest model needs {gigabytes(LEAST_MEMORY)}"
        return [Result("memory", "problem", f"{gigabytes(available)} available", remedy)]
    return [Result("memory", "ok", f"{gigabytes(available)} available")]


def available_memory(context: Context) -> int | None:
    """Bytes that a load could take; None where the system does not tell."""
    from atlas.runtime import host

    return host.available_memory(context.meminfo, context.cgroup) if context.meminfo.exists() else None


def storage(context: Context) -> list[Result]:
    """The cache folders, who may write to them, and room on their disk and for temporary files."""
    root = cache_root()
    results, sizes = [], []
    if root.exists() or root.is_symlink():
        if fault := _fault(root):
            results.append(Result("cache", "problem", *fault))
        else:
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                if fault := _fault(folder) or _pack_fault(folder):
                    results.append(Result("cache", "problem", *fault))
                    continue
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                sizes.append(f"{folder.name} {gigabytes(size)}")
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    # Before a folder that could be written there may stand something that is none, and then nothing can be made.
    nearest = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if nearest != root and not nearest.is_dir():
        kind = "a symbolic link to no directory" if nearest.is_symlink() else "not a directory"
        remedy = f"remove it (rm {nearest}), or set XDG_CACHE_HOME to a folder of your own"
        found = f"{nearest} is {kind}, so {root} cannot be made"
        results.append(Result("cache", "problem", found, remedy))
    elif not os.access(existing, os.W_OK):
        remedy = "set XDG_CACHE_HOME to a folder of your own"
        results.append(Result("cache", "problem", f"{existing} cannot be written: {root} is of no use", remedy))
    free = shutil.disk_usage(existing).free
    if free < LEAST_DISK:
        remedy = f"free {gigabytes(LEAST_DISK)}, or set XDG_CACHE_HOME to a folder on another disk"
        results.append(Result("cache", "problem", f"{gigabytes(free)} free on the disk of {root}", remedy))
    try:
        tempfile.TemporaryDirectory().cleanup()
    except OSError as error:
        remedy = "set TMPDIR to a folder that can be written: the server's two processes meet there"
        results.append(Result("temporary files", "problem", str(error), remedy))
    held = ", ".join(sizes) or ("empty" if root.is_dir() else "made when it is needed")
    return results or [Result("cache", "ok", f"{root} ({held}), {gigabytes(free)} free")]


def _fault(folder: Path) -> tuple[str, str] | None:
    """What makes a cache folder unusable (it is then ignored), and the remedy."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a plain directory, so it is not used", f"remove it: rm {folder}"
    if status.st_uid != os.getuid():
        owner = f"{folder} belongs to user id {status.st_uid}, so it is not used"
        return owner, "set XDG_CACHE_HOME to a folder of your own, or change its owner"
    if status.st_mode & 0o022:
        return f"{folder} can be written by others, so it is not used", f"chmod 700 {folder}"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} cannot be read and written (mode {stat.S_IMODE(status.st_mode):04o})", f"chmod 700 {folder}"
    return None


def _pack_fault(folder: Path) -> tuple[str, str] | None:
    """Why the loader refuses the folder of cached packs, which hold code, in its own words, and the remedy."""
    if folder.name != kernel_sources.CACHE_FOLDER:
        return None
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False  # told in the report

    log = logging.getLogger(kernel_sources.__name__)
    log.addFilter(keep)
    try:
        usable = kernel_sources.cache_folder() is not None
    finally:
        log.removeFilter(keep)
    return None if usable else ("; ".join(said) or f"{folder} is not used", f"chmod 700 {folder}")
