"""The figures of a build, by kernel file: each kernel that differs once."""

from __future__ import annotations

import dataclasses

from atlas.build.manifest import Manifest
from bench.kernel_stage import figures
from tests.fake_packs import build


def test_a_kernel_that_targets_or_bounds_share_counts_once() -> None:
    manifest, blob = build(seconds=0.5, registers=40, spills=8, shared=1000)
    (one,) = manifest.sets
    norm, gate = sorted(one.kernels, key=lambda kernel: kernel.op, reverse=True)
    few = dataclasses.replace(norm.variants[0], max_rows=8)  # another bound, the same image
    other = dataclasses.replace(few, source_hash="cd" * 32, registers=90, spills=0, static_shared=24)
    kernels = (gate, dataclasses.replace(norm, variants=(few, norm.variants[0], other)))
    two = dataclasses.replace(one, model="twin", kernels=kernels)
    found = figures(Manifest((one, two), manifest.images, "test"))
    assert (found["kernels"], found["processor_seconds"]) == (3, 1.5)
    assert found["image_bytes"] == sum(image.size for image in manifest.images) <= len(blob)
    assert list(found["files"]) == ["cuda/gated_activation.cu for sm_90a", "cuda/rms_norm.cu for sm_90a"]
    assert found["files"]["cuda/rms_norm.cu for sm_90a"] == {
        "kernels": 2,
        "registers": [40, 90],
        "spilled_bytes_at_most": 8,
        "kernels_that_spill": 1,
        "shared_memory": [1000, 1024],
        "processor_seconds": 1.0,
        "image_bytes": 2 * manifest.images[norm.variants[0].image].size,
    }
