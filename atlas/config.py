"""Every setting of the server, declared once: flags, their help and the config file come from here.

Precedence, highest first: a flag, the `--config` file, the model's own files, the value built in here.
Where a value came from is kept beside it, so that `--print-config` can answer "why is it that?".
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from atlas.cli import Parser
from atlas.errors import ConfigError

Backend = Literal["auto", "cpu", "cuda", "reference"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_SIZE_ACCEPTED = "a number of bytes, or a number with a unit such as 512MiB, 2GiB or 1.5GB"


def parse_bytes(value: str | int) -> int:
    """`2GiB` -> 2147483648, `2GB` -> 2000000000, `4096` -> 4096. Raises ValueError on anything else."""
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a size")
    number, unit, binary = match.groups()
    factor = (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1 if unit else 0)
    size = int(float(number) * factor)
    if size < 1:
        raise ValueError(f"{value!r} is less than one byte")
    return size


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process needs to know; `None` leaves the choice to it. Crosses as one message."""

    model: str
    backend: Backend = "auto"
    quant: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    max_context: int | None = None
    max_seqs: int | None = None
    max_rows: int | None = None
    kv_memory_bytes: int | None = None
    kernel_packs: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """This configuration as one JSON object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> EngineConfig:
        """The inverse of `to_json`. Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(data, type=cls)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `python -m atlas.serve`. The description of a field is its help text."""

    model: Annotated[
        str, Meta(min_length=1, description="a catalogue name, a directory, a GGUF file or a Hugging Face id")
    ] = "smollm2-135m"
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    served_model_name: Annotated[
        str | None, Meta(description="name of the model in the API; unset: MODEL, without its folder")
    ] = None
    quant: Annotated[
        str | None,
        Meta(
            description="f32, bf16, int8 or int4 on a CPU, bf16, fp8, nvfp4 or int4 on a GPU that has kernels for it; "
            "unset: on a GPU what the checkpoint is stored in, else bf16; on a CPU what keeps most of that"
        ),
    ] = None
    kv_dtype: Annotated[
        str | None, Meta(description="format of the KV cache; so far only the quant's own: f32 with f32, else bf16")
    ] = None
    backend: Annotated[Backend, Meta(description="what executes the model")] = "auto"
    kernel_pack: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="file with kernels, made by `python -m atlas.build`; may be given several times"),
    ] = ()
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="CPU threads; unset: the cores this process may use"),
    ] = None
    max_context: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="longest prompt plus answer in tokens; unset: the model's, limited by KV memory"),
    ] = None
    max_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="sequences that run at once; unset: 32, on a GPU 256"),
    ] = None
    max_rows: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(description="tokens computed in one step; unset: 512, on a GPU 8192"),
    ] = None
    kv_memory: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="memory of the KV cache, e.g. 2GiB; unset: automatic"),
    ] = None
    offline: Annotated[bool, Meta(description="download nothing")] = False
    log_level: Annotated[LogLevel, Meta(description="least serious messages to log")] = "info"
    log_format: Annotated[LogFormat, Meta(description="lines for people, or a JSON object a line")] = "text"
    metrics_prefix: Annotated[
        str,
        Meta(
            pattern="^[a-zA-Z_][a-zA-Z0-9_]*$",
            description="stands before the names of /metrics: letters, digits and underscores, no digit first; "
            "a dashboard made for another server may want that server's",
        ),
    ] = "atlas"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="URL that takes OpenTelemetry traces as OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces; unset: there are none"
        ),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="seed of requests that name none; unset: a random one for each request"),
    ] = None
    drain_timeout: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0

    @property
    def model_name(self) -> str:
        """The name under which the API knows the model."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        # A catalogue name or a Hugging Face id is itself the name; of a path, only the end means anything.
        return path.resolve().name.removesuffix(".gguf") if path.exists() else self.model

    def engine(self, model_path: Path) -> EngineConfig:
        """The engine's part, once it is known where the model's files are."""
        return EngineConfig(
            model=str(model_path),
            backend=self.backend,
            quant=self.quant,
            kv_dtype=self.kv_dtype,
            threads=self.threads,
            max_context=self.max_context,
            max_seqs=self.max_seqs,
            max_rows=self.max_rows,
            kv_memory_bytes=self.kv_memory,
            kernel_packs=tuple(str(Path(path).expanduser().absolute()) for path in self.kernel_pack),
        )


OFFLINE_FIELDS = (
    "quant",
    "kv_dtype",
    "backend",
    "kernel_pack",
    "threads",
    "max_context",
    "max_seqs",
    "max_rows",
    "kv_memory",
    "offline",
)
"""Settings that mean something without a server."""


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


_PARSERS: Mapping[str, Callable[[str | int], int]] = {"kv_memory": parse_bytes}


def describe(origins: Sequence[Origin]) -> str:
    """One line per setting: name, value, origin."""
    rows = [(o.name, _shown(o.value), o.origin) for o in origins]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}} = {value:<{widths[1]}}  ({origin})" for name, value, origin in rows)


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "unset"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def load(argv: Sequence[str]) -> LoadedConfig:
    """Read flags and, where `--config` names one, a TOML file. Raises ConfigError; `--help` exits."""
    given = vars(_parser().parse_args(argv))
    file, print_config = given.pop("config_file", None), given.pop("print_config", False)
    from_file = _read_file(Path(file)) if file else {}
    values: dict[str, Any] = {}
    origins = []
    for field in msgspec.structs.fields(ServeConfig):
        name = field.name
        if name in given:
            where, origin, raw, strict = flag_name(name), "flag", given[name], False
        elif name in from_file:
            where, origin, raw, strict = f"{file}: {name}", f"file {file}", from_file[name], True
        else:
            origins.append(Origin(name, field.default, "built-in"))
            continue
        values[name] = _convert(where, name, raw, strict=strict)
        origins.append(Origin(name, values[name], origin))
    return LoadedConfig(ServeConfig(**values), origins, print_config)


def flag_name(field: str) -> str:
    """How a field is spelt on the command line."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


class _Parser(Parser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [option for action in self._actions for option in action.option_strings]
            raise ConfigError(rest[0], "unknown argument", fix=_nearest(rest[0].split("=")[0], flags))
        return known


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m atlas.serve",
        description="Serve a model over the OpenAI API.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for field in msgspec.structs.fields(ServeConfig):
        _add_flag(parser, field)
    parser.add_argument("--config", dest="config_file", metavar="FILE", help="read settings from a TOML file")
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
    hint = get_type_hints(ServeConfig)[field.name]
    help_text = _description(field.name)
    if field.default not in (None, ()):
        help_text += f" (default: {field.default})"
    choices = get_args(hint)
    if field.name == "model":
        parser.add_argument("model", nargs="?", metavar="MODEL", help=help_text)
    elif hint is bool:
        parser.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(hint) is tuple:
        parser.add_argument(flag_name(field.name), action="append", metavar="FILE", help=help_text)
    else:
        metavar = "|".join(choices) if choices and all(isinstance(c, str) for c in choices) else None
        parser.add_argument(flag_name(field.name), metavar=metavar, help=help_text)


def _description(name: str) -> str:
    annotation = get_type_hints(ServeConfig, include_extras=True)[name]
    return next(m.description for m in annotation.__metadata__ if isinstance(m, Meta) and m.description)


def _convert(where: str, name: str, raw: Any, *, strict: bool) -> Any:
    """One raw value as its field's type; the error names the flag or file and what is accepted."""
    parse = _PARSERS.get(name)
    if parse is not None:
        try:
            return parse(raw)
        except ValueError as error:
            raise ConfigError(where, str(error), _SIZE_ACCEPTED) from None
    annotation = get_type_hints(ServeConfig, include_extras=True)[name]
    if strict and isinstance(raw, int) and not isinstance(raw, bool) and annotation.__origin__ is float:
        raw = float(raw)
    try:
        return msgspec.convert(raw, annotation, strict=strict)
    except msgspec.ValidationError as error:
        choices = get_args(get_type_hints(ServeConfig)[name])
        literal = bool(choices) and all(isinstance(choice, str) for choice in choices)
        accepted = ", ".join(choices) if literal else _description(name)
        raise ConfigError(where, f"{raw!r}: {error}", accepted) from None


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
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else "accepted: " + ", ".join(known)
