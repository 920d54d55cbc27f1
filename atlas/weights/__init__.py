"""Model files: opening them, naming their tensors, reading and dequantising them, fetching them."""

from atlas.weights.checkpoint import Checkpoint, TensorInfo, TokenizerFiles, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "TokenizerFiles", "open_checkpoint"]
