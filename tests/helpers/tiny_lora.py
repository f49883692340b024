"""LoRAs of tiny targets, as PEFT saves them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

SIZE = 0.3
"""Of what is added to its matrices, so that texts change."""


def loaded(base: Path, lora: Path) -> Any:
    """A model with a LoRA beside its matrices: what was trained."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    with warnings.catch_warnings(action="ignore"):  # PEFT's, about ties and what transformers calls
        return PeftModel.from_pretrained(model, lora).eval()


def merged(base: Path, lora: Path) -> Any:
    """As PEFT merges both."""
    with warnings.catch_warnings(action="ignore"):
        return loaded(base, lora).merge_and_unload()


def write_lora(folder: Path, base: Path, seed: int = 1, **choices: Any) -> Path:
    """A LoRA of the model in `base`. choices: of `LoraConfig`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    choices = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8.0} | choices
    with warnings.catch_warnings(action="ignore"):
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **choices))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data += SIZE * torch.randn_like(parameter)
        wrapped.save_pretrained(folder)
    return folder
