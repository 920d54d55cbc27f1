"""Targets: hardware, shape, quant recipe, and the kernel tree. Standard library only."""
