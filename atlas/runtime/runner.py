"""The runner: a model on a backend. Load reads top to bottom in `Runner.load`."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from atlas.build.kernel_file import ROW_MAJOR
from atlas.build.manifest import KernelEntry
from atlas.config import EngineConfig
from atlas.errors import AtlasError, ConfigError, DeviceError
from atlas.models import ModelConfig, family_of, fusion
from atlas.runtime import core, host, kernel_set, kernel_sources, loader, memory_plan, variants, weight_formats
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.flight import LOGPROBS, TOKENS, InFlight, Place, Slot, SlotRows
from atlas.runtime.kernel_set import Choice
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.program import Buffer, StepPrograms
from atlas.runtime.reference import ReferenceBackend
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL, Limits, StepBlock
from atlas.targets.quant import Recipe, recipe
from atlas.targets.shape import KV_BLOCK_SIZE, Shape, Shard
from atlas.weights import Checkpoint
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray

_log = logging.getLogger(__name__)

_KV_SHARE_OF_HOST = 0.25
"""Of the host memory available at load, what the KV cache may take when nothing is said: the machine has other work."""

_DEFAULT_SIZES = {False: (32, 512), True: (256, 8192)}
"""Sequences and rows of a step when nothing is said, by whether a GPU runs it. 8,192 rows of a prompt keep its matrix
units busy for some milliseconds; one more step then costs little."""

_SHARE_OF_DEVICE = 0.8
"""Of a GPU's memory, what weights and KV cache may take together when nothing is said."""


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """How to run a model; None lets the runner decide.

    max_context: tokens of one sequence.
    max_seqs: sequences in one step (default 32, on a GPU 256).
    max_rows: rows in one step (default 512, on a GPU 8192).
    max_logits: rows of one step whose logits are computed (default max_seqs).
    kv_dtype: format of the KV cache (default the quant recipe's).
    kv_memory_bytes: size of the KV cache.  level: CPU instruction-set level.
    kernel_packs: files with kernels, one of which must serve.
    programs: "cuda" lets `reference` run the programs of a GPU that has every kernel, fused launches and all.
    """

    backend: str = "auto"
    quant: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    level: str = ""
    max_context: int | None = None
    max_seqs: int | None = None
    max_rows: int | None = None
    max_logits: int | None = None
    kv_memory_bytes: int | None = None
    kernel_packs: tuple[str, ...] = ()
    programs: str = ""

    @classmethod
    def of(cls, config: EngineConfig) -> RunnerOptions:
        """The runner's part of the engine's settings."""
        return cls(
            backend=config.backend,
            quant=config.quant,
            kv_dtype=config.kv_dtype,
            threads=config.threads,
            max_context=config.max_context,
            max_seqs=config.max_seqs,
            max_rows=config.max_rows,
            kv_memory_bytes=config.kv_memory_bytes,
            kernel_packs=config.kernel_packs,
        )


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """What op `logprobs` gave, by logit row: logprob float32 and rank int32 [n_logits], top_token int32 and
    top_logprob float32 [n_logits, MAX_TOP]. Rows and entries that nobody asked for hold anything."""

    logprob: Array
    rank: Array
    top_token: Array
    top_logprob: Array


class Runner:
    """A loaded model. Fill `block`, then call `forward` and `sample`, once each per step.

    Attributes:
        config: the model's configuration.  limits: largest value of every symbol.
        max_context: longest sequence, prompt and generated tokens together.
        ledger: (stage, seconds) of the load.
        ahead: steps that may be in flight while the host makes the next one.
        decode_rows: rows of one step of generated tokens, where these have kernels of their own; else 0.
        choice: which backend and kernel set run, and why.
    """

    def __init__(
        self,
        config: ModelConfig,
        choice: Choice,
        backend: Backend,
        limits: Limits,
        max_context: int,
        forward: BoundProgram,
        sample: BoundProgram,
        layouts: dict[str, str],
        ledger: list[tuple[str, float]],
    ) -> None:
        self.config, self.choice, self.backend, self.limits = config, choice, backend, limits
        self.max_context = max_context
        self.buffers, self.layouts, self.ledger = forward.buffers, layouts, ledger
        self.forward_program, self.sample_program = forward.program, sample.program
        self._bound, self._launches = forward, forward.program.launches + sample.program.launches
        graphs = choice.backend == "cuda"
        self._places = [Place(backend, forward, sample, i, graphs) for i in range(len(forward.plan.places))]
        self.decode_rows = 0
        if graphs or any(launch.phase for launch in self._launches):
            self.decode_rows = min(limits.n_rows, variants.most_rows(self._launches, forward.kernels, "n_rows"))
        self.work_ahead(len(self._places) - 1)
        self._tokens = np.zeros(limits.n_logits, np.int32)
        self._slot_rows = SlotRows(backend, 4 * config.shape.vocab_size)

    @property
    def block(self) -> StepBlock:
        """The step block to fill for the next step."""
        return self._slots[self._next].block

    @property
    def step_memory(self) -> memoryview:
        """The memory of `block`."""
        return self._slots[self._next].memory

    @property
    def plan(self) -> MemoryPlan:
        """Where buffers lie in the next step."""
        return self._here.plan

    @property
    def _here(self) -> Place:
        """The place on the device of the next step."""
        return self._slots[self._next].place

    def work_ahead(self, steps: int) -> None:
        """Let `steps` steps be in flight while the next one is made. None may be in flight now."""
        self.ahead = steps
        self._slots = [Slot(self.backend, self._places[i % len(self._places)], self._bound) for i in range(steps + 1)]
        self._next = 0

    @property
    def memory(self) -> list[tuple[str, int]]:
        """(owner, bytes) of all memory that the model takes: the arena, and the host's side of steps in flight."""
        return [
            *self.plan.owners(self.buffers),
            ("step staging", sum(slot.nbytes for slot in self._slots) + self._slot_rows.nbytes),
        ]

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        options: RunnerOptions,
        progress: Callable[[str], None] = lambda stage: None,
        weights_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Runner:
        """Configuration, kernel set, memory plan, weights, programs: in that order.

        progress: called with the name of each stage.  weights_progress: with the bytes loaded so far and in all.

        Raises:
            CheckpointError, ConfigError, DeviceError: what is wrong, before any memory is taken where possible.
        """
        ledger: list[tuple[str, float]] = []
        started = time.perf_counter()

        def stage(name: str) -> None:
            nonlocal started
            now = time.perf_counter()
            if ledger:
                ledger[-1] = (ledger[-1][0], now - started)
            ledger.append((name, 0.0))
            started = now
            progress(name)

        stage("configure")
        family = family_of(checkpoint.config)
        config = loader.untied(checkpoint, family.configure(checkpoint.config, Shard()), family)
        natural = weight_formats.natural_quants(checkpoint)
        backend, choice, kernels = _open_backend(config.shape, options, str(checkpoint.path), natural)
        _log.debug("kernel set %s on %s (%s)", choice.name, backend.describe(), choice.reason)
        roles = _recipe(choice, options)
        sources = family.weights(config, checkpoint.tensors)
        kind = _kind(choice, options)
        formats, everything = weight_formats.chooser(checkpoint, sources), choice.backend == "reference"
        programs = fusion.record(family, config, roles, kind, formats, lambda key: everything or key.name() in kernels)
        loader.check(checkpoint, programs, sources, family.other_parts)

        stage("memory")
        layouts = memory_plan.buffer_layouts(programs, kernels)
        limits = _limits(
            config,
            options,
            _kv_block_bytes(programs, layouts),
            _kv_budget(choice, programs),
            choice.backend == "cuda",
            variants.most_rows(programs.launches(), kernels, "n_logits"),
        )
        sizes = {name: _nbytes(programs.buffers[name], layout, limits.symbols()) for name, layout in layouts.items()}
        # A GPU works beside the host: copies of one step run beside the next.
        places = 2 if choice.backend == "cuda" else 1
        plan = memory_plan.plan(programs, limits, sizes, memory_plan.scratch_of(programs, kernels), places)
        forward, sample = (
            BoundProgram(program, programs.buffers, plan, limits, kernels)
            for program in (programs.forward, programs.sample)
        )
        try:
            backend.allocate(plan.total)
        except DeviceError as error:
            fix = "lower --max-context, --max-seqs or --kv-memory"
            raise DeviceError(error.where, error.found, error.accepted, fix) from None

        begin, end = plan.regions[memory_plan.SCRATCH]
        if end > begin:
            backend.fill(begin, 0, end - begin)

        stage("weights")
        loader.load(checkpoint, backend, forward, sources, layouts, weights_progress)

        stage("programs")
        # What was asked for, and not what its last block would hold besides.
        max_context = min(limits.max_blocks * KV_BLOCK_SIZE, options.max_context or config.max_context)
        runner = Runner(config, choice, backend, limits, max_context, forward, sample, layouts, ledger)
        buckets = variants.buckets(runner.decode_rows) if choice.backend == "cuda" else []
        if buckets:
            stage("graphs")
            runner.capture(buckets)

        stage("warm up")
        runner.warm_up()
        for rows in buckets:
            for _ in runner._places:
                runner.warm_up(PHASE_DECODE, rows)
        ledger[-1] = (ledger[-1][0], time.perf_counter() - started)
        return runner

    def capture(self, buckets: Iterable[int]) -> None:
        """Record the graphs that decode steps of up to so many rows are replayed from."""
        for place in self._places:
            assert place.step is not None
            for rows in buckets:
                self.backend.capture(place.step, PHASE_DECODE, rows)

    def warm_up(self, phase: int = PHASE_PREFILL, rows: int = 1) -> None:
        """Run one step of `rows` sequences of one row, so that nothing is loaded or touched first by a request. Leaves
        no trace: every row writes the first token of KV block 0, which no sequence owns yet."""
        block, seqs = self.block, min(rows, self.limits.n_seqs)
        logits = min(rows, self.limits.n_logits)
        block.set_symbols({"n_rows": rows, "n_seqs": seqs, "n_logits": logits})
        block.set_phase(phase)
        for name in ("row_token", "row_position", "row_kind"):
            getattr(block, name)[:rows] = 0
        block.row_seq[:rows] = np.minimum(np.arange(rows), seqs - 1)
        block.logit_row[:logits] = np.arange(logits)
        block.seq_slot[:seqs] = block.seq_rope[:seqs] = block.block_table[:seqs, 0] = 0
        for name in ("logit_slot", "logit_mask", "logit_n_top", "logit_target"):
            getattr(block, name)[:logits] = -1
        for name in ("logit_position", "logit_adjust", "logit_temperature"):
            getattr(block, name)[:logits] = 0
        self.collect(self.submit())
        block.set_phase(PHASE_PREFILL)

    def submit(self, masks: Sequence[Array] = (), logprobs: bool = False) -> InFlight:
        """Start the step that `block` describes; `block` is then the next one's. At most `ahead` + 1 may be in flight.

        masks: rows to deliver, as `deliver_mask` takes them.  logprobs: whether some row asks for them.
        """
        slot, rows = self._slots[self._next], self.block.symbols()["n_logits"]
        place, before = slot.place, self._slots[self._next - 1].place
        self.backend.begin_step(place.plan.offsets["step.header"], slot.memory, slot.block.used_bytes())
        if masks:
            if place is before:
                self.backend.order_uploads()  # the step before may still read its masks there
            slot.deliver(masks)
        if rows and place.step is not None:
            self.backend.run(place.step, 0, len(self._launches))
        else:
            self.backend.run(place.forward, 0, len(self.forward_program.launches))
            if rows:
                self.backend.run(place.sample, 0, len(self.sample_program.launches))
        self._next = (self._next + 1) % len(self._slots)
        if rows:
            for name in (*TOKENS, *(LOGPROBS if logprobs else ())):
                slot.read_later(name, rows)
        return InFlight(slot, self.backend.fence(), rows, logprobs)

    def collect(self, step: InFlight) -> tuple[Array, Logprobs | None]:
        """Wait for a submitted step. Returns the tokens [n_logits], as `sample` does, and the log-probabilities if
        it was submitted with them; both are overwritten when the step's slot is used again."""
        self.backend.wait(step.ticket)
        (tokens,) = (step.slot.result(name, step.rows) for name in TOKENS)
        if not step.logprobs:
            return tokens, None
        return tokens, Logprobs(*(step.slot.result(name, step.rows) for name in LOGPROBS))

    def forward(self) -> None:
        """Run the forward program on the step that `block` describes."""
        self.backend.begin_step(self.plan.offsets["step.header"], self.step_memory, self.block.used_bytes())
        self.backend.run(self._here.forward, 0, len(self.forward_program.launches))

    def write_slot(self, name: str, slot: int, row: Array) -> None:
        """One slot's row of per-slot state, "logit_bias" (float32) or "token_count" (int32) [vocab], for steps that are
        submitted from now on. Those in flight have the old one: whoever had the slot before may be in them."""
        self._slot_rows.send(self.plan.offsets[name] + slot * row.nbytes, row)

    def deliver_mask(self, mask: Array) -> None:
        """Between forward and sample: bit masks [rows, ceil(vocab / 32)] uint32, addressed by `block.logit_mask`
        of the rows whose `block.logit_adjust` says that a mask applies."""
        self.backend.write(self.plan.offsets["logit_mask"], np.ascontiguousarray(mask, np.uint32))

    def sample(self) -> Array:
        """Run the sample program. Returns the tokens [n_logits], INVALID_TOKEN where logits were not finite."""
        self.backend.run(self._here.sample, 0, len(self.sample_program.launches))
        count = self.block.symbols()["n_logits"]
        self.backend.read(self.plan.offsets["token"], self._tokens[:count])
        return self._tokens[:count]

    def logits(self) -> Array:
        """A copy of the step's logits, float32 [n_logits, vocab]. Between forward and the next step."""
        rows = np.empty((self.block.symbols()["n_logits"], self.config.shape.vocab_size), np.float32)
        self.backend.read(self.plan.offsets["logits"], rows)
        return rows

    def logprobs(self) -> Logprobs:
        """After sample: what it left for the rows whose `block.logit_n_top` is not negative."""
        count = self.block.symbols()["n_logits"]
        arrays = []
        for name in ("logprob", "rank", "top_token", "top_logprob"):
            buffer = self.buffers[name]
            shape = (count, *buffer.extents(self.limits.symbols())[1:])
            arrays.append(np.empty(shape, NUMPY[buffer.dtype]))
            self.backend.read(self.plan.offsets[name], arrays[-1])
        return Logprobs(*arrays)

    def run_launch(self, program: str, index: int) -> None:
        """Run one launch of "forward" or "sample" on the current step: for debugging."""
        self.backend.run(self._here.forward if program == "forward" else self._here.sample, index, index + 1)

    def run_timed(self) -> list[float]:
        """Run forward and sample on the current step. Returns the seconds of each launch alone: for debugging."""
        assert isinstance(self.backend, core.CoreBackend)
        self.backend.begin_step(self.plan.offsets["step.header"], self.step_memory, self.block.used_bytes())
        return [
            seconds
            for handle, program in (
                (self._here.forward, self.forward_program),
                (self._here.sample, self.sample_program),
            )
            for seconds in self.backend.run_timed(handle, 0, len(program.launches))
        ]

    def run_growing(self, repeats: int) -> list[float]:
        """Run the step's first launch, its first two, and so on. Returns by how many seconds each makes the step
        longer, with what overlaps: for debugging, `cuda` only."""
        handle = self._here.step
        assert isinstance(self.backend, core.CoreBackend) and handle is not None
        self.backend.begin_step(self.plan.offsets["step.header"], self.step_memory, self.block.used_bytes())
        total = [self.backend.run_seconds(handle, 0, end + 1, repeats) for end in range(len(self._launches))]
        return [after - before for before, after in zip([0.0, *total], total, strict=False)]

    def write(self, name: str, values: Array | BlockArray) -> None:
        """Overwrite a buffer, given in logical layout: for debugging."""
        stored = values.quantized() if isinstance(values, BlockArray) else values
        packed = LAYOUTS[self.layouts.get(name, ROW_MAJOR)].pack(stored, self.buffers[name].dtype)
        self.backend.write(self.plan.offsets[name], packed)

    def stored(self, name: str) -> Array | BlockArray:
        """A copy of a buffer, in logical layout, block formats as they are: for debugging."""
        buffer = self.buffers[name]
        layout, shape = LAYOUTS[self.layouts.get(name, ROW_MAJOR)], buffer.extents(self.limits.symbols())
        raw = np.empty(layout.nbytes(shape, buffer.dtype), np.uint8)
        self.backend.read(self.plan.offsets[name], raw)
        return layout.unpack(raw, shape, buffer.dtype)

    def read(self, name: str) -> Array:
        """`stored`, with block formats dequantised."""
        return self.stored(name).astype(NUMPY.get(self.buffers[name].dtype, np.float32), copy=False)


def _kind(choice: Choice, options: RunnerOptions) -> str:
    """The kind of hardware whose programs run."""
    return "cuda" if choice.backend == "cuda" or options.programs == "cuda" else "cpu"


def _nbytes(buffer: Buffer, layout: str, symbols: Mapping[str, int]) -> int:
    return LAYOUTS[layout].nbytes(buffer.extents(symbols), buffer.dtype)


def _kv_block_bytes(programs: StepPrograms, layouts: Mapping[str, str]) -> int:
    """Bytes of one KV block over all layers, K and V."""
    caches = [buffer for buffer in programs.buffers.values() if buffer.shape[0] == "n_blocks"]
    return sum(_nbytes(buffer, layouts[buffer.name], {"n_blocks": 1}) for buffer in caches)


def _recipe(choice: Choice, options: RunnerOptions) -> Recipe:
    """The quant's recipe. Kernels are compiled for a recipe's own KV format, so no other can run yet."""
    quant, kv_dtype = choice.quant, options.kv_dtype
    roles = recipe(quant, _kind(choice, options))
    if kv_dtype is not None and {"fp32": "f32"}.get(kv_dtype, kv_dtype) != roles.kv:
        raise ConfigError("kv_dtype", f"{kv_dtype!r} with quant {quant}", f"{roles.kv}, the quant's own")
    return roles


def _open_backend(
    shape: Shape, options: RunnerOptions, model: str, natural: Mapping[str, str] = kernel_set.NO_PREFERENCE
) -> tuple[Backend, Choice, dict[str, KernelEntry]]:
    if options.kernel_packs and options.backend in ("cpu", "reference"):
        raise ConfigError(
            "kernel_pack", f"given with backend {options.backend}", "backend auto or cuda", "leave one of the two out"
        )
    if options.backend == "reference":
        choice = kernel_set.choose("reference", options.quant, shape, (), (), natural=natural)
        return ReferenceBackend(), choice, {}
    devices, no_device = _cuda_devices(options.backend)
    fix = kernel_sources.rebuild_fix(model, options.quant or natural["cuda"], devices)
    if devices or options.kernel_packs:
        sources = kernel_sources.find(shape.hash(), options.quant, options.kernel_packs, fix)
    else:
        sources = iter([kernel_sources.embedded()])  # nothing else has kernels for a CPU
    choice = kernel_set.choose(options.backend, options.quant, shape, sources, devices, no_device, fix, natural)
    assert choice.kernel_set is not None
    if choice.backend == "cuda":
        kernels, images = kernel_set.device_images(choice)
        return core.cuda_backend(images, choice.device), choice, kernels
    kernels = {kernel.name: kernel for kernel in choice.kernel_set.kernels}
    return core.cpu_backend(options.threads, options.level), choice, kernels


def _cuda_devices(backend: str) -> tuple[list[dict[str, Any]], str]:
    """The GPUs, and why there are none. Where a GPU was asked for, a missing driver is an error."""
    if backend not in ("auto", "cuda"):
        return [], ""
    try:
        devices = core.extension().cuda_devices()
    except DeviceError as error:
        if backend == "cuda":
            raise
        return [], error.found
    return devices, "" if devices else "the NVIDIA driver reports no device"


def _kv_budget(choice: Choice, programs: StepPrograms) -> int:
    """Bytes the KV cache may take when nothing is said."""
    if choice.backend != "cuda":
        return int(host.available_memory() * _KV_SHARE_OF_HOST)
    device = next(d for d in core.extension().cuda_devices() if d["index"] == choice.device)
    return int(device["total_memory"] * _SHARE_OF_DEVICE) - programs.weight_bytes()


def _limits(
    config: ModelConfig,
    options: RunnerOptions,
    block_bytes: int,
    default_budget: int,
    on_gpu: bool,
    most_logits: int,
) -> Limits:
    """Sizes of everything that grows with the load, within the KV memory. most_logits: that kernels are made for."""
    default = _DEFAULT_SIZES[on_gpu]
    max_rows = default[1] if options.max_rows is None else options.max_rows
    max_seqs = min(default[0], max_rows) if options.max_seqs is None else options.max_seqs
    for name, value in (("max_seqs", max_seqs), ("max_rows", max_rows)):
        if value < 1:
            raise ConfigError(name, f"{value}", "an integer of at least 1")
    if max_rows < max_seqs:
        raise ConfigError("max_rows", f"{max_rows} is below max_seqs {max_seqs}", "max_rows >= max_seqs")
    max_logits = options.max_logits or max_seqs
    if options.max_seqs is None:
        max_logits = max(max_logits, max_seqs)
    wanted = options.max_context or config.max_context
    if not 1 <= wanted <= config.max_context:
        raise ConfigError("max_context", f"{wanted}", f"1..{config.max_context}, the model's own limit")
    max_blocks = math.ceil(wanted / KV_BLOCK_SIZE)
    budget = options.kv_memory_bytes or default_budget
    n_blocks = min(budget // block_bytes, max_seqs * max_blocks)
    if n_blocks < 1:
        raise ConfigError("kv_memory", f"{budget} bytes hold no KV block", f"at least {block_bytes} bytes")
    if n_blocks < max_blocks:
        if options.max_context is not None:
            raise AtlasError(
                "kv_memory",
                f"{budget} bytes hold {n_blocks * KV_BLOCK_SIZE} tokens",
                f"at least {max_blocks * block_bytes} bytes for max_context {wanted}",
                "lower --max-context or raise --kv-memory",
            )
        _log.warning(
            "max_context is %d instead of the model's %d: the KV memory of %d bytes holds no more",
            n_blocks * KV_BLOCK_SIZE,
            wanted,
            budget,
        )
        max_blocks = n_blocks
    return Limits(
        n_rows=max_rows,
        n_seqs=max_seqs,
        n_logits=min(max_logits, most_logits),
        max_blocks=max_blocks,
        n_blocks=n_blocks,
        n_slots=max_seqs,
    )
