"""DeepSpeed's ZeRO as an engine: its own backward and step, our checkpoints.

DeepSpeed's checkpoints are pickles, one per process and only good for as many processes again; its
optimizer's state is read and written here by parameter name instead.
"""

from __future__ import annotations

import logging
import math

import torch
from accelerate import Accelerator
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from draftheads.train.engines import MOMENTS, PartitionedEngine, State
from draftheads.train.learner import JointLearner, Learner, Rates
from draftheads.train.recipe import OptimChoices


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

    def moments(self, *, keep: bool) -> State:
        """Gathered one at a time."""
        moments = {}
        for name, parameter in self._named.items():
            for key in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)
                if keep:
                    moments[f"{key}.{name}"] = whole.cpu()
        step = self._zero.optimizer.state[self._flat[0]]["step"]
        return moments | {f"step.{name}": step.clone() for name in self._named if keep}

    def restore(self, moments: State) -> None:
        """Into the part of each flat group that this process has."""
        for name, parameter in self._named.items() if moments else ():
            for flat in self._flat:
                self._zero.optimizer.state[flat]["step"].copy_(moments[f"step.{name}"])
            for key in MOMENTS:
                value = moments[f"{key}.{name}"].to(self._flat[0].device)
                safe_set_full_optimizer_state(parameter, value, key)

    def _begin(self) -> None:
        """Make AdamW's state, empty, before the first step would. ZeRO-1 and 2 connect it with the
        parameters once, after stepping one group; those of other groups would be left out.
        """
        for flat in self._flat:
            empty = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.zeros(()), **empty}
        if isinstance(self._zero, DeepSpeedZeroOptimizer):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole
