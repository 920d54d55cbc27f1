"""Asks the NVIDIA driver which devices this machine has, through ctypes: used by builds, before the
extension exists. Standard library only; creates no context."""

from __future__ import annotations

import ctypes
import dataclasses

_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One device as the driver reports it."""

    name: str
    compute_capability: tuple[int, int]


def gpus(library: str = "libcuda.so.1") -> tuple[list[Gpu], str]:
    """The devices, and the reason when there are none. Never raises."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return [], f"no NVIDIA driver ({library} not found)"
    code = cuda.cuInit(0)
    if code:
        return [], f"the NVIDIA driver did not start (cuInit returned {code})"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGetName(name, 256, index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_MAJOR, index)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_MINOR, index)
        found.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    return found, "" if found else "the NVIDIA driver reports no device"
