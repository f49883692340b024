"""What the heads are worth on documents that they were not trained on, and the tree that follows
from it.

Legend: M learned positions, K draft depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.shape import Tree, TreeShape
from draftheads.heads.target import Target
from draftheads.train.batches import Rows

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


@torch.no_grad()
def observe(
    head: DraftHead, target: Target, rows: Rows, rows_per_batch: int, accelerator: Accelerator
) -> Tensor:
    """ranks_MK of the held-out rows, in row order, on every process; they share the work."""
    mine: list[tuple[int, Tensor]] = []
    batches = list(_batches(rows, rows_per_batch))
    for number in range(accelerator.process_index, len(batches), accelerator.num_processes):
        batch = rows.batch(batches[number]).to(accelerator.device)
        features_BTD = target.features(batch, head.training_layers)
        with accelerator.autocast():
            mine.append((number, head.observe(batch, features_BTD, target).cpu()))
    everyone = sorted(gather_object(mine), key=lambda part: part[0])
    return torch.cat([ranks_MK for _, ranks_MK in everyone])


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
    tokens = 0
    for start in range(0, len(rows), rows_per_batch):
        if tokens >= HELDOUT_TOKENS:
            return
        batch = list(range(start, min(start + rows_per_batch, len(rows))))
        tokens += sum(rows.sizes[row] for row in batch)
        yield batch
