"""Which batch and what in it was not finite, once a step was.

Legend: B batch, T tokens, D feature width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.base import Batch, DraftHead
from draftheads.heads.staging import staged
from draftheads.heads.target import Target

if TYPE_CHECKING:
    from draftheads.train.batches import Rows

SHOWN = 8
"""Row, answer and parameter names given in a line."""


@dataclass(frozen=True)
class Fault:
    """A micro batch with something in it that is not finite.

    process, batch: which one, micro batches counted over all processes of the step. rows, answers:
    what is in it. source: the first thing on the way from tokens to gradient that is not finite.
    """

    process: int
    batch: int
    rows: list[int]
    answers: list[int]
    source: str

    def __str__(self) -> str:
        return (
            f"batch {self.batch} on process {self.process} (rows {_some(self.rows)}; answers "
            f"{_some(self.answers)}): {self.source}"
        )


class Examiner:
    """Runs micro batches of a bad step again, one by one; its randomness is a function of the
    step, so they are the same.
    """

    def __init__(self, head: DraftHead, target: Target, accelerator: Accelerator) -> None:
        self.head, self.target, self.accelerator = head, target, accelerator
        self.kept: list[tuple[Fault, dict[str, Tensor]]] = []

    def examine(self, number: int, rows: Sequence[int], batch: Batch, features_BTD: Tensor) -> None:
        """Note what is wrong with this process's micro batch `number`, if anything is."""
        source = next(self._sources(batch, features_BTD), None)
        if source is not None:
            fault = Fault(self.accelerator.process_index, number, list(rows), [], source)
            tensors = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
            self.kept.append((fault, {**tensors, "features_BTD": features_BTD}))

    def found(self, data: Rows) -> list[Fault]:
        """The faults of all processes, in order of their batches."""
        mine = [replace(fault, answers=data.answers(fault.rows)) for fault, _ in self.kept]
        self.kept = [(fault, kept[1]) for fault, kept in zip(mine, self.kept, strict=True)]
        return sorted(gather_object(mine), key=lambda fault: fault.batch)

    def save(self, folder: Path) -> None:
        """Write this process's first bad batch, if it has one: tensors, and what is known."""
        for fault, tensors in self.kept[:1]:
            with staged(folder / f"process-{fault.process}") as staging:
                on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
                save_file(on_cpu, staging / "batch.safetensors")
                (staging / "fault.json").write_text(json.dumps(asdict(fault), indent=2) + "\n")

    def _sources(self, batch: Batch, features_BTD: Tensor) -> Iterator[str]:
        bad = [name for name, p in self.head.named_parameters() if not p.isfinite().all()]
        if bad:
            yield f"weights of the heads are not finite: {_some(bad)}"
        wrong_BT = ~features_BTD.isfinite().all(-1) & (batch.documents_BT >= 0)
        if wrong_BT.any():
            line, place = wrong_BT.nonzero()[0].tolist()
            yield (
                f"the target's features are not finite at {int(wrong_BT.sum())} tokens, first in "
                f"line {line} of the batch at token {place}"
            )
        trained = {n: p for n, p in self.head.named_parameters() if p.requires_grad}
        loss = self.head(batch, features_BTD, self.target).loss
        if not loss.isfinite():
            yield f"the loss of the heads is {float(loss.detach())}"
        # not backward(): DDP's hooks would take these gradients for the step's
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        bad = [
            name
            for name, grad in zip(trained, grads, strict=True)
            if grad is not None and not grad.isfinite().all()
        ]
        if bad:
            yield f"gradients are not finite: {_some(bad)}"


def explain(faults: Sequence[Fault]) -> str:
    """One line for all of them."""
    if not faults:
        return "no batch shows it when run alone: a sum over batches overflowed, or memory is bad"
    more = f"; and {len(faults) - 1} more batches" if len(faults) > 1 else ""
    return f"{faults[0]}{more}"


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(str(name) for name in names[:SHOWN])
    return f"{shown}, ... ({len(names)})" if len(names) > SHOWN else shown
