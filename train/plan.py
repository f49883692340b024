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
from dataclasses import asdict, dataclass, field
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
from draftheads.heads.target import Target
from draftheads.heads.weights import decoder_layers
from draftheads.train.batches import HELDOUT_TOKENS, Documents, Order, Reading, Rows
from draftheads.train.data.answers import MANIFEST, count, read_answers, read_manifest
from draftheads.train.loop import fit
from draftheads.train.recipe import MedusaChoices, Recipe, SequentialChoices, load_recipe
from draftheads.train.setup import check_tokens

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
SAMPLE_TOKENS = 2_000_000
"""Tokens that are read of a data set; a larger one is taken to continue as it begins."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Launch:
    """Processes on "cpu" or "cuda", the trained state divided by `engine`."""

    processes: int
    engine: str
    device: str

    @classmethod
    def here(cls, processes: int | None = None, engine: str = "ddp") -> Launch:
        """On this machine's device; processes: default WORLD_SIZE, else one."""
        world = processes or int(os.environ.get("WORLD_SIZE", "1"))
        return cls(world, engine, "cuda" if torch.cuda.is_available() else "cpu")


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
        self.target = ShapeTarget(model, name=recipe.target)
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
        with torch.device("meta"):
            head = HEADS[recipe.head.kind].create(self.target, **choices)
            self.adapter = self.adapted = 0
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
    Medusa head, (depth + 12) D more in a sequential one; 22 D + 5 I in a decoder layer (with
    gradient checkpointing 2 D, and one layer is made again), 6 D + I more where it is adapted.
    Besides: masks, four copies of a chunk of logits, gradients made in the loss's forward and what
    AdamW holds meanwhile.
    """
    choices, width = recipe.head, shapes.width

    def stack(layers: int, inner: int, more: int = 0) -> int:
        layer = 22 * width + 5 * inner + more
        kept = 2 * width * layers + layer if recipe.run.gradient_checkpointing else layer * layers
        return kept if layers else 0

    inner = getattr(choices, "intermediate_size", None) or shapes.inner
    if isinstance(choices, MedusaChoices):
        block, prefix = 3 * choices.layers + 4, 0
        if isinstance(choices, SequentialChoices):
            block, prefix = block + choices.depth + 12, int(choices.prefix)
        kept = block * width * choices.depth + stack(prefix, inner)
    else:
        kept = stack(choices.steps * choices.layers, inner) + 3 * width * choices.steps
    kept += stack(shapes.adapted, shapes.inner, 6 * width + shapes.inner)
    kept += 10 * width + 3 * shapes.inner + 3 * width * shapes.states + 7 * length
    vocabulary = getattr(choices, "vocabulary", None) or shapes.target.vocab_size
    if choices.labels == "soft" or recipe.adapter:
        vocabulary = shapes.target.vocab_size
    chunk = max(CHUNK_ROWS * vocabulary, CHUNK_LOGITS[_device()])
    return 4 * (recipe.data.rows_per_batch * length * kept + 4 * chunk) + 2 * shapes.trained


@dataclass(frozen=True)
class Workload:
    """A run's rows of `length` tokens at most, and its steps. rows: to train on, with `tokens` in
    all; None: the data is missing. heldout: tokens evaluated at each save. rows_per_step: over all
    processes; micro_batches: per process. steps: None where unknown. passes: over the rows. alone:
    share of the steps that train heads alone. sample: (tokens, learned tokens) of some rows.
    """

    length: int
    rows: int | None
    tokens: int
    heldout: int
    rows_per_step: int
    micro_batches: int
    steps: int | None
    passes: float | None
    saves: int | None
    alone: float
    note: str
    sample: list[tuple[int, int]] = field(repr=False)

    @property
    def row_tokens(self) -> float:
        """Mean tokens per row, padding not counted."""
        return self.tokens / self.rows if self.rows else float(self.length)


def read_workload(recipe: Recipe, target: Target, processes: int) -> Workload:
    """Look at the recipe's data; full rows are assumed where there is none. Raises ValueError for a
    folder that is not in order.
    """
    data, run = recipe.data, recipe.run
    length = min(data.sequence_length, target.context)
    rows, tokens, heldout, sample = None, 0, HELDOUT_TOKENS, [(length, length - 1)]
    if (data.path / MANIFEST).is_file():
        answers, size = [], 0
        for answer in read_answers(data.path):
            answers.append(answer)
            size += len(answer.tokens)
            if size >= SAMPLE_TOKENS:
                break
        documents = Documents.read(answers)
        check_tokens(recipe, int(documents.tokens_N.max()), target.vocab_size)
        spans, apart = documents.split(data.heldout)
        train = Rows(documents, spans, length, pack=data.pack, seed=run.seed)
        if not len(train):
            raise ValueError(f"{data.path}: expected tokens written by the target, got none")
        times = count_documents(data.path) / len(answers) if size >= SAMPLE_TOKENS else 1
        rows, tokens = round(len(train) * times), round(sum(train.sizes) * times)
        heldout = min(heldout, round(sum(stop - start for start, stop in apart) * times))
        sample = list(zip(train.sizes, train.learned, strict=True))
    reading = Reading(rows, length, run.epochs, processes)
    per_step, note = reading.rows_per_step(run.tokens_per_step, data.rows_per_batch)
    steps = run.steps
    if rows and run.epochs:
        steps = Order(rows, per_step, run.seed).steps(run.epochs)
    warning = reading.warning(steps, per_step) if steps else ""
    alone = recipe.adapter.start if recipe.adapter else 1.0
    return Workload(
        length=length,
        rows=rows,
        tokens=tokens,
        heldout=heldout,
        rows_per_step=per_step,
        micro_batches=max(1, per_step // (data.rows_per_batch * processes)),
        steps=steps,
        passes=steps * per_step / rows if steps and rows else None,
        saves=math.ceil(steps / run.save_every) if steps else None,
        alone=math.ceil(alone * steps - 1e-9) / steps if steps else alone,  # as training counts
        note="; ".join(filter(None, (note, warning))),
        sample=sample,
    )


def count_documents(folder: Path) -> int:
    """Documents in a folder; the manifest of a finished one knows."""
    manifest = read_manifest(folder)
    known = manifest.get("counts") if manifest["complete"] else None
    known = known or count(folder, manifest).numbers()
    return int(known.get("documents", known["done"]))  # without, each prompt gave one


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


class TrialError(Exception):
    """A trial that cannot be made here, and why."""


def try_steps(recipe: Recipe, shapes: Shapes, work: Workload, clock: str = "wall") -> Trial:
    """Train in a child process: some steps on new rows, as many on the same rows again, and, where
    an adapter begins to learn later, as many with it. Raises TrialError.
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
    with tempfile.TemporaryDirectory(prefix="draftheads-plan-") as name:
        folder = Path(name)
        write_target(recipe, layers, folder / "target")
        numbers = write_rows(folder / "data", recipe, shapes, work.sample, rows)
        values = recipe.model_dump(mode="json")
        values |= {"target": str(folder / "target"), "target_revision": None}
        values |= {"target_placement": "whole", "features": {}}
        values["eval"] = {"every": 0, "report": False}
        values["data"] |= {"path": str(folder / "data"), "pack": False, "heldout": batch / rows}
        values["data"]["cache_gb"] = 1e6 if remembers else 0
        values["run"] |= {"output": str(folder / "run"), "trackers": [], "epochs": None}
        values["run"] |= {"steps": kinds * steps, "save_every": kinds * steps}
        values["run"]["tokens_per_step"] = micro * batch * work.length
        if "feature_layers" in values["head"] and layers < shapes.layers:
            states = len(values["head"]["feature_layers"] or range(3))
            values["head"]["feature_layers"] = list(range(states))
        if recipe.adapter:
            values["adapter"] |= {"layers": adapted, "start": 2 / 3 if kinds == 3 else 0}
        (folder / "recipe.json").write_text(json.dumps(values))
        found = _run_child(folder, clock)
    gaps = [after - before for before, after in pairwise(found["steps"])]  # not of the first step
    phases = [gaps[max(0, n * steps - 1) : (n + 1) * steps - 1] for n in range(kinds)]
    new, again, joint = median(phases[0]), median(phases[1]), median(phases[-1])
    features = max(0.0, new - again) if remembers else 0.0
    of_layer, deeper = features / layers, shapes.layers - layers
    joint += of_layer * (deeper + BACKWARD * (shapes.adapted - adapted))
    remembered = shapes.feature_bytes(numbers) if remembers else 0
    held = found["base"] + shapes.target_bytes(layers) + 4 * shapes.trained + remembered
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
    torch.manual_seed(0)
    dtype = config.dtype or torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    logging.disable(logging.WARNING)  # saving imports libraries that tell what they look for
    try:
        model.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)


def write_rows(
    folder: Path, recipe: Recipe, shapes: Shapes, sample: list[tuple[int, int]], rows: int
) -> int:
    """Random documents as large as some of the sample; returns how many tokens they have."""
    draw = random.Random(0)
    vocabulary = shapes.target.vocab_size
    vocabulary = min(vocabulary, getattr(recipe.head, "vocabulary", None) or vocabulary)
    sizes = draw.choices(sample, k=rows)
    folder.mkdir()
    with (folder / "answers-00000-of-00001.jsonl").open("w") as file:
        for number, (size, learned) in enumerate(sizes):
            tokens = draw.choices(range(vocabulary), k=size)
            record = {"id": number, "tokens": tokens, "learn": [(size - learned, size)]}
            file.write(json.dumps({**record, "turns": 1, "finish": "eos"}) + "\n")
    manifest = {"format": 1, "batch_size": rows, "complete": True}
    counts = {"prompts": {"count": rows}, "counts": {"done": rows}}
    (folder / MANIFEST).write_text(json.dumps(manifest | counts))
    return sum(size for size, _ in sizes)


def _run_child(folder: Path, clock: str) -> dict[str, Any]:
    launch = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")
    environment = {key: value for key, value in os.environ.items() if key not in launch}
    command = [sys.executable, "-m", "draftheads.train.plan", str(folder), clock]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"a trial was not done after {PATIENCE / 60:.0f} minutes") from error
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise TrialError(f"a trial failed: {lines[-1]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def main(folder: Path, clock: str) -> None:
    """The child: train as its recipe says, and write what that took."""
    now = CLOCKS[clock]
    recipe, steps = load_recipe(folder / "recipe.json"), []
    register_optimizer_step_post_hook(lambda *_: steps.append(now()))
    base, begin = _resident(), now()
    saved = fit(recipe).checkpoint
    found = {"base": base, "peak": _peak(), "begin": begin, "end": now(), "steps": steps}
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    (folder / "found.json").write_text(json.dumps({**found, "checkpoint": size}))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory(device: str) -> tuple[int, int]:
    """(bytes that it has, bytes that are free now)."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total, free
    memory, group = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else ""
    limits = [int(limit)] if limit.isdigit() else []
    return min([memory.total, *limits]), min([memory.available, *limits])


def _resident() -> int:
    """Bytes of this process; 0 on a GPU, which has none of Python."""
    return 0 if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if not status.exists():
        import resource  # of the parent, too, where it was larger

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = dict(line.split(":") for line in status.read_text().splitlines())
    return int(values["VmHWM"].split()[0]) * 1024


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the highest point. base: Python and its libraries, on a CPU. cache:
    features kept in memory. limit: of the device, which `processes` share.
    """

    base: int
    target: int
    weights: int
    gradients: int
    optimizer: int
    data: int
    cache: int
    activations: int
    limit: int
    processes: int

    @property
    def total(self) -> int:
        """Of one process."""
        trained = self.weights + self.gradients + self.optimizer
        return self.base + self.target + trained + self.data + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device has as much for all its processes."""
        return self.total * self.processes <= self.limit


@dataclass(frozen=True)
class Disk:
    """Bytes. checkpoints: at most, the one being written included. allowed: of features. free: in
    the output folder.
    """

    checkpoint: int
    checkpoints: int
    features: int
    allowed: int
    free: int

    @property
    def total(self) -> int:
        """What the run will write."""
        return self.checkpoint * self.checkpoints + self.features

    @property
    def fits(self) -> bool:
        """Whether there is as much."""
        return self.total <= self.free and self.features <= self.allowed


@dataclass(frozen=True)
class Duration:
    """Seconds. step: a mean; alone, joint: of steps without and with an adapter that learns, 0
    where there are none; later: of a step whose features are known. save: with the evaluation.
    total: None for unknown steps.
    """

    step: float
    alone: float
    joint: float
    later: float
    load: float
    save: float
    total: float | None


@dataclass(frozen=True)
class Plan:
    """All of it. trial: None, because of `reason`, where shapes alone were counted. time: None
    without a trial.
    """

    recipe: Recipe
    launch: Launch
    shapes: Shapes
    work: Workload
    trial: Trial | None
    reason: str
    memory: Memory
    disk: Disk
    time: Duration | None

    @property
    def tokens_per_step(self) -> float:
        """Over all processes, padding not counted."""
        return self.work.rows_per_step * self.work.row_tokens

    def to_json(self) -> dict[str, Any]:
        """Everything but the sample of rows."""
        shapes, work = self.shapes, asdict(self.work)
        del work["sample"]
        return {
            "launch": asdict(self.launch),
            "target": {"name": shapes.target.name, "parameters": shapes.frozen},
            "head": {"kind": self.recipe.head.kind, "parameters": shapes.head},
            "adapter": {"layers": shapes.adapted, "parameters": shapes.adapter},
            "steps": {**work, "count": work["steps"]},
            "memory": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "disk": {**asdict(self.disk), "total": self.disk.total, "fits": self.disk.fits},
            "time": asdict(self.time) if self.time else None,
            "probed": [self.trial.layers] if self.trial else [],
            "reason": self.reason,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def make_plan(recipe: Recipe, launch: Launch, *, probe: bool = True, clock: str = "wall") -> Plan:
    """Count and try. clock: of the trial, "wall" or "cpu". Raises ValueError and OSError for what
    the trainer would refuse of target, head, adapter, data and launch.
    """
    divided = ENGINES.get(launch.engine)
    if divided is None:
        raise ValueError(f"--engine: expected one of {', '.join(ENGINES)}, got {launch.engine!r}")
    if recipe.adapter and "weights" in divided:
        raise ValueError(
            f"--engine: expected ddp, zero1 or zero2 with an adapter, got {launch.engine}, which "
            "would divide matrices that the target reads between the heads' forwards"
        )
    check_placement(recipe.target_placement, recipe.target_bits, launch.processes)
    shapes = Shapes(recipe)
    work = read_workload(recipe, shapes.target, launch.processes)
    # as a step of few rows is divided
    batch = min(recipe.data.rows_per_batch, work.rows_per_step // launch.processes)
    data = recipe.data.model_copy(update={"rows_per_batch": batch})
    recipe = recipe.model_copy(update={"data": data})
    trial, reason = None, "--no-probe was given"
    if probe:
        try:
            trial, reason = try_steps(recipe, shapes, work, clock), ""
        except TrialError as error:
            reason = str(error)
    memory = plan_memory(recipe, launch, shapes, work, trial)
    disk = plan_disk(recipe, shapes, work, trial)
    time = plan_time(recipe, shapes, work, trial) if trial else None
    return Plan(recipe, launch, shapes, work, trial, reason, memory, disk, time)


def plan_memory(
    recipe: Recipe, launch: Launch, shapes: Shapes, work: Workload, trial: Trial | None
) -> Memory:
    """Counted, but for activations: the trial's, or an upper bound."""
    on_cpu = launch.device == "cpu"
    shards = launch.processes if recipe.target_placement == "sharded" else 1
    moments = 3 if launch.engine in ("zero1", "zero2") else 2  # DeepSpeed keeps weights twice
    trained = {"weights": shapes.trained, "gradients": shapes.trained}
    trained["optimizer"] = moments * shapes.trained
    for part in ENGINES[launch.engine]:
        trained[part] = math.ceil(trained[part] / launch.processes)
    cache = 0
    if on_cpu and recipe.features.mode == "online":
        rows = min(work.rows or 0, (work.steps or 0) * work.rows_per_step)
        cache = min(int(recipe.data.cache_gb * 1e9), shapes.feature_bytes(rows * work.row_tokens))
    return Memory(
        base=trial.base if trial else _resident(),
        target=shapes.target_bytes(shapes.layers, shards),
        **trained,
        data=5 * work.tokens if on_cpu else 0,
        cache=cache,
        activations=trial.activations if trial else activation_bytes(recipe, shapes, work.length),
        limit=device_memory(launch.device)[0],
        processes=launch.processes if on_cpu else 1,
    )


def plan_disk(recipe: Recipe, shapes: Shapes, work: Workload, trial: Trial | None) -> Disk:
    """Checkpoints as the trial wrote them, or their tensors alone."""
    most = recipe.run.keep + 2  # the best one may be older, and one is being written
    features = 0
    if recipe.features.mode == "cached":
        number, scale = FEATURE_BYTES[recipe.features.dtype]
        tokens = work.tokens or (work.steps or 1) * work.rows_per_step * work.length
        if not recipe.adapter:  # which changes those of held-out rows
            tokens += work.heldout
        features = tokens * shapes.states * (shapes.width * number + scale)
    place = recipe.run.output.absolute()
    while not place.exists():
        place = place.parent
    return Disk(
        checkpoint=trial.checkpoint if trial else 3 * shapes.trained + shapes.buffers,
        checkpoints=min(work.saves or most, most),
        features=features,
        allowed=int(recipe.features.disk_gb * 1e9),
        free=shutil.disk_usage(place).free,
    )


def plan_time(recipe: Recipe, shapes: Shapes, work: Workload, trial: Trial) -> Duration:
    """Steps as in the trial, features as far as they are not kept from an earlier epoch."""
    rows = work.rows or work.rows_per_step
    seen = min(1.0, 1 / work.passes) if work.passes else 1.0
    kept = min(1.0, recipe.data.cache_gb * 1e9 / shapes.feature_bytes(rows * work.row_tokens))
    load, features = trial.load, trial.features
    if recipe.features.mode == "cached":
        load += features * rows / work.rows_per_step
        features = 0.0

    def new(start: float, stop: float) -> float:
        """Share of the steps in a part of the run whose features are not known."""
        return 1 - kept * max(0.0, stop - max(start, seen)) / (stop - start)

    alone = joint = 0.0
    if work.alone:
        alone = trial.alone + features * new(0.0, work.alone)
    if work.alone < 1:
        joint = trial.joint + features * new(work.alone, 1.0)
    step = work.alone * alone + (1 - work.alone) * joint
    later = work.alone * trial.alone + (1 - work.alone) * trial.joint
    total = None
    if work.steps and work.saves:
        total = load + work.steps * step + work.saves * trial.save
    return Duration(step, alone, joint, later, load, trial.save, total)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
