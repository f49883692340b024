"""Parameters and bytes of a run, from shapes alone: nothing is loaded, downloaded weights included.

Legend: D width, I inner width of an MLP, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from draftheads.heads.adapter import Adapter
from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.placement import check_path, read_config, reading
from draftheads.heads.target import Target
from draftheads.train.plan.parts import FLOAT, AdapterSizes, HeadSizes, Sizes, TargetSizes
from draftheads.train.recipe import Recipe

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
