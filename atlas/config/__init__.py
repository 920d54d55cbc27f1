"""The one typed configuration of the server: its settings, how they are read, and where each value came from."""

from atlas.config.loading import (
    LoadedConfig,
    Origin,
    add_offline_flags,
    describe,
    flag_name,
    load,
    offline_config,
    public,
)
from atlas.config.settings import (
    OFFLINE_FIELDS,
    Backend,
    EngineConfig,
    LogFormat,
    LogLevel,
    ReasoningParser,
    ServeConfig,
    ToolParser,
    parse_bytes,
)

__all__ = [
    "OFFLINE_FIELDS",
    "Backend",
    "EngineConfig",
    "LoadedConfig",
    "LogFormat",
    "LogLevel",
    "Origin",
    "ReasoningParser",
    "ServeConfig",
    "ToolParser",
    "add_offline_flags",
    "describe",
    "flag_name",
    "load",
    "offline_config",
    "parse_bytes",
    "public",
]
