"""What suits a model when nobody says otherwise, each with a reason: parsers of its answers, sampling by mode."""

from atlas.presets.presets import EFFORT, EFFORTS, Asked, Presets

__all__ = ["EFFORT", "EFFORTS", "Asked", "Presets"]
