"""Heads of all kinds and choices whose every parameter has left its start, saved ones, and the
engines' layouts that each can be converted to.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tiny_heads import make_head
from tiny_targets import tiny_target

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import HEADS, save_head
from draftheads.heads.tree import DynamicTree, StaticTree

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FEW = [5, 3, 11, 0, 8, 18]
TREES = {"medusa": StaticTree(((0,), (0, 0), (2,)))}


def trained(name: str = "medusa-plain", **choices: Any) -> DraftHead:
    """A head with every parameter moved away from its start, and a tree that no head starts with.
    name: of one of `CHOICES`, or a kind and nothing but `choices`.
    """
    kind = name.partition("-")[0]
    head = make_head(HEADS[kind], tiny_target(), **{**CHOICES.get(name, ({},))[0], **choices})
    torch.manual_seed(2)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.tree = TREES.get(kind, DynamicTree(9, 3, 3))
    return head.eval()


DOMINO = {
    "conditioning": "none",
    "design": {"conditioning": "domino", "rank": 6, "gru_size": 24},
}
THREE = {"feature_layers": [1, 2, 3]}
USUAL = {"feature_layers": [2, 2, 2]}  # what n = 5 layers would have: [2, n // 2, n - 3]
BLOCK = {"feature_layers": [1, 2], "mask": 7, "rank": 6, "block_size": 5}
DFLASH = {"sample_from_anchor": False, "conditioning": "none"}
DFLASH2 = {"rank": 6, "candidates": 5, "convolutions": True}
ALL = {"vllm", "sglang", "gguf", "speculators", "mlx"}
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "medusa-own": ({"layers": 1, "depth": 3}, {"vllm"}),
    "medusa-shared": ({"lm_head": "shared"}, {"vllm"}),
    "medusa-deep": ({"layers": 2}, {"vllm"}),
    "medusa-deep-shared": ({"layers": 2, "lm_head": "shared"}, {"vllm"}),
    "medusa-reduced": ({"vocabulary": FEW}, set()),
    "medusa-shared-reduced": ({"lm_head": "shared", "vocabulary": FEW}, set()),
    "sequential-recurrent": ({"conditioning": "recurrent", "rank": 7}, set()),
    "sequential-shared": ({"lm_head": "shared", "vocabulary": FEW, "layers": 2}, set()),
    "sequential-hydra": ({"conditioning": "hydra", "layers": 2, "vocabulary": FEW}, set()),
    "sequential-hydra-shared": ({"conditioning": "hydra", "lm_head": "shared"}, set()),
    "sequential-prefix": (
        {"prefix": True, "rope_scaling": SCALED, "heads": 2, "kv_heads": 1},
        set(),
    ),
    "eagle-plain": ({}, {"vllm", "sglang"}),
    "eagle-deep": ({"layers": 3}, {"vllm", "sglang"}),
    "eagle-window": ({"sliding_window": 5}, set()),
    "eagle-scaled": ({"rope_scaling": SCALED}, {"vllm", "sglang"}),
    "eagle-sizes": ({"head_dim": 16}, {"vllm", "sglang"}),
    "eagle3-usual": (USUAL, {"vllm", "gguf", "sglang", "speculators"}),
    "eagle3-theta": (
        {**USUAL, "rope_theta": 5e5, "vocabulary": FEW},
        {"vllm", "gguf", "sglang", "speculators"},
    ),
    "eagle3-reduced": (
        {"vocabulary": FEW, "feature_layers": [1, 1, 2]},
        {"vllm", "gguf", "sglang", "speculators"},
    ),
    "eagle3-two": ({"feature_layers": [1, 2]}, {"vllm", "sglang", "speculators"}),
    "eagle3-falling": ({"feature_layers": [2, 1]}, {"speculators"}),
    "eagle3-one": ({"feature_layers": [2]}, {"vllm", "speculators"}),
    "eagle3-embeddings": ({"feature_layers": [0, 1, 2]}, {"vllm", "gguf", "speculators"}),
    "eagle3-last": (THREE, set()),
    "eagle3-norms": (
        {**USUAL, "fc_norm": True, "norm_output": True},
        {"vllm", "sglang", "speculators"},
    ),
    "eagle3-before-fc": (
        {**USUAL, "norm_before_fc": True},
        {"vllm", "gguf", "sglang", "speculators"},
    ),
    "eagle3-residual": ({**USUAL, "norm_before_residual": True}, {"vllm", "gguf", "speculators"}),
    "eagle3-sizes": (
        {**USUAL, "heads": 2, "kv_heads": 1, "head_dim": 24, "intermediate_size": 40},
        {"vllm", "gguf", "sglang", "speculators"},
    ),
    "eagle3-both-norms": (
        {**USUAL, "norm_before_fc": True, "unchecked": {"fc_norm": True}},
        {"vllm", "sglang"},
    ),
    "eagle3-qk-norm": ({**USUAL, "qk_norm": True, "vocabulary": FEW}, {"vllm", "speculators"}),
    "eagle3-qk-norm-window": (
        {**USUAL, "qk_norm": True, "sliding_window": 5, "layers": 2},
        {"vllm", "speculators"},
    ),
    "eagle3-deep": ({**USUAL, "layers": 2}, {"vllm", "speculators"}),
    "eagle3-window": ({**USUAL, "sliding_window": 5}, {"vllm", "sglang", "speculators"}),
    "eagle3-scaled": (
        {**USUAL, "rope_scaling": SCALED},
        {"vllm", "gguf", "sglang", "speculators"},
    ),
    "block-markov": ({**BLOCK, "conditioning": "markov"}, ALL),
    "block-confident": ({**BLOCK, "conditioning": "markov", "confidence": True}, ALL),
    "block-rnn": ({**BLOCK, "confidence": True}, {"sglang", "speculators"}),
    "block-none": ({**BLOCK, "conditioning": "none"}, ALL),
    "block-state": (
        {**BLOCK, "conditioning": "none", "confidence": True},
        {"vllm", "sglang", "gguf", "speculators", "mlx"},
    ),
    "block-dflash": ({**BLOCK, **DFLASH}, ALL | {"openvino"}),
    "block-dflash-window": (
        {**BLOCK, **DFLASH, "sliding_window": 5},
        {"vllm", "sglang", "gguf", "openvino"},
    ),
    "block-dflash-markov": ({**BLOCK, **DFLASH, "conditioning": "markov"}, ALL),
    "block-dflash-rnn": ({**BLOCK, "sample_from_anchor": False}, {"sglang"}),
    "block-domino": ({**BLOCK, **DOMINO}, {"sglang"}),
    "block-dflash-domino": ({**BLOCK, **DFLASH, **DOMINO, "sliding_window": 5}, {"sglang"}),
    "block-domino-reduced": ({**BLOCK, **DOMINO, "vocabulary": FEW}, set()),
    "block-dflash-reduced": (
        {**BLOCK, **DFLASH, "vocabulary": FEW},
        {"vllm", "gguf", "speculators"},
    ),
    "block-dflash2": ({**BLOCK, **DFLASH, "design": DFLASH2}, {"vllm", "sglang", "gguf"}),
    "block-dflash2-anchor": ({**BLOCK, "design": DFLASH2, "conditioning": "none"}, set()),
    "block-selector": ({**BLOCK, **DFLASH, "design": {**DFLASH2, "convolutions": False}}, set()),
    "block-convolutions": ({**BLOCK, **DFLASH, "design": {"convolutions": True}}, set()),
    "block-reduced": (
        {**BLOCK, "conditioning": "markov", "vocabulary": FEW},
        {"vllm", "gguf", "speculators"},
    ),
    "block-sizes": (
        {
            **BLOCK,
            "conditioning": "markov",
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 24,
            "intermediate_size": 40,
            "layers": 1,
            "rope_theta": 5e5,
        },
        ALL,
    ),
    "block-scaled": ({**BLOCK, "conditioning": "markov", "rope_scaling": SCALED}, ALL),
    "block-window": (
        {**BLOCK, "conditioning": "markov", "sliding_window": 5},
        {"vllm", "sglang", "gguf"},
    ),
    "block-own-head": ({**BLOCK, "conditioning": "markov", "lm_head": "own"}, {"vllm", "gguf"}),
    "block-own-embeddings": ({**BLOCK, "conditioning": "markov", "embeddings": "own"}, {"vllm"}),
    "block-learned-mask": ({"feature_layers": [1, 2], "mask": "learned"}, set()),
    "block-embeddings": (
        {**BLOCK, "conditioning": "markov", "feature_layers": [0, 2]},
        {"vllm", "gguf", "speculators"},
    ),
    "block-last": ({**BLOCK, "conditioning": "markov", "feature_layers": [1, 3]}, set()),
}
"""Heads, and the destinations that can be told of them; `test_llamacpp` has those of GGUF."""
POSSIBLE = [
    (name, to)
    for name, (_, ways) in CHOICES.items()
    for to in (*sorted(ways - {"gguf"}), "draftheads")
]


SAVED = TemporaryDirectory(prefix="draftheads-saved-")
"""One folder for each of `CHOICES` that this process has saved."""


@cache
def original(name: str) -> Path:
    """The folder of a head, to be copied."""
    path = Path(SAVED.name) / name
    return save_head(trained(name), path, target=tiny_target(), training={"steps": 3})


def saved(name: str, path: Path) -> Path:
    return Path(shutil.copytree(original(name), path))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def forget(folder: Path) -> None:
    """Our own facts, so that only others' words are left."""
    config = json.loads((folder / "config.json").read_text())
    del config["draftheads"]
    (folder / "config.json").write_text(json.dumps(config))
