"""The build of kernel sets: what is compiled again and what is not, the same bytes everywhere, and every
check that fails it. Most tests count with a stand-in for the compiler; the marked ones compile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas import cache
from atlas.build import compile as build
from atlas.build import cuda, kernel_job
from atlas.build.manifest import KernelVariant, Manifest
from atlas.errors import BuildError
from atlas.targets.target import Target
from tests.build.conftest import CountingCompiler

Targets = Callable[..., list[Target]]


def quiet(_: str) -> None:
    pass


def built(tree: Path, targets: list[Target]) -> tuple[Manifest, bytes]:
    return build.build(tree, targets, 2, quiet, selection={})


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


class TestWhatIsCompiled:
    def test_a_kernel_that_two_targets_share_is_compiled_once(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        shutil.copy(tree / "models/smollm2-135m.json", tree / "models/twin.json")
        one = built(tree, gpu_targets(tree))
        count = len(counting.calls)
        assert count == len(one[0].sets[0].kernels)
        shutil.rmtree(cache.cache_root())
        counting.calls.clear()
        both, _ = built(tree, gpu_targets(tree, model="smollm2-135m,twin"))
        assert len(both.sets) == 2 and len(counting.calls) == count
        assert both.sets[0].kernels == both.sets[1].kernels

    def test_kernels_that_differ_in_an_argument_are_one_image(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        def linears() -> list[KernelVariant]:
            counting.calls.clear()
            kernels = built(tree, gpu_targets(tree))[0].sets[0].kernels
            return [variant for kernel in kernels if kernel.op == "linear" for variant in kernel.variants]

        apart = linears()
        assert len({variant.image for variant in apart}) == len(apart) == counting.calls.count("linear.cu") > 1
        assert all(variant.arguments == () for variant in apart)
        edit(tree / "cuda/linear.cu", "[launch]\n", '[launch]\narguments = ["n", "k"]\n')
        edit(tree / "cuda/gated_linear.cu", "[launch]\n", "[launch]\narguments = []\n")  # which is like the other
        together = linears()
        # As many as there are choices of types and knobs, whose symbols say nothing of n and k.
        assert counting.calls.count("linear.cu") == len({variant.image for variant in together}) < len(apart)
        assert {variant.arguments for variant in together} == {("n", "k")}
        assert not any("__n" in variant.symbol or "__k" in variant.symbol for variant in together)
        assert [variant.grid for variant in together] == [variant.grid for variant in apart]

    def test_architectures_share_nothing(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        manifest, _ = built(tree, gpu_targets(tree, "h200,gb10"))
        assert len(counting.calls) == sum(len(s.kernels) for s in manifest.sets)

    def test_nothing_is_compiled_twice(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        lines: list[str] = []
        first = build.build(tree, gpu_targets(tree), 2, lines.append, selection={})
        counting.calls.clear()
        assert build.build(tree, gpu_targets(tree), 2, lines.append, selection={}) == first
        assert counting.calls == []
        assert [line for line in lines if "different kernels" in line] == [
            "17 different kernels, 17 compiled, 0 from the cache",
            "17 different kernels, 0 compiled, 17 from the cache",
        ]

    def test_a_touched_kernel_is_compiled_again_and_nothing_else(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        built(tree, gpu_targets(tree))
        counting.calls.clear()
        with (tree / "cuda/residual_rms_norm.cu").open("a") as file:
            file.write("// touched\n")
        built(tree, gpu_targets(tree))
        assert counting.calls == ["residual_rms_norm.cu"]

    def test_a_touched_header_rebuilds_what_includes_it(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        built(tree, gpu_targets(tree))
        counting.calls.clear()
        with (tree / "cuda/include/atlas/philox.cuh").open("a") as file:
            file.write("// touched\n")
        built(tree, gpu_targets(tree))
        assert counting.calls == ["sample.cu"]

    def test_an_override_for_one_target_rebuilds_that_target_only(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        shutil.rmtree(tree / "h200/llama-3.2-1b", ignore_errors=True)  # a nearer override of the real tree would win
        both = gpu_targets(tree, model="smollm2-135m,llama-3.2-1b")
        built(tree, both)
        counting.calls.clear()
        (tree / "h200/llama-3.2-1b").mkdir(parents=True)
        shutil.copy(tree / "cuda/residual_rms_norm.cu", tree / "h200/llama-3.2-1b/residual_rms_norm.cu")
        edit(tree / "h200/llama-3.2-1b/residual_rms_norm.cu", "// residual_rms_norm", "// mine: residual_rms_norm")
        manifest, _ = built(tree, gpu_targets(tree, model="smollm2-135m,llama-3.2-1b"))
        assert counting.calls == ["residual_rms_norm.cu"]
        sources = {(s.model, *k.sources()) for s in manifest.sets for k in s.kernels if k.op == "residual_rms_norm"}
        assert sources == {
            ("smollm2-135m", "cuda/residual_rms_norm.cu"),
            ("llama-3.2-1b", "h200/llama-3.2-1b/residual_rms_norm.cu"),
        }

    def test_compiler_and_options_are_part_of_the_key(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built(tree, gpu_targets(tree))
        for change in (
            lambda: monkeypatch.setattr(cuda, "compiler_version", lambda: "counting 2.0"),
            lambda: monkeypatch.setattr(cuda, "OPTIONS", (*cuda.OPTIONS, "--fmad=false")),
        ):
            counting.calls.clear()
            change()
            built(tree, gpu_targets(tree))
            assert len(counting.calls) == 17


class TestVariants:
    """Files of one phase, bounds of rows, and what must be the same in all of a kernel's variants."""

    @staticmethod
    def split(tree: Path, rows: str = "[8, 32]") -> None:
        """residual_rms_norm for h200 in two files: decode with variants that know their bound, prefill without."""
        source = (tree / "cuda/residual_rms_norm.cu").read_text()
        (tree / "h200/residual_rms_norm.prefill.cu").write_text(source)
        decode = source.replace("[knobs]\n", f"[rows]\nup_to = {rows}\n[knobs]\n", 1)
        decode += "static_assert(launch::max_rows > 0);\n"
        (tree / "h200/residual_rms_norm.decode.cu").write_text(decode)

    def test_each_is_compiled_and_described(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        self.split(tree)
        edit(tree / "h200/residual_rms_norm.decode.cu", "THREADS = 256", 'THREADS = 256\nlegal = ["max_rows <= 32"]')
        manifest, _ = built(tree, gpu_targets(tree))
        (entry,) = (kernel for kernel in manifest.sets[0].kernels if kernel.op == "residual_rms_norm")
        assert [(v.phase, v.max_rows) for v in entry.variants] == [(1, 0), (2, 8), (2, 32)]
        assert [Path(v.source).name for v in entry.variants] == [
            "residual_rms_norm.prefill.cu",
            *["residual_rms_norm.decode.cu"] * 2,
        ]
        assert [v.symbol.rpartition("__")[2] for v in entry.variants] == ["prefill", "decode_8", "decode_32"]
        assert len({v.image for v in entry.variants}) == 3
        assert sorted(name for name in counting.calls if name.startswith("residual_rms")) == [
            *["residual_rms_norm.decode.cu"] * 2,
            "residual_rms_norm.prefill.cu",
        ]
        counting.calls.clear()
        built(tree, gpu_targets(tree))
        assert counting.calls == []

    @pytest.mark.parametrize(("named", "images"), [(False, 2), (True, 4)])
    def test_bounds_that_a_source_does_not_know_are_one_image(
        self, named: bool, images: int, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        """Where their knobs are the same. Each has its own line in the manifest all the same."""
        self.split(tree, "[8, 32, 64, 0]")
        file = tree / "h200/residual_rms_norm.decode.cu"
        edit(file, "THREADS = 256", 'THREADS = "64 + min(1, max_rows // 32) * 64"')
        if not named:
            edit(file, "static_assert(launch::max_rows > 0);\n", "")
        manifest, _ = built(tree, gpu_targets(tree))
        (entry,) = (kernel for kernel in manifest.sets[0].kernels if kernel.op == "residual_rms_norm")
        decode = [variant for variant in entry.variants if variant.phase == 2]
        assert [(v.max_rows, v.block) for v in decode] == [(8, 64), (32, 128), (64, 128), (0, 64)]
        assert len({v.image for v in decode}) == counting.calls.count("residual_rms_norm.decode.cu") == images
        assert (decode[1].image == decode[2].image) != named and (decode[0].image == decode[3].image) != named
        assert [v.symbol.endswith("__decode") for v in decode] == [not named, not named, not named, True]

    def test_a_launch_over_logits_needs_no_prefill_kernel(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        shutil.move(tree / "cuda/logprobs.cu", tree / "cuda/logprobs.decode.cu")
        manifest, _ = built(tree, gpu_targets(tree))
        (entry,) = (kernel for kernel in manifest.sets[0].kernels if kernel.op == "logprobs")
        assert [v.phase for v in entry.variants] == [2]

    ONE = '/* atlas\n[launch]\ngrid = ["rows", 1, 1]\nblock = 128\n[serves]\nwhere = ["head_dim {}"]\n*/\n'

    @pytest.mark.parametrize(("rule", "serves"), [("== 64", True), ("> 64", False)])
    def test_what_a_program_does_without_is_compiled_where_there_is_a_kernel(
        self, rule: str, serves: bool, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        """For decode steps only; the launches that it stands for are then compiled for prefill steps only."""
        (tree / "h200/rope_attention.decode.cu").write_text(self.ONE.format(rule))
        shutil.copy(tree / "cuda/paged_attention.cu", tree / "h200/paged_attention.decode.cu")
        shutil.copy(tree / "cuda/paged_attention.cu", tree / "h200/paged_attention.prefill.cu")
        manifest, _ = built(tree, gpu_targets(tree, "h200,gb10"))
        for kernels in manifest.sets:
            phases = {k.op: [v.phase for v in k.variants] for k in kernels.kernels}
            expected = [2] if serves and kernels.hardware == "h200" else None
            assert phases.get("rope_attention") == expected
            both = [1, 2] if kernels.hardware == "h200" else [0]
            assert phases["paged_attention"] == ([1] if expected else both)

    def test_a_phase_without_a_file(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        (target,) = gpu_targets(tree)
        shutil.move(tree / "cuda/residual_rms_norm.cu", tree / "cuda/residual_rms_norm.decode.cu")
        with pytest.raises(
            BuildError,
            match="no kernel for the prefill phase of x bf16 residual f32 weight f32 out bf16 for target h200/",
        ):
            built(tree, [target])

    def test_phases_that_want_different_layouts(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        self.split(tree)
        edit(tree / "h200/residual_rms_norm.decode.cu", 'other = "operand"', 'other = "tiles"')
        message = "operand out is row_major in .*prefill.cu and tiles in .*decode.cu; accepted: one layout"
        with pytest.raises(BuildError, match=message):
            built(tree, gpu_targets(tree))

    def test_a_table_of_tuning_toml_may_name_a_variant(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        self.split(tree)
        (name,) = (k.name() for k in build.closure(gpu_targets(tree)[0]) if k.op == "residual_rms_norm")
        folder = tree / "h200/smollm2-135m/bf16"
        folder.mkdir(parents=True, exist_ok=True)
        text = f"[residual_rms_norm]\nTHREADS = 1024\n[residual_rms_norm.{name}.decode_8]\nTHREADS = 128\n"
        (folder / "tuning.toml").write_text(text)
        manifest, _ = built(tree, gpu_targets(tree))
        (entry,) = (kernel for kernel in manifest.sets[0].kernels if kernel.op == "residual_rms_norm")
        assert [v.knobs["THREADS"] for v in entry.variants] == [1024, 128, 1024]

    @pytest.mark.parametrize(
        ("cluster", "message"),
        [
            ("16", r"a cluster of 16 blocks; accepted: 1\.\.8 on h200"),
            ("3", "grid axis x has 4 blocks for a cluster of 3"),
        ],
    )
    def test_a_cluster_that_cannot_be(
        self, cluster: str, message: str, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        edit(tree / "cuda/residual_add.cu", 'grid = ["rows"', f'cluster = {cluster}\ngrid = ["rows * 4"')
        with pytest.raises(BuildError, match=message):
            built(tree, gpu_targets(tree))


class TestReproducible:
    def test_two_folders_give_the_same_bytes(
        self, tree: Path, tmp_path: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        here = built(tree, gpu_targets(tree))
        elsewhere = tmp_path / "some" / "other place"
        shutil.copytree(tree, elsewhere)
        counting.calls.clear()
        there = built(elsewhere, gpu_targets(elsewhere))
        assert (there[0].to_json(), there[1]) == (here[0].to_json(), here[1])
        assert counting.calls == []  # no path is in a key
        assert str(tree) not in here[0].to_json()

    @pytest.mark.cuda_toolchain
    @pytest.mark.usefixtures("wheels")
    @pytest.mark.parametrize("start", [None, "/"])
    def test_two_folders_give_the_same_bytes_compiled(
        self, tree: Path, tmp_path: Path, gpu_targets: Targets, monkeypatch: pytest.MonkeyPatch, start: str | None
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        shutil.copytree(tree, elsewhere)
        here = built(tree, gpu_targets(tree))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache 2"))
        monkeypatch.chdir(start or tmp_path)
        there = build.build(elsewhere, gpu_targets(elsewhere), 1, quiet, selection={})
        assert (there[0].to_json(), there[1]) == (here[0].to_json(), here[1])
        for path in (str(tmp_path), str(Path.home())):
            assert path.encode() not in here[1] and path not in here[0].to_json()
        assert here[0].flags == cuda.OPTIONS and "ptxas" in here[0].compiler


class TestManifest:
    def test_it_says_knobs_and_where_they_come_from(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        folder = tree / "h200/smollm2-135m/bf16"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tuning.toml").write_text("[residual_rms_norm]\nTHREADS = 128\n")
        manifest, _ = built(tree, gpu_targets(tree))
        by_op = {kernel.op: kernel.variants[0] for kernel in manifest.sets[0].kernels}
        assert (by_op["residual_rms_norm"].knobs, by_op["residual_rms_norm"].knobs_from) == ({"THREADS": 128}, "tuned")
        assert by_op["residual_rms_norm"].block == 128
        assert by_op["linear"].knobs_from == "cost model"
        assert set(by_op["linear"].knobs) == {"SIDES", "TILE_M", "TILE_N", "WARPS", "STAGES"}
        assert by_op["residual_add"].knobs_from == "declared"
        assert by_op["residual_rms_norm"].seconds == 0.1 and "seconds" not in manifest.to_json()

    @pytest.mark.parametrize("embed", ["cubin", "ptx", "both"])
    def test_it_says_what_is_embedded(
        self, embed: str, tree: Path, gpu_targets: Targets, counting: CountingCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATLAS_EMBED", embed)
        lines: list[str] = []
        manifest, blob = build.build(tree, gpu_targets(tree, "gb10"), 1, lines.append, selection={})
        for (kernel,) in (entry.variants for entry in manifest.sets[0].kernels):
            assert (kernel.image >= 0, kernel.ptx >= 0) == (embed != "ptx", embed != "cubin")
            if kernel.ptx >= 0:
                image = manifest.images[kernel.ptx]
                assert blob[image.offset : image.offset + image.size].startswith(b".entry k(")
        note = f"ATLAS_EMBED={embed}: compute_121a PTX runs on compute capability 12.1 only (suffix a)"
        assert (note in lines) == (embed != "cubin")

    def test_another_choice_to_embed_is_refused(self) -> None:
        with pytest.raises(BuildError, match="ATLAS_EMBED: 'sass'; accepted: cubin: machine code .*; ptx: .*; both: "):
            build.embed_choice({"ATLAS_EMBED": "sass"})


class TestChecks:
    """Each failure names file, target and kernel, what was found and what is accepted."""

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            ({"spills": 16}, r"16 bytes of register spills; accepted: at most 0 \(\[limits\] spills\)"),
            (
                {"static_shared": 250_000},
                r"bytes of shared memory \(0 dynamic, 250000 static\); accepted: at most 232448",
            ),
            ({"reads": ()}, "never reads its input row_token; accepted: a load through every input's pointer"),
            ({"writes": ()}, "never writes its output out; accepted: a store through every output's pointer"),
            (
                {"seconds": 31.0},
                r"took 31.0 s of processor time to compile; accepted: at most 30 \(\[limits\] seconds\)",
            ),
        ],
    )
    def test_a_compiled_kernel(
        self, facts: dict[str, Any], message: str, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        counting.facts = facts
        with pytest.raises(BuildError, match=message) as caught:
            built(tree, gpu_targets(tree))
        assert f"{tree}/cuda/embedding.cu for h200/smollm2-135m/bf16 (embedding_table_bf16__" in str(caught.value)

    def test_what_is_declared_is_allowed(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        for file in (tree / "cuda").glob("*.cu"):
            text = file.read_text()
            limits = "[limits]\nspills = 16\nseconds = 40\n"
            declared = "[limits]\n" if "[limits]" in text else "[launch]\n"
            kept = "" if "[limits]" in text else "[launch]\n"
            file.write_text(text.replace(declared, limits + kept, 1))
        counting.facts = {"spills": 16, "seconds": 31.0}
        built(tree, gpu_targets(tree))

    def test_an_op_without_a_kernel(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        (target,) = gpu_targets(tree)
        (tree / "cuda/residual_rms_norm.cu").unlink()
        with pytest.raises(
            BuildError,
            match="op residual_rms_norm: no kernel for target h200.*; accepted: residual_rms_norm.cu in ",
        ):
            built(tree, [target])

    @pytest.mark.parametrize("threads", [2048, 100])
    def test_threads_per_block(
        self, threads: int, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        edit(tree / "cuda/residual_add.cu", "TILE = 256", f"TILE = {threads}")
        with pytest.raises(BuildError, match=f"{threads} threads per block; accepted: a multiple of 32, at most 1024"):
            built(tree, gpu_targets(tree))

    def test_a_header_that_is_not_there(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        edit(tree / "cuda/residual_add.cu", '"atlas/quad.cuh"', '"atlas/quod.cuh"')
        with pytest.raises(BuildError, match='#include "atlas/quod.cuh": no such header; accepted: .*/h200/include, '):
            built(tree, gpu_targets(tree))


@pytest.mark.cuda_toolchain
@pytest.mark.usefixtures("wheels")
class TestRealFailures:
    """What the compiler and the walk over its output find in kernels that are really wrong."""

    def test_spills(self, tree: Path, gpu_targets: Targets) -> None:
        edit(tree / "cuda/sample.cu", 'resident = "min(2, cluster_blocks, 1 + vocab // 4096)"', "resident = 4")
        with pytest.raises(BuildError, match=r"sample.cu for .*: \d+ bytes of register spills; accepted: at most 0"):
            built(tree, gpu_targets(tree))

    def test_shared_memory(self, tree: Path, gpu_targets: Targets) -> None:
        edit(tree / "cuda/residual_add.cu", 'block = "TILE"', 'block = "TILE"\nshared = 240000')
        with pytest.raises(
            BuildError,
            match=r"240000 bytes of shared memory \(240000 dynamic, 0 static\); accepted: at most 232448 on h200",
        ):
            built(tree, gpu_targets(tree))

    def test_a_kernel_that_lost_a_load(self, tree: Path, gpu_targets: Targets) -> None:
        load = "  atlas::load_quad<constants::hidden>(x + start, quad, added);\n"
        edit(tree / "cuda/residual_add.cu", load, "  for (float& value : added) value = 0.0f;\n")
        with pytest.raises(BuildError, match="residual_add.cu for .* never reads its input x"):
            built(tree, gpu_targets(tree))

    def test_an_output_that_is_not_written(self, tree: Path, gpu_targets: Targets) -> None:
        edit(tree / "cuda/include/atlas/sample.cuh", "last_token[slot] = token", "tokens[slot] = token")
        with pytest.raises(BuildError, match="never writes its output last_token"):
            built(tree, gpu_targets(tree))

    def test_an_input_declared_as_unread(self, tree: Path, gpu_targets: Targets) -> None:
        load = "atlas::load_quad<constants::hidden>(x + start, quad, added);"
        edit(tree / "cuda/residual_add.cu", load, "for (float& value : added) value = 1.0f;")
        with pytest.raises(BuildError, match="If the input is not needed, declare it: \\[limits\\] unread"):
            built(tree, gpu_targets(tree))
        edit(tree / "cuda/residual_add.cu", "[knobs]", '[limits]\nunread = ["x"]\n[knobs]')
        built(tree, gpu_targets(tree))


class TestCache:
    def test_a_damaged_entry_is_compiled_again(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        first = built(tree, gpu_targets(tree))
        entries = sorted((cache.cache_root() / "kernels").iterdir())
        assert len(entries) == 17 and all(entry.suffix == ".kernel" for entry in entries)
        damages: list[Callable[[bytes], bytes]] = [
            lambda data: data[:-1],
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            lambda data: b"",
            lambda data: b"[]\n",
            lambda data: data.replace(b'"registers"', b'"registres"'),
        ]
        for entry, damage in zip(entries, damages, strict=False):
            entry.write_bytes(damage(entry.read_bytes()))
        counting.calls.clear()
        assert built(tree, gpu_targets(tree)) == first
        assert len(counting.calls) == len(damages)
        counting.calls.clear()
        assert built(tree, gpu_targets(tree)) == first and counting.calls == []

    def test_the_folder_is_private(self, tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
        built(tree, gpu_targets(tree))
        for folder in (cache.cache_root(), cache.cache_root() / "kernels"):
            assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data.replace(b'"registers": ', b'"registers": 1', 1),
            lambda data: data.replace(b'"seconds": ', b'"seconds": 9', 1),
            lambda data: data.replace(b'"image_bytes": ', b'"image_bytes": -', 1),
            lambda data: b"[" * 200_000,
            lambda data: data[:-1],
            lambda data: data + b"x",
            lambda data: b"",
        ],
    )
    def test_any_change_of_an_entry_is_noticed_and_healed(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler, damage: Callable[[bytes], bytes]
    ) -> None:
        expected = built(tree, gpu_targets(tree))[0].to_json()
        entry = sorted((cache.cache_root() / "kernels").iterdir())[0]
        whole = entry.read_bytes()
        assert damage(whole) != whole
        entry.write_bytes(damage(whole))
        counting.calls.clear()
        assert built(tree, gpu_targets(tree))[0].to_json() == expected
        assert len(counting.calls) == 1
        counting.calls.clear()
        built(tree, gpu_targets(tree))
        assert counting.calls == []

    def test_an_entry_under_another_key_is_not_used(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler
    ) -> None:
        built(tree, gpu_targets(tree))
        first, second = sorted((cache.cache_root() / "kernels").iterdir())[:2]
        first.write_bytes(second.read_bytes())
        counting.calls.clear()
        built(tree, gpu_targets(tree))
        assert len(counting.calls) == 1

    def test_a_folder_that_others_can_write_to_is_not_used(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler, caplog: pytest.LogCaptureFixture
    ) -> None:
        built(tree, gpu_targets(tree))
        folder = cache.cache_root() / "kernels"
        folder.chmod(0o777)
        counting.calls.clear()
        built(tree, gpu_targets(tree))
        assert len(counting.calls) == 17
        assert f"the cache {folder} can be written by others: not used (chmod 700 it)" in caplog.text

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_somebody_else_is_not_used(
        self, tree: Path, gpu_targets: Targets, counting: CountingCompiler, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = cache.private_folder("kernels")
        assert folder is not None
        os.chown(folder, 12345, -1)
        assert cache.private_folder("kernels") is None
        assert "belongs to user id 12345, not to you: not used" in caplog.text

    def test_no_cache_is_no_obstacle(
        self,
        tree: Path,
        gpu_targets: Targets,
        counting: CountingCompiler,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        manifest, _ = built(tree, gpu_targets(tree))
        assert len(manifest.sets[0].kernels) == 17

    def test_a_relative_cache_home_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "here")
        assert cache.cache_root() == Path.home() / ".cache" / "atlas"


def test_the_first_failure_stops_the_rest(tree: Path, gpu_targets: Targets, counting: CountingCompiler) -> None:
    counting.facts = {"spills": 1}
    with pytest.raises(BuildError, match="embedding.cu"):
        built(tree, gpu_targets(tree, "h200,gb10", "*"))
    assert kernel_job.Compiler(1).compiled == []
