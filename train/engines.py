"""What an engine trains: the heads, or the heads and an adapter of the target together (Medusa-2).

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
from typing import Any

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
from draftheads.heads.target import Target
from draftheads.heads.weights import decoder_layers
from draftheads.train.launch import asked_for_fsdp
from draftheads.train.recipe import AdapterChoices, OptimChoices, Precision, Recipe

ADAPTER = "adapter."
"""What the names of an adapter's parameters begin with, beside those of the heads."""

Rates = dict[str, float]
"""Learning rates of the groups of an optimizer, by their `name`."""


class Learner(nn.Module):
    """The heads, their matmuls in the recipe's precision, their weights float32.

    Autocast stands inside, where no engine's own precision settings reach it. done: which share of
    the run is done; set before each step.
    """

    done = 0.0

    def __init__(self, head: DraftHead, precision: Precision) -> None:
        super().__init__()
        self.head, self.precision = head, precision

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The training loss."""
        with autocast(self.precision, features_BTD.device):
            out: HeadLoss = self.head(batch, features_BTD, target)
        return out

    def seen(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """What the heads are given, of the untouched target's features."""
        return features_BTD

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name. An engine may have replaced them: ask again."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def optimizer(self, choices: OptimChoices) -> torch.optim.AdamW:
        """AdamW over all that learns; weight decay for the heads' matrices only."""
        used = [group for group in self._groups(choices) if group["params"]]
        return torch.optim.AdamW(used, lr=choices.lr, betas=choices.betas)

    def rates(self, choices: OptimChoices, step: int, steps: int) -> Rates:
        """Learning rates of the update that follows `step` of `steps` steps."""
        return {"heads": learning_rate(choices, step, steps)}

    def _groups(self, choices: OptimChoices) -> Iterator[dict[str, Any]]:
        heads, decay = list(Learner.trained(self).values()), choices.weight_decay
        matrices, others = [p for p in heads if p.ndim >= 2], [p for p in heads if p.ndim < 2]
        yield {"name": "heads", "params": matrices, "weight_decay": decay}
        yield {"name": "heads", "params": others, "weight_decay": 0.0}


class JointLearner(Learner):
    """The heads read what the adapted target's states are; the adapter learns from them and from
    how far it has moved the target's distribution.

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

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The heads' loss and the divergence KL(untouched || adapted), summed over learned tokens.

        features_BTD: of the untouched target.
        """
        weight = self.choices.weight(self.done)
        if self.done < self.choices.start and not self._has_learned():
            out = super().forward(batch, features_BTD, target)
            idle = sum(parameter.sum() for parameter in self.changes) * 0.0  # DDP expects gradients
            return HeadLoss(out.loss + idle, out.ranks_KR)
        states_BTD = self.seen(batch, features_BTD, target)
        read_BTD = states_BTD.view_as(states_BTD)
        if read_BTD.requires_grad:
            read_BTD.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * weight
            )
        out = super().forward(batch, read_BTD, target)
        moved = divergence(states_BTD[batch.loss_mask_BT], features_BTD[batch.loss_mask_BT], target)
        return HeadLoss(out.loss + moved, out.ranks_KR)

    def _has_learned(self) -> bool:
        """Whether the adapter changes anything: not in a new run, but in one that was finished and
        made longer, so that its joint steps begin later than they did.
        """
        if self._changes_something is None:
            pairs = zip(self.names, self.changes, strict=True)
            self._changes_something = any(bool(p.any()) for name, p in pairs if "lora_B" in name)
        return self._changes_something

    def seen(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """The adapted target's states at the same layers."""
        with _recomputed(target, self.head.recompute):
            return target.states(batch, self.head.training_layers)

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

    def _groups(self, choices: OptimChoices) -> Iterator[dict[str, Any]]:
        yield from super()._groups(choices)
        yield {"name": "adapter", "params": list(self.changes), "weight_decay": 0.0}


def make_learner(recipe: Recipe, head: DraftHead, target: Target) -> Learner:
    """What the recipe trains."""
    if recipe.adapter is None:
        return Learner(head, recipe.run.precision)
    assert target.adapter is not None
    return JointLearner(head, recipe.run.precision, target.adapter, recipe.adapter)


def learning_rate(choices: OptimChoices, step: int, steps: int) -> float:
    """Of the update that follows `step` steps: linear warm-up, then cosine to zero at `steps`, or
    constant.
    """
    warmup = round(choices.warmup * steps)
    if step < warmup:
        return choices.lr * (step + 1) / warmup
    if choices.schedule == "constant":
        return choices.lr
    return choices.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def divergence(states_MD: Tensor, untouched_MD: Tensor, target: Target) -> Tensor:
    """KL in nats of the distribution at `states_MD` from that at `untouched_MD`, both last hidden
    states, summed over M; the gradient is the former's.
    """
    positions_M = torch.arange(len(states_MD), device=states_MD.device)
    teacher = Teacher(
        positions_M,
        lambda positions: target.unembed(untouched_MD[positions]),
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
    """A forward of the target that keeps only what goes into its layers, where `recompute` is set:
    its backward pass runs them again.
    """
    wanted = recompute and torch.is_grad_enabled()
    layers = list(decoder_layers(target.model)) if wanted else []
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


# How gradients, optimizer state and weights of the heads are divided over processes.
#
# `ReplicatedEngine` (one process, DDP), `ShardedEngine` (FSDP2) and `train.zero` (ZeRO-1/2/3)
# take the same calls and speak of the head's parameters by name, as whole float32 tensors. So a
# checkpoint does not know which engine wrote it, and any engine goes on with it, on any number of
# processes.
#
# The frozen target stands outside: an engine sees nothing but a `Learner`.


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside its number of steps."""

State = dict[str, Tensor]


class Engine(ABC):
    """Trains on all processes; every process calls the same methods in the same order."""

    model: nn.Module
    """Called as the learner itself; returns its loss."""

    def __init__(self, learner: Learner, choices: OptimChoices, world: int) -> None:
        self.learner, self.choices, self.world = learner, choices, world
        self._named = learner.trained()

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
    def whole(self) -> DraftHead:
        """The head with all of its weights, float32; not to be trained."""

    @abstractmethod
    def optimizer_state(self, *, keep: bool) -> State:
        """The optimizer's state, whole, float32, on the CPU: "exp_avg.NAME", "exp_avg_sq.NAME",
        "step.NAME". Empty before the first step, and where keep is false: there a process only
        takes part in gathering.
        """

    @abstractmethod
    def restore(self, optimizer_state: State) -> None:
        """Put `optimizer_state` back. The learner got its weights before."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Where a micro batch is run: processes exchange gradients at the last one only."""
        return nullcontext()


class ReplicatedEngine(Engine):
    """Everything whole on every process: one process alone, or DDP."""

    def __init__(self, learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> None:
        super().__init__(learner, choices, accelerator.num_processes)
        self.model = accelerator.prepare_model(learner)
        self.optimizer = learner.optimizer(choices)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """DDP's no_sync until the last."""
        if last or self.world == 1:
            return nullcontext()
        context: AbstractContextManager[Any] = self.model.no_sync()  # type: ignore[operator]
        return context

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """DDP averages over processes."""
        (loss * self.world).backward()  # type: ignore[no-untyped-call]

    def update(self, rates: Rates) -> float:
        """torch's clipping and AdamW."""
        return _step(self.optimizer, list(self._named.values()), rates, self.choices.clip)

    def whole(self) -> DraftHead:
        """The head itself."""
        return self.learner.head

    def optimizer_state(self, *, keep: bool) -> State:
        """Of torch's optimizer."""
        return _optimizer_state(self.optimizer, self._named) if keep else {}

    def restore(self, optimizer_state: State) -> None:
        """Into torch's optimizer."""
        for name, parameter in self._named.items() if optimizer_state else ():
            self.optimizer.state[parameter] = {
                "step": optimizer_state[f"step.{name}"],
                **{key: optimizer_state[f"{key}.{name}"].to(parameter.device) for key in MOMENTS},
            }


class PartitionedEngine(Engine):
    """Weights stand in parts on the processes, or belong to the engine: `whole` makes a copy."""

    def __init__(self, learner: Learner, choices: OptimChoices, world: int) -> None:
        super().__init__(learner, choices, world)
        head = learner.head
        self._blank = copy.deepcopy(head).to("meta")
        self._buffers = {n: t for n, t in head.state_dict().items() if n not in self._named}

    def whole(self) -> DraftHead:
        """A copy, gathered from all processes."""
        heads = {name: p for name, p in self._named.items() if not name.startswith(ADAPTER)}
        weights = {name: self._gather(p) for name, p in heads.items()}
        device = next(iter(weights.values())).device
        head = copy.deepcopy(self._blank).to_empty(device=device)
        head.load_state_dict({**self._buffers, **weights})
        head.tree = self.learner.head.tree
        return head

    @abstractmethod
    def _gather(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a weight, float32."""


class ShardedEngine(PartitionedEngine):
    """FSDP2: weights, gradients and moments divided over the processes.

    torch's `fully_shard` itself, as accelerate has FSDP on GPUs alone; so it runs over gloo too.
    """

    model: Learner

    def __init__(self, learner: Learner, choices: OptimChoices, world: int) -> None:
        super().__init__(learner, choices, world)
        self.model = learner
        fully_shard(self.model)
        self._named = learner.trained()
        self.optimizer = learner.optimizer(choices)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients stay whole on each process until the last."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """FSDP2 averages over processes."""
        (loss * self.world).backward()  # type: ignore[no-untyped-call]

    def update(self, rates: Rates) -> float:
        """torch's clipping and AdamW, which know divided tensors."""
        return _step(self.optimizer, list(self._named.values()), rates, self.choices.clip)

    def optimizer_state(self, *, keep: bool) -> State:
        """Gathered one at a time."""
        return _optimizer_state(self.optimizer, self._named, keep=keep)

    def restore(self, optimizer_state: State) -> None:
        """Divided as the weights are."""
        for name, parameter in self._named.items() if optimizer_state else ():
            assert isinstance(parameter, DTensor)
            mesh, placements = parameter.device_mesh, parameter.placements
            self.optimizer.state[parameter] = {"step": optimizer_state[f"step.{name}"]} | {
                key: distribute_tensor(
                    optimizer_state[f"{key}.{name}"].to(parameter.device), mesh, placements
                )
                for key in MOMENTS
            }

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        return _gathered(parameter)


def make_engine(learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> Engine:
    """The engine that the launch asked for. It takes the learner's weights as they are now.

    Raises ValueError where it cannot train what the learner has.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return DeepSpeedEngine(learner, choices, accelerator)
    if asked_for_fsdp(os.environ) and accelerator.num_processes > 1:
        if isinstance(learner, JointLearner):
            raise ValueError(
                "adapter: expected DDP, ZeRO-1 or ZeRO-2, got FSDP, which would divide matrices "
                "that stand in the target; launch with recipes/accelerate-zero2.yaml"
            )
        return ShardedEngine(learner, choices, accelerator.num_processes)
    return ReplicatedEngine(learner, choices, accelerator)


def _step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rates: Rates, clip: float
) -> float:
    norm = float(_gathered(nn.utils.clip_grad_norm_(parameters, clip)))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        optimizer.step()
    optimizer.zero_grad()
    return norm


def _optimizer_state(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], *, keep: bool = True
) -> State:
    optimizer_state = {}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            whole = _gathered(value)
            if keep:
                optimizer_state[f"{key}.{name}"] = whole.cpu()
    return optimizer_state


def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# DeepSpeed's ZeRO as an engine: its own backward and step, our checkpoints.
#
# DeepSpeed's checkpoints are pickles, one per process and only good for as many processes again;
# its optimizer's state is read and written here by parameter name instead.


class DeepSpeedEngine(PartitionedEngine):
    """ZeRO-1, 2 and 3. DeepSpeed itself refuses a step whose gradient is not finite."""

    def __init__(self, learner: Learner, choices: OptimChoices, accelerator: Accelerator) -> None:
        super().__init__(learner, choices, accelerator.num_processes)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        plugin = accelerator.state.deepspeed_plugin
        if plugin.zero_stage == 3 and isinstance(learner, JointLearner):
            raise ValueError(
                "adapter: expected DDP, ZeRO-1 or ZeRO-2, got ZeRO-3, which would divide matrices "
                "that stand in the target; launch with recipes/accelerate-zero2.yaml"
            )
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=1,  # what it would read from a DataLoader
            gradient_accumulation_steps=1,  # told at each micro batch instead
            gradient_clipping=choices.clip,
        )
        self._engine, _ = accelerator.prepare(learner, learner.optimizer(choices))
        self.model = self._engine
        self._named = learner.trained()
        if plugin.zero_stage == 3:  # losses read matrices without calling the module they are in
            from deepspeed.runtime.zero.partition_parameters import register_external_parameter

            for parameter in self._named.values():
                register_external_parameter(learner, parameter)
        self._zero = self._engine.optimizer
        self._flat: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if plugin.zero_stage == 3
            else self._zero.single_partition_of_fp32_groups
        )
        self._begin()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """DeepSpeed averages over processes."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world)

    def update(self, rates: Rates) -> float:
        """DeepSpeed's own clipping around torch's AdamW."""
        for group in self._zero.param_groups:
            group["lr"] = rates[group["name"]]
        self._engine.step()
        return math.nan if self._zero.overflow else float(self._engine.get_global_grad_norm())

    def optimizer_state(self, *, keep: bool) -> State:
        """Gathered one at a time."""
        from deepspeed.utils import safe_get_full_optimizer_state

        optimizer_state = {}
        for name, parameter in self._named.items():
            for key in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)
                if keep:
                    optimizer_state[f"{key}.{name}"] = whole.cpu()
        step = self._zero.optimizer.state[self._flat[0]]["step"]
        return optimizer_state | {f"step.{name}": step.clone() for name in self._named if keep}

    def restore(self, optimizer_state: State) -> None:
        """Into the part of each flat group that this process has."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in self._named.items() if optimizer_state else ():
            for flat in self._flat:
                self._zero.optimizer.state[flat]["step"].copy_(optimizer_state[f"step.{name}"])
            for key in MOMENTS:
                value = optimizer_state[f"{key}.{name}"].to(self._flat[0].device)
                safe_set_full_optimizer_state(parameter, value, key)

    def _begin(self) -> None:
        """Make AdamW's state, empty, before the first step would. ZeRO-1 and 2 connect it with the
        parameters once, after stepping one group; those of other groups would be left out.
        """
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        for flat in self._flat:
            empty = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.zeros(()), **empty}
        if isinstance(self._zero, DeepSpeedZeroOptimizer):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole
