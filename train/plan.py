"""What a run needs, before anything is loaded: memory, disk and time.

Weights, gradients and optimizer state are counted from shapes on the meta device, rows and steps
from the data. Activations and seconds are measured: a child process (this file, run as a module)
trains a few steps on a random target of the same widths. Of a target with more than DEEPEST layers
it takes SHALLOW, and what depends on depth is scaled by layers.

Legend: D width of the target, I inner width of its MLP.
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
from draftheads.heads.hub import HEADS
from draftheads.heads.losses import CHUNK_LOGITS, CHUNK_ROWS
from draftheads.heads.placement import check_path, check_placement, read_config, reading
from draftheads.heads.pretrained import decoder_layers
from draftheads.heads.target import Target
from draftheads.train.batches import HELDOUT_TOKENS, Order, Reading
from draftheads.train.data.answers import MANIFEST
from draftheads.train.loop import fit
from draftheads.train.recipe import MedusaChoices, Recipe, SequentialChoices, load_recipe
from draftheads.train.setup import load_data

FEATURE_BYTES = {"bf16": (2, 0), "fp8": (1, 4), "fp32": (4, 0)}
"""Of a stored feature: per number, and per token and state."""
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
"""Steps of each kind in a trial: as many as read TRIAL_TOKENS, within these limits."""
PATIENCE = 600
"""Seconds that a trial may take."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class ShapeTarget(Target):
    """A target without numbers. That lm_head gives the model's logits is not checked."""

    def unembed(self, hidden: Tensor) -> Tensor:
        """Shapes alone."""
        return hidden.new_empty(*hidden.shape[:-1], self.vocab_size)

    def unembed_weight(self) -> Tensor:
        """Shapes alone."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight


class Shapes:
    """The models that a run would load or create, without numbers.

    frozen, per_layer: parameters of the target and of one of its layers. itemsize: bytes of a
    number of it. head, adapter: trained parameters. adapted: layers that the adapter changes.
    states: of the target that training reads. buffers: bytes of the head besides parameters.

    Raises OSError without the target's config.json, ValueError for a head or an adapter that does
    not fit the target.
    """

    def __init__(self, recipe: Recipe) -> None:
        check_path(recipe.target)
        config = read_config(recipe.target, recipe.target_revision)
        with reading(recipe.target), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.target = ShapeTarget(model, name=recipe.target, fingerprint="")
        self.layers, self.width = self.target.layers, self.target.hidden_size
        self.inner: int = getattr(self.target.config, "intermediate_size", None) or 4 * self.width
        self.frozen, self.per_layer = _count(model), _count(decoder_layers(model)) // self.layers
        dtype = getattr(torch, recipe.target_dtype, self.target.config.dtype or torch.float32)
        on_cpu = recipe.target_dtype == "auto" and not torch.cuda.is_available()
        self.itemsize: int = 4 if on_cpu else dtype.itemsize
        self.bits = recipe.target_bits or 8 * self.itemsize
        # a new head copies lm_head to the CPU: one number, seen as a matrix, can be copied
        lm_head = model.get_output_embeddings()
        zeros_VD = torch.zeros(()).expand(lm_head.weight.shape)
        lm_head.weight = nn.Parameter(zeros_VD, requires_grad=False)
        choices = recipe.head.model_dump(exclude={"kind"})
        if size := choices.pop("vocabulary", None):
            choices["vocabulary"] = list(range(min(size, self.target.vocab_size)))
        self.adapter = self.adapted = 0
        with torch.device("meta"):
            head = HEADS[recipe.head.kind].create(self.target, **choices)
            if recipe.adapter:
                keys = {"rank", "alpha", "layers", "modules"}
                adapter = Adapter.create(model, "", **recipe.adapter.model_dump(include=keys))
                self.adapter = sum(p.numel() for p in adapter.parameters.values())
                self.adapted = len(adapter.config["layers_to_transform"])
        self.head, self.states = _count(head), len(head.training_layers)
        self.buffers = sum(x.nbytes for x in head.state_dict().values()) - 4 * self.head

    @property
    def trained(self) -> int:
        """Bytes of the trained weights, which are float32."""
        return 4 * (self.head + self.adapter)

    def target_bytes(self, layers: int, shards: int = 1) -> int:
        """Of the target on one device, with so many layers, each divided into `shards`."""
        outside = (self.frozen - self.layers * self.per_layer) * self.itemsize
        return outside + layers * self.per_layer * self.bits // 8 // shards

    def feature_bytes(self, tokens: float) -> int:
        """Of so many tokens, as the target computes features."""
        return int(tokens * self.width * self.states * self.itemsize)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def activation_bytes(recipe: Recipe, shapes: Shapes, length: int) -> int:
    """An upper bound of what a micro batch of rows of `length` learned tokens holds besides
    weights, gradients and moments.

    Numbers per token: 10 D + 3 I in the target's forward and 3 D per state; (3 layers + 4) D in a
    Medusa head, (depth + 12) D more in a sequential one; 28 D + 6 I in a decoder layer that learns
    or is adapted (with gradient checkpointing 2 D, and one layer is made again). Besides: masks,
    four copies of a chunk of logits, gradients made in the loss's forward and what AdamW holds.
    """
    choices, width, layers = recipe.head, shapes.width, shapes.adapted
    inner = getattr(choices, "intermediate_size", None) or shapes.inner
    kept = (10 + 3 * shapes.states) * width + 3 * shapes.inner + 7 * length
    if isinstance(choices, MedusaChoices):
        block = 3 * choices.layers + 4
        if isinstance(choices, SequentialChoices):
            block += choices.depth + 12
            layers += choices.prefix
        kept += block * width * choices.depth
    else:
        layers += choices.steps * choices.layers
        kept += 3 * width * choices.steps
    layer = 28 * width + 6 * max(inner, shapes.inner)
    if recipe.run.gradient_checkpointing and layers:
        kept += 2 * width * layers + layer
    else:
        kept += layer * layers
    vocabulary = getattr(choices, "vocabulary", None) or shapes.target.vocab_size
    if choices.labels == "soft" or recipe.adapter:
        vocabulary = shapes.target.vocab_size
    chunk = max(CHUNK_ROWS * vocabulary, CHUNK_LOGITS[_device()])
    return 4 * (recipe.data.rows_per_batch * length * kept + 4 * chunk) + 2 * shapes.trained


class Workload:
    """A run's rows of `length` tokens at most, and its steps; full rows where there is no data.

    rows: to train on, with `tokens` in all; None: the data is missing. heldout: tokens evaluated at
    each save. rows_per_step: over all processes; micro_batches: per process. steps: None where
    unknown. alone: share of the steps that train heads alone. sizes: (tokens, learned tokens) of
    the rows. Errors: as of `load_data`.
    """

    def __init__(self, recipe: Recipe, target: Target, processes: int) -> None:
        data, run = recipe.data, recipe.run
        self.length = min(data.sequence_length, target.context)
        self.rows, self.heldout = None, HELDOUT_TOKENS
        self.sizes = [(self.length, self.length - 1)]
        if (data.path / MANIFEST).is_file():
            found = load_data(recipe, target, log=lambda line: None)
            self.rows = len(found.train)
            self.heldout = min(HELDOUT_TOKENS, sum(found.heldout.sizes))
            self.sizes = list(zip(found.train.sizes, found.train.learned, strict=True))
        self.tokens = sum(size for size, _ in self.sizes)
        self.row_tokens = self.tokens / len(self.sizes)
        reading = Reading(self.rows, self.length, run.epochs, processes)
        count, note = reading.rows_per_step(run.tokens_per_step, data.rows_per_batch)
        self.rows_per_step, self.steps = count, run.steps
        if self.rows and run.epochs:
            self.steps = Order(self.rows, count, run.seed).steps(run.epochs)
        warning = reading.warning(self.steps, count) if self.steps else ""
        self.note = "; ".join(filter(None, (note, warning)))
        self.micro_batches = max(1, count // (data.rows_per_batch * processes))
        self.alone = recipe.adapter.start if recipe.adapter else 1.0
        if self.steps:  # as training counts them
            self.alone = math.ceil(self.alone * self.steps - 1e-9) / self.steps

    @property
    def epochs(self) -> float | None:
        """Passes over the rows."""
        return self.steps * self.rows_per_step / self.rows if self.steps and self.rows else None


@dataclass(frozen=True)
class Trial:
    """What a few steps say of the run's. layers: of the target that was tried. base, activations,
    checkpoint: bytes. Seconds: load, save: once; features: of the target in a step that computes
    them; alone, joint: of a step apart from that, without and with an adapter that learns.
    """

    layers: int
    base: int
    activations: int
    checkpoint: int
    load: float
    save: float
    features: float
    alone: float
    joint: float


def try_steps(recipe: Recipe, shapes: Shapes, work: Workload, clock: str) -> Trial:
    """Train in a child process: some steps on new rows, as many on the same rows again, and, where
    an adapter begins to learn later, as many with it. Raises RuntimeError where that fails.
    """
    layers = shapes.layers if shapes.layers <= DEEPEST else max(SHALLOW, shapes.states)
    adapted = min(layers, shapes.adapted)
    batch = recipe.data.rows_per_batch
    micro = min(2, work.micro_batches)  # the first makes gradients, others add to them
    steps = TRIAL_TOKENS // int(micro * batch * work.row_tokens)
    steps = min(MOST, max(FEWEST, steps))
    kinds = 3 if 0 < work.alone < 1 else 2
    rows = micro * batch * steps + batch  # the last ones are held out
    remembers = bool(recipe.data.cache_gb) or recipe.features.mode == "cached"
    remembers = remembers or layers < shapes.layers  # to tell features from the rest
    sizes = random.Random(0).choices(work.sizes, k=rows)
    values = recipe.model_dump(mode="json")
    values |= {"target_revision": None, "target_placement": "whole", "features": {}}
    values["eval"] = {"every": 0, "report": False}
    values["data"] |= {"pack": False, "heldout": batch / rows, "cache_gb": 1e6 * remembers}
    values["run"] |= {"steps": kinds * steps, "save_every": kinds * steps, "epochs": None}
    values["run"] |= {"tokens_per_step": micro * batch * work.length, "trackers": []}
    if "feature_layers" in values["head"] and layers < shapes.layers:
        read = values["head"]["feature_layers"] or range(3)
        values["head"]["feature_layers"] = list(range(len(read)))
    if recipe.adapter:
        values["adapter"] |= {"layers": adapted, "start": 2 / 3 if kinds == 3 else 0}
    with tempfile.TemporaryDirectory(prefix="draftheads-plan-") as name:
        write_target(recipe, layers, Path(name) / "target")
        vocabulary = getattr(recipe.head, "vocabulary", None) or shapes.target.vocab_size
        write_rows(Path(name) / "data", sizes, min(vocabulary, shapes.target.vocab_size))
        found = _run_child(Path(name), values, clock)
    gaps = [after - before for before, after in pairwise(found["steps"])]  # not of the first step
    phases = [gaps[max(0, n * steps - 1) : (n + 1) * steps - 1] for n in range(kinds)]
    new, again, joint = median(phases[0]), median(phases[1]), median(phases[-1])
    features = max(0.0, new - again) if remembers else 0.0
    of_layer, deeper = features / layers, shapes.layers - layers
    joint += of_layer * (deeper + BACKWARD * (shapes.adapted - adapted))
    held = found["base"] + shapes.target_bytes(layers) + 4 * shapes.trained
    if remembers:
        held += shapes.feature_bytes(sum(size for size, _ in sizes))
    batches = work.heldout / (batch * work.row_tokens) - 1  # besides the trial's one
    of_batch = (features + of_layer * deeper + again / 3) / micro  # a third is the forward pass
    times = work.micro_batches / micro
    return Trial(
        layers=layers,
        base=found["base"],
        activations=max(0, found["peak"] - held),
        checkpoint=found["checkpoint"],
        load=found["steps"][0] - found["begin"] - new,
        save=found["end"] - found["steps"][-1] + max(0, batches) * of_batch,
        features=of_layer * shapes.layers * times,
        alone=again * times if work.alone else 0.0,
        joint=joint * times if work.alone < 1 else 0.0,
    )


def write_target(recipe: Recipe, layers: int, folder: Path) -> None:
    """A random target with so many layers, saved as the real one is."""
    config = read_config(recipe.target, recipe.target_revision)
    text = config.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # layer_types etc.
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    logging.disable(logging.WARNING)  # saving imports libraries that tell what they look for
    try:
        model.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)


def write_rows(folder: Path, sizes: list[tuple[int, int]], vocabulary: int) -> None:
    """Random documents of such sizes: (tokens, learned tokens at the end)."""
    folder.mkdir()
    with (folder / "answers-00000-of-00001.jsonl").open("w") as file:
        for number, (size, learned) in enumerate(sizes):
            tokens = random.Random(number).choices(range(vocabulary), k=size)
            record = {"id": number, "tokens": tokens, "learn": [(size - learned, size)]}
            file.write(json.dumps({**record, "turns": 1, "finish": "eos"}) + "\n")
    manifest = {"format": 1, "batch_size": len(sizes), "complete": True}
    counts = {"prompts": {"count": len(sizes)}, "counts": {"done": len(sizes)}}
    (folder / MANIFEST).write_text(json.dumps(manifest | counts))


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


def main(folder: Path, clock: str) -> None:
    """The child: train as its recipe says, and write what that took."""
    on_gpu, now = torch.cuda.is_available(), CLOCKS[clock]
    recipe, steps = load_recipe(folder / "recipe.json"), []
    register_optimizer_step_post_hook(lambda *_: steps.append(now()))
    base, begin = 0 if on_gpu else psutil.Process().memory_info().rss, now()
    saved = fit(recipe).checkpoint
    end, status = now(), Path("/proc/self/status")
    peak = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
    if not on_gpu and status.exists():
        fields = dict(line.split(":") for line in status.read_text().splitlines())
        peak = int(fields["VmHWM"].split()[0]) * 1024
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    found = {"base": base, "peak": peak, "begin": begin, "end": end, "steps": steps}
    (folder / "found.json").write_text(json.dumps({**found, "checkpoint": size}))


@dataclass(frozen=True)
class Plan:
    """What a run on so many processes needs. trial: None, because of `reason`, where shapes alone
    were counted.
    """

    recipe: Recipe
    processes: int
    engine: str
    shapes: Shapes
    work: Workload
    trial: Trial | None
    reason: str

    @property
    def tokens_per_step(self) -> float:
        """Over all processes, padding not counted."""
        return self.work.rows_per_step * self.work.row_tokens

    @property
    def saves(self) -> int | None:
        """Checkpoints that the run writes."""
        return math.ceil(self.work.steps / self.recipe.run.save_every) if self.work.steps else None

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of one process at the highest point, by part."""
        shapes, work, trial = self.shapes, self.work, self.trial
        moments = 3 if self.engine in ("zero1", "zero2") else 2  # DeepSpeed keeps weights twice
        parts = {"weights": shapes.trained, "gradients": shapes.trained}
        parts["optimizer"] = moments * shapes.trained
        for part in ENGINES[self.engine]:
            parts[part] = math.ceil(parts[part] / self.processes)
        shards = self.processes if self.recipe.target_placement == "sharded" else 1
        parts["target"] = shapes.target_bytes(shapes.layers, shards)
        if _device() == "cpu":
            parts["libraries"] = trial.base if trial else psutil.Process().memory_info().rss
            parts["data"] = 5 * work.tokens if work.rows else 0
            if self.recipe.features.mode == "online":
                rows = min(work.rows or 0, (work.steps or 0) * work.rows_per_step)
                room = int(self.recipe.data.cache_gb * 1e9)
                parts["cache"] = min(room, shapes.feature_bytes(rows * work.row_tokens))
        bound = activation_bytes(self.recipe, shapes, work.length)
        return {**parts, "activations": trial.activations if trial else bound}

    @property
    def peak(self) -> int:
        """Bytes of memory of one process."""
        return sum(self.memory.values())

    @property
    def limit(self) -> int:
        """Bytes of memory that one process can have."""
        return device_memory() // (self.processes if _device() == "cpu" else 1)

    @cached_property
    def disk(self) -> dict[str, int]:
        """Bytes: a checkpoint, of which there are `checkpoints` at most; features; free."""
        run, shapes, work = self.recipe.run, self.shapes, self.work
        tokens = 0
        if self.recipe.features.mode == "cached":
            tokens = round(work.row_tokens * (work.rows or work.rows_per_step * (work.steps or 1)))
            if not self.recipe.adapter:  # which changes those of held-out rows
                tokens += work.heldout
        number, scale = FEATURE_BYTES[self.recipe.features.dtype]
        place = run.output.absolute()
        while not place.exists():
            place = place.parent
        checkpoint = 3 * shapes.trained + shapes.buffers  # weights and two moments
        most = run.keep + 2  # the best one may be older, and one is being written
        return {
            "checkpoint": self.trial.checkpoint if self.trial else checkpoint,
            "checkpoints": min(self.saves or most, most),
            "features": tokens * shapes.states * (shapes.width * number + scale),
            "free": shutil.disk_usage(place).free,
        }

    @property
    def written(self) -> int:
        """Bytes that the run writes."""
        return self.disk["checkpoint"] * self.disk["checkpoints"] + self.disk["features"]

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds, if there was a trial. step: a mean; alone, joint: of steps without and with an
        adapter that learns; later: of steps whose features are known; load; save: with the
        evaluation; total: where the number of steps is known.
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
        if work.steps and self.saves:
            found["total"] = load + work.steps * found["step"] + self.saves * trial.save
        return found

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
                "tokens_per_step": self.tokens_per_step,
                "alone": work.alone,
                "note": work.note,
            },
            "memory": {**self.memory, "total": self.peak, "limit": self.limit},
            "disk": {**self.disk, "total": self.written},
            "time": self.time or None,
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
    """Count and try. processes: default WORLD_SIZE, else one; engine: a key of ENGINES; clock: of
    the trial, a key of CLOCKS. Raises ValueError and OSError for what the trainer would refuse of
    target, head, adapter, data and launch.
    """
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if engine not in ENGINES:
        raise ValueError(f"--engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if recipe.adapter and "weights" in ENGINES[engine]:
        raise ValueError(
            f"--engine: expected ddp, zero1 or zero2 with an adapter, got {engine}, which would "
            "divide matrices that the target reads between the heads' forwards"
        )
    check_placement(recipe.target_placement, recipe.target_bits, processes)
    shapes = Shapes(recipe)
    work = Workload(recipe, shapes.target, processes)
    # as a step of few rows is divided
    batch = min(recipe.data.rows_per_batch, work.rows_per_step // processes)
    data = recipe.data.model_copy(update={"rows_per_batch": batch})
    recipe = recipe.model_copy(update={"data": data})
    trial, reason = None, "--no-probe was given"
    if probe:
        try:
            trial, reason = try_steps(recipe, shapes, work, clock), ""
        except RuntimeError as error:
            reason = str(error)
    return Plan(recipe, processes, engine, shapes, work, trial, reason)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory() -> int:
    """Bytes of this machine's device, or what this process may have of it."""
    if _device() == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    group = Path("/sys/fs/cgroup/memory.max")
    allowed = group.read_text().strip() if group.exists() else "max"
    total: int = psutil.virtual_memory().total
    return min(total, int(allowed)) if allowed.isdigit() else total


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
