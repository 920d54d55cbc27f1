"""Settings from flags and a file, each with its origin.

Precedence, highest first: a flag, the `--config` file, the model's own files, the value built in.
Where a value came from is kept beside it, so that `--print-config` can answer "why is it that?".
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from atlas import __version__
from atlas.api_keys import KEY_ACCEPTED, digest_keys, name_of
from atlas.cli import Parser
from atlas.config.settings import OFFLINE_FIELDS, SIZE_ACCEPTED, ServeConfig, parse_bytes
from atlas.errors import ConfigError


def offline_config(model: str | Path, options: Mapping[str, Any], *, strict: bool = True) -> ServeConfig:
    """The settings of a model that is used without a server.

    strict: False takes numbers as text too, as on a command line.

    Raises:
        ConfigError: naming the option.
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OFFLINE_FIELDS:
            raise ConfigError(name, "unknown option", fix=_nearest(name, OFFLINE_FIELDS))
        if name == "kernel_pack" and isinstance(value, str | Path):
            value = (value,)
        if name == "kernel_pack" and isinstance(value, list | tuple):
            value = tuple(str(path) if isinstance(path, Path) else path for path in value)
        if name == "chat_template" and isinstance(value, Path):
            value = str(value)
        if value is not None or name not in ("backend", "kernel_pack", "offline"):
            values[name] = value if value is None else _convert(name, name, value, strict=strict)
    return ServeConfig(model=_convert("model", "model", str(model), strict=True), **values)


class Origin(msgspec.Struct, frozen=True):
    """One setting as it stands and where it came from."""

    name: str
    value: Any
    origin: str


class LoadedConfig(msgspec.Struct, frozen=True):
    """The settings and, for each, its origin."""

    config: ServeConfig
    origins: list[Origin]
    print_config: bool = False


def _sampling(raw: Any) -> dict[str, float]:
    # Its ranges stand with the engine, which imports this package.
    from atlas.engine.sampling_defaults import parse_defaults

    return parse_defaults(raw)


_PARSERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "kv_memory": (parse_bytes, SIZE_ACCEPTED),
    "response_memory": (parse_bytes, SIZE_ACCEPTED),
    "api_key": (digest_keys, KEY_ACCEPTED),
    "default_sampling": (_sampling, 'an object of sampling fields and numbers, such as {"temperature": 0.2}'),
}
_USER = re.compile(r"(\w+://)[^/?#]*@")
_GROUPS = {
    "host": "where it listens",
    "served_model_name": "what requests get",
    "quant": "how the model runs",
    "log_level": "what it tells",
    "drain_timeout": "failures and the end",
    "api_key": "who may ask",
    "requests_per_minute": "limits",
    "ssl_certfile": "TLS",
}
"""Titles of --help, by the first setting below each."""
_METAVARS = {
    "kernel_pack": "FILE",
    "api_key": "KEY",
    "allowed_host": "HOST",
    "cors_origin": "ORIGIN",
    "served_model_name": "NAME",
    "chat_template": "FILE",
    "default_sampling": "JSON",
    "kv_memory": "SIZE",
    "response_memory": "SIZE",
    "otlp_traces_endpoint": "URL",
    "metrics_prefix": "PREFIX",
    "kv_dtype": "FORMAT",
    **dict.fromkeys(("api_key_file", "ssl_certfile", "ssl_keyfile"), "FILE"),
    **dict.fromkeys(("max_context", "max_rows", "tokens_per_minute"), "TOKENS"),
    **dict.fromkeys(("drain_timeout", "engine_timeout", "request_timeout", "write_timeout"), "SECONDS"),
    **dict.fromkeys(("threads", "max_seqs", "seed", "engine_restarts", "requests_per_minute", "max_concurrent"), "N"),
    **dict.fromkeys(("max_queue", "min_priority", "max_responses"), "N"),
}


_ELSEWHERE = {
    **dict.fromkeys(("--max-model-len", "--context-length", "--ctx-size", "-c"), "--max-context"),
    **dict.fromkeys(("--max-num-seqs", "--max-running-requests", "--parallel", "-np"), "--max-seqs"),
    **dict.fromkeys(("--max-num-batched-tokens", "--chunked-prefill-size", "--batch-size", "-b"), "--max-rows"),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "--kv-memory"),
    **dict.fromkeys(("--model", "--model-path", "-m"), "MODEL without a flag"),
    **dict.fromkeys(("--dtype", "--quantization"), "--quant"),
    **dict.fromkeys(("--alias", "-a"), "--served-model-name"),
    "--tool-call-parser": "--tool-parser",
}
"""What vLLM, SGLang and llama.cpp call settings, where their names are too far from ours to be guessed."""


def describe(origins: Sequence[Origin]) -> str:
    """One line per setting: name, value, origin."""
    rows = [(o.name, _shown(o.value), o.origin) for o in origins]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}} = {value:<{widths[1]}}  ({origin})" for name, value, origin in rows)


def public(value: Any) -> Any:
    """A setting's value for anyone to see: API keys by name, URLs without their user and password."""
    if isinstance(value, tuple):
        return [public(item) for item in value]
    if isinstance(value, bytes):
        return name_of(value)
    if isinstance(value, str) and (match := _USER.match(value)):
        return f"{match[1]}***@{value[match.end() :]}"
    return value


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "unset"
    value = public(value)
    if isinstance(value, dict):
        return json.dumps(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def load(argv: Sequence[str]) -> LoadedConfig:
    """Read flags and, where `--config` names one, a TOML file. Raises ConfigError; `--help` exits."""
    given = vars(_parser().parse_args(argv))
    file, print_config = given.pop("config_file", None), given.pop("print_config", False)
    from_file = _read_file(Path(file)) if file else {}
    values: dict[str, Any] = {}
    origins, builtin = [], ServeConfig()
    for field in msgspec.structs.fields(ServeConfig):
        name = field.name
        if name in given:
            where, origin, raw, strict = flag_name(name), "flag", given[name], False
        elif name in from_file:
            where, origin, raw, strict = f"{file}: {name}", f"file {file}", from_file[name], True
        else:
            origins.append(Origin(name, getattr(builtin, name), "built-in"))
            continue
        values[name] = _convert(where, name, raw, strict=strict)
        if origin != "flag":
            values[name] = _beside(Path(file), name, values[name])
        origins.append(Origin(name, values[name], origin))
    return LoadedConfig(ServeConfig(**values), origins, print_config)


_PATHS = ("chat_template", "kernel_pack", "api_key_file", "ssl_certfile", "ssl_keyfile")


def _beside(file: Path, name: str, value: Any) -> Any:
    """A setting of a file, whose paths are relative to it. A model is a path only where there is one."""
    if isinstance(value, tuple) and name in _PATHS:
        return tuple(_beside(file, name, item) for item in value)
    if not isinstance(value, str) or name not in (*_PATHS, "model") or value.startswith("~"):
        return value
    path = file.parent / value
    return str(path) if name != "model" or path.exists() else value


def flag_name(field: str) -> str:
    """How a field is spelt on the command line."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


class _Parser(Parser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [option for action in self._actions for option in action.option_strings]
            flag = rest[0].split("=")[0]  # what follows may be a secret
            meant = _ELSEWHERE.get(flag) or "".join(_near(flag, flags))
            raise ConfigError(flag, "unknown argument", fix=f"did you mean {meant}?" if meant else "see --help")
        return known


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m atlas.serve",
        description="Serve a model over the OpenAI and Anthropic APIs.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--version", action="version", version=f"atlas {__version__}", help="print the version and exit"
    )
    group: argparse._ActionsContainer = parser
    for field in msgspec.structs.fields(ServeConfig):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        _add_flag(group, field)
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE",
        help="read settings from a TOML file; its paths are relative to it",
    )
    parser.add_argument("--print-config", action="store_true", help="print every setting with its origin and exit")
    return parser


def add_offline_flags(parser: argparse._ActionsContainer, without: Sequence[str] = ()) -> None:
    """Flags of OFFLINE_FIELDS but `without`, spelt and explained as the server's. What was given goes to
    `offline_config` with strict=False. Give the parser `argument_default=argparse.SUPPRESS`, so that the rest stays
    unset."""
    for field in msgspec.structs.fields(ServeConfig):
        if field.name in OFFLINE_FIELDS and field.name not in without:
            _add_flag(parser, field)


def _add_flag(parser: argparse._ActionsContainer, field: Any) -> None:
    hint = _hints(extras=False)[field.name]
    help_text = _description(field.name)
    if field.default not in (None, ()) and field.default_factory is msgspec.NODEFAULT:
        size = f"{field.default >> 20}MiB" if field.name == "response_memory" else field.default
        help_text += f" (default: {size})"
    choices = get_args(hint)
    if field.name == "model":
        parser.add_argument("model", nargs="?", metavar="MODEL", help=help_text)
    elif hint in (bool, bool | None):
        parser.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(hint) is tuple:
        parser.add_argument(flag_name(field.name), action="append", metavar=_METAVARS[field.name], help=help_text)
    else:
        literal = choices and all(isinstance(choice, str) for choice in choices)
        metavar = "|".join(choices) if literal else _METAVARS.get(field.name)
        parser.add_argument(flag_name(field.name), metavar=metavar, help=help_text)


@functools.cache
def _hints(*, extras: bool) -> Mapping[str, Any]:
    """The fields' types; each look evaluates all annotations."""
    return get_type_hints(ServeConfig, include_extras=extras)


def _description(name: str) -> str:
    annotation = _hints(extras=True)[name]
    return next(m.description for m in annotation.__metadata__ if isinstance(m, Meta) and m.description)


def _convert(where: str, name: str, raw: Any, *, strict: bool) -> Any:
    """One raw value as its field's type; the error names the flag or file and what is accepted."""
    parse = _PARSERS.get(name)
    if parse is not None:
        function, accepted = parse
        try:
            return function(raw)
        except ValueError as error:
            raise ConfigError(where, str(error), accepted) from None
    annotation = _hints(extras=True)[name]
    if strict and isinstance(raw, int) and not isinstance(raw, bool) and annotation.__origin__ is float:
        raw = float(raw)
    try:
        return msgspec.convert(raw, annotation, strict=strict)
    except msgspec.ValidationError:
        choices = get_args(_hints(extras=False)[name])
        literal = bool(choices) and all(isinstance(choice, str) for choice in choices)
        accepted = ", ".join(choices) if literal else f"{_kind(annotation)} ({_description(name)})"
        raise ConfigError(where, repr(public(raw)), accepted) from None


def _kind(annotation: Any) -> str:
    """A type and its bounds in words."""
    whole = msgspec.json.schema(annotation)
    schema = next((part for part in whole.get("anyOf", [whole]) if part.get("type") != "null"), whole)
    words = {"integer": "an integer", "number": "a number", "string": "a text", "boolean": "true or false"}
    text = words.get(schema.get("type", ""), "a list of texts")
    if schema.get("items", schema).get("minLength"):
        text += ", not empty"
    for bound, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to")):
        if (value := schema.get(bound)) is not None and abs(value) < 2**53:
            text += f" {word} {value}"
    if pattern := schema.get("pattern"):
        text += f" that matches {pattern}"
    return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", f"{path}: {error.strerror}", "a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path}: {error}", "a TOML file") from None
    names = [field.name for field in msgspec.structs.fields(ServeConfig)]
    for key in values:
        if key not in names:
            raise ConfigError(f"{path}: {key}", "unknown setting", fix=_nearest(key, names))
    return values


def _nearest(word: str, known: Sequence[str]) -> str:
    close = _near(word, known)
    return f"did you mean {close[0]}?" if close else "accepted: " + ", ".join(known)


def _near(word: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.7)
