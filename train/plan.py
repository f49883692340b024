"""What this machine has, and how much of it this process holds: memory in bytes, of the GPU where
there is one, else of the process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftheads.heads.adapter import Adapter
from draftheads.heads.base import DraftHead
from draftheads.heads.eagle import default_features
from draftheads.heads.hub import HEADS
from draftheads.heads.losses import CHUNK_LOGITS, CHUNK_ROWS
from draftheads.heads.placement import check_path, check_placement, read_config, reading
from draftheads.heads.target import Target
from draftheads.train.batches import HELDOUT_TOKENS, Documents, Order, Reading, Rows
from draftheads.train.checkpoint import check_same_run, newest, read_state
from draftheads.train.data.answers import (
    MANIFEST,
    Answer,
    count,
    read_answers,
    read_manifest,
    write_manifest,
)
from draftheads.train.evaluate import check_eval
from draftheads.train.features import SHARD_BYTES
from draftheads.train.loop import fit
from draftheads.train.progress import check_trackers
from draftheads.train.recipe import (
    DecoderChoices,
    Eagle3Choices,
    EvalChoices,
    MedusaChoices,
    Recipe,
    SequentialChoices,
)
from draftheads.train.setup import check_tokens


def device_memory(device: str) -> tuple[int, int]:
    """(bytes that it has, bytes that are free now)."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total, free
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path) and (text := Path(path).read_text().strip()).isdigit():
            total, free = min(total, int(text)), min(free, int(text))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # free pages leave out what the page cache would give back
        values = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = min(total, int(values["MemAvailable"].split()[0]) * 1024)
    return total, free


def peak() -> int:
    """Highest memory in bytes: what torch allocated on a GPU, else what this process held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if os.path.exists("/proc/self/status"):
        return _status("VmHWM")
    import resource  # where there is no /proc, there is one number for all phases

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Let `peak` begin anew, where the system can do that."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): VmHWM begins anew


def resident() -> int:
    """Bytes of memory that this process holds now; 0 on a GPU, which has none of Python."""
    if torch.cuda.is_available():
        return 0
    return _status("VmRSS") if os.path.exists("/proc/self/status") else peak()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


# The parts of a run and their sizes, as numbers: target, head, adapter.
#
# Legend: D width, I inner width of an MLP.


FLOAT = 4
"""Bytes of a trained number: weights, gradients and both moments are float32."""
FOLDER_BYTES, TENSOR_BYTES = 10_800, 400
"""Of a checkpoint, besides its numbers: texts per folder; names and shapes per tensor."""
ADAPTER_FOLDER_BYTES, ADAPTER_TENSOR_BYTES = 2_900, 570
"""The same of an adapter, whose names are longer."""


@dataclass(frozen=True)
class TargetSizes:
    """Parameters of the frozen target by part. lm_head: 0 where it is the embeddings. per_layer: of
    one of `layers` equal ones (their mean). inner: I. dtype: as loaded for training.
    """

    name: str
    width: int
    inner: int
    vocabulary: int
    context: int
    layers: int
    embeddings: int
    per_layer: int
    lm_head: int
    rest: int
    dtype: torch.dtype
    bits: int | None

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embeddings + self.layers * self.per_layer + self.lm_head + self.rest

    def bytes(self, placement: str = "whole", processes: int = 1) -> int:
        """On one device. placement: as `target_placement` in a recipe; `sharded` divides layers."""
        of_layers = self.layers * self.per_layer * (self.bits or 8 * self.dtype.itemsize) // 8
        outside = self.parameters - self.layers * self.per_layer
        shared = processes if placement == "sharded" else 1
        return of_layers // shared + outside * self.dtype.itemsize


@dataclass(frozen=True)
class HeadSizes:
    """Parameters of the recipe's head, all trained in float32. buffers: bytes saved besides.
    tensors: how many are saved. largest: parameters of the largest. features: states of the
    target that training reads, each D wide.
    """

    kind: str
    parameters: int
    buffers: int
    tensors: int
    largest: int
    features: int

    @property
    def bytes(self) -> int:
        """Of the weights; gradients take as much, both moments twice as much."""
        return FLOAT * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of a step-* folder: weights, both moments, texts."""
        texts = FOLDER_BYTES + self.tensors * TENSOR_BYTES
        return 3 * self.bytes + self.buffers + texts


@dataclass(frozen=True)
class AdapterSizes:
    """Parameters of the recipe's adapter of the target, all trained in float32; zeros where there
    is none. layers: that it changes, the last ones. tensors, largest: as of `HeadSizes`. reads:
    numbers per token that its matrices in one layer read.
    """

    layers: int = 0
    parameters: int = 0
    tensors: int = 0
    largest: int = 0
    reads: int = 0

    @property
    def bytes(self) -> int:
        """Of the weights; gradients take as much, both moments twice as much."""
        return FLOAT * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of its part of a step-* folder: weights, both moments, texts."""
        texts = ADAPTER_FOLDER_BYTES + self.tensors * ADAPTER_TENSOR_BYTES
        return 3 * self.bytes + texts if self.layers else 0


@dataclass(frozen=True)
class Sizes:
    """Of all models of a run."""

    target: TargetSizes
    head: HeadSizes
    adapter: AdapterSizes

    @property
    def trained(self) -> int:
        """Bytes of the weights that learn."""
        return self.head.bytes + self.adapter.bytes

    @property
    def checkpoint(self) -> int:
        """Bytes of a step-* folder."""
        return self.head.checkpoint + self.adapter.checkpoint


# Memory that comes and goes in a training step, from shapes alone: an upper bound of it.
#
# Legend: D width, I inner width of an MLP, L blocks of a head, r rank.


def activation_bytes(recipe: Recipe, sizes: Sizes, length: int) -> int:
    """An upper bound of what a micro batch of rows of `length` tokens holds besides weights,
    gradients and moments, all of its tokens learned.

    Everything in 4 bytes. The target's forward: 10 D + 3 I per token, what it passes on 3 D per
    state, masks 9 per pair of tokens. The head: see `_kept`, and as much again of its largest
    piece for the backward pass. The layers of the target that an adapter changes: see `_adapted`.
    Logits: four copies of a chunk. Gradients that the loss makes in its forward pass: the head's
    weights once more; what AdamW holds meanwhile: its largest parameter twice on a CPU, all on a
    GPU.
    """
    target, head, adapter = sizes.target, sizes.head, sizes.adapter
    tokens = recipe.data.rows_per_batch * length
    width, pairs = target.width, tokens * length
    forward = tokens * (10 * width + 3 * target.inner + 3 * width * head.features) + 9 * pairs // 4
    vocabulary = _size(recipe.head, "vocabulary", target.vocabulary)
    whole = recipe.head.labels == "soft" or adapter.layers  # soft labels, or the divergence
    widest = target.vocabulary if whole else vocabulary
    on_gpu = torch.cuda.is_available()
    chunk = max(CHUNK_ROWS * widest, CHUNK_LOGITS["cuda" if on_gpu else "cpu"])
    kept = _kept(recipe, target, tokens, pairs)
    kept += _adapted(recipe, target, adapter, tokens, pairs)
    largest = max(head.largest, adapter.largest)
    update = sizes.trained // FLOAT if on_gpu else 2 * largest
    return FLOAT * (forward + kept + 4 * chunk + head.parameters + update)


def _kept(recipe: Recipe, target: TargetSizes, tokens: int, pairs: int) -> int:
    """Numbers that the head keeps for its backward pass.

    A Medusa head of L blocks: (3 L + 4) D per token; one that knows the token before: 4 D + 3 r
    more, of hydra its whole input. A decoder layer: 16 D + 5 I + 6 of attention per token and
    pass, and two masks. With gradient checkpointing a decoder layer keeps 2 D, and one pass is
    made again.
    """
    choices, width = recipe.head, target.width
    attention = max(width, _size(choices, "heads", 0) * _size(choices, "head_dim", 0))
    layer = _layer(width, _size(choices, "intermediate_size", target.inner), attention)
    if isinstance(choices, MedusaChoices):
        each = (3 * choices.layers + 4) * width
        if isinstance(choices, SequentialChoices):
            each += 4 * width + 3 * (choices.rank or width)
            each += (choices.depth + 1) * width if choices.conditioning == "hydra" else 0
        prefix = layer * tokens + 2 * pairs if getattr(choices, "prefix", False) else 0
        return tokens * each * choices.depth + prefix
    passes = choices.steps * choices.layers
    if recipe.run.gradient_checkpointing:
        return tokens * (2 * width * passes + layer) + 2 * pairs
    return tokens * (layer * passes + 3 * width * choices.steps) + 2 * pairs


def _adapted(
    recipe: Recipe, target: TargetSizes, adapter: AdapterSizes, tokens: int, pairs: int
) -> int:
    """Numbers that the target keeps for the backward pass through the layers that an adapter
    changes: those of a decoder layer, and what the adapter's matrices read once more, in their own
    dtype. With gradient checkpointing a layer keeps 2 D, and one is made again.
    """
    if not adapter.layers:
        return 0
    layer = _layer(target.width, target.inner, target.width) + adapter.reads
    if recipe.run.gradient_checkpointing:
        return tokens * (2 * target.width * adapter.layers + layer) + 2 * pairs
    return tokens * layer * adapter.layers + 2 * pairs


def _layer(width: int, inner: int, attention: int) -> int:
    """Numbers per token that a decoder layer keeps."""
    return 16 * width + 5 * inner + 6 * attention


def _size(choices: Any, name: str, default: int) -> int:
    return int(getattr(choices, name, None) or default)


# What a run needs of a machine: memory, disk and time, as numbers.


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the highest point. base: Python and its libraries (CPU alone). cache:
    features kept, or mapped from files, which give way to others (`mapped`). activations: all that
    comes and goes. limit: of the device, which serves `sharing` processes.
    """

    base: int
    target: int
    weights: int
    gradients: int
    optimizer: int
    data: int
    cache: int
    mapped: bool
    activations: int
    limit: int
    sharing: int

    @property
    def total(self) -> int:
        """Of one process."""
        trained = self.weights + self.gradients + self.optimizer
        return self.base + self.target + trained + self.data + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device has as much, for all processes that it serves."""
        return self.needed <= self.limit

    @property
    def needed(self) -> int:
        """Of all processes on this device."""
        return (self.total - (self.cache if self.mapped else 0)) * self.sharing


@dataclass(frozen=True)
class Disk:
    """Bytes. checkpoint: one; checkpoints: how many at most, the one being written included.
    features: files of cached features, of which the recipe allows `allowed`. data: what was
    distilled. free: in the output folder.
    """

    checkpoint: int
    checkpoints: int
    features: int
    allowed: int
    data: int
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
    """Seconds. step: mean over the run; alone, joint: over the steps in which heads learn alone, or
    with an adapter, None where there are none; first_pass, later: as `step`, if the target computed
    features in all of them, and if they were kept. save: with the held-out documents. total: None
    for unknown steps.
    """

    step: float
    alone: float | None
    joint: float | None
    first_pass: float
    later: float
    load: float
    save: float
    total: float | None


# Parameters and bytes of a run, from shapes alone: nothing is loaded, downloaded weights included.
#
# Legend: D width, I inner width of an MLP, V vocabulary, v draft vocabulary.


ENGINES: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"moments"}),
    "zero2": frozenset({"moments", "gradients"}),
    "zero3": frozenset({"moments", "gradients", "weights"}),
    "fsdp2": frozenset({"moments", "gradients", "weights"}),
}
"""What each engine divides over the processes of a launch."""

FEATURE_BYTES = {"bf16": (2, 0), "fp8": (1, 4), "fp32": (4, 0)}
"""Of a stored feature: per number, and per token and state."""


@dataclass(frozen=True)
class Launch:
    """Who trains: `processes` of them, on "cpu" or "cuda", the trained state divided by `engine`.

    Raises ValueError for an engine that is not in ENGINES.
    """

    processes: int
    engine: str
    device: str

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"--engine: expected one of {', '.join(ENGINES)}, got {self.engine!r}")

    @classmethod
    def here(cls, processes: int | None = None, engine: str = "ddp") -> Launch:
        """This machine's device; processes: default WORLD_SIZE, else one."""
        count = processes or int(os.environ.get("WORLD_SIZE", "1"))
        return cls(count, engine, "cuda" if torch.cuda.is_available() else "cpu")

    def share(self, part: str, size: int) -> int:
        """What one process holds of `size` bytes of "weights", "gradients" or "moments"."""
        return -(-size // self.processes) if part in ENGINES[self.engine] else size

    def trained(self, size: int) -> dict[str, int]:
        """Bytes on one process of weights that are `size` bytes together, of their gradients and
        of the optimizer: two moments, and what DeepSpeed's first stages keep besides, the weights
        of their part once more.
        """
        copies = 3 if self.engine in ("zero1", "zero2") else 2
        return {
            "weights": self.share("weights", size),
            "gradients": self.share("gradients", size),
            "optimizer": self.share("moments", copies * size),
        }


class ShapeTarget(Target):
    """A target whose parameters have shapes and no numbers, from its config.json alone.

    Raises OSError when there is no config, ValueError for a model that no head can stand on.
    """

    def __init__(self, recipe: Recipe) -> None:
        check_path(recipe.target)
        self.recipe_config = read_config(recipe.target, recipe.target_revision)
        with reading(recipe.target), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.recipe_config)
        super().__init__(model, name=recipe.target)
        self.sizes = _target_sizes(self, recipe)
        # new heads copy the last matrix to the CPU: one number, seen as a matrix, can be copied
        lm_head = model.get_output_embeddings()
        zeros_VD = torch.zeros(()).expand(lm_head.weight.shape)
        lm_head.weight = nn.Parameter(zeros_VD, requires_grad=False)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Of no numbers; that lm_head gives the model's logits is for the trainer to check."""
        return hidden.new_empty(*hidden.shape[:-1], self.vocab_size)

    def unembed_weight(self) -> Tensor:
        """The matrix without numbers."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight


def count_sizes(recipe: Recipe) -> Sizes:
    """Of all that the recipe loads or creates. Raises what these raise."""
    shapes = ShapeTarget(recipe)
    head = head_sizes(recipe, shapes)
    return Sizes(shapes.sizes, head, adapter_sizes(recipe, shapes))


def head_sizes(recipe: Recipe, target: Target) -> HeadSizes:
    """Of the head that training would create; a reduced vocabulary is as large as the recipe says.

    Raises ValueError where the head cannot stand on this target.
    """
    choices = recipe.head.model_dump(exclude={"kind"})
    if size := choices.pop("vocabulary", None):
        choices["vocabulary"] = list(range(min(size, target.vocab_size)))
    with torch.device("meta"):
        head: DraftHead = HEADS[recipe.head.kind].create(target, **choices)
    trained = [parameter.numel() for parameter in head.parameters() if parameter.requires_grad]
    state: dict[str, Tensor] = head.state_dict()
    return HeadSizes(
        kind=head.kind,
        parameters=sum(trained),
        buffers=sum(x.nbytes for x in state.values()) - FLOAT * sum(trained),
        tensors=len(state),
        largest=max(trained),
        features=len(head.training_layers),
    )


def adapter_sizes(recipe: Recipe, target: Target) -> AdapterSizes:
    """Of the adapter that training would create. It is put on `target`, so nothing else can be
    asked of that afterwards. Raises ValueError for layers or modules that there are not.
    """
    if recipe.adapter is None:
        return AdapterSizes()
    keys = {"rank", "alpha", "layers", "modules"}
    with torch.device("meta"):
        adapter = Adapter.create(target.model, "", **recipe.adapter.model_dump(include=keys))
    trained = adapter.parameters.values()
    layers = len(adapter.config["layers_to_transform"])
    return AdapterSizes(
        layers=layers,
        parameters=sum(parameter.numel() for parameter in trained),
        tensors=len(trained),
        largest=max(parameter.numel() for parameter in trained),
        reads=sum(parameter.shape[1] for parameter in trained) // layers,
    )


def layer_list(model: nn.Module, layers: int) -> nn.ModuleList:
    """The decoder layers of a model: its list of `layers` modules that has most parameters."""
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == layers]
    if not lists:
        raise ValueError(f"expected a model with a list of {layers} layers, found none")
    return max(lists, key=lambda x: sum(p.numel() for p in x.parameters()))


def _target_sizes(target: Target, recipe: Recipe) -> TargetSizes:
    model, config = target.model, target.config
    layers = _count(layer_list(model, target.layers))
    embeddings = _count(model.get_input_embeddings())
    lm_head = model.get_output_embeddings()
    tied = lm_head.weight is model.get_input_embeddings().weight
    last = 0 if tied else _count(lm_head)
    total = sum(p.numel() for p in model.parameters())
    return TargetSizes(
        name=target.name,
        width=target.hidden_size,
        inner=_inner(config, target.hidden_size),
        vocabulary=target.vocab_size,
        context=target.context,
        layers=target.layers,
        embeddings=embeddings,
        per_layer=layers // target.layers,
        lm_head=last,
        rest=total - embeddings - last - layers // target.layers * target.layers,
        dtype=_dtype(recipe, config),
        bits=recipe.target_bits,
    )


def _dtype(recipe: Recipe, config: PretrainedConfig) -> torch.dtype:
    if recipe.target_dtype != "auto":
        dtype: torch.dtype = getattr(torch, recipe.target_dtype)
        return dtype
    stored = getattr(config, "dtype", None) or torch.float32
    return stored if torch.cuda.is_available() else torch.float32


def _inner(config: Any, width: int) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * width)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# How much there is to train on: rows, tokens and steps of a recipe's data, or what is assumed
# where there is none.
#
# Legend: N tokens.


SAMPLE_TOKENS = 2_000_000
"""Read of a data set to know its rows; a larger one is taken to go on as it begins."""
DOCUMENT_BYTES = 400
"""Python's objects per document: spans, pieces, rows."""


@dataclass(frozen=True)
class Workload:
    """The rows of a run. answers: a sample of the data, or made up. known: the data is there.
    whole: all of it is in `answers`. rows: to train on, of `length` tokens at most; None: unknown.
    tokens: of these rows, padding not counted. heldout: tokens observed at each save.
    documents, stored: of the data, and its bytes on disk.
    """

    answers: list[Answer]
    known: bool
    whole: bool
    length: int
    rows: int | None
    tokens: int
    learned: float
    heldout: int
    documents: int
    stored: int

    @property
    def memory(self) -> int:
        """Bytes of the data in a training process: ids, what is learned, Python's spans."""
        return self.tokens * (4 + 1) + self.documents * DOCUMENT_BYTES

    @property
    def sampled(self) -> int:
        """As `memory`, of the sample alone."""
        return 5 * sum(len(x.tokens) for x in self.answers) + len(self.answers) * DOCUMENT_BYTES

    @property
    def row_tokens(self) -> float:
        """Tokens per row, padding not counted."""
        return self.tokens / self.rows if self.rows else float(self.length)


@dataclass(frozen=True)
class Steps:
    """micro_batches: per step and process. rows: per step, over all processes. count: None where
    the number of epochs is given and that of rows is not known. passes: over the rows. alone: share
    of the steps in which heads learn alone, 1 without an adapter.
    """

    micro_batches: int
    rows: int
    count: int | None
    passes: float | None
    saves: int | None
    alone: float
    note: str


def read_workload(recipe: Recipe, context: int) -> Workload:
    """Look at the recipe's data. Raises ValueError for a folder that is not in order."""
    length = min(recipe.data.sequence_length, context)
    if not (recipe.data.path / MANIFEST).is_file():
        return Workload([], False, False, length, None, 0, 1.0, HELDOUT_TOKENS, 0, 0)
    manifest = read_manifest(recipe.data.path)
    answers = list(_sample(recipe.data.path))
    documents = Documents.read(answers)
    size = len(documents.tokens_N)
    whole = size < SAMPLE_TOKENS
    total = len(answers) if whole else count_documents(recipe.data.path, manifest)
    times = total / len(answers)
    spans, apart = documents.split(recipe.data.heldout)
    train = Rows(documents, spans, length, pack=recipe.data.pack, seed=recipe.run.seed)
    heldout = Rows(documents, apart, length, pack=recipe.data.pack, seed=0)
    if not len(train) or not len(heldout):
        raise ValueError(f"{recipe.data.path}: expected tokens written by the target, got none")
    return Workload(
        answers,
        True,
        whole,
        length,
        round(len(train) * times),
        round(sum(train.sizes) * times),
        sum(train.learned) / sum(train.sizes),
        min(HELDOUT_TOKENS, round(sum(heldout.sizes) * times)),
        total,
        sum(path.stat().st_size for path in recipe.data.path.glob("*.json*")),
    )


def count_documents(folder: Path, manifest: dict[str, object]) -> int:
    """Documents in a folder; the manifest of a finished one knows."""
    counts = manifest.get("counts")
    if manifest["complete"] and isinstance(counts, dict):
        several = "documents" in counts  # else written when each prompt gave one
        return int(counts["documents" if several else "done"])
    return count(folder, manifest).documents


def plan_steps(recipe: Recipe, workload: Workload, processes: int) -> Steps:
    """How a run on so many processes goes."""
    choices = recipe.adapter
    rows = recipe.data.rows_per_batch
    reading = Reading(workload.rows, workload.length, recipe.run.epochs, processes)
    per_step, note = reading.rows_per_step(recipe.run.tokens_per_step, rows)
    steps = recipe.run.steps
    if steps is None and workload.rows and recipe.run.epochs:
        steps = Order(workload.rows, per_step, recipe.run.seed).steps(recipe.run.epochs)
    warning = reading.warning(steps, per_step) if steps else ""
    note = "; ".join(filter(None, (note, warning)))
    passes = steps * per_step / workload.rows if steps and workload.rows else None
    saves = -(-steps // recipe.run.save_every) if steps else None
    alone = choices.start if choices else 1.0
    if choices and steps:
        alone = math.ceil(alone * steps - 1e-9) / steps  # as the learner counts them
    micro_batches = max(1, per_step // (rows * processes))
    return Steps(micro_batches, per_step, steps, passes, saves, alone, note)


def made_up(rows: int, length: int, vocabulary: int) -> list[Answer]:
    """Rows that are full, and learned but for their first token: nothing costs more."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator).tolist()
    return [Answer(row, [(1, length)]) for row in tokens]


def heldout_tokens(answers: list[Answer], recipe: Recipe) -> int:
    """Tokens of these answers that a run observes when it saves."""
    _, apart = Documents.read(answers).split(recipe.data.heldout)
    return min(HELDOUT_TOKENS, sum(stop - start for start, stop in apart))


def write_answers(folder: Path, answers: list[Answer]) -> None:
    """A finished distillation folder that names no target."""
    talks: list[list[dict[str, object]]] = []
    for answer in answers:
        document = {"tokens": answer.tokens, "learn": answer.learn, "turns": 1, "finish": "eos"}
        if not answer.follows:
            talks.append([])
        talks[-1].append(document)
    folder.mkdir(parents=True)
    with (folder / "answers-00000-of-00001.jsonl").open("w") as file:
        for number, talk in enumerate(talks):
            file.write(json.dumps({"id": number, "documents": talk}) + "\n")
    manifest = {"format": 1, "batch_size": len(talks), "complete": True}
    counts = {"prompts": {"count": len(talks)}, "counts": {"done": len(talks)}}
    write_manifest(folder, {**manifest, **counts})


def _sample(folder: Path) -> Iterator[Answer]:
    size = 0
    for answer in islice(read_answers(folder), SAMPLE_TOKENS):
        if size >= SAMPLE_TOKENS:
            return
        size += len(answer.tokens)
        yield answer


# What a few steps of the trainer on a target of one depth took, read from a child's marks.


ALONE, JOINT = "alone", "joint"
"""Kinds of steps: heads learn alone, or together with an adapter of the target."""
Depth = tuple[int, int]
"""Layers of a target, and how many of them an adapter changes."""


@dataclass(frozen=True)
class Pace:
    """Seconds, the untouched target's features apart. body: of one more micro batch; rest: of a
    step of as many as the trial has.
    """

    body: float
    rest: float


@dataclass(frozen=True)
class Trial:
    """What steps on a target of some depth took.

    base: bytes of Python and its libraries. peaks: bytes, the highest of each phase. Seconds:
    features: of the untouched target per micro batch; paces: by kind of step; load, observe and
    save: once. checkpoint: bytes.
    """

    depth: Depth
    micro_batches: int
    base: int
    peaks: dict[str, int]
    features: float
    paces: dict[str, Pace]
    load: float
    observe: float
    save: float
    checkpoint: int

    def step(self, micro_batches: int, kind: str = ALONE) -> float:
        """Seconds of a step of so many micro batches, features apart."""
        pace = self.paces[kind]
        return pace.rest + (micro_batches - self.micro_batches) * pace.body


def read_trial(found: dict[str, Any], depth: Depth, calls: int, checkpoint: int) -> Trial:
    """What a child's marks say. calls: forwards of the untouched target per micro batch."""
    marks: list[tuple[str, float]] = [(name, at) for name, at in found["marks"]]
    ends = [at for name, at in marks if name == "optimizer end"]
    heads = [at for name, at in marks if name == "head"]
    steps: dict[str, list[tuple[float, float]]] = {}
    for start, stop in pairwise(ends):
        joint = any(name == "adapted" and start <= at < stop for name, at in marks)
        steps.setdefault(JOINT if joint else ALONE, []).append((start, stop))
    micro = len(heads) // len(ends)
    forwards = _forwards(marks)
    inside = [stop - start for start, stop in forwards if ends[0] <= start < ends[-1]]
    before = [stop - start for start, stop in forwards if start < heads[0]]

    def apart(start: float, stop: float) -> float:
        """Seconds without the untouched target's."""
        return stop - start - sum(b - a for a, b in forwards if start <= a < stop)

    def pace(of_kind: Sequence[tuple[float, float]]) -> Pace:
        bodies = [
            apart(a, b)
            for start, stop in of_kind
            for a, b in pairwise(head for head in heads if start <= head < stop)
        ]
        rest = median(apart(start, stop) for start, stop in of_kind)
        return Pace(median(bodies) if bodies else 0.0, rest)

    at = dict(marks)  # the last of each name
    observe = max(0.0, at["forward end"] - ends[-1])
    return Trial(
        depth=depth,
        micro_batches=micro,
        base=found["base"],
        peaks=found["peaks"],
        features=calls * median(inside or before),  # before: where they are written to files first
        paces={kind: pace(of_kind) for kind, of_kind in steps.items()},
        load=apart(at["begin"], heads[0]),
        observe=observe,
        save=at["end"] - ends[-1] - observe,
        checkpoint=checkpoint,
    )


def _forwards(marks: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    """(start, stop) of the untouched target's outermost forwards."""
    spans, open_since = [], []
    for name, at in marks:
        if name == "target":
            open_since.append(at)
        elif name == "target end":
            start = open_since.pop()
            if not open_since:
                spans.append((start, at))
    return spans


# The child process of a probe: it trains as a recipe says and notes when what began, and the
# highest memory of each phase.
#
#     python -m draftheads.train.plan FOLDER CLOCK
#
# It reads recipe.json in the folder and writes marks.json there.
# It listens through torch's own global hooks, so that what is measured is the trainer itself.


RECIPE, MARKS = "recipe.json", "marks.json"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""cpu: of this process; it knows nothing of others that take turns with it."""
PHASES = ("load", "train", "save")


class Listener:
    """Marks (name, seconds): "target" and "target end" around each forward of the untouched target,
    "adapted" and "adapted end" around one with an adapter that learns, "head" at each of the head,
    "optimizer" and "optimizer end", "forward end" of the last module.
    peaks: bytes by phase; a phase ends at the first head, at the last optimizer step, at the end.
    """

    def __init__(self, steps: int, now: Callable[[], float]) -> None:
        self.left, self.now = steps, now
        self.marks: list[tuple[str, float]] = []
        self.peaks: dict[str, int] = {}
        self.observed = 0.0
        reset_peak()
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after)
        register_optimizer_step_pre_hook(lambda *_: self.mark("optimizer"))
        register_optimizer_step_post_hook(self._stepped)

    def mark(self, name: str) -> None:
        """Note what begins now."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((name, self.now()))

    def end_phase(self) -> None:
        """Note the highest memory since the phase before."""
        self.peaks[PHASES[len(self.peaks)]] = peak()
        reset_peak()

    def _before(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self.mark(_called())
        elif isinstance(module, DraftHead):
            if not self.peaks:
                self.end_phase()
            self.mark("head")

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self.mark(f"{_called()} end")
        if not self.left:  # the held-out documents: what comes after the last module is saving
            self.observed = self.now()

    def _stepped(self, *_: Any) -> None:
        self.mark("optimizer end")
        self.left -= 1
        if not self.left:
            self.end_phase()


def _called() -> str:
    """What a forward of the target is for: gradients go through it for an adapter alone."""
    return "adapted" if torch.is_grad_enabled() else "target"


def main(argv: Sequence[str]) -> int:
    """Train as `recipe.json` in the folder says."""
    folder = Path(argv[0])
    recipe = Recipe.model_validate_json((folder / RECIPE).read_text())
    assert recipe.run.steps, "a probe has a number of steps"
    base = resident()
    listener = Listener(recipe.run.steps, CLOCKS[argv[1]])
    listener.mark("begin")
    try:
        outcome = fit(recipe)
    except (ValueError, OSError) as error:  # as the trainer's own entry: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    listener.marks.append(("forward end", listener.observed))
    listener.mark("end")
    listener.end_phase()
    found = {"base": base, "peaks": listener.peaks, "marks": listener.marks}
    (folder / MARKS).write_text(json.dumps({**found, "checkpoint": str(outcome.checkpoint)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# A few steps of the real trainer on a shallow target of the same widths, and what they say of the
# whole one: time and memory are lines in the number of layers, and in how many of them learn.
#
# Everything it writes is in a temporary folder; training runs in child processes (`listen`).


FEWEST, MOST = 4, 16
"""Steps of a probe, of each kind; the first of them is not timed."""
SECONDS = 5.0
"""Of steps, that a probe aims at between FEWEST and MOST."""
PATIENCE = 600.0
"""Seconds; a probe that would take longer is not begun."""
SHALLOW = 4
"""Layers of the deeper probe, where the features do not need more."""
LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")


class ProbeError(Exception):
    """A probe that this machine cannot make, and why."""


@dataclass(frozen=True)
class Probe:
    """Trials at one depth or several, and the data that they were made with: from each to the next,
    the target has more layers or, with as many, an adapter changes more of them. (Without the
    latter, it changes all or none.) heldout: observed tokens. rows: trained on in each.
    """

    trials: list[Trial]
    heldout: int
    rows: int

    @property
    def layers(self) -> list[int]:
        """Depths that were tried."""
        return sorted({trial.depth[0] for trial in self.trials})

    def at(self, depth: Depth) -> Trial:
        """The trial that a target of this depth would give: lines through what was measured. What
        does not depend on the target's depth, where no adapter learns, is the trials' mean.
        """

        trials, last = self.trials, self.trials[-1]
        depths = [trial.depth for trial in trials]

        def line(values: Iterable[float]) -> float:
            found = list(values)
            value = found[-1]
            for (near, far), (low, high) in zip(pairwise(depths), pairwise(found), strict=True):
                part = 0 if far[0] > near[0] else 1  # what grows from one to the other
                slope = (high - low) / (far[part] - near[part])
                value += max(0.0, slope) * (depth[part] - last.depth[part])
            return value

        def heads(values: Iterable[float]) -> float:
            return line(values) if depth[1] else fmean(values)

        def pace(paces: list[Pace]) -> Pace:
            return Pace(heads(pace.body for pace in paces), heads(pace.rest for pace in paces))

        return Trial(
            depth,
            last.micro_batches,
            int(fmean(trial.base for trial in trials)),
            {name: int(line(trial.peaks[name] for trial in trials)) for name in last.peaks},
            line(trial.features for trial in trials),
            {kind: pace([trial.paces[kind] for trial in trials]) for kind in last.paces},
            line(trial.load for trial in trials),
            line(trial.observe for trial in trials),
            heads(trial.save for trial in trials),
            int(heads(trial.checkpoint for trial in trials)),
        )


@dataclass(frozen=True)
class Prober:
    """Makes trials of a recipe; sizes: of the real run. clock: a key of `CLOCKS`."""

    recipe: Recipe
    sizes: Sizes
    work: Workload
    plan: Steps
    clock: str = "wall"

    def run(self) -> Probe:
        """Train at some depths. Raises ProbeError where that is not possible here."""
        depths = self.depths()
        micro = min(self.plan.micro_batches, 3)  # the first makes gradients, others add to them
        seconds = self.step_seconds(depths[-1], micro)
        kinds = 2 if 0 < self.plan.alone < 1 else 1
        steps = kinds * max(FEWEST, min(MOST, round(SECONDS / seconds)))
        expected = steps * seconds * len(depths)
        if expected > PATIENCE:
            raise ProbeError(f"it would take about {expected / 60:.0f} minutes here")
        rows = steps * micro * self.recipe.data.rows_per_batch
        answers = self.work.answers or self._made_up(rows)
        with tempfile.TemporaryDirectory(prefix="draftheads-plan-") as name:
            folder = Path(name)
            write_answers(folder / "data", answers)
            trials = [self._try(folder, depth, micro, steps) for depth in depths]
        return Probe(trials, heldout_tokens(answers, self.recipe), rows)

    def depths(self) -> list[Depth]:
        """Two numbers of layers that have as many states as the head reads; the target's own number
        where that is not more. An adapter changes all of them; where it leaves some layers of the
        target alone, a third trial tells what one of those takes.
        """
        layers, adapted = self.sizes.target.layers, self.sizes.adapter.layers
        low = max(1, self.sizes.head.features - 1)
        high = max(SHALLOW, 2 * low)
        if high >= layers:
            return [(layers, adapted)]
        if not adapted:
            return [(low, 0), (high, 0)]
        return [(low, low), *([(high, low)] if adapted < layers else []), (high, high)]

    def bytes(self, activations: int) -> int:
        """Memory that the deepest trial may need. activations: as counted from shapes."""
        target = replace(self.sizes.target, layers=self.depths()[-1][0]).bytes()
        return 2 * target + 5 * self.sizes.trained + activations

    def step_seconds(self, depth: Depth, micro_batches: int) -> float:
        """A guess, from the rate at which this machine multiplies matrices."""
        tokens = micro_batches * self.recipe.data.rows_per_batch * self.work.length
        choices, (layers, adapted) = self.recipe.head, depth
        passes = choices.steps if isinstance(choices, DecoderChoices) else 1
        forwards = layers * (2 if adapted else 1) + adapted  # untouched; adapted, and backward
        per_token = 2 * forwards * self.sizes.target.per_layer
        per_token += 6 * self.sizes.head.parameters * passes
        return tokens * per_token / _multiply_rate()

    def _made_up(self, rows: int) -> list[Answer]:
        apart = math.ceil(rows * self.recipe.data.heldout) + 1
        return made_up(rows + apart, self.work.length, self.sizes.target.vocabulary)

    def _try(self, folder: Path, depth: Depth, micro_batches: int, steps: int) -> Trial:
        with tempfile.TemporaryDirectory(prefix=f"{depth[0]}-", dir=folder) as name:
            place = Path(name)
            write_shallow(self.recipe, depth[0], place / "target")
            recipe = self._shallow(depth, place, micro_batches, steps)
            (place / RECIPE).write_text(recipe.model_dump_json())
            _train(place, self.clock)
            found = json.loads((place / MARKS).read_text())
            saved = Path(found["checkpoint"])
            size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        by_row = self.recipe.data.cache_gb > 0 or self.recipe.features.mode == "cached"
        calls = self.recipe.data.rows_per_batch if by_row else 1
        return read_trial(found, depth, calls, size)

    def _shallow(self, depth: Depth, place: Path, micro_batches: int, steps: int) -> Recipe:
        recipe, (layers, adapted) = self.recipe, depth
        data = {"path": place.parent / "data"}
        head = {}
        real = self.sizes.target.layers
        if isinstance(recipe.head, Eagle3Choices) and layers < real:
            head = {"feature_layers": _spread(recipe.head, real, layers)}
        alone = self.plan.alone
        learning = {"layers": adapted, "start": 0.5 if 0 < alone < 1 else min(alone, 0.99)}
        run = {
            "output": place / "run",
            "steps": steps,
            "epochs": None,
            "tokens_per_step": micro_batches * recipe.data.rows_per_batch * self.work.length,
            "save_every": steps,
            "trackers": [],
        }
        values = {
            "target": str(place / "target"),
            "target_revision": None,
            "target_placement": "whole",
            "data": recipe.data.model_copy(update=data),
            "features": recipe.features.model_copy(update={"path": place / "features"}),
            "head": recipe.head.model_copy(update=head),
            "adapter": recipe.adapter and recipe.adapter.model_copy(update=learning),
            "eval": EvalChoices(every=0, report=False),
            "run": recipe.run.model_copy(update=run),
        }
        return recipe.model_copy(update=values)


def _spread(choices: Eagle3Choices, real: int, layers: int) -> list[int]:
    """As many states of a shallow target as the head reads of the real one."""
    last = len(choices.feature_layers or default_features(real)) - 1
    return [round(place * layers / last) for place in range(last + 1)] if last else [layers]


def write_shallow(recipe: Recipe, layers: int, folder: Path) -> None:
    """A random target of so many layers, saved as the real one is."""
    config = read_config(recipe.target, recipe.target_revision)
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:  # layer_types and the like
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    torch.manual_seed(0)
    dtype = getattr(config, "dtype", None) or torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    logging.disable(logging.WARNING)  # saving imports libraries that tell what they look for
    try:
        model.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)


def _train(folder: Path, clock: str) -> None:
    """Run the child. Raises ProbeError with its last line when it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    command = [sys.executable, "-m", "draftheads.train.plan", str(folder), clock]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=2 * PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it was not done after {2 * PATIENCE / 60:.0f} minutes") from error
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["it said nothing"]
        raise ProbeError(f"exit code {child.returncode}: {lines[-1].removeprefix('error: ')}")


def _multiply_rate() -> float:
    """FLOP per second of a float32 matrix product."""
    size = 1024 if not torch.cuda.is_available() else 8192
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.ones(size, size, device=device)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        float((left @ left)[0, 0])
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / median(seconds[1:])


# What a run will need: memory per device, disk and time, before anything is loaded.
#
# Sizes follow from shapes (`sizes`), rows from the data (`workload`); what shapes do not
# tell is tried (`probe`) and extrapolated to the target's depth.


@dataclass(frozen=True)
class Plan:
    """All of it. probed: layers of the targets that were tried; empty: shapes alone, because of
    `reason`. time: None without a probe. busy: processes per core that wanted to run before it.
    """

    recipe: Recipe
    launch: Launch
    sizes: Sizes
    work: Workload
    steps: Steps
    memory: Memory
    disk: Disk
    time: Duration | None
    probed: list[int]
    reason: str
    busy: float

    @property
    def tokens_per_step(self) -> float:
        """Over all processes, padding not counted."""
        return self.steps.rows * self.work.row_tokens

    def remedy(self) -> str:
        """One line, empty where everything fits."""
        if not self.memory.fits:
            needed, limit = self.memory.needed, self.memory.limit
            what = (
                f"memory; {'set run.gradient_checkpointing, ' if self.recipe.adapter else ''}lower "
                "data.rows_per_batch, data.sequence_length or data.cache_gb, set head.vocabulary, "
                "or divide the head's state over processes with --engine zero2"
            )
        elif self.disk.features > self.disk.allowed:
            needed, limit = self.disk.features, self.disk.allowed
            what = "features; take features.dtype=fp8 or raise features.disk_gb"
        elif self.disk.fits:
            return ""
        else:
            needed, limit = self.disk.total, self.disk.free
            what = "disk; lower run.keep, take features.dtype=fp8, or another run.output"
        return (
            f"does not fit: expected at most {limit / 1e9:.1f} GB, needs {needed / 1e9:.1f} GB of "
            f"{what}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON."""
        work = {key: value for key, value in vars(self.work).items() if key != "answers"}
        target = self.sizes.target
        return {
            "launch": asdict(self.launch),
            **asdict(self.sizes),
            "target": {**asdict(target), "dtype": str(target.dtype).split(".")[-1]},
            "data": {**work, "row_tokens": self.work.row_tokens},
            "steps": {**asdict(self.steps), "tokens_per_step": self.tokens_per_step},
            "memory": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "disk": {**asdict(self.disk), "total": self.disk.total, "fits": self.disk.fits},
            "time": asdict(self.time) if self.time else None,
            "probed": self.probed,
            "reason": self.reason,
            "busy": self.busy,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def make_plan(recipe: Recipe, launch: Launch, *, probe: bool = True, clock: str = "wall") -> Plan:
    """Count, look, try. clock: of the probe, "wall" or "cpu". Raises ValueError and OSError for
    what the trainer would refuse.
    """
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    if recipe.adapter and "weights" in ENGINES[launch.engine]:
        raise ValueError(
            f"--engine: expected ddp, zero1 or zero2 with an adapter, got {launch.engine}, which "
            "would divide matrices that the target reads between the heads' forwards"
        )
    _refuse(recipe, launch)
    sizes = count_sizes(recipe)
    work = read_workload(recipe, sizes.target.context)
    largest = max((max(answer.tokens) for answer in work.answers), default=0)
    check_tokens(recipe, largest, sizes.target.vocabulary)
    steps = plan_steps(recipe, work, launch.processes)
    batch = min(recipe.data.rows_per_batch, steps.rows // launch.processes)  # as `share` divides it
    data = recipe.data.model_copy(update={"rows_per_batch": batch})
    recipe = recipe.model_copy(update={"data": data})
    activations = activation_bytes(recipe, sizes, work.length)
    found, reason = None, "--no-probe was given"
    if probe:
        found, reason = _probe(Prober(recipe, sizes, work, steps, clock), activations)
    trial = found.at((sizes.target.layers, sizes.adapter.layers)) if found else None
    planner = _Planner(recipe, launch, sizes, work, steps)
    return Plan(
        **vars(planner),
        memory=planner.probed(trial, found) if trial and found else planner.counted(activations),
        disk=planner.disk(trial),
        time=planner.duration(trial, found) if trial and found else None,
        probed=found.layers if found else [],
        reason=reason,
        busy=busy,
    )


def _refuse(recipe: Recipe, launch: Launch) -> None:
    """What the trainer refuses before it loads anything."""
    check_trackers(recipe.run.trackers)
    check_eval(recipe, lambda said: None)
    check_placement(recipe.target_placement, recipe.target_bits, launch.processes)
    place = _existing(recipe.run.output)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(
            f"{recipe.run.output}: expected a folder that can be written, {place} is not one; "
            "give another run.output"
        )
    checkpoint, _ = newest(recipe.run.output)
    if checkpoint:
        check_same_run(checkpoint, read_state(checkpoint), recipe)


def _existing(path: Path) -> Path:
    """A path, or the nearest of its parents that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _probe(prober: Prober, activations: int) -> tuple[Probe | None, str]:
    """(what it found, "") or (None, why there is none)."""
    needed = prober.bytes(activations)
    free = device_memory("cuda" if torch.cuda.is_available() else "cpu")[1]
    if needed > free:
        return None, (
            f"a probe needs up to {needed / 1e9:.1f} GB here, and {free / 1e9:.1f} GB are free"
        )
    try:
        return prober.run(), ""
    except ProbeError as error:
        return None, f"the probe failed: {error}"


@dataclass(frozen=True)
class _Planner:
    recipe: Recipe
    launch: Launch
    sizes: Sizes
    work: Workload
    steps: Steps

    def counted(self, activations: int) -> Memory:
        """From shapes alone: the most that training holds, or writing a shard of features."""
        return self._memory(resident(), max(activations, self._shard_bytes()))

    def probed(self, trial: Trial, probe: Probe) -> Memory:
        """The highest of the phases, with what the probe had no part in."""
        parts = self._memory(trial.base, 0)
        trained = parts.weights + parts.gradients + parts.optimizer
        undivided = 4 * self.sizes.trained - trained  # saving makes everything whole again
        elsewhere = self.sizes.target.bytes() - parts.target
        new = parts.cache - min(parts.cache, self._kept_features(probe.rows))
        more = parts.data - min(parts.data, self.work.sampled)
        peaks = {
            "load": trial.peaks["load"] + more - elsewhere,
            "train": trial.peaks["train"] + more + new - undivided - elsewhere,
            "save": trial.peaks["save"] + more + new - elsewhere,
        }
        rest = max(peaks.values()) - parts.total
        # what is less than the parts has freed some of the target
        target = max(0, parts.target + min(0, rest))
        return replace(self._memory(trial.base, max(0, rest)), target=target)

    def disk(self, trial: Trial | None) -> Disk:
        """Checkpoints as the probe wrote them, or as counted."""
        run = self.recipe.run
        most = run.keep + 2  # the best one may be older, and one is being written
        return Disk(
            checkpoint=trial.checkpoint if trial else self.sizes.checkpoint,
            checkpoints=min(self.steps.saves or most, most),
            features=self._stored_features(),
            allowed=int(self.recipe.features.disk_gb * 1e9),
            data=self.work.stored,
            free=shutil.disk_usage(_existing(run.output)).free,
        )

    def duration(self, trial: Trial, probe: Probe) -> Duration:
        """Steps at the real depth; the held-out documents as many as there are."""
        micro, count, alone = self.steps.micro_batches, self.steps.count, self.steps.alone
        features = micro * trial.features
        save = trial.observe * self.work.heldout / max(1, probe.heldout) + trial.save
        load = trial.load
        if self.recipe.features.mode == "cached":
            rows = self._stored_tokens() / self.work.row_tokens
            load += trial.features * rows / self.recipe.data.rows_per_batch
            features = 0.0
        kept = min(1.0, self.recipe.data.cache_gb * 1e9 / max(1, self._feature_bytes(self._rows())))
        seen = min(1.0, 1 / self.steps.passes) if self.steps.passes else 1.0

        def mean(start: float, stop: float, kind: str) -> float:
            """Of the steps between two parts of the run."""
            remembered = kept * max(0.0, stop - max(start, seen)) / (stop - start)
            return trial.step(micro, kind) + features * (1 - remembered)

        apart = mean(0.0, alone, ALONE) if alone else None
        joint = mean(alone, 1.0, JOINT) if alone < 1 else None
        shares = {ALONE: alone, JOINT: 1 - alone}
        later = sum(share * trial.step(micro, kind) for kind, share in shares.items() if share)
        step = later + features * (1 - (1 - seen) * kept)
        total = load + count * step + (self.steps.saves or 1) * save if count else None
        return Duration(step, apart, joint, later + features, later, load, save, total)

    def _memory(self, base: int, activations: int) -> Memory:
        launch = self.launch
        on_cpu = launch.device == "cpu"
        placement = self.recipe.target_placement
        seen = self.steps.rows * self.steps.count if self.steps.count else None
        return Memory(
            base=base,
            target=self.sizes.target.bytes(placement, launch.processes),
            **launch.trained(self.sizes.trained),
            data=self.work.memory if on_cpu else 0,
            cache=self._kept_features(seen) if on_cpu else 0,
            mapped=self.recipe.features.mode == "cached",
            activations=activations,
            limit=device_memory(launch.device)[0],
            sharing=launch.processes if on_cpu else 1,
        )

    def _rows(self) -> int:
        return self.work.rows or self.steps.rows * (self.steps.count or 1)

    def _feature_bytes(self, rows: float) -> int:
        """Of so many rows, as the target computes them."""
        target = self.sizes.target
        numbers = rows * self.work.row_tokens * target.width * self.sizes.head.features
        return int(numbers * target.dtype.itemsize)

    def _kept_features(self, seen: int | None) -> int:
        """In memory, after so many rows were trained on; None: enough to fill it."""
        if self.recipe.features.mode == "cached":
            rows = self._rows()
            return self._stored_features() * min(rows, rows if seen is None else seen) // rows
        known = [rows for rows in (self.work.rows, seen) if rows is not None]
        room = int(self.recipe.data.cache_gb * 1e9)
        return min(room, self._feature_bytes(min(known))) if known else room

    def _shard_bytes(self) -> int:
        """While a shard is written: rows as computed, encoded, joined, as bytes and on their way to
        the file.
        """
        number = FEATURE_BYTES[self.recipe.features.dtype][0]
        copies = 4 + self.sizes.target.dtype.itemsize / number
        return int(min(SHARD_BYTES, self._stored_features()) * copies)

    def _stored_features(self) -> int:
        choices = self.recipe.features
        if choices.mode != "cached":
            return 0
        number, scale = FEATURE_BYTES[choices.dtype]
        per_token = self.sizes.head.features * (self.sizes.target.width * number + scale)
        return int(self._stored_tokens() * per_token)

    def _stored_tokens(self) -> float:
        """Whose features are in files: with an adapter, not the held-out ones, which it changes."""
        heldout = 0 if self.recipe.adapter else self.work.heldout
        return self._rows() * self.work.row_tokens + heldout
