"""Content, reasoning and tool calls out of the text of an answer, the same for a stream and for a whole response."""

from atlas.parsers.answer import AnswerParser
from atlas.parsers.calls import ToolFormat, Tools
from atlas.parsers.deepseek import DeepSeek, DeepSeekV32
from atlas.parsers.events import (
    Answer,
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    collect,
)
from atlas.parsers.gemma import Gemma
from atlas.parsers.glm import Glm
from atlas.parsers.hermes import Hermes
from atlas.parsers.llama3_json import Llama3Json
from atlas.parsers.minimax import MiniMax
from atlas.parsers.mistral import Mistral
from atlas.parsers.qwen3_coder import Qwen3Coder
from atlas.parsers.reasoning import MARKERS, Markers

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "minimax": MiniMax(),
    "deepseek": DeepSeek(),
    "deepseek_v32": DeepSeekV32(),
    "glm": Glm(),
    "gemma": Gemma(),
}
"""By the name that the command line and the models' presets use."""


def shown_words(tool_format: ToolFormat | None, markers: Markers | None) -> frozenset[str]:
    """The words that a parser looks for: special tokens in them have to be in the text that it reads."""
    words = (markers.start, markers.end) if markers else ()
    return frozenset((*words, *(tool_format.words if tool_format else ())))


__all__ = [
    "MARKERS",
    "TOOL_FORMATS",
    "Answer",
    "AnswerParser",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Markers",
    "Reasoning",
    "ToolFormat",
    "Tools",
    "collect",
    "shown_words",
]
