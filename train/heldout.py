"""What the heads are worth on documents that they were not trained on, and the tree that follows
from it.

Legend: M learned positions, K draft depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import Batch, DraftHead
from draftheads.heads.shape import Tree, TreeShape
from draftheads.heads.target import Target
from draftheads.train.batches import Rows

if TYPE_CHECKING:
    from draftheads.train.features import FeatureSource

HELDOUT_TOKENS = 1 << 17
"""Tokens observed at most: more would not change the tree, but every checkpoint would wait for
them.
"""


@dataclass(frozen=True)
class Calibration:
    """tree: what the head gets. tokens_per_step: tau of the best fixed tree, the target's own token
    included.

    top1, top5: share of held-out positions at which the right token had such a rank, one entry
    per depth.
    """

    tree: Tree
    tokens_per_step: float
    top1: list[float]
    top5: list[float]
    positions: int

    def __str__(self) -> str:
        top1 = " ".join(f"{share:.3f}" for share in self.top1)
        top5 = " ".join(f"{share:.3f}" for share in self.top5)
        return (
            f"held-out: {self.tokens_per_step:.2f} tokens per step predicted for the best fixed "
            f"tree of {self.tree.draft_nodes} draft nodes; right by depth: top-1 {top1}, "
            f"top-5 {top5} ({self.positions} positions)"
        )


@dataclass(frozen=True)
class Share:
    """This process's part of the held-out rows."""

    rows: Rows
    rows_per_batch: int
    accelerator: Accelerator

    def batches(self) -> Iterator[tuple[int | None, list[int], Batch]]:
        """Number among all batches, row numbers, tokens. All processes run equally many, as a
        forward may be a collective: one that has none left runs the last again, as number None.
        """
        batches = list(_batches(self.rows, self.rows_per_batch))
        world = self.accelerator.num_processes
        for first in range(0, len(batches), world):
            number = first + self.accelerator.process_index
            numbers = batches[min(number, len(batches) - 1)]
            batch = self.rows.batch(numbers).to(self.accelerator.device)
            yield (number if number < len(batches) else None), numbers, batch


@torch.no_grad()
def observe(head: DraftHead, target: Target, share: Share, features: FeatureSource) -> Tensor:
    """ranks_MK of the held-out rows, in row order, on every process; they share the work.

    features: of these rows.
    """
    mine: list[tuple[int, Tensor]] = []
    for number, numbers, batch in share.batches():
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):  # as heads are trained on
            features_BTD = features(numbers, batch)
        ranks_MK = head.observe(batch, features_BTD, target).cpu()
        if number is not None:
            mine.append((number, ranks_MK))
    everyone = sorted(gather_object(mine), key=lambda part: part[0])
    return torch.cat([ranks_MK for _, ranks_MK in everyone])


def observed(rows: Rows) -> int:
    """How many rows, the first ones, are observed."""
    ends = accumulate(rows.sizes)
    return next((row for row, end in enumerate(ends, 1) if end >= HELDOUT_TOKENS), len(rows))


def calibrate(ranks_MK: Tensor, nodes: int, tree: Tree) -> Calibration:
    """`tree`, fitted to these observations, and what the best fixed tree of `nodes` draft nodes
    would bring (a dynamic one brings more).

    The prediction is cross-fitted: each half of the positions judges the tree chosen on the
    other half, so that a tree fitted to few positions does not praise itself.
    """
    half = len(ranks_MK) // 2
    first_MK, second_MK = ranks_MK[:half], ranks_MK[half:]
    none = TreeShape(())
    total = none.fitted(first_MK, nodes).expected_tokens(second_MK) * len(second_MK)
    total += none.fitted(second_MK, nodes).expected_tokens(first_MK) * len(first_MK)
    found_MK = ranks_MK >= 0
    return Calibration(
        tree=tree.fitted(ranks_MK, nodes),
        tokens_per_step=total / len(ranks_MK),
        top1=(ranks_MK == 0).float().mean(0).tolist(),
        top5=(found_MK & (ranks_MK < 5)).float().mean(0).tolist(),
        positions=len(ranks_MK),
    )


def _batches(rows: Rows, rows_per_batch: int) -> Iterator[list[int]]:
    count = observed(rows)
    for start in range(0, count, rows_per_batch):
        yield list(range(start, min(start + rows_per_batch, count)))
