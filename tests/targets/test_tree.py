"""Where the kernel tree is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import atlas
from atlas.errors import BuildError
from atlas.targets.tree import check_tree, kernels_root


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("card/gated_activatione.cu", "no op is called 'gated_activatione'.*nearest: gated_activation"),
        ("card/llama-3.2-1b/gated_activation_b.cu", "no op is called 'gated_activation_b'"),
        ("card/lama-3.2-1b/bf16/gated_activation.cu", "no model is called 'lama-3.2-1b'.*nearest: llama-3.2-1b"),
        ("card/lama-3.2-1b/tuning.toml", "no model is called 'lama-3.2-1b'"),
        ("card/llama-3.2-1b/bf61/gated_activation.cu", "no quant is called 'bf61'.*nearest: bf16"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("")
    with pytest.raises(BuildError, match=message):
        check_tree(tmp_path, ["card"], ["llama-3.2-1b"])


def test_headers_and_tuning_files_are_no_kernels(tmp_path: Path) -> None:
    strays = ("card/__pycache__/x.pyc", "card/notes/a.md", "card/.hidden/b")
    for name in (
        "card/include/atlas/any.cuh",
        "card/include/other.cu",
        "card/tuning.toml",
        "card/gated_activation.cu",
        *strays,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    check_tree(tmp_path, ["card"], [])
