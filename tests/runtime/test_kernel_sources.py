"""Where kernel sets are looked for, in which order, and what is refused on the way."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atlas.build import pack, wheel
from atlas.build.manifest import KernelEntry, KernelSet, Manifest
from atlas.errors import AtlasError, BuildError
from atlas.runtime import core, kernel_sources
from atlas.runtime.kernel_sources import Source, find
from tests.fake_packs import SHAPE, build, packed

H200 = {"index": 0, "name": "NVIDIA H200", "compute_capability": (9, 0)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own, and an extension with CPU kernels only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu = KernelSet("cpu", "cpu", "*", "bf16", "*", "", (0, 0), ())
    monkeypatch.setattr(core, "embedded", lambda: (Manifest((cpu,), (), "test"), []))
    return tmp_path / "cache" / "atlas" / "packs"


def store(quant: str = "bf16", data: bytes | None = None, abi: str = str(pack.CORE_ABI)) -> Path:
    folder = kernel_sources.cache_folder()
    assert folder is not None
    path = folder / pack.cache_name(build(quant=quant)[0].sets[0]).replace(f"-{pack.CORE_ABI}.", f"-{abi}.")
    path.write_bytes(packed(quant=quant) if data is None else data)
    return path


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None = None) -> str:
    """Unpack a data wheel into a folder of sys.path, as pip does."""
    built = wheel.write(folder / "wheels", packed() if data is None else data, build()[0].sets[0])
    site = folder / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, built],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"},
    )
    monkeypatch.syspath_prepend(str(site))
    return "wheel atlas-infer-kernels-h200-test-model-bf16 0.1.0"


def labels(*packs: str, quant: str | None = "bf16") -> list[str]:
    return [source.label for source in find(SHAPE, quant, packs)]


def test_the_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [tmp_path / "b.atlaspack", tmp_path / "a.atlaspack"]
    for path in given:
        path.write_bytes(packed())
    cached, name = store(), install(tmp_path, monkeypatch)
    expected = [*(f"--kernel-pack {path}" for path in given), "embedded", name, f"cache {cached}"]
    assert labels(*map(str, given)) == expected
    assert [source.asked_for for source in find(SHAPE, "bf16", [str(given[0])])] == [True, False, False, False]
    assert all(source.error is None for source in find(SHAPE, "bf16"))


def test_a_source_is_opened_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sources, "_data_wheels", lambda fix: pytest.fail("not needed"))
    assert next(find(SHAPE, "bf16")).label == "embedded"


# ---- the cache ---------------------------------------------------------------------------------------


def test_the_cache_is_searched_by_shape_and_quant() -> None:
    bf16, fp8, old = store(), store("fp8"), store(abi="0")
    assert labels() == ["embedded", f"cache {old}", f"cache {bf16}"]
    assert labels(quant="fp8") == ["embedded", f"cache {fp8}"]
    assert len(list(find())) == 4 and [s.label for s in find("0" * 16, "bf16")] == ["embedded"]


def test_packs_with_different_kernels_stand_beside_each_other() -> None:
    """Known failure: the pack of one checkpoint took the place of another's that has the same shape and quant, and
    mixes formats in another way."""
    kernel_set = build()[0].sets[0]
    first, second = kernel_set.kernels

    def name(*kernels: KernelEntry) -> str:
        return pack.cache_name(dataclasses.replace(kernel_set, kernels=kernels))

    other = name(first, dataclasses.replace(second, name=f"{second.name}__other"))
    assert name(first) != name(first, second) != other
    assert name(dataclasses.replace(second, source="edited.cu"), first) == name(first, second)  # made anew
    mine = store()
    (mine.parent / other).write_bytes(packed())
    assert set(labels()) == {"embedded", f"cache {mine}", f"cache {mine.parent / other}"}


def test_the_newest_pack_of_the_cache_comes_first() -> None:
    """Or one that an older Atlas made, with other kernels, would hide one that has just been built."""
    path = store()
    others = [path.with_name(f"h200-{SHAPE}-bf16-{digit * 8}-{pack.CORE_ABI}{pack.SUFFIX}") for digit in "0f"]
    for order in ([*others, path], [path, *others[::-1]]):
        for age, file in enumerate(order):
            file.write_bytes(packed())
            os.utime(file, ns=(0, (9 - age) * 10**9))
        gone = path.with_name(f"h200-{SHAPE}-bf16-gone{pack.SUFFIX}")
        gone.unlink(missing_ok=True)
        gone.symlink_to(path.parent / "nowhere")
        os.utime(gone, ns=(0, 0), follow_symlinks=False)
        assert labels() == ["embedded", *(f"cache {file}" for file in [*order, gone])]


def test_looking_makes_no_cache_and_making_one_makes_it_private(cache: Path) -> None:
    assert labels() == ["embedded"] and not cache.parent.exists()
    store()
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_cache_that_others_can_reach_is_ignored_with_a_warning(
    mode: int, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store()
    cache.chmod(mode)
    assert labels() == ["embedded"]
    assert str(cache) in caplog.text and "not used" in caplog.text and "chmod 700 it" in caplog.text


def test_a_cache_of_somebody_else_is_ignored_with_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert labels() == ["embedded"]
    assert f"belongs to user id {own}, not to you: not used" in caplog.text


def test_a_cache_that_is_a_link_is_ignored_with_a_warning(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    assert labels() == ["embedded"] and f"the cache {cache} is not a plain directory: not used" in caplog.text


def test_a_damaged_pack_in_the_cache_is_a_source_with_an_error() -> None:
    path = store(data=packed()[:-1])
    source = list(find(SHAPE, "bf16", fix="run: this"))[-1]
    assert (source.manifest, source.asked_for) == (None, False)
    assert isinstance(source.error, BuildError) and str(source.error).startswith(f"{path}: cut off: ")
    assert str(source.error).endswith("run: this")


# ---- data wheels ---------------------------------------------------------------------------------------


def test_a_data_wheel_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = install(tmp_path, monkeypatch)
    source = next(source for source in find(SHAPE, "bf16") if source.label == name)
    assert source.manifest == build()[0] and len(source.images) == 2
    assert not [module for module in sys.modules if module.startswith("atlas_infer_kernels")]
    assert not list((tmp_path / "site").glob("**/*.py"))


def test_a_data_wheel_with_a_damaged_pack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = install(tmp_path, monkeypatch, packed()[:-1] + b"\1")
    source = next(source for source in find(SHAPE, "bf16") if source.label == name)
    assert "damaged: its sha256 is" in str(source.error)


@pytest.mark.parametrize("value", ["../../etc", "os:system", "a.b"])
def test_an_entry_point_that_names_no_folder_is_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[atlas.kernels]\nx = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = list(find(SHAPE, "bf16"))[-1]
    assert source.label == "entry point x" and source.manifest is None
    assert f"entry point x: names the folder {value!r}; accepted: a data wheel made by" in str(source.error)


# ---- the rest ------------------------------------------------------------------------------------------


def test_an_extension_that_does_not_load_is_a_source_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise AtlasError("atlas._core", "is missing", "", "run `pip install .`")

    monkeypatch.setattr(core, "embedded", missing)
    assert str(next(find()).error) == "atlas._core: is missing; run `pip install .`"


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "h200"), ((12, 1), "gb10"), ((7, 0), "HW"), (None, "HW")])
def test_the_suggested_command_names_the_hardware_of_the_device(capability: Any, name: str) -> None:
    devices = [{**H200, "compute_capability": capability}] if capability else []
    expected = f"run: python -m atlas.build /models/llama --hw {name} --quant bf16"
    assert kernel_sources.rebuild_fix("/models/llama", "bf16", devices) == expected


def test_without_a_kernel_tree_the_suggested_command_still_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tree() -> Path:
        raise BuildError("kernel tree", "is not there")

    monkeypatch.setattr(kernel_sources, "kernels_root", no_tree)
    assert kernel_sources.rebuild_fix("m", "bf16", [H200]) == "run: python -m atlas.build m --hw HW --quant bf16"


def test_sources_log_nothing_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    store()
    with caplog.at_level(logging.INFO):
        assert [type(source) for source in find(SHAPE, "bf16")] == [Source, Source]
    assert caplog.text == ""
