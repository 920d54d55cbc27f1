"""Text to token ids and back."""

from atlas.tokenizer.detokenizer import Detokenizer
from atlas.tokenizer.tokenizer import GUARD, Tokenizer, end_ids

__all__ = ["GUARD", "Detokenizer", "Tokenizer", "end_ids"]
