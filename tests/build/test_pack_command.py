"""`python -m atlas.build`: from a checkpoint to a pack or a data wheel. Compiling is replaced but where marked."""

from __future__ import annotations

import base64
import dataclasses
import email
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas import __version__
from atlas.build import __main__ as command
from atlas.build import compile as compiler
from atlas.build import pack, toolchain, wheel
from atlas.build.checkpoint_target import checkpoint_target, configuration
from atlas.build.manifest import Manifest
from atlas.errors import AtlasError, BuildError, ConfigError
from atlas.targets.target import Target
from tests.fake_packs import build, packed

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
FACTS = json.loads((KERNELS / "models" / "smollm2-135m.json").read_text())
OTHER = {**FACTS, "intermediate_size": 1024}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Target]:
    """Replaces the compiler; returns the targets it was asked for. The cache is a folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[Target] = []

    def fake(root: Path, selected: Sequence[Target], jobs: int, report: Any, selection: Any) -> tuple[Manifest, bytes]:
        assert root == KERNELS and jobs >= 1 and selection == {}
        asked.extend(selected)
        manifest, blob = build(hardware=selected[0].hardware.name, quant=selected[0].quant)
        return manifest, blob

    monkeypatch.setattr(compiler, "build", fake)
    return asked


def checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- what MODEL may be ---------------------------------------------------------------------------------


def test_a_model_is_a_folder_a_json_file_or_a_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "My Llama", OTHER)
    assert configuration(str(folder), KERNELS) == (OTHER, "My Llama", None)
    assert configuration(str(folder / "config.json"), KERNELS) == (OTHER, "My Llama", None)
    (tmp_path / "facts-9b.json").write_text(json.dumps(OTHER))
    assert configuration(str(tmp_path / "facts-9b.json"), KERNELS) == (OTHER, "facts-9b", None)
    assert configuration("SmolLM2-135M", KERNELS) == (FACTS, "smollm2-135m", None)


def test_a_gguf_file_is_a_model(smollm2_path: Path) -> None:
    config, name, files = configuration(str(smollm2_path), KERNELS)
    assert files == smollm2_path and name == smollm2_path.name.removesuffix(".gguf")
    target = checkpoint_target(KERNELS, config, name, "h200", "bf16")
    assert target.name == "h200/smollm2-135m/bf16"


def test_a_model_that_is_nothing_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        configuration("smollm2", KERNELS)
    assert "MODEL: 'smollm2' is no file, directory or known model; accepted: a model directory" in str(caught.value)
    assert "smollm2-" in str(caught.value).split("nearest: ")[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FACTS, "architectures": ["Mystery"]}, "architecture 'Mystery' is not supported; accepted: "),
        ({**FACTS, "hidden_size": -1}, "hidden_size is -1; accepted: an integer in 1.."),
    ],
)
def test_an_unsupported_model_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AtlasError) as caught:
        checkpoint_target(KERNELS, config, "m", "h200", "bf16")
    assert message in str(caught.value)


# ---- the target ----------------------------------------------------------------------------------------


def test_a_fine_tune_gets_the_target_of_its_base() -> None:
    tuned = {**FACTS, "rope_theta": 1e6, "bos_token_id": 7, "num_hidden_layers": 30}
    target = checkpoint_target(KERNELS, tuned, "my fine-tune", "gb10", "bf16")
    assert target == checkpoint_target(KERNELS, FACTS, "x", "gb10", "bf16")
    assert target.name == "gb10/smollm2-135m/bf16"


def test_another_shape_gets_a_name_of_its_own() -> None:
    assert checkpoint_target(KERNELS, OTHER, "My Llama (v2)", "h200", "bf16").model == "my-llama-v2"
    assert checkpoint_target(KERNELS, OTHER, "..", "h200", "bf16").model == "model"
    borrowed = checkpoint_target(KERNELS, OTHER, "smollm2-135m", "h200", "bf16").model
    assert borrowed.startswith("smollm2-135m-") and len(borrowed) == len("smollm2-135m-") + 16


@pytest.mark.parametrize(
    ("hardware", "quant", "message"),
    [
        ("cpu", "bf16", "--hw: 'cpu' needs no pack; accepted: "),
        ("h20", "bf16", "nearest: h200"),
        ("cuda", "bf16", "--hw: unknown hardware 'cuda'; accepted: "),
        ("h200", "fp9", "--quant: h200 has no fp9 kernels; accepted: bf16"),
    ],
)
def test_a_wrong_target_is_refused(hardware: str, quant: str, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        checkpoint_target(KERNELS, FACTS, "m", hardware, quant)
    assert message in str(caught.value)


# ---- the command -----------------------------------------------------------------------------------------


def test_the_default_output_is_the_private_cache(
    compiled: list[Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["smollm2-135m", "--hw", "h200", "--quant", "bf16"]) == 0
    path = tmp_path / "cache" / "atlas" / "packs" / pack.cache_name(build()[0].sets[0])
    assert path.name.startswith("h200-0123456789abcdef-bf16-") and path.name.endswith(f"-{pack.CORE_ABI}.atlaspack")
    assert path.read_bytes() == packed() and path.parent.stat().st_mode & 0o777 == 0o700
    assert [target.name for target in compiled] == ["h200/smollm2-135m/bf16"]
    assert (
        f"atlas: wrote {path} ({len(packed())} bytes, sm_90a): the server finds it there: " in capsys.readouterr().out
    )


def test_the_command_that_serves_a_pack_asks_for_its_quant(
    compiled: list[Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it a GPU would serve bf16 and refuse the pack."""
    for output in ([], ["-o", str(tmp_path / "x.atlaspack")]):
        assert command.main(["smollm2-135m", "--hw", "h200", "--quant", "nvfp4", *output]) == 0
        assert "python -m atlas.serve MODEL --quant nvfp4" in capsys.readouterr().out


def test_an_output_of_ones_own_and_a_wheel(
    compiled: list[Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, wheels = tmp_path / "x.atlaspack", tmp_path / "wheels"
    given = ["smollm2-135m", "--hw", "gb10", "--quant", "bf16", "-o", str(output), "--wheel", str(wheels)]
    assert command.main(given) == 0
    text = capsys.readouterr().out
    assert f"python -m atlas.serve MODEL --kernel-pack {output}" in text
    (made,) = wheels.iterdir()
    assert f"atlas: wrote {made}: pip install it" in text
    assert made.name == f"atlas_infer_kernels_gb10_test_model_bf16-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(made) as archive:
        inside = archive.read("atlas_infer_kernels_gb10_test_model_bf16/kernels.atlaspack")
    assert inside == output.read_bytes() == packed(hardware="gb10") and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "command line: the following arguments are required: MODEL, --hw, --quant; see python -m atlas.build"),
        (["m", "--hw", "h200", "--quant", "bf16", "--frob"], "command line: unrecognized arguments: --frob"),
        (["smollm2-135m", "--hw", "h200", "--quant", "bf16", "--jobs", "0"], "--jobs: 0; accepted: an integer of at"),
        (["smollm2-135m", "--hw", "h200", "--quant", "bf16", "-o", "/proc/x/y"], "/proc/x/y: cannot be written ("),
        (["smollm2-135m", "--hw", "h200", "--quant", "bf16", "--wheel", "/proc/x"], "--wheel /proc/x: cannot be writ"),
    ],
)
def test_wrong_arguments_are_named(
    given: list[str], message: str, compiled: list[Target], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(given) == 1
    assert message in capsys.readouterr().err


def test_a_cache_that_others_can_read_is_refused_before_compiling(
    compiled: list[Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache" / "atlas" / "packs"
    folder.mkdir(parents=True)
    (tmp_path / "cache" / "atlas").chmod(0o700)
    folder.chmod(0o755)
    assert command.main(["smollm2-135m", "--hw", "h200", "--quant", "bf16"]) == 1
    assert "cache: cannot be used; the warning says why; accepted: a folder of your own" in capsys.readouterr().err
    assert compiled == []


def test_tune_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, "atlas.build.tune", SimpleNamespace(main=lambda argv: seen.append(argv) or 3))
    assert command.main(["tune", "--hw", "h200"]) == 3 and seen == [["--hw", "h200"]]


# ---- data wheels -----------------------------------------------------------------------------------------


def test_a_data_wheel_is_a_valid_wheel_without_code(tmp_path: Path) -> None:
    kernel_set = dataclasses.replace(build()[0].sets[0], model="qwen3.6-35b_a3b")
    path = wheel.write(tmp_path, packed(), kernel_set)
    package = "atlas_infer_kernels_h200_qwen3_6_35b_a3b_bf16"
    info = f"{package}-{__version__}.dist-info"
    assert path.name == f"{package}-{__version__}-py3-none-any.whl" and list(tmp_path.iterdir()) == [path]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    assert set(files) == {f"{package}/kernels.atlaspack"} | {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD")
    }
    metadata = email.message_from_bytes(files[f"{info}/METADATA"])
    assert (metadata["Name"], metadata["Version"]) == (package.replace("_", "-"), __version__)
    assert email.message_from_bytes(files[f"{info}/WHEEL"])["Tag"] == "py3-none-any"
    assert files[f"{info}/entry_points.txt"].decode() == f"[atlas.kernels]\n{metadata['Name']} = {package}\n"
    lines = [line.split(",") for line in files[f"{info}/RECORD"].decode().splitlines()]
    assert lines.pop() == [f"{info}/RECORD", "", ""] and len(lines) == 4
    for name, digest, size in lines:
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(files[name])))


def test_the_same_pack_gives_the_same_wheel(tmp_path: Path) -> None:
    kernel_set = build()[0].sets[0]
    first = wheel.write(tmp_path / "a", packed(), kernel_set).read_bytes()
    assert first == wheel.write(tmp_path / "b", packed(), kernel_set).read_bytes()


# ---- with the compilers ------------------------------------------------------------------------------------


@pytest.mark.cuda_toolchain
def test_a_pack_for_a_gb10_is_the_same_bytes_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        toolchain.find()
    except BuildError as error:
        pytest.skip(str(error))
    made = []
    for name in ("a", "b b"):
        home = tmp_path / name
        tree = Path(shutil.copytree(KERNELS, home / "kernels"))
        monkeypatch.setattr(command, "kernels_root", lambda tree=tree: tree)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))  # compiled anew
        monkeypatch.setenv("ATLAS_TARGET_HW", name)  # is no part of a pack
        output = home / "p.atlaspack"
        assert command.main(["smollm2-135m", "--hw", "gb10", "--quant", "bf16", "-o", str(output)]) == 0
        made.append(output.read_bytes())
    assert made[0] == made[1]
    for text in (str(tmp_path), str(KERNELS), str(Path.home()), sys.prefix):
        assert text.encode() not in made[0]
    opened = pack.from_bytes(made[0], "p")
    assert opened.kernel_set.name == "gb10/smollm2-135m/bf16" and opened.kernel_set.arch == "sm_121a"
    assert all(bytes(image[:4]) == b"\x7fELF" for image in opened.images)


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    given = [sys.executable, "-m", "atlas.build", "smollm2-135m", "--hw", "cpu", "--quant", "bf16"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=KERNELS.parent)
    assert done.returncode == 1 and done.stderr.startswith("atlas: --hw: 'cpu' needs no pack; accepted: ")
