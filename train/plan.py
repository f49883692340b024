"""What a run needs, before anything is loaded: memory, disk and time.

Weights, gradients and optimizer state are counted from shapes on the meta device, rows and steps
from the data. Activations and seconds are measured: a child process (this file, run as a module)
trains a few steps on a random target of the same widths. A target with more than DEEPEST layers is
cut to SHALLOW, and what depends on depth is scaled by the number of layers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from draftheads.heads.adapter import Adapter
from draftheads.heads.kinds import HEADS
from draftheads.heads.placement import check_path, check_placement, read_config, reading
from draftheads.heads.pretrained import decoder_layers
from draftheads.heads.target import Target
from draftheads.infer.measure.precision import Pace, measured_pace
from draftheads.train.batches import HELDOUT_TOKENS, Order, Reading
from draftheads.train.data.answers import MANIFEST, has_shards, new_manifest, store_batch
from draftheads.train.data.shards import rows_of, to_batch
from draftheads.train.loop import fit
from draftheads.train.recipe import Recipe, load_recipe
from draftheads.train.setup import load_data

FEATURE_BYTES = {"bf16": (2, 0), "fp8": (1, 4), "fp32": (4, 0)}
"""Stored features: bytes per number, and per token and layer."""
ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
    "fsdp2": ("optimizer", "gradients", "weights"),
}
"""What each engine divides over the processes of a launch."""
DEEPEST, SHALLOW = 8, 4
BACKWARD = 2
"""Cost of a layer's backward pass, in forward passes."""
FEWEST, MOST, TRIAL_TOKENS = 4, 16, 1 << 15
"""Steps of each kind in a trial: enough to read TRIAL_TOKENS, within these limits."""
BYTES_PER_DOCUMENT = 90
"""Of a process that has the data open: scripts/benchmarks/answers_scale.py."""
PATIENCE = 600
"""Seconds that a trial may take."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


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
    that the head reads. buffers: bytes of the head's other tensors.

    Raises OSError without the target's config.json, ValueError for a head or an adapter that does
    not fit the target.
    """

    def __init__(self, recipe: Recipe) -> None:
        check_path(recipe.target)
        config = read_config(recipe.target, recipe.target_revision)
        with reading(recipe.target), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        self.target = ShapeTarget(model, name=recipe.target, fingerprint="")
        self.layers = self.target.layers
        self.frozen, self.per_layer = _count(model), _count(decoder_layers(model)) // self.layers
        dtype = getattr(torch, recipe.target_dtype, self.target.config.dtype or torch.float32)
        on_cpu = recipe.target_dtype == "auto" and not torch.cuda.is_available()
        self.itemsize: int = 4 if on_cpu else dtype.itemsize
        self.bits = recipe.target_bits or 8 * self.itemsize
        # a new head copies lm_head to the CPU: one number, expanded to a matrix, can be copied
        lm_head = model.get_output_embeddings()
        zeros_VD = torch.zeros(()).expand(lm_head.weight.shape)
        lm_head.weight = nn.Parameter(zeros_VD, requires_grad=False)
        vocabulary: Sequence[int] | None = None
        if recipe.head.draft_vocabulary is not None:
            vocabulary = range(min(recipe.head.draft_vocabulary, self.target.vocab_size))
        self.adapter = self.adapted = 0
        with torch.device("meta"):
            head = HEADS[recipe.head.kind].create(self.target, recipe.head, vocabulary)
            if recipe.adapter:
                keys = {"rank", "alpha", "layers", "modules"}
                adapter = Adapter.create(model, "", **recipe.adapter.model_dump(include=keys))
                self.adapter = sum(p.numel() for p in adapter.parameters.values())
                self.adapted = len(adapter.config["layers_to_transform"])
        self.head, self.states = _count(head), len(head.training_layers)
        self.features = len(head.feature_layers)
        self.trained = 4 * (self.head + self.adapter)
        self.buffers = sum(x.nbytes for x in head.state_dict().values()) - 4 * self.head

    def target_bytes(self, layers: int, shards: int = 1) -> int:
        """Bytes of a target of this many layers on one device, each layer split into `shards`."""
        outside = (self.frozen - self.layers * self.per_layer) * self.itemsize
        return outside + layers * self.per_layer * self.bits // 8 // shards

    def feature_bytes(self, tokens: float) -> int:
        """Bytes of the features of this many tokens in the target's dtype."""
        return int(tokens * self.target.hidden_size * self.states * self.itemsize)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Workload:
    """A run's rows and steps. Without data, rows are assumed to be full.

    length: tokens of a full row. rows: to train on, with `tokens` in total; None: the data is
    missing. data: bytes of memory. row_tokens: mean tokens per row. sizes: (tokens, learned tokens)
    of each row. heldout: tokens evaluated at each save. rows_per_step, tokens_per_step: over all
    processes. micro_batches: per process. steps, epochs, saves: None where unknown. alone: share of
    the steps that train heads alone. Raises what `load_data` raises.
    """

    def __init__(self, recipe: Recipe, target: Target, processes: int) -> None:
        data, run = recipe.data, recipe.run
        self.length = min(data.sequence_length, target.context)
        self.rows, self.heldout = None, HELDOUT_TOKENS
        self.sizes = [(self.length, self.length - 1)]
        self.data = 0
        if (data.path / MANIFEST).is_file():
            found = load_data(recipe, target, log=lambda line: None)
            self.rows = len(found.train)
            self.data = BYTES_PER_DOCUMENT * len(found.documents)
            if not has_shards(found.manifest):
                self.data += 4 * found.documents.size
            self.heldout = min(HELDOUT_TOKENS, sum(found.heldout.sizes))
            self.sizes = list(zip(found.train.sizes, found.train.learned, strict=True))
        self.tokens = sum(size for size, _ in self.sizes)
        self.row_tokens = self.tokens / len(self.sizes)
        reading = Reading(self.rows, self.length, run.epochs, processes)
        count, note = reading.rows_per_step(run.tokens_per_step, data.rows_per_batch)
        self.rows_per_step, self.tokens_per_step = count, count * self.row_tokens
        self.micro_batches = max(1, count // (data.rows_per_batch * processes))
        self.steps, self.epochs, self.saves = run.steps, None, None
        self.alone = recipe.adapter.start if recipe.adapter else 1.0
        if self.rows and run.epochs:
            self.steps = Order(self.rows, count, run.seed).steps(run.epochs)
        warning = ""
        if self.steps:
            warning = reading.warning(self.steps, count)
            self.epochs = self.steps * count / self.rows if self.rows else None
            self.saves = math.ceil(self.steps / run.save_every)
            self.alone = math.ceil(self.alone * self.steps - 1e-9) / self.steps  # as in training
        self.note = "; ".join(filter(None, (note, warning)))


@dataclass(frozen=True)
class Trial:
    """What a few steps predict for the run. layers: of the target that was tried. base,
    activations: bytes. load, save: seconds per run and per save. features: the target's seconds of
    a step; alone, joint: the rest of it, without and with a learning adapter.
    """

    layers: int
    base: int
    activations: int
    load: float
    save: float
    features: float
    alone: float
    joint: float


def try_steps(recipe: Recipe, shapes: Shapes, work: Workload, clock: str) -> Trial:
    """Train in a child process: a number of steps on new rows, the same number on the same rows,
    and, where an adapter starts to learn later, the same number with it. Raises RuntimeError where
    that fails.
    """
    layers = shapes.layers if shapes.layers <= DEEPEST else max(SHALLOW, shapes.states)
    adapted = min(layers, shapes.adapted)
    batch = recipe.data.rows_per_batch
    micro = min(2, work.micro_batches)  # the first makes gradients, others add to them
    steps = TRIAL_TOKENS // int(micro * batch * work.row_tokens)
    steps = min(MOST, max(FEWEST, steps))
    kinds = 3 if 0 < work.alone < 1 else 2
    rows = micro * batch * steps + batch  # the last ones are held out
    # features of a shortened target are cached, too, to tell their time from the rest
    cached = (
        bool(recipe.data.cache_gb) or recipe.features.mode == "cached" or layers < shapes.layers
    )
    sizes = random.Random(0).choices(work.sizes, k=rows)
    values = recipe.model_dump(mode="json")
    values |= {"target_revision": None, "target_placement": "whole", "features": {}}
    values["eval"] = {"every": 0}
    values["data"] |= {"pack": False, "heldout": batch / rows, "cache_gb": 1e6 * cached}
    values["run"] |= {"steps": kinds * steps, "save_every": kinds * steps, "epochs": None}
    values["run"] |= {"tokens_per_step": micro * batch * work.length, "trackers": []}
    if "feature_layers" in values["head"] and layers < shapes.layers:
        values["head"]["feature_layers"] = list(range(shapes.features))
    if recipe.adapter:
        values["adapter"] |= {"layers": adapted, "start": 2 / 3 if kinds == 3 else 0}
    with tempfile.TemporaryDirectory(prefix="draftheads-plan-") as name:
        write_target(recipe, layers, Path(name) / "target")
        vocabulary = getattr(recipe.head, "vocabulary", None) or shapes.target.vocab_size
        write_rows(Path(name) / "data", sizes, min(vocabulary, shapes.target.vocab_size))
        found = _run_child(Path(name), values, clock)
    gaps = [after - before for before, after in pairwise(found["steps"])]  # without the first step
    phases = [gaps[max(0, n * steps - 1) : (n + 1) * steps - 1] for n in range(kinds)]
    new, again, joint = median(phases[0]), median(phases[1]), median(phases[-1])
    features = max(0.0, new - again) if cached else 0.0
    of_layer, deeper = features / layers, shapes.layers - layers
    joint += of_layer * (deeper + BACKWARD * (shapes.adapted - adapted))
    held = found["base"] + shapes.target_bytes(layers) + 4 * shapes.trained
    if cached and _device() == "cpu":
        held += shapes.feature_bytes(sum(size for size, _ in sizes))
    batches = max(0, work.heldout / (batch * work.row_tokens) - 1)  # the trial evaluates one
    of_batch = (features + of_layer * deeper + again / 3) / micro  # a third is the forward pass
    times = work.micro_batches / micro
    return Trial(
        layers=layers,
        base=found["base"],
        activations=max(0, found["peak"] - held),
        load=found["steps"][0] - found["begin"] - new,
        save=found["end"] - found["steps"][-1] + batches * of_batch,
        features=of_layer * shapes.layers * times,
        alone=again * times if work.alone else 0.0,
        joint=joint * times if work.alone < 1 else 0.0,
    )


def write_target(recipe: Recipe, layers: int, folder: Path) -> None:
    """Save a random target like the recipe's, cut to this many layers."""
    config = read_config(recipe.target, recipe.target_revision)
    text = config.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # layer_types etc.
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    dtype = config.dtype or torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    logging.disable(logging.WARNING)  # saving imports libraries that log what they look for
    try:
        model.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)


def write_rows(folder: Path, sizes: list[tuple[int, int]], vocabulary: int) -> None:
    """Write random documents of these sizes: (tokens, learned tokens at the end)."""
    rows = []
    for number, (size, learned) in enumerate(sizes):
        tokens = random.Random(number).choices(range(vocabulary), k=size)
        learn = [(size - learned, size)]
        rows += rows_of(
            {"id": number, "tokens": tokens, "learn": learn, "turns": 1, "finish": "eos"}
        )
    folder.mkdir()
    prompts = {"count": len(sizes), "sha256": "0" * 12}
    manifest = new_manifest({"name": "random"}, {}, prompts)
    store_batch(folder, manifest, to_batch(rows))


def _run_child(folder: Path, values: dict[str, Any], clock: str) -> dict[str, Any]:
    values["target"], values["data"]["path"] = str(folder / "target"), str(folder / "data")
    values["run"]["output"] = str(folder / "run")
    (folder / "recipe.json").write_text(json.dumps(values))
    launch = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")
    environment = {key: value for key, value in os.environ.items() if key not in launch}
    command = [sys.executable, "-m", "draftheads.train.plan", str(folder), clock]
    try:
        subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a trial was not done after {PATIENCE / 60:.0f} minutes") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise RuntimeError(f"a trial failed: {lines[-1]}") from error
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def peak_memory() -> int:
    """Most bytes that this process ever had, where the system knows; else those of now."""
    status = Path("/proc/self/status")
    if not status.exists():
        return int(psutil.Process().memory_info().rss)
    fields = dict(line.split(":") for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def main(folder: Path, clock: str) -> None:
    """The child: train the folder's recipe.json and write what it took to found.json."""
    on_gpu, now = torch.cuda.is_available(), CLOCKS[clock]
    recipe, steps, peak = load_recipe(folder / "recipe.json"), [], 0

    def note(*_: object) -> None:  # before anything is saved, which needs memory of its own
        nonlocal peak
        steps.append(now())
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory()

    register_optimizer_step_post_hook(note)
    base, begin = 0 if on_gpu else psutil.Process().memory_info().rss, now()
    fit(recipe)
    found = {"base": base, "peak": peak, "begin": begin, "end": now(), "steps": steps}
    (folder / "found.json").write_text(json.dumps(found))


@dataclass(frozen=True)
class Plan:
    """What a run needs. trial: None, for `reason`, where only shapes were counted."""

    recipe: Recipe
    processes: int
    engine: str
    shapes: Shapes
    work: Workload
    trial: Trial | None
    reason: str
    pace: Pace | None = None  # of decoding, on a CPU

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
            parts["libraries"] = trial.base if trial else psutil.Process().memory_info().rss
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
        if self.recipe.features.mode == "cached":
            tokens = round(work.row_tokens * (work.rows or work.rows_per_step * (work.steps or 1)))
            if not self.recipe.adapter:  # which changes the features of held-out rows
                tokens += work.heldout
        number, scale = FEATURE_BYTES[self.recipe.features.dtype]
        features = tokens * shapes.states * (shapes.target.hidden_size * number + scale)
        checkpoint = 3 * shapes.trained + shapes.buffers  # weights and two moments
        most = run.keep + 2  # the best one may be older, and one is being written
        count = min(work.saves or most, most)
        output = run.output.absolute()
        place = next(at for at in (output, *output.parents) if at.exists())
        return {
            "checkpoint": checkpoint,
            "checkpoints": count,
            "features": features,
            "free": shutil.disk_usage(place).free,
            "total": checkpoint * count + features,
        }

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds; empty without a trial. step: mean; alone, joint: steps without and with a
        learning adapter; later: steps whose features are known; load; save: with the evaluation;
        total: where the number of steps is known.
        """
        trial, work = self.trial, self.work
        if not trial:
            return {}
        rows = work.rows or work.rows_per_step
        load, features = trial.load, trial.features
        if self.recipe.features.mode == "cached":
            load += features * rows / work.rows_per_step
            features = 0.0
        room = self.recipe.data.cache_gb * 1e9
        kept = min(1.0, room / self.shapes.feature_bytes(rows * work.row_tokens))
        features *= 1 - kept * (1 - 1 / max(1.0, work.epochs or 1.0))  # none after the first epoch
        later = work.alone * trial.alone + (1 - work.alone) * trial.joint
        found = {"step": later + features, "later": later, "load": load, "save": trial.save}
        found["alone"] = trial.alone + features if work.alone else 0.0
        found["joint"] = trial.joint + features if work.alone < 1 else 0.0
        if work.steps and work.saves:
            found["total"] = load + work.steps * found["step"] + work.saves * trial.save
        return found

    @property
    def break_even(self) -> dict[str, float]:
        """For each dtype, tokens per step at which the head's tree pays on this CPU, at least."""
        pace = self.pace
        return {dtype: pace.break_even(dtype) for dtype in pace.seconds} if pace else {}

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
                "count": work.steps,
                "rows": work.rows_per_step,
                "micro_batches": work.micro_batches,
                "tokens_per_step": work.tokens_per_step,
                "alone": work.alone,
                "note": work.note,
            },
            "memory": {**self.memory, "total": self.peak, "limit": self.limit},
            "disk": self.disk,
            "time": self.time or None,
            "break_even": self.break_even,
            "probed": [self.trial.layers] if self.trial else [],
            "reason": self.reason,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def make_plan(
    recipe: Recipe,
    processes: int | None = None,
    engine: str = "ddp",
    *,
    probe: bool = True,
    clock: str = "wall",
) -> Plan:
    """Count shapes and, with `probe`, train a few steps.

    processes: default WORLD_SIZE, else one. engine: a key of ENGINES. clock: of the trial, a key of
    CLOCKS. Raises the ValueError or OSError that training would raise for target, head, adapter,
    data and launch.
    """
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
    trial, reason, pace = None, "--no-probe was given", None
    if probe:
        if _device() == "cpu":
            pace = measured_pace(shapes.target.model.config, recipe.head.nodes)
        try:
            trial, reason = try_steps(recipe, shapes, work, clock), ""
        except RuntimeError as error:
            reason = str(error)
    return Plan(recipe, processes, engine, shapes, work, trial, reason, pace)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory() -> int:
    """Bytes of memory of the GPU, or of RAM within the cgroup's limit."""
    if _device() == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    group = Path("/sys/fs/cgroup/memory.max")
    allowed = group.read_text().strip() if group.exists() else "max"
    total: int = psutil.virtual_memory().total
    return min(total, int(allowed)) if allowed.isdigit() else total


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
