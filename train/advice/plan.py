"""What a run needs, before it is started: memory, disk and time.

Weights, gradients and optimizer state are counted from shapes on the meta device, rows and steps
from the data. Then activations and seconds are measured by the run's own trial, where the answers
are there and memory can hold the run.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftheads.arguments import check_path, nearest
from draftheads.heads.batch import Batch
from draftheads.heads.files import own_name, sweep
from draftheads.heads.formats.hub import refusals
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.adapter import Adapter
from draftheads.heads.target.lora import Lora
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import (
    check_placement,
    read_config,
    reading,
)
from draftheads.heads.target.pretrained import decoder_layers
from draftheads.train.batches import HELDOUT_TOKENS, Order, Reading, release
from draftheads.train.data.answers import has_answers, has_shards
from draftheads.train.entry import one_line
from draftheads.train.features.served import captured_states, measured_rate, serve_command
from draftheads.train.features.sources import OnlineFeatures, SharedFaults
from draftheads.train.launch import make_accelerator, use_huge_pages
from draftheads.train.loop import trial_seconds
from draftheads.train.medusa import start
from draftheads.train.origin import initial_shape
from draftheads.train.recipe import Recipe
from draftheads.train.setup import excess, frozen_target, load_data

ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
    "fsdp2": ("optimizer", "gradients", "weights"),
}
"""What each engine divides over the processes of a launch."""
BYTES_PER_DOCUMENT = 90
"""Of a process that has the data open, measured with 2 million documents."""
LAUNCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")
"""What a launcher tells its processes."""
CLEAR = Path("/proc/self/clear_refs")
"""Where Linux lets a process reset its peak."""


TRIAL = "draftheads-plan-"
"""Beginning of the names of temporary folders."""


class ShapeTarget(Target):
    """A target on the meta device."""

    def unembed(self, hidden: Tensor) -> Tensor:
        """Shapes alone."""
        return hidden.new_empty(*hidden.shape[:-1], self.vocab_size)

    def unembed_weight(self) -> Tensor:
        """Shapes alone."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight


class Shapes:
    """Parameter counts of the models that a run would load or create.

    frozen, per_layer: parameters of the target and of one of its layers. itemsize: bytes per
    number of the target. head, adapter: trained parameters; trained: their bytes in float32.
    adapted: layers with an adapter. states: number of target layers that training reads; features:
    that the head reads. vocabulary: of the head's drafts. buffers: bytes of the head's other
    tensors. row: see `row_bytes`.

    Raises OSError without the target's config.json, ValueError for a head or an adapter that does
    not fit the target.
    """

    def __init__(self, recipe: Recipe) -> None:
        check_path(recipe.target)
        if recipe.target_adapter:
            Lora.open(recipe.target_adapter)
        config = read_config(recipe.target, recipe.target_revision)
        saved = config.get_text_config(decoder=True).dtype or torch.float32
        self.served_dtype: torch.dtype = getattr(torch, recipe.target_dtype, saved)
        dtype = self.served_dtype
        if recipe.target_dtype == "auto" and not torch.cuda.is_available():
            dtype = torch.float32
        with reading(recipe.target), torch.device("meta"):
            # the only experts that run in any dtype on the meta device
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation="batched_mm", trust_remote_code=False
            )
        self.target = ShapeTarget(model, name=recipe.target, fingerprint="")
        self.layers = self.target.layers
        self.frozen = _count(model)
        self.per_layer = _count(decoder_layers(model)) // self.layers
        self.itemsize: int = dtype.itemsize
        self.bits = recipe.target_bits or 8 * self.itemsize
        self.is_served = bool(recipe.features.server)
        self.row = None if self.is_served else row_bytes(self.target)
        # a new head copies lm_head to the CPU: one number, expanded to a matrix, can be copied
        lm_head = model.get_output_embeddings()
        zeros_VD = torch.zeros(()).expand(lm_head.weight.shape)
        lm_head.weight = nn.Parameter(zeros_VD, requires_grad=False)
        vocabulary: Sequence[int] | None = None
        if recipe.head.draft_vocabulary is not None:
            vocabulary = range(min(recipe.head.draft_vocabulary, self.target.vocab_size))
        self.vocabulary = self.target.vocab_size if vocabulary is None else len(vocabulary)
        self.adapter = self.adapted = 0
        with torch.device("meta"):
            if recipe.head.source:
                head = initial_shape(recipe, self.target)
            else:
                head = HEADS[recipe.head.kind].create(self.target, recipe.head, vocabulary)
            if recipe.adapter:
                keys = {"rank", "alpha", "layers", "modules"}
                adapter = Adapter.create(model, "", **recipe.adapter.model_dump(include=keys))
                self.adapter = sum(p.numel() for p in adapter.parameters.values())
                self.adapted = len(adapter.config["layers_to_transform"])
        self.head, self.refusals = _count(head), refusals(head, self.target)
        self.states = len(head.training_layers)
        self.features = len(head.feature_layers)
        self.captured = recipe.features.layers or captured_states(head.training_layers, self.layers)
        self.served_token = (
            len(self.captured) * self.target.hidden_size * self.served_dtype.itemsize
        )
        self.trained = 4 * (self.head + self.adapter)
        self.buffers = sum(x.nbytes for x in head.state_dict().values()) - 4 * self.head

    def target_bytes(self, layers: int, shards: int = 1) -> int:
        """Bytes of a target of this many layers on one device, each layer split into `shards`."""
        outside = (self.frozen - self.layers * self.per_layer) * self.itemsize
        if self.is_served:
            return outside
        return outside + layers * self.per_layer * self.bits // 8 // shards

    def feature_bytes(self, tokens: float) -> int:
        """Bytes of the features of this many tokens in the target's dtype."""
        return int(tokens * self.target.hidden_size * self.states * self.itemsize)


class RowBytes(NamedTuple):
    """Bytes of the target's cache for one row. keys_and_values: of 1,000 tokens. states: of
    recurrent layers, whatever the length.
    """

    keys_and_values: int
    states: int


@torch.no_grad()
def row_bytes(target: Target) -> RowBytes | None:
    """What a cache holds after a prompt of two tokens; None if the model does not run on the meta
    device.
    """
    cache = target.new_cache(1, 1000)
    try:
        target.prefill([[0, 0]], cache, ())
    except RuntimeError:  # a model that reads values; its other figures are worth printing
        return None
    layers = [layer for layer in cache.layers if layer.is_initialized]
    keys_and_values = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    states = 0
    if cache.states is not None:
        for mixer in cache.states.committed.values():
            states += sum(state.nbytes for state in mixer.values())
    return RowBytes(keys_and_values, states)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Workload:
    """A run's rows and steps. Without data, rows are assumed to be full.

    length: tokens of a full row. rows: to train on, with `tokens` in total; None: the data is
    missing. data: bytes of memory. row_tokens: mean tokens per row. sizes, learned: tokens and
    learned tokens of each row. heldout: tokens evaluated at each save. rows_per_step,
    tokens_per_step: over all processes. micro_batches: per process. steps, epochs, saves: None
    where unknown. stores: whether features are written first. Raises what `load_data` raises.
    """

    def __init__(self, recipe: Recipe, target: Target, processes: int) -> None:
        data, run = recipe.data, recipe.run
        self.length = min(data.sequence_length, target.context)
        self.rows = None
        self.heldout = HELDOUT_TOKENS
        self.sizes: Sequence[int] = [self.length]
        self.learned: Sequence[int] = [self.length - 1]
        self.data = 0
        self.stores = recipe.features.mode == "cached"
        if has_answers(data.path):
            answers = load_data(recipe, target, log=lambda line: None)
            self.rows = len(answers.train)
            self.stores &= bool(answers.manifest["target"])  # else another toolkit has written them
            self.data = BYTES_PER_DOCUMENT * len(answers.documents)
            if not has_shards(answers.manifest):
                self.data += 4 * answers.documents.size
            self.heldout = min(HELDOUT_TOKENS, sum(answers.heldout.sizes))
            self.sizes = answers.train.sizes
            self.learned = answers.train.learned
        self.tokens = sum(self.sizes)
        self.row_tokens = self.tokens / len(self.sizes)
        reading = Reading(self.rows, self.length, run.epochs_of_size, processes)
        count, note = reading.rows_per_step(run.tokens_per_step, data.rows_per_batch)
        self.rows_per_step = count
        self.tokens_per_step = count * self.row_tokens
        self.micro_batches = max(1, count // (data.rows_per_batch * processes))
        self.steps = run.steps
        self.epochs = None
        self.saves = None
        if self.rows and run.epochs:
            self.steps = Order(self.rows, count, run.seed).steps(run.epochs)
        notes = [note, *excess(recipe, target)]
        if self.steps:
            notes.append(reading.warning(self.steps, count))
            self.epochs = self.steps * count / self.rows if self.rows else None
            self.saves = math.ceil(self.steps / run.save_every)
        self.note = "; ".join(filter(None, notes))


@dataclass(frozen=True)
class StepTrial:
    """What a few steps predict for the run. base, activations: bytes. load, save: seconds per run
    and per save. features: the target's seconds of a step; rest: the others.
    """

    base: int
    activations: int
    load: float
    save: float
    features: float
    rest: float


def try_steps(recipe: Recipe, shapes: Shapes, work: Workload) -> StepTrial:
    """Start the run, in another folder, and take the steps of its trial, which change nothing, with
    one or two micro batches each. Raises what training raises.
    """
    sweep(Path(tempfile.gettempdir()), f"{TRIAL}*")
    owner = own_name(Path(TRIAL)).name.removeprefix(f".{TRIAL}")
    gc.collect()
    release()
    forget_peak()
    base = _resident() if _device() == "cpu" else 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(owner, f".{TRIAL}") as folder, _apart():
        short = _short(recipe, shapes, work, Path(folder))
        run = start(short, make_accelerator(short), None)
        load = time.perf_counter() - began
        try:
            if shapes.is_served:
                source = RandomFeatures(run.target, run.head.training_layers)
                run.features = SharedFaults(source, run.target, len(source.layers))
            first, again = trial_seconds(run)
        finally:
            run.features.close()
            run.checkpoints.close()
    rows = _micro_batches(work) * recipe.data.rows_per_batch
    known = base + shapes.target_bytes(shapes.layers) + 2 * shapes.trained  # weights and gradients
    if short.data.cache_gb and _device() == "cpu":
        known += shapes.feature_bytes(2 * rows * work.row_tokens)  # of two steps
    # the target's forward pass and the head's, a third of its step, for each held-out row
    of_row = (max(0.0, first - again) + again / 3) / rows
    times = work.micro_batches / _micro_batches(work)
    return StepTrial(
        base=base,
        activations=max(0, peak_memory() - known),
        load=load,
        save=of_row * work.heldout / work.row_tokens,
        features=max(0.0, first - again) * times,
        rest=again * times,
    )


def _short(recipe: Recipe, shapes: Shapes, work: Workload, output: Path) -> Recipe:
    """The recipe of a trial, which writes no features and keeps those that the run keeps."""
    features, data = recipe.features, recipe.data
    if shapes.is_served or work.stores:
        mode = "served" if shapes.is_served else "online"
        features = features.model_copy(update={"mode": mode})
    is_known = bool(data.cache_gb) or recipe.features.mode != "online"
    data = data.model_copy(update={"cache_gb": 1e6 if is_known else 0.0})
    tokens = _micro_batches(work) * data.rows_per_batch * work.length
    steps = {"tokens_per_step": tokens, "steps": 2, "epochs": None, "minutes": None}
    run = recipe.run.model_copy(update={"output": output, "trackers": [], **steps})
    parts = {"features": features, "data": data, "run": run, "target_placement": "whole"}
    return recipe.model_copy(update=parts)


def _micro_batches(work: Workload) -> int:
    """Of a trial's step: the first makes gradients, others add to them."""
    return min(2, work.micro_batches)


class RandomFeatures(OnlineFeatures):
    """In place of those that a server gives."""

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource`."""
        shape = (*batch.tokens_BT.shape, len(self.layers) * self.target.hidden_size)
        return torch.randn(shape, dtype=self.target.dtype, device=self.target.device)


@contextmanager
def _apart() -> Iterator[None]:
    """Train in this process alone, whatever launch it belongs to, and print nothing."""
    launch = {key: os.environ.pop(key) for key in LAUNCH if key in os.environ}
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        os.environ.update(launch)


def forget_peak() -> None:
    """Begin to count `peak_memory` anew."""
    if _device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # see proc(5)


def peak_memory() -> int:
    """Most bytes of memory since `forget_peak`; those of now where the system cannot forget."""
    if _device() == "cuda":
        return int(torch.cuda.max_memory_allocated())
    if CLEAR.exists():
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _resident()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Plan:
    """What a run needs. trial: None, for `reason`, where only shapes were counted."""

    recipe: Recipe
    processes: int
    engine: str
    shapes: Shapes
    work: Workload
    trial: StepTrial | None
    reason: str
    rate: float | str = ""  # tokens per second that servers give, or why it is not known

    @cached_property
    def served(self) -> dict[str, Any] | None:
        """What servers must give. bytes: of a token; wanted: tokens per second, if the time of a
        step is known; folder: bytes at most in the exchange folder.
        """
        recipe, shapes = self.recipe, self.shapes
        if not shapes.is_served:
            return None
        batches = 1 + recipe.batches_ahead
        rows = self.processes * recipe.data.rows_per_batch * batches
        return {
            "states": shapes.captured,
            "bytes": shapes.served_token,
            "wanted": self.work.tokens_per_step / self.time["step"] if self.time else None,
            "rate": self.rate,
            "folder": rows * self.work.length * shapes.served_token,
            "command": serve_command(recipe, shapes.captured, shapes.served_dtype),
        }

    @cached_property
    def memory(self) -> dict[str, int | None]:
        """Peak bytes of one process, by part; None: not measured."""
        shapes, work, trial = self.shapes, self.work, self.trial
        moments = 3 if self.engine in ("zero1", "zero2") else 2  # DeepSpeed keeps weights twice
        trained = {"weights": 1, "gradients": 1, "optimizer": moments}
        parts: dict[str, int | None] = {}
        for part, copies in trained.items():
            shards = self.processes if part in ENGINES[self.engine] else 1
            parts[part] = math.ceil(copies * shapes.trained / shards)
        shards = self.processes if self.recipe.target_placement == "sharded" else 1
        parts["target"] = shapes.target_bytes(shapes.layers, shards)
        if _device() == "cpu":
            parts["libraries"] = trial.base if trial else _resident()
            parts["data"] = work.data
            # the first process trains on while a copy of weights and moments is written
            parts["checkpoint"] = self.disk["checkpoint"]
            if self.recipe.features.mode == "online":
                rows = min(work.rows or 0, (work.steps or 0) * work.rows_per_step)
                room = int(self.recipe.data.cache_gb * 1e9)
                parts["cache"] = min(room, shapes.feature_bytes(rows * work.row_tokens))
        return {**parts, "activations": trial.activations if trial else None}

    @property
    def peak(self) -> int:
        """Bytes of memory of one process, without what was not measured."""
        return sum(size or 0 for size in self.memory.values())

    @property
    def limit(self) -> int:
        """Bytes of memory available to one process."""
        return device_memory() // (self.processes if _device() == "cpu" else 1)

    @cached_property
    def disk(self) -> dict[str, int]:
        """Bytes of a checkpoint, of which there are at most `checkpoints`; features; free; total
        that the run writes.
        """
        run, shapes, work = self.recipe.run, self.shapes, self.work
        tokens = 0
        if self.work.stores:
            tokens = round(work.row_tokens * (work.rows or work.rows_per_step * (work.steps or 1)))
            if not self.recipe.adapter:  # which changes the features of held-out rows
                tokens += work.heldout
        features = shapes.feature_bytes(tokens)
        checkpoint = 3 * shapes.trained + shapes.buffers  # weights and two moments
        most = run.keep + 2  # the best one may be older, and one is being written
        count = min(work.saves or most, most)
        return {
            "checkpoint": checkpoint,
            "checkpoints": count,
            "features": features,
            "free": shutil.disk_usage(nearest(run.output)).free,
            "total": checkpoint * count + features,
        }

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds; empty without a trial. step: mean; later: steps whose features are known; load;
        save: with the evaluation; total: where the number of steps is known.
        """
        trial, work = self.trial, self.work
        if not trial:
            return {}
        rows = work.rows or work.rows_per_step
        load = trial.load
        features = trial.features
        if self.recipe.features.mode == "cached":
            load += features * rows / work.rows_per_step if work.stores else 0.0
            features = 0.0
        room = self.recipe.data.cache_gb * 1e9
        cached = min(1.0, room / self.shapes.feature_bytes(rows * work.row_tokens))
        features *= 1 - cached * (1 - 1 / max(1.0, work.epochs or 1.0))  # none after one epoch
        step = trial.rest + features
        seconds = {"step": step, "later": trial.rest, "load": load, "save": trial.save}
        if work.steps and work.saves:
            seconds["total"] = load + work.steps * step + work.saves * trial.save
        if minutes := self.recipe.run.minutes:
            saves = math.ceil(60 * minutes / step / self.recipe.run.save_every)
            seconds["total"] = load + 60 * minutes + saves * trial.save
        return seconds

    @property
    def steps(self) -> int | None:
        """Optimizer steps; with a time budget, from the trial's; None: unknown."""
        minutes = self.recipe.run.minutes
        if minutes and self.time:
            return max(1, int(60 * minutes / self.time["step"]))
        return self.work.steps

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        shapes, work = self.shapes, self.work
        return {
            "launch": {"processes": self.processes, "engine": self.engine, "device": _device()},
            "target": {"name": shapes.target.name, "parameters": shapes.frozen},
            "head": {"kind": self.recipe.head.kind, "parameters": shapes.head},
            "adapter": {"layers": shapes.adapted, "parameters": shapes.adapter},
            "data": {"rows": work.rows, "tokens": work.tokens, "heldout": work.heldout},
            "steps": {
                "count": self.steps,
                "rows": work.rows_per_step,
                "micro_batches": work.micro_batches,
                "tokens_per_step": work.tokens_per_step,
                "note": work.note,
            },
            "memory": {**self.memory, "total": self.peak, "limit": self.limit},
            "disk": self.disk,
            "time": self.time or None,
            "served": self.served,
            "decoding": shapes.row._asdict() if shapes.row else None,
            "reason": self.reason,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def make_plan(
    recipe: Recipe,
    processes: int | None = None,
    engine: str = "ddp",
    *,
    probe: bool = True,
) -> Plan:
    """Count shapes and, with `probe`, try a few steps.

    processes: default WORLD_SIZE, else one. engine: a key of ENGINES. Raises the ValueError or
    OSError that training would raise for target, head, adapter, data and launch.
    """
    use_huge_pages()
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if engine not in ENGINES:
        raise ValueError(f"--engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if recipe.adapter and "weights" in ENGINES[engine]:
        raise ValueError(
            f"--engine: expected ddp, zero1 or zero2 with an adapter, got {engine}, which would "
            "shard matrices that the target reads between the heads' forward passes"
        )
    check_placement(recipe.target_placement, recipe.target_bits, processes)
    shapes = Shapes(recipe)
    work = Workload(recipe, shapes.target, processes)
    # a step of few rows has smaller batches
    batch = min(recipe.data.rows_per_batch, work.rows_per_step // processes)
    data = recipe.data.model_copy(update={"rows_per_batch": batch})
    recipe = recipe.model_copy(update={"data": data})
    skipped = "--no-probe was given"
    plan = Plan(recipe, processes, engine, shapes, work, None, skipped, rate=skipped)
    return _measured(plan) if probe else plan


def _measured(plan: Plan) -> Plan:
    """The plan with what a trial and servers show on this machine."""
    recipe, shapes, work = plan.recipe, plan.shapes, plan.work
    alone = replace(plan, processes=1, engine="ddp")  # as it is tried
    trial = None
    rate: float | str = served_rate(recipe, shapes) if shapes.is_served else ""
    reason = ""
    if work.rows is None:
        reason = f"no answers in {recipe.data.path} to try a step with"
    elif alone.peak > alone.limit:
        reason = "memory cannot hold the run of one process"
    else:
        try:
            trial = try_steps(recipe, shapes, work)
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            reason = f"a trial failed: {one_line(error)}"  # shapes are worth printing
    return replace(plan, trial=trial, reason=reason, rate=rate)


def served_rate(recipe: Recipe, shapes: Shapes) -> float | str:
    """Tokens per second that the recipe's servers give, or why that is not known."""
    if not has_answers(recipe.data.path):
        return "there is no data yet"
    try:
        target = frozen_target(recipe, Accelerator())
        rows = load_data(recipe, target, log=_silent).train
        return measured_rate(target, recipe, rows, shapes.captured)
    except (OSError, ValueError) as error:
        return one_line(error)


def _silent(line: str) -> None:
    """A log of what another one says."""


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory() -> int:
    """Bytes of memory of the GPU, or of RAM within the cgroup's limit."""
    if _device() == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    total: int = psutil.virtual_memory().total
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists():
        limit = group.read_text().strip()
        if limit != "max":
            return min(total, int(limit))
    return total
