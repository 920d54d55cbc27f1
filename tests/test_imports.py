"""What importing Atlas costs and needs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

STANDARD_ONLY = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {third_party}:
            raise ImportError(f"{{name}} is not the standard library")
sys.meta_path.insert(0, Refuse())
import {module}
"""

THIRD_PARTY = {"numpy", "ml_dtypes", "msgspec", "starlette", "uvicorn", "jinja2", "tokenizers", "gguf", "safetensors"}


@pytest.mark.parametrize(
    "module",
    [
        "atlas",
        "atlas.targets.target",
        "atlas.targets.shape",
        "atlas.targets.driver",
        "atlas.ops",
        "atlas.models",
        "atlas.runtime.program",
        "atlas.runtime.step",
        "atlas.build.compile",
        "atlas.build.toolchain",
        "build_targets",
    ],
)
def test_what_the_build_imports_is_standard_library_only(module: str) -> None:
    """The isolated build environment has scikit-build-core and pybind11, nothing else."""
    code = STANDARD_ONLY.format(third_party=THIRD_PARTY, module=module)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_import_is_quick_and_loads_no_device_library() -> None:
    code = (
        "import atlas, sys; maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''; "
        "assert 'libcuda' not in maps and 'numpy' not in sys.modules and 'atlas._core' not in sys.modules"
    )
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    bare = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - started)
    assert min(times) - min(bare) < 0.3


def test_the_extension_opens_no_device_on_import() -> None:
    code = (
        "from atlas.runtime import core; core.extension(); import os; "
        "assert 'libcuda' not in open('/proc/self/maps').read(); "
        "paths = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]; "
        "links = [os.readlink(path) for path in paths if os.path.exists(path)]; "
        "assert not [link for link in links if 'nvidia' in link], links"
    )
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_driver_starts_before_anything_heavy_is_imported() -> None:
    """Its start takes as long as the imports, and runs beside them."""
    code = (
        "import atlas.runtime.extension, sys; "
        "heavy = {'numpy', 'msgspec', 'dataclasses', 'atlas.build.manifest', 'atlas._core'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
