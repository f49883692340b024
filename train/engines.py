"""How gradients, optimizer state and weights are divided over processes: DDP, FSDP2, ZeRO-1/2/3.

All engines take the same calls and speak of the head's parameters by name, as full float32 tensors.
So a checkpoint does not know which engine wrote it, and any engine resumes it, on any number of
processes. The frozen target stays outside: an engine sees nothing but a `Learner`, which is the
heads, or the heads and an adapter of the target together (Medusa-2).

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
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from draftheads.heads.adapter import Adapter
from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch
from draftheads.heads.losses import Teacher, linear_cross_entropy
from draftheads.heads.pretrained import decoder_layers
from draftheads.heads.target import Target
from draftheads.train.launch import asked_for_fsdp
from draftheads.train.recipe import AdapterChoices, OptimChoices, Precision, Recipe

ADAPTER = "adapter."
"""What the names of an adapter's parameters begin with, beside those of the heads."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside its number of steps."""

Rates = dict[str, float]
"""Learning rates of an optimizer's groups, by their `name`."""
State = dict[str, Tensor]
"""Optimizer state: "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME", full float32 tensors."""


class Learner(nn.Module):
    """The heads, their matmuls in the recipe's precision, their weights float32.

    Autocast is inside, where no engine's own precision settings reach it.
    """

    def __init__(self, head: DraftHead, precision: Precision) -> None:
        super().__init__()
        self.head, self.precision = head, precision

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target, done: float) -> HeadLoss:
        """The training loss. features_BTD: of the frozen target. done: share of the run."""
        with autocast(self.precision, features_BTD.device):
            out: HeadLoss = self.head(batch, features_BTD, target)
        return out

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name. An engine may have replaced them: ask again."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def optimizer(self, choices: OptimChoices) -> torch.optim.AdamW:
        """AdamW over all that learns; weight decay for the heads' matrices only."""
        trained = self.trained()
        heads = [p for name, p in trained.items() if not name.startswith(ADAPTER)]
        adapter = [p for name, p in trained.items() if name.startswith(ADAPTER)]
        matrices, vectors = [p for p in heads if p.ndim >= 2], [p for p in heads if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"name": "heads", "params": matrices, "weight_decay": choices.weight_decay},
            {"name": "heads", "params": vectors, "weight_decay": 0.0},
            {"name": "adapter", "params": adapter, "weight_decay": 0.0},
        ]
        used = [group for group in groups if group["params"]]
        return torch.optim.AdamW(used, lr=choices.lr, betas=choices.betas)

    def rates(self, choices: OptimChoices, step: int, steps: int) -> Rates:
        """Learning rates of the update that follows `step` of `steps` steps."""
        return {"heads": learning_rate(choices, step, steps)}


class JointLearner(Learner):
    """The heads read the adapted target's states; the adapter learns from them and from how far it
    has moved the target's distribution.

    What flows back from the heads into the adapter is weighted; what they learn themselves is not.
    """

    def __init__(
        self, head: DraftHead, precision: Precision, adapter: Adapter, choices: AdapterChoices
    ) -> None:
        super().__init__(head, precision)
        self.choices = choices
        self.names = list(adapter.parameters)
        self.changes = nn.ParameterList(adapter.parameters.values())
        self._changes_something: bool | None = None

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target, done: float) -> HeadLoss:
        """The heads' loss and the divergence KL(frozen || adapted), summed over learned tokens."""
        if done < self.choices.start and not self._has_learned():
            out = super().forward(batch, features_BTD, target, done)
            idle = sum(parameter.sum() for parameter in self.changes) * 0.0  # DDP expects gradients
            return HeadLoss(out.loss + idle, out.ranks_KR)
        with _recomputed(target, self.head.recompute):
            states_BTD = target.states(batch, self.head.training_layers)
        read_BTD = states_BTD.view_as(states_BTD)
        if read_BTD.requires_grad:
            weight = self.choices.weight(done)
            read_BTD.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * weight
            )
        out = super().forward(batch, read_BTD, target, done)
        learned_BT = batch.loss_mask_BT
        moved = divergence(states_BTD[learned_BT], features_BTD[learned_BT], target)
        return HeadLoss(out.loss + moved, out.ranks_KR)

    def _has_learned(self) -> bool:
        """Whether the adapter changes anything: not in a new run, but in one that was finished and
        made longer, so that its joint steps begin later than they did.
        """
        if self._changes_something is None:
            named = zip(self.names, self.changes, strict=True)
            self._changes_something = any(bool(p.any()) for name, p in named if "lora_B" in name)
        return self._changes_something

    def trained(self) -> dict[str, nn.Parameter]:
        """Those of the heads, and then the adapter's."""
        changes = zip(self.names, self.changes, strict=True)
        return {**super().trained(), **{ADAPTER + name: p for name, p in changes}}

    def rates(self, choices: OptimChoices, step: int, steps: int) -> Rates:
        """The adapter's rate rises and falls within the steps in which it learns."""
        own = choices.model_copy(update={"lr": self.choices.lr})
        first = math.ceil(self.choices.start * steps - 1e-9)  # 0.1 of 30 steps are 3
        rate = learning_rate(own, step - first, steps - first) if step >= first else 0.0
        return {**super().rates(choices, step, steps), "adapter": rate}


def make_learner(recipe: Recipe, head: DraftHead, target: Target) -> Learner:
    """What the recipe trains."""
    if recipe.adapter is None:
        return Learner(head, recipe.run.precision)
    assert target.adapter is not None
    return JointLearner(head, recipe.run.precision, target.adapter, recipe.adapter)


def learning_rate(choices: OptimChoices, step: int, steps: int) -> float:
    """The rate of the update that follows `step` steps: linear warm-up, then cosine to zero at
    `steps`, or constant.
    """
    warmup = round(choices.warmup * steps)
    if step < warmup:
        return choices.lr * (step + 1) / warmup
    if choices.schedule == "constant":
        return choices.lr
    return choices.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def divergence(states_MD: Tensor, frozen_MD: Tensor, target: Target) -> Tensor:
    """KL in nats of the distribution at `states_MD` from that at `frozen_MD`, both last hidden
    states, summed over M; the gradient is the former's.
    """
    positions_M = torch.arange(len(states_MD), device=states_MD.device)
    teacher = Teacher(
        positions_M,
        lambda positions: target.unembed(frozen_MD[positions]),
        objective="kl",
        vocab_size=target.vocab_size,
    )
    labels_M = torch.zeros_like(positions_M)  # their ranks are not asked for
    return linear_cross_entropy(states_MD, target.unembed_weight(), labels_M, teacher=teacher)[0]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Matmuls in bfloat16 where the recipe says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def _recomputed(target: Target, recompute: bool) -> Iterator[None]:
    """Forwards of the target inside keep only what goes into its layers, where `recompute` is set:
    their backward pass runs the layers again.
    """
    layers = list(decoder_layers(target.model)) if recompute and torch.is_grad_enabled() else []
    own = [vars(layer).get("forward") for layer in layers]  # accelerate's, of a divided target
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


class Engine(ABC):
    """Trains on all processes; every process calls the same methods in the same order. model is
    called as the learner itself.
    """

    model: Any  # as DDP, FSDP2 and DeepSpeed wrap a module

    def __init__(self, learner: Learner, choices: OptimChoices, world: int) -> None:
        self.learner, self.choices, self.world = learner, choices, world
        self._named = learner.trained()
        tensors = learner.head.state_dict()
        self._constant = {name: each for name, each in tensors.items() if name not in self._named}
        self._blank = copy.deepcopy(learner.head).to("meta")

    @abstractmethod
    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Where a micro batch is run: processes exchange gradients at the last one only."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of this process's `loss`; the step's gradient is the sum over micro
        batches and processes. last: of the step.
        """

    @abstractmethod
    def update(self, rates: Rates) -> float:
        """Clip and step, unless the gradient is not finite; forget the gradient. Returns its norm
        before clipping, inf or nan when nothing was changed; the same on all processes.
        """

    @abstractmethod
    def optimizer_state(self, *, keep: bool) -> State:
        """The full optimizer state on the CPU, gathered one tensor at a time. Empty before the
        first step, and where keep is false: there a process only takes part in gathering.
        """

    @abstractmethod
    def restore(self, optimizer_state: State) -> None:
        """Put it back; empty: nothing to do. The learner got its weights before."""

    @abstractmethod
    def _full(self, parameter: nn.Parameter) -> Tensor:
        """All of a parameter, float32, gathered from all processes."""

    def full_head(self) -> DraftHead:
        """A copy of the head with all of its weights, float32; not to be trained."""
        weights = dict(self._constant)
        for name, parameter in self._named.items():
            if not name.startswith(ADAPTER):
                weights[name] = full = self._full(parameter)
        head = copy.deepcopy(self._blank).to_empty(device=full.device)
        head.load_state_dict(weights)
        head.tree = self.learner.head.tree
        return head


class TorchEngine(Engine):
    """One process alone, DDP, or FSDP2 (torch's `fully_shard`, as accelerate has FSDP on GPUs
    alone; it runs over gloo too).
    """

    def __init__(
        self, learner: Learner, choices: OptimChoices, accelerator: Accelerator, *, sharded: bool
    ) -> None:
        super().__init__(learner, choices, accelerator.num_processes)
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
        (loss * self.world).backward()  # type: ignore[no-untyped-call]  # both average

    def update(self, rates: Rates) -> float:
        parameters = list(self._named.values())
        norm = float(_gathered(nn.utils.clip_grad_norm_(parameters, self.choices.clip)))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rates[group["name"]]
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def optimizer_state(self, *, keep: bool) -> State:
        state: State = {}
        for name, parameter in self._named.items():
            for key, value in self.optimizer.state[parameter].items():
                full = _gathered(value)
                if keep:
                    state[f"{key}.{name}"] = full.cpu()
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
        """Where nothing is sharded, the head itself."""
        return super().full_head() if isinstance(self.model, FSDPModule) else self.learner.head

    def _full(self, parameter: nn.Parameter) -> Tensor:
        return _gathered(parameter)


class DeepSpeedEngine(Engine):
    """ZeRO-1, 2 and 3, with DeepSpeed's own backward and step, and our checkpoints: DeepSpeed's are
    pickles, one per process, and only good for as many processes again.
    """

    def __init__(self, learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> None:
        super().__init__(learner, choices, accelerator.num_processes)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=1,  # what it would read from a DataLoader
            gradient_accumulation_steps=1,  # told at each micro batch instead
            gradient_clipping=choices.clip,
        )
        self.model, _ = accelerator.prepare(learner, learner.optimizer(choices))
        self._named = learner.trained()
        self._zero: Any = self.model.optimizer
        if plugin.zero_stage == 3:  # losses read matrices without calling the module they are in
            from deepspeed.runtime.zero.partition_parameters import register_external_parameter

            for parameter in self._named.values():
                register_external_parameter(learner, parameter)
            self._flat = self._zero.fp32_partitioned_groups_flat
        else:
            self._flat = self._zero.single_partition_of_fp32_groups
        # ZeRO-1 and 2 connect AdamW's state with the parameters once, after stepping one group, and
        # leave out the other groups: all of it is made before the first step
        for flat in self._flat:
            empty = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.zeros(()), **empty}
        if plugin.zero_stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.world)  # it averages over processes

    def update(self, rates: Rates) -> float:
        for group in self._zero.param_groups:
            group["lr"] = rates[group["name"]]
        self.model.step()  # which skips a gradient that is not finite
        return math.nan if self._zero.overflow else float(self.model.get_global_grad_norm())

    def optimizer_state(self, *, keep: bool) -> State:
        from deepspeed.utils import safe_get_full_optimizer_state

        state: State = {}
        for name, parameter in self._named.items():
            for key in MOMENTS:
                full = safe_get_full_optimizer_state(parameter, key)
                if keep:
                    state[f"{key}.{name}"] = full.cpu()
        step = self._zero.optimizer.state[self._flat[0]]["step"]
        return state | {f"step.{name}": step.clone() for name in self._named if keep}

    def restore(self, optimizer_state: State) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not optimizer_state:
            return
        for name, parameter in self._named.items():
            for flat in self._flat:
                self._zero.optimizer.state[flat]["step"].copy_(optimizer_state[f"step.{name}"])
            for key in MOMENTS:
                value = optimizer_state[f"{key}.{name}"].to(self._flat[0].device)
                safe_set_full_optimizer_state(parameter, value, key)

    def _full(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        full: Tensor = safe_get_full_fp32_param(parameter)
        return full


def make_engine(learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> Engine:
    """The engine that the launch asked for. It takes the learner's weights as they are now.

    Raises ValueError where it cannot train what the learner has.
    """
    plugin = accelerator.state.deepspeed_plugin
    sharded = asked_for_fsdp(os.environ) and accelerator.num_processes > 1
    if isinstance(learner, JointLearner) and (sharded or (plugin and plugin.zero_stage == 3)):
        raise ValueError(
            "adapter: expected DDP, ZeRO-1 or ZeRO-2, got FSDP or ZeRO-3, which would divide "
            "matrices of the target; launch with recipes/accelerate-zero2.yaml"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return DeepSpeedEngine(learner, choices, accelerator)
    return TorchEngine(learner, choices, accelerator, sharded=sharded)


def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
