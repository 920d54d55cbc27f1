"""Writes quantised checkpoints in the layouts that others read too: `python -m atlas.quantize`.

selection: which matrices are quantised.    layouts: how each named layout stores them.
writer: streaming safetensors.              job: one run, from checkpoint to folder.
report: what quantising cost each tensor.   calibration, activation_aware: int4 by what enters each matrix.
"""
