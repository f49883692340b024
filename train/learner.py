"""What an engine trains: the heads, or the heads and an adapter of the target together (Medusa-2).

Legend: B batch, T tokens, M learned positions, D feature width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftheads.heads.adapter import Adapter
from draftheads.heads.base import Batch, DraftHead, HeadLoss
from draftheads.heads.losses import Teacher, linear_cross_entropy
from draftheads.heads.target import Target
from draftheads.heads.weights import decoder_layers
from draftheads.train.adapter_choices import AdapterChoices
from draftheads.train.recipe import OptimChoices, Precision, Recipe

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
        moved = divergence(states_BTD[batch.learn_BT], features_BTD[batch.learn_BT], target)
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
