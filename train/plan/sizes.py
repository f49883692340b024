"""Parameters and bytes of a run, from shapes alone: nothing is loaded, downloaded weights included.

Legend: D width, I inner width of an MLP, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.losses import CHUNK_LOGITS, CHUNK_ROWS
from draftheads.heads.placement import check_path
from draftheads.heads.target import Target
from draftheads.train.choices import MedusaChoices, SequentialChoices
from draftheads.train.recipe import Recipe

ENGINES: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"moments"}),
    "zero2": frozenset({"moments", "gradients"}),
    "zero3": frozenset({"moments", "gradients", "weights"}),
    "fsdp2": frozenset({"moments", "gradients", "weights"}),
}
"""What each engine divides over the processes of a launch."""

FLOAT = 4
"""Bytes of a trained number: weights, gradients and both moments are float32."""
FEATURE_BYTES = {"bf16": (2, 0), "fp8": (1, 4), "fp32": (4, 0)}
"""Of a stored feature: per number, and per token and state."""
FOLDER_BYTES, TENSOR_BYTES = 8_200, 385
"""Of a checkpoint, besides its numbers: texts per folder; names and shapes per tensor."""


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


class ShapeTarget(Target):
    """A target whose parameters have shapes and no numbers, from its config.json alone.

    Raises OSError when there is no config, ValueError for a model that no head can stand on.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe_config = read_config(recipe)
        with torch.device("meta"):
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


def read_config(recipe: Recipe) -> PretrainedConfig:
    """The target's config.json, from its folder or the Hub. Raises OSError when there is none."""
    check_path(recipe.target)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            recipe.target, revision=recipe.target_revision
        )
    except OSError as error:  # its message has several lines
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"target {recipe.target}: {reason} Pass a model folder or a Hub id"
        ) from error
    return config


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


def activation_bytes(recipe: Recipe, target: TargetSizes, head: HeadSizes, length: int) -> int:
    """An upper bound of what a micro batch of rows of `length` tokens holds besides weights,
    gradients and moments, all of its tokens learned.

    Everything in 4 bytes. The target's forward: 10 D + 3 I per token, what it passes on 3 D per
    state, masks 9 per pair of tokens. The head: see `_kept`, and as much again of its largest
    piece for the backward pass. Logits: four copies of a chunk. Gradients that the loss makes in
    its forward pass: the head's weights once more; what AdamW holds meanwhile: its largest
    parameter twice on a CPU, all on a GPU.
    """
    tokens = recipe.data.rows_per_batch * length
    width, pairs = target.width, tokens * length
    forward = tokens * (10 * width + 3 * target.inner + 3 * width * head.features) + 9 * pairs // 4
    vocabulary = _size(recipe.head, "vocabulary", target.vocabulary)
    widest = target.vocabulary if recipe.head.labels == "soft" else vocabulary
    on_gpu = torch.cuda.is_available()
    chunk = max(CHUNK_ROWS * widest, CHUNK_LOGITS["cuda" if on_gpu else "cpu"])
    kept = _kept(recipe, target, tokens, pairs)
    update = head.parameters if on_gpu else 2 * head.largest
    return FLOAT * (forward + kept + 4 * chunk + head.parameters + update)


def _kept(recipe: Recipe, target: TargetSizes, tokens: int, pairs: int) -> int:
    """Numbers that the head keeps for its backward pass.

    A Medusa head of L blocks: (3 L + 4) D per token; one that knows the token before: 4 D + 3 r
    more, of hydra its whole input. A decoder layer: 16 D + 5 I + 6 of attention per token and
    pass, and two masks. With gradient checkpointing a decoder layer keeps 2 D, and one pass is
    made again.
    """
    choices, width = recipe.head, target.width
    layer = 16 * width + 5 * _size(choices, "intermediate_size", target.inner)
    layer += 6 * max(width, _size(choices, "heads", 0) * _size(choices, "head_dim", 0))
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


def _size(choices: Any, name: str, default: int) -> int:
    return int(getattr(choices, name, None) or default)
