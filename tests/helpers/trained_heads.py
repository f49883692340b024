"""Heads of all kinds and choices whose every parameter has left its start."""

from __future__ import annotations

from typing import Any

import torch
from tiny_heads import make_head
from tiny_targets import tiny_target

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import HEADS
from draftheads.heads.tree import DynamicTree, StaticTree

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FEW = [5, 3, 11, 0, 8, 18]
CHOICES = {
    "medusa-own": {"depth": 3, "layers": 2},
    "medusa-shared": {"lm_head": "shared"},
    "medusa-reduced": {"vocabulary": FEW},
    "medusa-shared-reduced": {"lm_head": "shared", "vocabulary": FEW},
    "sequential-shared": {"lm_head": "shared", "vocabulary": FEW, "layers": 2},
    "sequential-recurrent": {"conditioning": "recurrent", "rank": 7},
    "sequential-hydra": {"conditioning": "hydra", "layers": 2, "vocabulary": FEW},
    "sequential-hydra-shared": {"conditioning": "hydra", "lm_head": "shared"},
    "sequential-prefix": {"prefix": True, "rope_scaling": SCALED, "heads": 2, "kv_heads": 1},
    "eagle3-plain": {},
    "eagle3-reduced": {"vocabulary": FEW, "feature_layers": [0, 2], "rope_theta": 500000.0},
    "eagle3-deep": {"layers": 2, "sliding_window": 5, "rope_scaling": SCALED},
    "eagle3-norms": {"fc_norm": True, "norm_output": True, "vocabulary": FEW},
    "eagle3-other-norms": {"norm_before_fc": True, "norm_before_residual": True},
    "eagle3-sizes": {"heads": 2, "kv_heads": 1, "head_dim": 24, "intermediate_size": 40},
    "eagle-plain": {},
    "eagle-deep": {"layers": 3, "sliding_window": 5, "rope_theta": 500000.0},
    "eagle-scaled": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "kv_heads": 4},
}
TREES = {"medusa": StaticTree(((0,), (0, 0), (2,)))}


def trained(name: str = "medusa-plain", **choices: Any) -> DraftHead:
    """A head with every parameter moved away from its start, and a tree that no head starts with.
    name: of one of `CHOICES`, or a kind and nothing but `choices`.
    """
    kind = name.partition("-")[0]
    head = make_head(HEADS[kind], tiny_target(), **{**CHOICES.get(name, {}), **choices})
    torch.manual_seed(2)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.tree = TREES.get(kind, DynamicTree(9, 3, 3))
    return head.eval()
