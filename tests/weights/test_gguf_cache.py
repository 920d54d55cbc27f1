"""Split GGUF models, and the index that is left in the user's cache."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.errors import CheckpointError
from atlas.weights import gguf as atlas_gguf
from atlas.weights import open_checkpoint
from tests.weights.gguf_files import (
    NAMES,
    ROUND_TRIP,
    hf_weights,
    with_types,
    write,
)

pytestmark = pytest.mark.usefixtures("cache")


# ---- split models --------------------------------------------------------------------------------


def test_split_model_opens_from_any_part_and_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write(folder / "model.gguf", split=4)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in (folder, parts[0], parts[2]):
        checkpoint = open_checkpoint(path)
        assert len({info.file for info in checkpoint.tensors.values()}) == 3
        for stem, weight in hf_weights().items():
            np.testing.assert_array_equal(checkpoint.read(f"{NAMES[stem]}.weight"), weight)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: the file is missing"):
        open_checkpoint(folder)


def test_renamed_part_and_two_models_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split=4)
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003.gguf").unlink()
    (tmp_path / "model-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"renamed\.gguf: .*of 3; .*first part under its own name"):
        open_checkpoint(tmp_path)
    write(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models: other\.gguf, renamed\.gguf"):
        open_checkpoint(tmp_path)


# ---- the cache -----------------------------------------------------------------------------------


def forbid_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the header was read although an index is cached")

    monkeypatch.setattr(atlas_gguf, "read_header", refuse)


def test_second_opening_uses_the_index_alone(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", tensors=with_types(ROUND_TRIP))
    first = open_checkpoint(path)
    files = first.tokenizer_files()
    forbid_headers(monkeypatch)
    second = open_checkpoint(path)
    assert (second.config, second.tensors, second.digest()) == (first.config, first.tensors, first.digest())
    assert second.tokenizer_files() == files
    for name in first.tensors:
        np.testing.assert_array_equal(second.read(name), first.read(name))
    folder = cache / first.digest()
    assert {entry.name for entry in folder.iterdir()} == {
        "index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.sha256",
    }
    for level in (cache.parent, cache, folder):
        assert stat.S_IMODE(level.stat().st_mode) == 0o700


def test_smollm2_opens_fast_the_second_time(smollm2_path: Path) -> None:
    def opened() -> float:
        begin = time.perf_counter()
        open_checkpoint(smollm2_path).tokenizer_files()
        return time.perf_counter() - begin

    cold = opened()
    warm = min(opened() for _ in range(3))
    print(f"open SmolLM2: cold {cold:.3f} s, warm {warm:.3f} s")
    assert warm < 0.3


def test_missing_pre_tokeniser_is_warned_about_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.gguf", pre=None)
    for _ in range(2):
        caplog.clear()
        open_checkpoint(path).tokenizer_files()
        assert "m.gguf: tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize("change", ["content", "copy"])
def test_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path)
    if change == "content":
        write(path, without=("rope.freq_base",))
        second = open_checkpoint(path)
        assert second.config["rope_theta"] == 10000.0
        assert second.digest() != first.digest()
    else:
        (tmp_path / "n.gguf").write_bytes(path.read_bytes())
        assert open_checkpoint(tmp_path / "n.gguf").digest() == first.digest()


def test_changed_weight_changes_the_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path).digest()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(path).digest() != first


@pytest.mark.parametrize(
    "victim", ["index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.sha256", "seen"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_damaged_cache_is_made_again(tmp_path: Path, cache: Path, victim: str, damage: str) -> None:
    path = write(tmp_path / "m.gguf")
    first = open_checkpoint(path)
    files = first.tokenizer_files()
    file = next((cache / "seen").iterdir()) if victim == "seen" else cache / first.digest() / victim
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(
        {
            "cut": good[:middle],
            "flip": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "empty": b"",
            "other": b'{"sha256": "", "body": {}}',
        }[damage]
    )
    again = open_checkpoint(path)
    assert (again.config, again.tensors, again.digest()) == (first.config, first.tensors, first.digest())
    assert again.tokenizer_files() == files
    assert file.read_bytes() == good


def test_cache_of_somebody_else_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.gguf")
    expected = open_checkpoint(path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(path)
    assert "not to you: not used" in caplog.text
    assert checkpoint.config == expected.config
    assert checkpoint.tokenizer_files() == expected.tokenizer_files()


def test_cache_that_others_can_write_is_ignored(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.gguf")
    open_checkpoint(path)
    cache.chmod(0o777)
    open_checkpoint(path).tokenizer_files()
    assert "can be written by others: not used" in caplog.text


def test_no_cache_folder_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    assert open_checkpoint(write(tmp_path / "m.gguf")).tokenizer_files().source.endswith("m.gguf")
    assert "no cache in" in caplog.text
