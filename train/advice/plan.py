"""Predicts the memory and time of a run before it starts.

Weights, gradients and optimizer state are counted from shapes on the meta device, rows and steps
from the data. Activations and seconds are then measured with a few of the run's own steps, if the
answers exist and memory can hold the run.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftheads.arguments import check_path
from draftheads.heads.files import own_name, sweep
from draftheads.heads.formats.hub import refusals
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.lora import Lora
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import (
    check_placement,
    read_config,
    reading,
)
from draftheads.heads.target.pretrained import decoder_layers
from draftheads.train.batches import HELDOUT_TOKENS, DataAmount, Order, release
from draftheads.train.data.answers import has_answers
from draftheads.train.entry import one_line
from draftheads.train.features.served import captured_states, serve_command
from draftheads.train.launch import make_accelerator, use_huge_pages
from draftheads.train.loop import train_step
from draftheads.train.medusa import start
from draftheads.train.origin import initial_shape
from draftheads.train.recipe import Recipe
from draftheads.train.run import Run
from draftheads.train.setup import excess, load_data

ENGINES = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
    "fsdp2": ("optimizer", "gradients", "weights"),
}
"""Engine -> the parts that it divides over the processes of a launch."""
CLEAR = Path("/proc/self/clear_refs")
"""The file through which Linux lets a process reset its peak memory."""


TRIAL = "draftheads-plan-"
"""Beginning of the names of temporary folders."""
LONG_S = 5.0
"""A first step that takes longer than this many seconds is not repeated."""


class ShapeTarget(Target):
    """A target on the meta device, which computes no logits."""

    def _checked_lm_head(self) -> Any:
        return self.model.get_output_embeddings()


class Shapes:
    """Parameter counts of the models that a run would load or create.

    frozen, per_layer: parameters of the target and of one of its layers. itemsize: bytes per
    number of the target. head, adapter: trained parameters; trained: their bytes in float32.
    states: number of target layers that training reads.
    checkpoint: bytes of weights, moments and the head's other tensors.

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
        if recipe.target_dtype == "auto" and not _on_gpu():
            dtype = torch.float32
        with reading(recipe.target), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        self.target = ShapeTarget(model, name=recipe.target, fingerprint="")
        self.layers = self.target.layers
        self.frozen = _count(model)
        self.per_layer = _count(decoder_layers(model)) // self.layers
        self.itemsize: int = dtype.itemsize
        self.bits = recipe.target_bits or 8 * self.itemsize
        self.is_served = bool(recipe.features.server)
        # a new head copies lm_head to the CPU: one number, expanded to a matrix, can be copied
        lm_head = model.get_output_embeddings()
        zeros_VD = torch.zeros(()).expand(lm_head.weight.shape)
        lm_head.weight = nn.Parameter(zeros_VD, requires_grad=False)
        vocabulary: Sequence[int] | None = None
        if recipe.head.draft_vocabulary is not None:
            vocabulary = range(min(recipe.head.draft_vocabulary, self.target.vocab_size))
        self.adapter = 0
        with torch.device("meta"):
            if recipe.head.source:
                head = initial_shape(recipe, self.target)
            else:
                head = HEADS[recipe.head.kind].create(self.target, recipe.head, vocabulary)
            if recipe.adapter:
                keys = {"rank", "alpha", "layers", "modules"}
                adapter = self.target.adapt(**recipe.adapter.model_dump(include=keys))
                self.adapter = sum(p.numel() for p in adapter.parameters.values())
        self.head, self.refusals = _count(head), refusals(head, self.target)
        self.states = len(head.training_layers)
        self.captured = recipe.features.layers or captured_states(head.training_layers, self.layers)
        self.trained = 4 * (self.head + self.adapter)
        buffers = sum(x.nbytes for x in head.state_dict().values()) - 4 * self.head
        self.checkpoint = 3 * self.trained + buffers

    def target_bytes(self, shards: int = 1) -> int:
        """Bytes of the target on one device, each layer split into `shards`."""
        layers = self.layers * self.per_layer
        outside = (self.frozen - layers) * self.itemsize
        if self.is_served:
            return outside
        return outside + layers * self.bits // 8 // shards

    def feature_bytes(self, tokens: float) -> int:
        """Bytes of the features of this many tokens in the target's dtype."""
        return int(tokens * self.target.hidden_size * self.states * self.itemsize)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Workload:
    """A run's rows and steps. Without data, rows are assumed to be full.

    length: tokens of a full row. rows: to train on, with `tokens` in total; None: the data is
    missing. row_tokens: mean tokens per row. heldout: tokens evaluated at each save. rows_per_step,
    tokens_per_step: over all processes. micro_batches: per process. steps, epochs: None where
    unknown. stores: whether features are written first. Raises what `load_data` raises.
    """

    def __init__(self, recipe: Recipe, target: Target, processes: int) -> None:
        data, run = recipe.data, recipe.run
        self.length = min(data.sequence_length, target.context)
        self.rows = None
        self.heldout = HELDOUT_TOKENS
        self.tokens = self.length
        self.stores = recipe.features.mode == "cached"
        if has_answers(data.path):
            answers = load_data(recipe, target, log=lambda line: None)
            self.rows = len(answers.train)
            self.heldout = min(HELDOUT_TOKENS, sum(answers.heldout.sizes))
            self.tokens = sum(answers.train.sizes)
        self.row_tokens = self.tokens / (self.rows or 1)
        reading = DataAmount(self.rows, self.length, run.epochs_of_size, processes)
        count, note = reading.rows_per_step(run.tokens_per_step, data.rows_per_batch)
        self.rows_per_step = count
        self.tokens_per_step = count * self.row_tokens
        self.micro_batches = max(1, count // (data.rows_per_batch * processes))
        self.steps = run.steps
        self.epochs = None
        if self.rows and run.epochs:
            self.steps = Order(self.rows, count, run.seed).steps(run.epochs)
        notes = [note, *excess(recipe, target)]
        if self.steps:
            notes.append(reading.warning(self.steps, count))
            self.epochs = self.steps * count / self.rows if self.rows else None
        self.note = "; ".join(filter(None, notes))


@dataclass(frozen=True)
class StepTrial:
    """Measurements of a few steps. base, activations: bytes. load, save: seconds per run and per
    save. features: the target's seconds in a step; rest: the other seconds.
    """

    base: int
    activations: int
    load: float
    save: float
    features: float
    rest: float


def try_steps(recipe: Recipe, shapes: Shapes, work: Workload) -> StepTrial:
    """Start the run in a temporary folder, and take two or three steps of one micro batch each.
    Raises what training raises.
    """
    sweep(Path(tempfile.gettempdir()), f"{TRIAL}*")
    owner = own_name(Path(TRIAL)).name.removeprefix(f".{TRIAL}")
    gc.collect()
    release()
    forget_peak()
    base = 0 if _on_gpu() else _resident()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(owner, f".{TRIAL}") as folder, _in_silence():
        short = _short(recipe, work, Path(folder))
        run = start(short, make_accelerator(short))
        load = time.perf_counter() - began
        with closing(run.checkpoints), closing(run.features):
            first, again = trial_seconds(run)
    rows = recipe.data.rows_per_batch
    known = base + shapes.target_bytes() + 4 * shapes.trained  # weights, gradients, two moments
    if short.data.cache_gb and not _on_gpu():
        known += shapes.feature_bytes(2 * rows * work.row_tokens)  # features of two steps
    # the target's forward pass and the head's, a third of its step, for each held-out row
    of_row = (max(0.0, first - again) + again / 3) / rows
    return StepTrial(
        base=base,
        activations=max(0, peak_memory() - known),
        load=load,
        save=of_row * work.heldout / work.row_tokens,
        features=max(0.0, first - again) * work.micro_batches,
        rest=again * work.micro_batches,
    )


def trial_seconds(run: Run) -> tuple[float, float]:
    """Seconds of a step, and of a step whose features are in memory."""

    def seconds(step: int) -> float:
        run.state = replace(run.state, step=step, steps=step + 1)
        run.batches = run.micro_batches()
        began = time.perf_counter()
        with closing(run.batches):
            train_step(run, step)
        return time.perf_counter() - began

    for number in range(2):  # the first warms up
        first = seconds(number)
        if first > LONG_S:
            break
    for parameter in run.engine.learner.trained().values():
        parameter.grad = torch.zeros_like(parameter)  # as left by an earlier micro batch
    return first, seconds(number)


def _short(recipe: Recipe, work: Workload, output: Path) -> Recipe:
    """The recipe of a trial. It writes no features, keeps those in memory that the run would keep,
    and lets an adapter learn from the first step, because that costs most.
    """
    features = recipe.features
    is_known = bool(recipe.data.cache_gb or features.server) or features.mode == "cached"
    if work.stores:
        features = features.model_copy(update={"mode": "online"})
    data = recipe.data.model_copy(update={"cache_gb": 1e6 if is_known else 0.0})
    tokens = recipe.data.rows_per_batch * work.length
    steps = {"tokens_per_step": tokens, "steps": 2, "epochs": None, "minutes": None}
    run = recipe.run.model_copy(update={"output": output, "trackers": [], **steps})
    adapter = recipe.adapter and recipe.adapter.model_copy(update={"start": 0.0})
    parts = {
        "features": features,
        "data": data,
        "run": run,
        "adapter": adapter,
        "target_placement": "whole",
    }
    return recipe.model_copy(update=parts)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Print and log nothing."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def forget_peak() -> None:
    """Reset `peak_memory`."""
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # see proc(5)


def peak_memory() -> int:
    """Most bytes of memory since `forget_peak`; the present bytes if the system cannot reset the
    peak.
    """
    if _on_gpu():
        return int(torch.cuda.max_memory_allocated())
    if CLEAR.exists():
        # getrusage includes the peak of the parent process
        kilobytes = re.findall(r"VmHWM:\s*(\d+)", CLEAR.with_name("status").read_text())[0]
        return int(kilobytes) * 1024
    return _resident()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Plan:
    """The predicted needs of a run. trial: None if, for `reason`, only shapes were counted."""

    recipe: Recipe
    processes: int
    engine: str
    shapes: Shapes
    work: Workload
    trial: StepTrial | None
    reason: str

    @cached_property
    def memory(self) -> dict[str, int]:
        """Peak bytes of one process by part, without activations unless a trial measured them."""
        shapes, work, trial = self.shapes, self.work, self.trial
        moments = 3 if self.engine in ("zero1", "zero2") else 2  # DeepSpeed keeps weights twice
        trained = {"weights": 1, "gradients": 1, "optimizer": moments}
        parts: dict[str, int] = {}
        for part, copies in trained.items():
            shards = self.processes if part in ENGINES[self.engine] else 1
            parts[part] = math.ceil(copies * shapes.trained / shards)
        shards = self.processes if self.recipe.target_placement == "sharded" else 1
        parts["target"] = shapes.target_bytes(shards)
        if not _on_gpu():
            parts["libraries"] = trial.base if trial else _resident()
            # the first process trains on while a copy of weights and moments is written
            parts["checkpoint"] = shapes.checkpoint
            if self.recipe.features.mode == "online":
                tokens: float = work.tokens
                if work.steps:
                    tokens = min(tokens, work.steps * work.tokens_per_step)
                room = int(self.recipe.data.cache_gb * 1e9)
                parts["cache"] = min(room, shapes.feature_bytes(tokens))
        if trial:
            parts["activations"] = trial.activations
        return parts

    @property
    def peak(self) -> int:
        """Peak bytes of one process, without parts that were not measured."""
        return sum(self.memory.values())

    @property
    def limit(self) -> int:
        """Bytes of memory available to one process."""
        return device_memory() // (1 if _on_gpu() else self.processes)

    @property
    def fits(self) -> bool:
        """True if memory can hold the run, as far as it was counted or measured."""
        return self.peak <= self.limit

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds of a mean step and in total, and the number of steps; empty without a trial."""
        trial, work, run = self.trial, self.work, self.recipe.run
        if not trial:
            return {}
        epoch = work.tokens / work.tokens_per_step
        load = trial.load
        first = later = trial.rest
        if work.stores:
            load += trial.features * epoch
        elif self.recipe.features.mode == "online" and not self.shapes.is_served:  # asked for ahead
            room = self.recipe.data.cache_gb * 1e9
            first += trial.features
            known = min(1.0, room / self.shapes.feature_bytes(work.tokens))
            later = first - known * trial.features
        steps: float = work.steps or 0
        if run.minutes:
            rest = 60 * run.minutes - epoch * first
            steps = epoch + rest / (first if rest < 0 else later)
        seconds = min(steps, epoch) * first + max(0.0, steps - epoch) * later
        saves = math.ceil(steps / run.save_every)
        total = load + seconds + saves * trial.save
        return {"step": seconds / steps, "steps": math.ceil(steps), "total": total}

    @property
    def servers(self) -> list[str]:
        """Lines about the servers of features: the tokens per second that they must deliver, and
        the command that starts them. Empty without servers.
        """
        shapes, trial = self.shapes, self.trial
        if not shapes.is_served:
            return []
        size = len(shapes.captured) * shapes.target.hidden_size * shapes.served_dtype.itemsize
        needs = f"server: {size / 1024:.4g} KiB per token (states {shapes.captured})"
        if trial:
            wanted = self.work.tokens_per_step / trial.rest
            given = self.work.tokens_per_step / max(trial.features, 1e-9)
            needs += f"; it should give {wanted:,.0f} tokens per second, and gives {given:,.0f}"
        command = serve_command(self.recipe, shapes.captured, shapes.served_dtype)
        return [needs, f"start it with: {command}"]


def make_plan(
    recipe: Recipe,
    processes: int = 1,
    engine: str = "ddp",
    *,
    probe: bool = True,
    counted: Callable[[Plan], object] | None = None,
) -> Plan:
    """Count shapes and, with `probe`, try a few steps. counted: called with the plan before the
    trial.

    engine: a key of ENGINES. Raises the ValueError or OSError that training would raise for target,
    head, adapter, data and launch.
    """
    use_huge_pages()
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
    plan = Plan(recipe, processes, engine, shapes, work, None, "--no-probe was given")
    if counted:
        counted(plan)
    if not probe:
        return plan
    alone = replace(plan, processes=1, engine="ddp")  # the launch of the trial
    if work.rows is None:
        return replace(plan, reason=f"no answers in {recipe.data.path} to try a step with")
    if not alone.fits:
        return replace(plan, reason="memory cannot hold the run of one process")
    try:
        return replace(plan, trial=try_steps(recipe, shapes, work), reason="")
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        # the counted shapes are still useful
        return replace(plan, reason=f"a trial failed: {one_line(error)}")


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def device_memory() -> int:
    """Bytes of memory of the GPU, or of RAM within the cgroup's limit."""
    if _on_gpu():
        return int(torch.cuda.mem_get_info()[1])
    total: int = psutil.virtual_memory().total
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists():
        limit = group.read_text().strip()
        if limit != "max":
            return min(total, int(limit))
    return total
