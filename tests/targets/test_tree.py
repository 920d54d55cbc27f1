"""Where the kernel tree is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import atlas
from atlas.errors import BuildError
from atlas.targets.tree import kernels_root


def plant(folder: Path) -> Path:
    (folder / "models").mkdir(parents=True)
    (folder / "h200").mkdir()
    (folder / "h200" / "HARDWARE.toml").touch()
    return folder


def test_a_checkout_uses_its_own_tree() -> None:
    assert kernels_root() == Path(atlas.__file__).resolve().parents[1] / "kernels"


def test_an_installed_package_uses_its_copy_and_no_stranger_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "atlas"
    installed = plant(package / "_kernels")
    plant(tmp_path / "site-packages" / "kernels")
    assert kernels_root(package) == installed


def test_a_checkout_comes_before_an_installed_copy(tmp_path: Path) -> None:
    plant(tmp_path / "atlas" / "_kernels")
    checkout = plant(tmp_path / "kernels")
    (tmp_path / "build_targets.py").touch()
    assert kernels_root(tmp_path / "atlas") == checkout


def test_without_a_tree_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "atlas" / "_kernels").mkdir(parents=True)
    with pytest.raises(BuildError) as caught:
        kernels_root(tmp_path / "atlas")
    message = str(caught.value)
    assert str(tmp_path / "kernels") in message and str(tmp_path / "atlas" / "_kernels") in message
    assert "pip install --force-reinstall 'atlas-infer[build]'" in message
