"""The runner: a model on a backend. Load reads top to bottom in `Runner.load`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from atlas.build.kernel_file import ROW_MAJOR
from atlas.errors import DeviceError
from atlas.models import ModelConfig, family_of
from atlas.runtime import core, headers, loader, memory_plan, opening, variants, weight_formats
from atlas.runtime.backend import Array, Backend, BoundProgram
from atlas.runtime.dtypes import NUMPY
from atlas.runtime.flight import LOGPROBS, TOKENS, InFlight, Place, Slot, SlotRows
from atlas.runtime.kernel_set import Choice
from atlas.runtime.limits import kv_block_bytes, kv_budget, limits_of, nbytes
from atlas.runtime.memory_plan import MemoryPlan
from atlas.runtime.options import RunnerOptions as RunnerOptions
from atlas.runtime.program import Program
from atlas.runtime.recording import Recording
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL, Limits, StepBlock
from atlas.targets.shape import KV_BLOCK_SIZE, Shard
from atlas.weights import Checkpoint
from atlas.weights.layouts import LAYOUTS
from atlas.weights.quantized import BlockArray

_log = logging.getLogger(__name__)


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
        hidden: the buffer of the rows that the head reads, [n_logits, hidden]; None: they cannot be read here.
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
        self.hidden = None if graphs else _head_rows(forward, layouts)
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
        config = headers.untied(checkpoint, family.configure(checkpoint.config, Shard()), family)
        natural = weight_formats.natural_quants(checkpoint)
        recording = Recording(checkpoint, family, config)
        backend, choice, kernels = opening.open_backend(
            config.shape, options, str(checkpoint.path), natural, recording.lacks
        )
        _log.debug("kernel set %s on %s (%s)", choice.name, backend.describe(), choice.reason)
        roles = opening.recipe_of(choice, options)
        sources, kind = recording.sources, opening.kind(choice, options)
        programs = recording.programs(roles, kind, None if choice.backend == "reference" else kernels)
        headers.check(checkpoint, programs, sources, family.other_parts)

        stage("memory")
        layouts = memory_plan.buffer_layouts(programs, kernels)
        block_bytes = kv_block_bytes(programs, layouts)
        limits = limits_of(
            config,
            options,
            block_bytes,
            options.kv_memory_bytes or kv_budget(choice, programs, block_bytes),
            choice.backend == "cuda",
            variants.most_rows(programs.launches(), kernels, "n_logits"),
        )
        sizes = {name: nbytes(programs.buffers[name], layout, limits.symbols()) for name, layout in layouts.items()}
        # A GPU works beside the host: copies of one step run beside the next.
        places = 2 if choice.backend == "cuda" else 1
        scratch, shared = memory_plan.scratch_of(programs, kernels), memory_plan.shares(programs, kernels)
        plan = memory_plan.plan(programs, limits, sizes, scratch, places, shared)
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
            assert place.plain is not None
            for rows in buckets:
                for handle in (place.forward, place.sample, place.plain.handle):
                    self.backend.capture(handle, PHASE_DECODE, rows)

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
        self.collect(self.submit(logprobs=phase == PHASE_PREFILL))  # once all launches, and then those of most steps
        block.set_phase(PHASE_PREFILL)

    def submit(self, masks: Sequence[Array] | Array = (), logprobs: bool = False, hidden: bool = False) -> InFlight:
        """Start the step that `block` describes; `block` is then the next one's. At most `ahead` + 1 may be in flight.

        masks: rows to deliver, as `deliver_mask` takes them.  logprobs: whether some row asks for them.
        hidden: whether some row's `hidden` is wanted.
        """
        slot, rows = self._slots[self._next], self.block.symbols()["n_logits"]
        plain = slot.place.plain
        if rows == 0 or plain is None or logprobs or hidden or len(masks) or np.any(slot.block.logit_adjust[:rows]):
            self.begin(hidden)
            return self.end(masks, logprobs)
        self.backend.begin_step(slot.place.plan.offsets["step.header"], slot.memory, slot.block.used_bytes())
        self.backend.run(plain.handle, 0, plain.launches)
        return self._submitted(logprobs)

    def begin(self, hidden: bool = False) -> None:
        """The first half of `submit`: everything before masks. `end` must follow; steps in flight may be collected
        between the two."""
        slot = self._slots[self._next]
        self.backend.begin_step(slot.place.plan.offsets["step.header"], slot.memory, slot.block.used_bytes())
        self.backend.run(slot.place.forward, 0, len(self.forward_program.launches))
        if hidden and (rows := self.block.symbols()["n_logits"]):
            assert self.hidden is not None
            slot.read_later(self.hidden, rows)  # now: the sample program may use the memory for something else

    def end(self, masks: Sequence[Array] | Array = (), logprobs: bool = False) -> InFlight:
        """The second half of `submit`, whose arguments it takes."""
        slot, rows = self._slots[self._next], self.block.symbols()["n_logits"]
        if len(masks):
            if slot.place is self._slots[self._next - 1].place:
                self.backend.order_uploads()  # the step before may still read its masks there
            slot.deliver(masks)
        if rows:
            self.backend.run(slot.place.sample, 0, len(self.sample_program.launches))
        return self._submitted(logprobs)

    def _submitted(self, logprobs: bool) -> InFlight:
        """Have the results of the step copied; the next slot is then the one to fill."""
        slot, rows = self._slots[self._next], self.block.symbols()["n_logits"]
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

    def hidden_rows(self, step: InFlight) -> Array:
        """The rows [n_logits, hidden] of a collected step that was submitted with `hidden`, as float32."""
        assert self.hidden is not None
        return step.slot.result(self.hidden, step.rows).astype(np.float32)

    def forward(self) -> None:
        """Run the forward program on the step that `block` describes, all of whose logits are then there: rows that ask
        for no log-probabilities now ask for those of one token."""
        n_top = self.block.logit_n_top[: self.block.symbols()["n_logits"]]
        np.maximum(n_top, 0, out=n_top)
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
        assert isinstance(self.backend, core.CoreBackend)
        whole = dataclasses.replace(self._bound, plan=self.plan, program=Program("step", self._launches))
        handle = self.backend.load(whole)
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


def _head_rows(forward: BoundProgram, layouts: dict[str, str]) -> str | None:
    """The buffer that the head reads, if the host can."""
    for launch in forward.program.launches:
        if launch.name == "final_norm" and not launch.phase:
            name = dict(launch.operands)["out"]
            if forward.buffers[name].dtype in NUMPY and layouts.get(name, ROW_MAJOR) == ROW_MAJOR:
                return name
    return None
