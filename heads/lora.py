"""A LoRA of a target, in PEFT's format, merged into its matrices as it is loaded.

Any LoRA that PEFT merges; `heads.adapter` has those that learn along with heads (Medusa-2).
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftheads.arguments import check_lora
from draftheads.extras import extras
from draftheads.heads.adapter import CONFIG, WEIGHTS
from draftheads.heads.files import read_json
from draftheads.heads.online import download
from draftheads.heads.tensors import opened

TEXTS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")
"""Files of the tokenizer that a LoRA may bring."""


def titled(name: str | None, lora: str | None) -> str:
    """A target's name and its LoRA's, for people."""
    return f"{name} with adapter {lora}" if lora else str(name)


@dataclass(frozen=True)
class Lora:
    """A LoRA on this machine. name: as it is recorded; on the Hub with its commit."""

    name: str
    folder: Path

    @classmethod
    def open(cls, source: str | Path) -> Lora:
        """Find a folder, or user/name or user/name@revision on the Hub. No weights are read.

        Raises FileNotFoundError for missing files, ValueError for another kind of adapter,
        ModuleNotFoundError without PEFT.
        """
        name = str(source)
        check_lora(name)
        with extras():
            import peft  # noqa: F401
        folder = Path(os.path.expanduser(name))
        if not folder.is_dir():
            repository, _, revision = name.partition("@")
            folder = download("adapter", repository, revision or None, [CONFIG, WEIGHTS, *TEXTS])
            name = f"{repository}@{folder.name}"
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise FileNotFoundError(
                    f"adapter {name}: expected {CONFIG} and {WEIGHTS}, found no {file}; get it "
                    "again, or save it with PEFT's save_pretrained"
                )
        kind = read_json(folder / CONFIG).get("peft_type")
        if kind != "LORA":
            raise ValueError(
                f"adapter {name}: expected a LoRA, got one of peft_type {kind}; merge it with "
                "PEFT, if it can be, save the result, and pass that as the target"
            )
        return cls(name, folder)

    @property
    def has_tokenizer(self) -> bool:
        """Whether it brings a tokenizer of its own, as training with a chat template saves it."""
        return any(self.folder.glob("tokenizer*"))

    def merge(self, model: PreTrainedModel) -> None:
        """Add it to the model's matrices, in float64, so that the sum is rounded once, and equal on
        every machine: a fingerprint depends on it.

        Raises ValueError for a damaged LoRA, and for one of another model.
        """
        with opened(self.folder / WEIGHTS) as stored:
            names = " ".join(stored.keys())
        untied = _untie(model, names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about ties, and layers that are merged already
                left = self._merge(model)
        except Exception as error:  # what does not fit may raise anything, in many lines
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            raise ValueError(self._misfit(model, reason)) from error
        if left:
            raise ValueError(self._misfit(model, f"{len(left)} tensors differ, such as {left[0]}"))
        if untied:
            _tie_equal(model)

    def _misfit(self, model: PreTrainedModel, reason: str) -> str:
        base = read_json(self.folder / CONFIG).get("base_model_name_or_path")
        return (
            f"adapter {self.name}: expected a LoRA of {model.config.name_or_path} "
            f"({type(model).__name__}), got one of {base or 'an unnamed model'} that does not fit "
            f"({reason}); pass the target that it was trained on, or get it again"
        )

    def _merge(self, model: PreTrainedModel) -> list[str]:
        """Returns the names of tensors that only the file or only the model has."""
        from peft import PeftConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        config = PeftConfig.from_pretrained(str(self.folder))
        config.inference_mode = True
        renames = getattr(model, "_checkpoint_conversion_mapping", {})
        wrapped: Any = get_peft_model(model, config)
        result = wrapped.load_adapter(
            str(self.folder), "default", torch_device="cpu", key_mapping=renames
        )
        wrapped.base_model._check_merge_allowed()
        layers = [each for each in wrapped.modules() if isinstance(each, BaseTunerLayer)]
        for layer in reversed(layers):  # inner ones first: those of experts are nested
            dtype = next(layer.get_base_layer().parameters()).dtype
            layer.double()
            layer.merge(safe_merge=True)
            layer.to(dtype)
        wrapped.merge_and_unload()
        return [*result.missing_keys, *result.unexpected_keys]


def _untie(model: PreTrainedModel, names: str) -> bool:
    """Give the lm_head weights of its own if the embeddings have the same and a LoRA changes one of
    both: PEFT would add it to both.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return False
    ends = [name for name, each in model.named_modules() if each in (embeddings, head)]
    if not any(f".{end}." in names for end in ends):
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return True


def _tie_equal(model: PreTrainedModel) -> None:
    """Tie embeddings and lm_head again if they were changed alike; record whether they are tied."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = bool(embeddings.weight.equal(head.weight))
    if is_tied:
        head.weight = embeddings.weight
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = is_tied
