"""Targets deep enough for three features below the last state, and EAGLE-3 heads for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_heads import random_head
from tiny_targets import CONFIGS, scaled_up
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftheads.heads.formats.hub import save_head
from draftheads.heads.target.model import Target

LAYERS = 5
READ = {"feature_layers": [1, 2, 4]}


@cache
def deep(name: str) -> Target:
    """Deep enough for three features below the last state."""
    torch.manual_seed(0)
    kind, options = CONFIGS[name]
    config = CONFIG_MAPPING[kind](**{**options, "num_hidden_layers": LAYERS})
    return Target(scaled_up(AutoModelForCausalLM.from_config(config)), name=f"tiny-{name}")


def target() -> Target:
    return deep("llama")


def saved(folder: Path, **choices: Any) -> Path:
    head = random_head("eagle3", target(), **{**READ, **choices})
    return save_head(head, folder / "ours", target=target())
