"""How gradients, optimizer state and weights of the heads are divided over processes.

`ReplicatedEngine` (one process, DDP), `ShardedEngine` (FSDP2) and `train.zero` (ZeRO-1/2/3)
take the same calls and speak of the head's parameters by name, as whole float32 tensors. So a
checkpoint does not know which engine wrote it, and any engine goes on with it, on any number of
processes.

The frozen target stands outside: an engine sees nothing but a `Learner`.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftheads.heads.base import DraftHead
from draftheads.train.launch import asked_for_fsdp
from draftheads.train.learner import ADAPTER, JointLearner, Learner, Rates
from draftheads.train.recipe import OptimChoices

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
    def moments(self, *, keep: bool) -> State:
        """The optimizer's state, whole, float32, on the CPU: "exp_avg.NAME", "exp_avg_sq.NAME",
        "step.NAME". Empty before the first step, and where keep is false: there a process only
        takes part in gathering.
        """

    @abstractmethod
    def restore(self, moments: State) -> None:
        """Put `moments` back. The weights were put into the learner before the engine took it."""

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

    def moments(self, *, keep: bool) -> State:
        """Of torch's optimizer."""
        return _moments(self.optimizer, self._named) if keep else {}

    def restore(self, moments: State) -> None:
        """Into torch's optimizer."""
        for name, parameter in self._named.items() if moments else ():
            self.optimizer.state[parameter] = {
                "step": moments[f"step.{name}"],
                **{key: moments[f"{key}.{name}"].to(parameter.device) for key in MOMENTS},
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

    def moments(self, *, keep: bool) -> State:
        """Gathered one at a time."""
        return _moments(self.optimizer, self._named, keep=keep)

    def restore(self, moments: State) -> None:
        """Divided as the weights are."""
        for name, parameter in self._named.items() if moments else ():
            assert isinstance(parameter, DTensor)
            mesh, placements = parameter.device_mesh, parameter.placements
            self.optimizer.state[parameter] = {"step": moments[f"step.{name}"]} | {
                key: distribute_tensor(
                    moments[f"{key}.{name}"].to(parameter.device), mesh, placements
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
        from draftheads.train.zero import DeepSpeedEngine  # it is optional, and slow to import

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


def _moments(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], *, keep: bool = True
) -> State:
    moments = {}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            whole = _gathered(value)
            if keep:
                moments[f"{key}.{name}"] = whole.cpu()
    return moments


def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
