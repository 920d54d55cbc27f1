"""Every setting of the server, declared once: flags, their help and the config file come from here."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Backend = Literal["auto", "cpu", "cuda", "reference"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
# "auto", "none", and the names of atlas.parsers.TOOL_FORMATS and MARKERS; a test compares them.
ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "minimax",
    "deepseek",
    "deepseek_v32",
    "glm",
    "gemma",
]
ReasoningParser = Literal["auto", "none", "think", "deepseek_r1", "mistral", "gemma"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
SIZE_ACCEPTED = "a number of bytes, or a number with a unit such as 512MiB, 2GiB or 1.5GB"


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
    prepare_grammars: bool = False

    def to_json(self) -> bytes:
        """This configuration as one JSON object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> EngineConfig:
        """The inverse of `to_json`. Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(data, type=cls)


ANY_NAME = "*"
"""As a served name: whatever clients call the model. Agent tools ask for names of models that they know."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `python -m atlas.serve`. The description of a field is its help text."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="a name of the catalogue (smollm2-135m, gemma-3-270m), a Hugging Face id (org/name), "
            "a directory or a GGUF file",
        ),
    ] = "smollm2-135m"
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    served_model_name: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="name of the model in the API, or several, of which answers say the first; * takes any name; "
            "unset: MODEL, without its folder"
        ),
    ] = ()
    chat_template: Annotated[
        str | None, Meta(description="file with a Jinja2 chat template, in place of the model's own")
    ] = None
    tool_parser: Annotated[
        ToolParser,
        Meta(description="how the model writes tool calls; none: requests with tools are refused; auto: what suits it"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(description="what the model writes around reasoning; none: it stays in the answer; auto: what suits it"),
    ] = "auto"
    enable_thinking: Annotated[
        bool | None,
        Meta(description="thinking switch of requests that leave it out; unset: what the chat template does then"),
    ] = None
    default_sampling: Annotated[
        dict[str, float],
        Meta(
            description="sampling of requests that leave it out, over the model's own: a JSON object such as "
            '\'{"temperature": 0.2, "top_k": 40}\''
        ),
    ] = {}
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="seed of requests that name none; unset: a random one for each request"),
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
    prepare_grammars: Annotated[
        bool,
        Meta(
            description="read the tokenizer for structured output before the server is ready; else the first request "
            "that needs it does, for which all wait a moment"
        ),
    ] = False
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
        Annotated[str, Meta(pattern=r"^https?://[^/?#]+/")] | None,
        Meta(
            description="URL that takes OpenTelemetry traces as OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces; unset: there are none"
        ),
    ] = None
    drain_timeout: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    engine_timeout: Annotated[
        float,
        Meta(gt=0, le=86400, description="seconds without progress after which the engine counts as hung, so dead"),
    ] = 300.0
    engine_restarts: Annotated[
        int,
        Meta(
            ge=0, le=1000, description="how often in ten minutes a dead engine is started again; then the server ends"
        ),
    ] = 1
    api_key: Annotated[
        tuple[bytes, ...],
        Meta(description="key that requests must bring; may be given several times; others see it in the process list"),
    ] = ()
    api_key_file: Annotated[str | None, Meta(description="file of such keys, one a line")] = None
    insecure: Annotated[bool, Meta(description="let other machines in without an API key")] = False
    allowed_host: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="name in a URL of this server, besides --host and localhost; *.NAME, or * for any"),
    ] = ()
    cors_origin: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="origin whose web pages may call this server, such as https://app.example.com; * for any"),
    ] = ()
    requests_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="requests per minute and API key; unset: no limit")
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="tokens of prompts and answers per minute and API key; unset: no limit"),
    ] = None
    max_concurrent: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="requests under way per API key; unset: no limit")
    ] = None
    max_queue: Annotated[
        int, Meta(ge=1, description="sequences that wait for their first token; more are refused with 429")
    ] = 2048
    min_priority: Annotated[
        int,
        Meta(
            ge=-(2**63),
            le=2**63 - 1,
            description="least `priority` of a request; lower ones run first, so below 0 clients may go in front",
        ),
    ] = 0
    strict_fields: Annotated[
        bool, Meta(description="refuse requests with fields that do not exist, instead of naming them in a header")
    ] = False
    max_responses: Annotated[
        int, Meta(ge=1, description="responses of /v1/responses that are kept; then those longest unused go")
    ] = 10_000
    response_memory: Annotated[int, Meta(ge=1, description="memory that they may take, e.g. 256MiB")] = 256 << 20
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds from a request's arrival to the end of its answer; unset: no limit"),
    ] = None
    write_timeout: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86400,
            description="seconds after which a connection ends whose client takes nothing of its answer",
        ),
    ] = 60.0
    ssl_certfile: Annotated[str | None, Meta(description="PEM file with the certificate chain: serve HTTPS")] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="PEM file with its private key, not encrypted; unset: in --ssl-certfile")
    ] = None

    @property
    def model_name(self) -> str:
        """The name by which the API calls the model."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names under which the API knows the model."""
        if names := tuple(name for name in self.served_model_name if name != ANY_NAME):
            return names
        return (_own_name(self.model),)

    def serves(self, name: str) -> bool:
        """Whether a request for the model `name` is one for this model."""
        return name in self.model_names or name == self.model or ANY_NAME in self.served_model_name

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
            prepare_grammars=self.prepare_grammars,
        )


@functools.cache
def _own_name(model: str) -> str:
    """Asked for by every request, so the file system is asked once."""
    path = Path(model).expanduser()
    # A catalogue name or a Hugging Face id is itself the name; of a path, only the end means anything.
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


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
    "chat_template",
)
"""Settings that mean something without a server."""
