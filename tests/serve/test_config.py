"""Settings: flags and files, their errors, and where each value came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from serve_harness import Start, environment

from atlas.config import EngineConfig, ServeConfig, describe, load, parse_bytes, public
from atlas.engine.sampling_defaults import SamplingDefaults
from atlas.errors import ConfigError
from atlas.weights.catalogue import CATALOGUE, DEFAULT_MODEL


def origin(argv: list[str], name: str) -> tuple[object, str]:
    found = next(o for o in load(argv).origins if o.name == name)
    return found.value, found.origin


def test_flag_beats_file_beats_builtin(tmp_path: Path) -> None:
    file = tmp_path / "atlas.toml"
    file.write_text('port = 9000\nkv_memory = "1GiB"\noffline = true\ndrain_timeout = 5\n')
    argv = ["--config", str(file), "--port", "9001"]
    assert origin(argv, "port") == (9001, "flag")
    assert origin(argv, "kv_memory") == (1 << 30, f"file {file}")
    assert origin(argv, "offline") == (True, f"file {file}")
    assert origin(argv, "drain_timeout") == (5.0, f"file {file}")
    assert origin(argv, "host") == ("127.0.0.1", "built-in")
    assert load(argv).config.port == 9001
    assert f"(file {file})" in describe(load(argv).origins)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    file = tmp_path / "atlas.toml"
    file.write_text(
        'model = "tiny"\napi_key_file = "keys"\nchat_template = "/etc/x.jinja"\nssl_certfile = "~/cert.pem"\n'
        'ssl_keyfile = "tls/key.pem"\nkernel_pack = ["a.pack", "/b.pack"]\nhost = "localhost"\n'
    )
    argv = ["--config", str(file)]
    config = load(argv).config
    assert config.model == str(tmp_path / "tiny") and config.model_name == "tiny"
    assert config.api_key_file == str(tmp_path / "keys") and config.ssl_keyfile == str(tmp_path / "tls/key.pem")
    assert (config.chat_template, config.ssl_certfile, config.host) == ("/etc/x.jinja", "~/cert.pem", "localhost")
    assert config.kernel_pack == (str(tmp_path / "a.pack"), "/b.pack")
    assert load([*argv, "--api-key-file", "keys"]).config.api_key_file == "keys"
    file.write_text('model = "smollm2-135m"\n')
    assert load(argv).config.model == "smollm2-135m"


def test_help_names_the_catalogue() -> None:
    with pytest.raises(ConfigError) as error:
        load(["--config", "/dev/null", ""])
    assert all(name in str(error.value) for name in CATALOGUE)


def test_defaults_of_requests_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "atlas.toml"
    file.write_text("enable_thinking = false\n[default_sampling]\ntemperature = 1\ntop_k = 40\n")
    argv = ["--config", str(file)]
    assert origin(argv, "enable_thinking") == (False, f"file {file}")
    assert origin(argv, "default_sampling") == ({"temperature": 1, "top_k": 40}, f"file {file}")
    assert '= {"temperature": 1, "top_k": 40}' in describe(load(argv).origins)
    assert origin([*argv, "--enable-thinking"], "enable_thinking") == (True, "flag")
    assert origin([], "default_sampling") == ({}, "built-in") and origin([], "enable_thinking") == (None, "built-in")


def test_every_field_has_a_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"])
    text = capsys.readouterr().out
    for name in ServeConfig.__struct_fields__:
        assert ("MODEL" if name == "model" else "--" + name.replace("_", "-")) in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "1"], ["--prot", "did you mean --port?"]),
        (["--max-model-len", "1"], ["--max-model-len", "did you mean --max-context?"]),
        (["-m", "x"], ["-m", "did you mean MODEL without a flag?"]),
        (["--tensor-parallel-size=2"], ["--tensor-parallel-size: unknown argument; see --help"]),
        (["--port", "x"], ["--port", "'x'", "int"]),
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--backend", "gpu"], ["--backend", "gpu", "auto, cpu, cuda, reference"]),
        (["--kv-memory", "much"], ["--kv-memory", "much", "2GiB"]),
        (["--max-seqs", "0"], ["--max-seqs", "0"]),
        (["--threads", "0"], ["--threads", "0"]),
        (["--config", "/does/not/exist.toml"], ["--config", "/does/not/exist.toml"]),
        (["--port"], ["--port", "expected one argument"]),
        (["one", "two"], ["two"]),
        (["--tool-parser", "hermez"], ["--tool-parser", "'hermez'", "auto, none, hermes, qwen3_coder"]),
        (["--reasoning-parser", "x"], ["--reasoning-parser", "'x'", "auto, none, think"]),
        (["--default-sampling", "0.5"], ["--default-sampling", "'0.5'", '{"temperature": 0.2}']),
        (["--default-sampling", "{"], ["--default-sampling", "'{'"]),
        (["--default-sampling", '{"temperatur": 1}'], ["--default-sampling", "'temperatur'", "temperature, top_p"]),
        (["--default-sampling", '{"top_p": 2}'], ["--default-sampling", "top_p is 2", "a number from 0 to 1"]),
        (["--default-sampling", '{"top_k": 1.5}'], ["--default-sampling", "top_k is 1.5", "a whole number"]),
        (["--default-sampling", '{"min_p": "0.1"}'], ["--default-sampling", "min_p is '0.1'"]),
        (["--default-sampling", '{"min_p": true}'], ["--default-sampling", "min_p is True"]),
        (["--otlp-traces-endpoint", "localhost:4318"], ["--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]),
        (["--served-model-name", ""], ["--served-model-name", "not empty"]),
        (["--enable-thinking=x"], ["--enable-thinking"]),
        (["--log-format", "xml"], ["--log-format", "xml", "text, json"]),
        (["--metrics-prefix", "9x:"], ["--metrics-prefix", "9x:", "letters, digits and underscores"]),
    ],
)
def test_wrong_flags_are_named(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(argv)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["prot", "did you mean port?"]),
        ('port = "8000"', ["port", "int"]),
        ("port = ", ["TOML"]),
        ("offline = 1", ["offline", "true or false"]),
        ("default_sampling = {top_p = 2}", ["default_sampling", "top_p is 2"]),
        ('served_model_name = "x"', ["served_model_name", "a list of texts"]),
        ('enable_thinking = "no"', ["enable_thinking", "true or false"]),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(["--config", str(file)])
    for word in [str(file), *words]:
        assert word in str(error.value)


def test_sizes() -> None:
    sizes = {
        "4096": 4096,
        "2GiB": 2 << 30,
        "2 gib": 2 << 30,
        "1.5GB": 1_500_000_000,
        "512MiB": 512 << 20,
        "1k": 1000,
    }
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1", "0", "2XB", "1e9"):
        with pytest.raises(ValueError, match=r"size|less"):
            parse_bytes(text)


def test_engine_config_round_trip() -> None:
    config = load(["--quant", "f32", "--kv-memory", "1MiB", "--threads", "2"]).config.engine(Path("/models/m"))
    assert EngineConfig.from_json(config.to_json()) == config
    assert (config.model, config.quant, config.kv_memory_bytes, config.threads) == (
        "/models/m",
        "f32",
        1 << 20,
        2,
    )


def test_the_default_model_is_the_catalogues() -> None:
    assert ServeConfig().model == DEFAULT_MODEL


def test_model_names(tmp_path: Path) -> None:
    file = tmp_path / "Tiny.Q4.gguf"
    file.touch()
    names = {
        str(file): "Tiny.Q4",
        f"{tmp_path}/": tmp_path.name,
        "org/name": "org/name",
        "smollm2": "smollm2",
    }
    assert {model: ServeConfig(model=model).model_name for model in names} == names
    assert ServeConfig(model=str(file), served_model_name=("x", "y")).model_name == "x"
    several = ServeConfig(model=str(file), served_model_name=("x", "y"))
    assert several.model_names == ("x", "y") and several.serves("y") and several.serves(str(file))
    assert not several.serves("Tiny.Q4") and not several.serves("*")
    any_name = ServeConfig(model=str(file), served_model_name=("*",))
    assert any_name.model_names == ("Tiny.Q4",) and any_name.serves("claude-sonnet-4-5") and any_name.serves("*")


def test_the_models_own_defaults() -> None:
    own = {"temperature": 0.6, "top_p": 1.5, "top_k": 20.0, "do_sample": True}
    defaults = SamplingDefaults.of_model(own)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 1.0, 20)
    origins = {o.name: o.origin for o in defaults.origins}
    assert origins["temperature"].startswith("model default")
    assert "1.5, which is out of range" in origins["top_p"]


def test_print_config_shows_the_models_own_defaults(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "atlas.serve", "--print-config", "--port", "1234", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment(), check=True)
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "1234" in lines["port"] and "(flag)" in lines["port"]
    assert "0.5" in lines["temperature"] and "generation_config.json" in lines["temperature"]
    assert "1.0" in lines["top_p"] and "built-in" in lines["top_p"]
    assert "20" in lines["top_k"] and "model default" in lines["top_k"]


def test_wrong_settings_end_with_code_2() -> None:
    command = [sys.executable, "-m", "atlas.serve", "--prot", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment(), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --prot: unknown argument; did you mean --port?")


def test_a_model_of_several_names(start: Start) -> None:
    server = start("--served-model-name", "first", "--served-model-name", "second").wait_ready()
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["first", "second"]
    assert client.models.retrieve("second").id == "second"
    for name in ("first", "second"):
        answer = client.completions.create(model=name, prompt="yo", max_tokens=1)
        assert answer.model == "first"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="third", prompt="yo", max_tokens=1)
    assert error.value.code == "model_not_found" and "first, second" in error.value.message


def test_any_name_of_a_model(start: Start) -> None:
    client = start("--served-model-name", "*").wait_ready().openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.completions.create(model="claude-sonnet-4-5", prompt="yo", max_tokens=1).model == "tiny"
    assert client.models.retrieve("gpt-4o").id == "tiny"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:secret@otel.example:4318/v1/traces?a=b@c", "https://***@otel.example:4318/v1/traces?a=b@c"),
        ("https://se@cret@otel.example/", "https://***@otel.example/"),
        ("http://otel.example/v1/@traces", "http://otel.example/v1/@traces"),
    ],
)
def test_users_and_passwords_of_urls_are_not_shown(url: str, shown: str) -> None:
    loaded = load(["--otlp-traces-endpoint", url])
    assert loaded.config.otlp_traces_endpoint == url
    line = next(line for line in describe(loaded.origins).splitlines() if line.startswith("otlp_traces_endpoint"))
    assert line.split(" = ")[1].split("  ")[0] == shown
    assert (public(b"\0" * 32), public((b"\1" * 32,)), public(8000)) == ("key-00000000", ["key-01010101"], 8000)
