"""A `tokenizers` document from the metadata of a GGUF file.

Byte-level BPE (`tokenizer.ggml.model` = gpt2) and SentencePiece with scores (= llama: Llama 2, Mistral, Gemma). The
ids are those of llama.cpp, which defines what the metadata means; tests hold them against it.
"""

from __future__ import annotations

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from atlas.errors import CheckpointError

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How text is cut before merges apply.

    patterns: applied one after the other, each to the pieces that the one before left.
    add_bos: whether BOS is prepended when the metadata does not say.
    ignore_merges: a piece that is a token as a whole is taken as it is.
    """

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False


_DIGIT_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_WORDS % r"\p{N}{1,3}",), add_bos=True, ignore_merges=True)
_QWEN2 = PreTokenizer((_WORDS % r"\p{N}",))

# The one table of `tokenizer.ggml.pre`. A value that is not here is refused: a near miss gives
# fluent nonsense.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "smollm": _DIGIT_THEN_GPT2,
    "starcoder": _DIGIT_THEN_GPT2,
    "refact": _DIGIT_THEN_GPT2,
    "command-r": _DIGIT_THEN_GPT2,
    "codeshell": _DIGIT_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
}


def tokenizer_documents(metadata: Mapping[str, Any], file: str) -> tuple[str, str]:
    """tokenizer.json and tokenizer_config.json for a GGUF's metadata.

    Raises:
        CheckpointError: a tokenizer model or pre-tokeniser that is not known, a missing or contradictory
            field; names it and `file`.
    """
    model = metadata.get("tokenizer.ggml.model")
    kinds: dict[Any, type[_Vocabulary]] = {"gpt2": _ByteLevel, "llama": _SentencePiece}
    if not isinstance(model, str) or model not in kinds:
        raise CheckpointError(
            file,
            f"tokenizer.ggml.model is {model!r}",
            "gpt2 (byte-level BPE) or llama (SentencePiece)",
            "use the model's safetensors directory, which has its own tokenizer.json",
        )
    vocabulary = kinds[model](metadata, file)
    config = vocabulary.config()
    return json.dumps(vocabulary.document(config), ensure_ascii=False), json.dumps(config, ensure_ascii=False)


def warn_without_pre(metadata: Mapping[str, Any], file: str) -> None:
    """Say so, at every opening, when the metadata does not tell how to cut text."""
    if "tokenizer.ggml.pre" not in metadata and metadata.get("tokenizer.ggml.model") != "llama":
        log.warning(
            "%s: tokenizer.ggml.pre is missing, so the pre-tokeniser 'default' is used, as in llama.cpp; "
            "the ids may differ from those the model was trained on: convert the model again",
            file,
        )


class _Vocabulary(ABC):
    """The tokenizer.ggml.* fields that both kinds of vocabulary have, checked."""

    add_bos: bool
    """Whether BOS is prepended when the metadata does not say."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata, self.file = metadata, file
        self.tokens: list[str] = self._strings("tokens")
        self.types: list[int] = self._numbers("token_type", 1, (int,))

    def field(self, name: str, default: Any = None) -> Any:
        return self.metadata.get("tokenizer.ggml." + name, default)

    def _strings(self, name: str) -> list[str]:
        value = self.field(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise CheckpointError(
                self.file,
                f"tokenizer.ggml.{name} is missing or no list of strings",
                fix="convert the model again",
            )
        return value

    def _numbers(self, name: str, default: float, kinds: tuple[type, ...]) -> Any:
        """A number for each token."""
        value = self.field(name, [default] * len(self.tokens))
        if not isinstance(value, list) or len(value) != len(self.tokens):
            raise CheckpointError(self.file, f"tokenizer.ggml.{name} differs in length from tokenizer.ggml.tokens")
        for index, number in enumerate(value):
            if type(number) not in kinds or not math.isfinite(number):
                raise CheckpointError(self.file, f"tokenizer.ggml.{name}[{index}] is {number!r}", "a finite number")
        return value

    def token(self, role: str) -> str | None:
        """The text of tokenizer.ggml.<role>_token_id; None when the model has no such token."""
        index = self.field(role + "_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise CheckpointError(
                self.file, f"tokenizer.ggml.{role}_token_id is {index!r}", f"an id below {len(self.tokens)}"
            )
        return self.tokens[index]

    def config(self) -> dict[str, Any]:
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
        result: dict[str, Any] = {
            f"{role}_token": text for role, name in roles.items() if (text := self.token(name)) is not None
        }
        result["add_bos_token"] = bool(self.field("add_bos_token", self.add_bos))
        result["add_eos_token"] = bool(self.field("add_eos_token", False))
        for role in ("bos", "eos"):
            if result[f"add_{role}_token"] and f"{role}_token" not in result:
                raise CheckpointError(
                    self.file,
                    f"tokenizer.ggml.add_{role}_token is set but tokenizer.ggml.{role}_token_id is missing",
                )
        if template := self.metadata.get("tokenizer.chat_template"):
            result["chat_template"] = template
            if with_tools := self.metadata.get("tokenizer.chat_template.tool_use"):
                named = {"default": template, "tool_use": with_tools}
                result["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        return result

    def document(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """tokenizer.json. Where a text occurs twice among the tokens, the later id stands for it."""
        vocab = {text: index for index, text in enumerate(self.tokens)}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": vocab[text],
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    # User-defined tokens are text with an id of their own; only the others control the model.
                    "special": kind != _USER_DEFINED,
                }
                for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and vocab[text] == index and text
            ],
            "post_processor": self._template(config, vocab),
            **self.stages(vocab),
        }

    @abstractmethod
    def stages(self, vocab: Mapping[str, int]) -> dict[str, Any]:
        """normalizer, pre_tokenizer, decoder and model of tokenizer.json."""

    def _template(self, config: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any] | None:
        ends = {role: config[f"{role}_token"] for role in ("bos", "eos") if config[f"add_{role}_token"]}
        if not ends:
            return None
        text = [{"Sequence": {"id": "A", "type_id": 0}}]
        special = {role: [{"SpecialToken": {"id": token, "type_id": 0}}] for role, token in ends.items()}
        return {
            "type": "TemplateProcessing",
            "single": special.get("bos", []) + text + special.get("eos", []),
            "pair": [*text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in ends.values()
            },
        }


class _ByteLevel(_Vocabulary):
    """Byte-level BPE with merges."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata, self.file = metadata, file
        self.pre = self._pre_tokenizer()
        self.add_bos = self.pre.add_bos
        super().__init__(metadata, file)
        self.merges: list[str] = self._strings("merges")

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.field("pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise CheckpointError(
                self.file,
                f"tokenizer.ggml.pre is {name!r}",
                ", ".join(PRE_TOKENIZERS),
                "use the model's safetensors directory, which has its own tokenizer.json",
            )
        return PRE_TOKENIZERS[name]

    def stages(self, vocab: Mapping[str, int]) -> dict[str, Any]:
        return {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    *(
                        {
                            "type": "Split",
                            "pattern": {"Regex": pattern},
                            "behavior": "Isolated",
                            "invert": False,
                        }
                        for pattern in self.pre.patterns
                    ),
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": False,
                    },
                ],
            },
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self.pre.ignore_merges,
                "vocab": vocab,
                "merges": [self._pair(index, merge, vocab) for index, merge in enumerate(self.merges)],
            },
        }

    def _pair(self, index: int, merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
        # From the second character: the first of a pair may itself begin with a space.
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                self.file,
                f"tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens into a third",
                fix="convert the model again",
            )
        return left, right


class _SentencePiece(_Vocabulary):
    """SentencePiece: of all neighbours, those whose join has the best score are joined first; bytes for the rest."""

    add_bos = True

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        super().__init__(metadata, file)
        self.scores: list[float] = self._numbers("scores", 0.0, (float, int))
        self.prefix = bool(self.field("add_space_prefix", True))

    def stages(self, vocab: Mapping[str, int]) -> dict[str, Any]:
        unknown = self.token("unknown")
        spaces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        text: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
        if self.prefix:
            spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self.prefix else []
        return {
            "normalizer": {"type": "Sequence", "normalizers": spaces},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [*text, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": unknown,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": _BYTE in self.types,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": self._merges(vocab),
            },
        }

    def _merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """Every pair of tokens whose join is a token, the best score first, among equals the earlier token."""
        ranked: list[tuple[float, int, str, str]] = []
        for index, (token, score, kind) in enumerate(zip(self.tokens, self.scores, self.types, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _BYTE) or vocab[token] != index:
                continue
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in vocab and right in vocab:
                    ranked.append((-score, index, left, right))
        ranked.sort(key=lambda pair: pair[:2])
        return [(left, right) for _, _, left, right in ranked]
