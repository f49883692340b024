"""Distribution of gradients, optimizer state and weights over processes: DDP, FSDP2, ZeRO-1/2/3.

All engines share one interface, in which parameters are full float32 tensors with names. So a
checkpoint is independent of the engine that wrote it: any engine resumes it, on any number of
processes. An engine wraps a `Learner`: the heads, or the heads and an adapter of the target
(Medusa-2). The frozen target stays outside.

Legend: B batch, T tokens, M learned positions, D feature width.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch, at_places
from draftheads.heads.losses import Teacher, linear_cross_entropy
from draftheads.heads.target.adapter import Adapter
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers
from draftheads.heads.tree import Tree
from draftheads.train.launch import asked_for_fsdp
from draftheads.train.recipe import AdapterChoices, OptimChoices, Precision, Recipe

ADAPTER = "adapter."
"""Prefix of the names of an adapter's parameters."""
MOMENTS = ("exp_avg", "exp_avg_sq")

Rates = dict[str, float]
"""Learning rate of each optimizer group, by the group's `name`."""
State = dict[str, Tensor]
"""AdamW state: "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME", full float32 tensors."""


class Learner(nn.Module):
    """The heads: float32 weights, matmuls in the recipe's precision.

    Autocast is inside, where no engine's own precision settings reach it.
    """

    def __init__(self, head: DraftHead, precision: Precision) -> None:
        super().__init__()
        self.head = head
        self.precision = precision

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target, done: float) -> HeadLoss:
        """The training loss. features_BTD: from the frozen target. done: fraction of the run."""
        with autocast(self.precision, features_BTD.device):
            out: HeadLoss = self.head(batch, features_BTD, target)
        return out

    def trained(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name. Engines replace them: call again after wrapping."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """Number of trained parameters, before an engine divides them."""
        return sum(parameter.numel() for parameter in self.trained().values())

    def optimizer(self, choices: OptimChoices) -> torch.optim.AdamW:
        """AdamW with weight decay for the heads' matrices only."""
        groups: dict[tuple[str, float], dict[str, Any]] = {}
        for name, parameter in self.trained().items():
            part = "adapter" if name.startswith(ADAPTER) else "heads"
            is_matrix = part == "heads" and parameter.ndim >= 2
            decay = choices.weight_decay if is_matrix else 0.0
            group = {"name": part, "params": [], "weight_decay": decay}
            groups.setdefault((part, decay), group)["params"].append(parameter)
        # on a CPU, one pass over weights, gradients and moments instead of a dozen
        on_host = all(p.device.type == "cpu" for p in self.trained().values())
        optimizer = torch.optim.AdamW(
            groups.values(), lr=choices.lr, betas=choices.betas, fused=True if on_host else None
        )
        # fused kernels do not count it, and heads keep products of unchanged weights
        optimizer.register_step_post_hook(lambda *_: increment_version(self.trained().values()))
        return optimizer

    def rates(self, choices: OptimChoices, step: float, steps: float) -> Rates:
        """Learning rates of the update after `step` of `steps` steps, or seconds."""
        return {"heads": learning_rate(choices, step, steps)}


class JointLearner(Learner):
    """Heads on the adapted target's states, trained together with the adapter.

    The adapter's loss is the heads' loss, with a weight, plus its divergence from the frozen
    target. The heads' own gradients are not weighted.
    """

    def __init__(
        self, head: DraftHead, precision: Precision, adapter: Adapter, choices: AdapterChoices
    ) -> None:
        super().__init__(head, precision)
        self.choices = choices
        self.names = [ADAPTER + name for name in adapter.parameters]
        self.changes = nn.ParameterList(adapter.parameters.values())

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target, done: float) -> HeadLoss:
        """The heads' loss plus KL(frozen || adapted), summed over learned tokens."""
        if done < self.choices.start and not self._has_learned:
            out = super().forward(batch, features_BTD, target, done)
            idle = sum(parameter.sum() for parameter in self.changes) * 0.0  # DDP expects gradients
            return HeadLoss(out.loss + idle, out.ranks_KR)
        with _checkpointed(target, self.head.recompute):
            states_BTD = target.states(batch, self.head.training_layers)
        # the heads read a view: its hook weighs what they send back to the adapter, and neither
        # their own gradients nor the divergence's
        read_BTD = states_BTD.view_as(states_BTD)
        if read_BTD.requires_grad:
            weight = 0.0
            if done >= self.choices.start:
                weight = self.choices.heads_weight
            read_BTD.register_hook(lambda grad: grad * weight)  # type: ignore[no-untyped-call]
        out = super().forward(batch, read_BTD, target, done)
        learned_M = batch.learned()
        states_MD = at_places(states_BTD, learned_M)
        frozen_MD = at_places(features_BTD, learned_M)
        return HeadLoss(out.loss + divergence(states_MD, frozen_MD, target), out.ranks_KR)

    @cached_property
    def _has_learned(self) -> bool:
        """True if a finished run resumes with more steps: its joint phase now begins later."""
        pairs = zip(self.names, self.changes, strict=True)
        return any(bool(p.any()) for name, p in pairs if "lora_B" in name)  # which begins at zero

    def trained(self) -> dict[str, nn.Parameter]:
        """The heads' parameters, then the adapter's."""
        return super().trained() | dict(zip(self.names, self.changes, strict=True))

    def rates(self, choices: OptimChoices, step: float, steps: float) -> Rates:
        """The adapter's schedule covers only the steps that train it."""
        own = choices.model_copy(update={"lr": self.choices.lr})
        first = math.ceil(self.choices.start * steps - 1e-9)  # 0.1 of 30 steps are 3
        rate = learning_rate(own, step - first, steps - first) if step >= first else 0.0
        return super().rates(choices, step, steps) | {"adapter": rate}


def make_learner(recipe: Recipe, head: DraftHead, target: Target) -> Learner:
    """The learner that the recipe describes."""
    if recipe.adapter is None:
        return Learner(head, recipe.run.precision)
    assert target.adapter is not None
    return JointLearner(head, recipe.run.precision, target.adapter, recipe.adapter)


def learning_rate(choices: OptimChoices, step: float, steps: float) -> float:
    """The rate of the update after `step` steps, or seconds: linear warm-up, then constant, or
    cosine to zero at `steps`.
    """
    warmup = round(choices.warmup * steps)
    if step < warmup:
        return choices.lr * min(step + 1, warmup) / warmup
    if choices.schedule == "constant":
        return choices.lr
    return choices.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def divergence(states_MD: Tensor, frozen_MD: Tensor, target: Target) -> Tensor:
    """KL(frozen || adapted) in nats, summed over M, from last hidden states. Only `states_MD` gets
    a gradient.
    """

    def logits(places_U: Tensor) -> Tensor:
        return target.unembed(frozen_MD[places_U])

    places_M = np.arange(len(states_MD))
    teacher = Teacher(places_M, logits, objective="kl", vocab_size=target.vocab_size)
    # for ranks, which are not used
    labels_M = torch.zeros(len(states_MD), dtype=torch.long, device=states_MD.device)
    return linear_cross_entropy(states_MD, target.unembed_weight(), labels_M, teacher=teacher)[0]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Matmuls in bfloat16 if `precision` is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def _checkpointed(target: Target, enabled: bool) -> Iterator[None]:
    """Gradient checkpointing of the target's layers in forwards inside the block."""
    # transformers' own acts in training mode alone, and the target stays in eval mode
    originals: dict[nn.Module, Any] = {}
    if enabled and torch.is_grad_enabled():
        originals = {layer: layer.forward for layer in decoder_layers(target.model)}
    for layer, forward in originals.items():
        layer.forward = partial(checkpoint, forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in originals.items():
            layer.forward = forward


class Engine(ABC):
    """Trains on all processes; every process calls the same methods in the same order."""

    model: Any  # the learner, wrapped; called as the learner itself

    def __init__(self, learner: Learner, choices: OptimChoices, world: int) -> None:
        self.learner = learner
        self.choices = choices
        self.world = world
        self._named = learner.trained()
        self.bytes_saved = 12 * learner.size  # weights and two moments, float32
        head = learner.head
        tensors = head.state_dict()
        self._constant = {name: each for name, each in tensors.items() if name not in self._named}
        # before an engine shards the head or adds hooks; its tensors are not copied
        meta: dict[int, Any] = {id(x): x.to("meta") for x in head.buffers()}
        for x in head.parameters():
            meta[id(x)] = nn.Parameter(x.detach().to("meta"), x.requires_grad)
        self._blank = copy.deepcopy(head, meta)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro batch: gradients are exchanged at the last one only."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; a step sums over micro batches and processes."""

    @abstractmethod
    def update(self, rates: Rates) -> float:
        """Clip, step and zero the gradient. Returns its norm before clipping, the same on all
        processes; if it is not finite, the weights are unchanged.
        """

    @abstractmethod
    def optimizer_state(self, *, keep: bool) -> State:
        """A copy of the full state in host memory, gathered one tensor at a time; empty before the
        first step. keep=False takes part in the gathering and returns nothing.
        """

    @abstractmethod
    def restore(self, optimizer_state: State) -> None:
        """Load an optimizer state; the weights are loaded already."""

    @abstractmethod
    def _full(self, parameter: nn.Parameter) -> Tensor:
        """The parameter in float32, gathered from all processes."""

    def full_head(self) -> DraftHead:
        """The head with all of its weights, float32; not to be trained. A collective."""
        weights = dict(self._constant)
        for name, parameter in self._named.items():
            if not name.startswith(ADAPTER):
                weights[name] = full = self._full(parameter)
        return self._filled(weights, full.device, self.learner.head.tree)

    def on_host(self, head: DraftHead) -> DraftHead:
        """A copy of a full head in host memory, which later steps do not change."""
        return self._filled(head.state_dict(), torch.device("cpu"), head.tree)

    def _filled(self, weights: State, device: torch.device, tree: Tree) -> DraftHead:
        head = copy.deepcopy(self._blank).to_empty(device=device)
        head.load_state_dict(weights)
        head.tree = tree
        return head


class TorchEngine(Engine):
    """One process, DDP, or FSDP2 by torch's `fully_shard` (accelerate's FSDP requires GPUs)."""

    def __init__(
        self, learner: Learner, choices: OptimChoices, accelerator: Accelerator, *, sharded: bool
    ) -> None:
        super().__init__(learner, choices, accelerator.num_processes)
        self.model: Any = learner
        if self.world > 1:
            self.model = fully_shard(learner) if sharded else accelerator.prepare_model(learner)
        self._named = learner.trained()
        self.optimizer = learner.optimizer(choices)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif self.world > 1 and not last:
            return cast(AbstractContextManager[Any], self.model.no_sync())
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # DDP and FSDP2 average over processes; a step is a sum
        (loss * self.world).backward()  # type: ignore[no-untyped-call]

    def update(self, rates: Rates) -> float:
        parameters = list(self._named.values())
        norm = float(self._full(nn.utils.clip_grad_norm_(parameters, self.choices.clip)))
        if math.isfinite(norm):  # the same norm, hence the same decision, on all processes
            for group in self.optimizer.param_groups:
                group["lr"] = rates[group["name"]]
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def optimizer_state(self, *, keep: bool) -> State:
        state: State = {}
        for name, parameter in self._named.items():
            for key, value in self.optimizer.state[parameter].items():
                full = self._full(value)
                if keep:
                    state[f"{key}.{name}"] = full.to("cpu", copy=True)
        return state

    def restore(self, optimizer_state: State) -> None:
        if not optimizer_state:
            return
        for name, parameter in self._named.items():
            state = {"step": optimizer_state[f"step.{name}"]}
            for key in MOMENTS:
                value = optimizer_state[f"{key}.{name}"].to(parameter.device)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                state[key] = value
            self.optimizer.state[parameter] = state

    def full_head(self) -> DraftHead:
        return super().full_head() if isinstance(self.model, FSDPModule) else self.learner.head

    def _full(self, parameter: Tensor) -> Tensor:
        parameter = parameter.detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class DeepSpeedEngine(Engine):
    """ZeRO-1, 2 and 3 with DeepSpeed's backward and step, but our checkpoints: DeepSpeed's are
    pickles, one per process, and fixed to their number of processes.
    """

    def __init__(self, learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> None:
        from deepspeed import utils  # an extra

        super().__init__(learner, choices, accelerator.num_processes)
        self._utils: Any = utils
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=1,  # required, as there is no DataLoader
            gradient_accumulation_steps=1,  # `backward` sets the boundary
            gradient_clipping=choices.clip,
        )
        self.model, _ = accelerator.prepare(learner, learner.optimizer(choices))
        self._named = learner.trained()
        self._zero: Any = self.model.optimizer
        if plugin.zero_stage == 3:  # losses read matrices without calling their module
            from deepspeed.runtime.zero.partition_parameters import register_external_parameter

            for parameter in self._named.values():
                register_external_parameter(learner, parameter)  # gathered with the learner
            self._flat = self._zero.fp32_partitioned_groups_flat
        else:
            self._flat = self._zero.single_partition_of_fp32_groups
        # ZeRO-1 and 2 link AdamW's state to the parameters after stepping the first group, and
        # miss the other groups: create all of it before the first step
        for flat in self._flat:
            empty = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.zeros(()), **empty}
        if plugin.zero_stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.world)  # it averages over processes

    def update(self, rates: Rates) -> float:
        for group in self._zero.param_groups:
            group["lr"] = rates[group["name"]]
        self.model.step()  # skips a gradient that is not finite
        return math.nan if self._zero.overflow else float(self.model.get_global_grad_norm())

    def optimizer_state(self, *, keep: bool) -> State:
        state: State = {}
        for name, parameter in self._named.items():
            for key in MOMENTS:
                full = self._utils.safe_get_full_optimizer_state(parameter, key)
                if keep:
                    state[f"{key}.{name}"] = full.to("cpu", copy=True)
        step = self._zero.optimizer.state[self._flat[0]]["step"]
        return state | {f"step.{name}": step.clone() for name in self._named if keep}

    def restore(self, optimizer_state: State) -> None:
        if not optimizer_state:
            return
        for name, parameter in self._named.items():
            for flat in self._flat:
                self._zero.optimizer.state[flat]["step"].copy_(optimizer_state[f"step.{name}"])
            for key in MOMENTS:
                value = optimizer_state[f"{key}.{name}"].to(self._flat[0].device)
                self._utils.safe_set_full_optimizer_state(parameter, value, key)

    def _full(self, parameter: nn.Parameter) -> Tensor:
        return cast(Tensor, self._utils.safe_get_full_fp32_param(parameter))


def make_engine(learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> Engine:
    """The engine that the launch requests. Raises ValueError if it cannot train this learner."""
    plugin = accelerator.state.deepspeed_plugin
    sharded = asked_for_fsdp(os.environ) and accelerator.num_processes > 1
    if isinstance(learner, JointLearner) and (sharded or (plugin and plugin.zero_stage == 3)):
        raise ValueError(
            "adapter: expected DDP, ZeRO-1 or ZeRO-2, got FSDP or ZeRO-3, which would shard "
            "matrices of the target; launch with recipes/accelerate-zero2.yaml"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        try:
            return DeepSpeedEngine(learner, choices, accelerator)
        except AttributeError as error:  # it reads private parts, which other versions may rename
            raise ValueError(
                f"deepspeed: expected the parts in which ZeRO keeps weights, got {error}; install "
                "another version, or launch with recipes/accelerate-fsdp2.yaml"
            ) from error
    return TorchEngine(learner, choices, accelerator, sharded=sharded)
