"""A LoRA of a target, in PEFT's format, merged into its matrices as it is loaded.

Any LoRA that PEFT merges; `heads.target.adapter` has those that learn along with heads (Medusa-2).
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftheads.arguments import head_folder
from draftheads.extras import extras
from draftheads.heads.files import read_json
from draftheads.heads.online import download
from draftheads.heads.target.adapter import CONFIG, WEIGHTS, check_files
from draftheads.heads.tensors import opened

FILES = (CONFIG, WEIGHTS, "*token*", "vocab*", "merges.txt", "*.jinja")
"""Those of a LoRA, and of the tokenizer that it may bring."""
PREFIX = "base_model.model."
"""Of the names of its tensors."""
NAME = re.compile(r"\^?(\.\*)?[\w.\\-]+\$?")
"""A name of modules, as PEFT's settings have them: matching other expressions may take for ever."""
SMALL_RANK = 64
"""A rank that needs little memory, whether or not the LoRA's matrices have it."""


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
        """Find a folder, or user/name or user/name@revision on the Hub. Reads no weights.

        Raises FileNotFoundError for missing files, ValueError for another kind of adapter,
        ModuleNotFoundError without PEFT.
        """
        name = str(source)
        folder = head_folder(source, "PEFT adapter")
        with extras():
            import peft  # noqa: F401
        if folder is None:
            repository, _, revision = name.partition("@")
            folder = download("adapter", repository, revision or None, FILES)
            name = f"{repository}@{folder.name}"
        check_files(folder, name)
        settings = read_json(folder / CONFIG)
        kind = settings.get("peft_type")
        if settings.get("alora_invocation_tokens"):
            kind = "aLoRA (alora_invocation_tokens), which acts from these tokens on"
        if kind != "LORA":
            raise ValueError(
                f"adapter {name}: expected a LoRA, got an adapter of type {kind}; merge it with "
                "PEFT, if it can be, save the result, and pass that as the target"
            )
        return cls(name, folder)

    def merge(self, model: PreTrainedModel) -> None:
        """Add it to a model's matrices. Raises ValueError for a damaged LoRA, and for one of
        another model.
        """
        with opened(self.folder / WEIGHTS):  # a damaged file is named before PEFT reads it
            pass
        head = model.get_output_embeddings()
        is_tied = head.weight is model.get_input_embeddings().weight
        if is_tied:  # PEFT would add to both what changes one of them
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about ties, and layers that are merged already
                _merge(model, self.folder)
        except Exception as error:  # what does not fit may raise anything, in many lines
            raise ValueError(
                f"adapter {self.name}: expected a LoRA of {model.config.name_or_path} "
                f"({type(model).__name__}), got one that does not fit ({type(error).__name__}: "
                f"{' '.join(str(error).split()):.300}); pass the target that it was trained on, or "
                "get it again"
            ) from error
        if not is_tied:
            return
        head = model.get_output_embeddings()
        embeddings = model.get_input_embeddings()
        stay_equal = head.weight.equal(embeddings.weight)
        if stay_equal:
            head.weight = embeddings.weight
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = stay_equal


def _merge(model: PreTrainedModel, folder: Path) -> None:
    """Sums are computed in float64, so that they are rounded once, and equal on every machine: the
    fingerprint depends on them.
    """
    from peft import PeftConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    if config.layer_replication:  # PEFT would merge into weights that layers share
        raise ValueError("it repeats layers (layer_replication)")
    renames = getattr(model, "_checkpoint_conversion_mapping", {})
    _bound(config, folder / WEIGHTS, renames)
    wrapped: Any = get_peft_model(model, config)
    loaded = wrapped.load_adapter(folder, "default", torch_device="cpu", key_mapping=renames)
    different = [*loaded.missing_keys, *loaded.unexpected_keys]
    if different:
        raise ValueError(f"{len(different)} tensors differ, such as {different[0]}")
    layers = [each for each in wrapped.modules() if isinstance(each, BaseTunerLayer)]
    for layer in reversed(layers):  # inner ones first: those of experts are nested
        dtype = next(layer.get_base_layer().parameters()).dtype
        layer.double()
        layer.merge(safe_merge=True)
        layer.to(dtype)
    wrapped.merge_and_unload()


def _bound(config: Any, file: Path, renames: dict[str, str]) -> None:
    """Take what PEFT would match and allocate from the file, and refuse settings that ask for more.

    A regular expression may take for ever, so the modules are those that have matrices.
    """
    with opened(file) as stored:
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    ranks = [shape[0] for name, shape in shapes.items() if re.search(r"\.lora_\w*A\b", name)]
    most = max([SMALL_RANK, *ranks])
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > most:
        raise ValueError(f"expected a rank of at most {most}, as its matrices have, got {rank}")
    for key in ("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save"):
        given = getattr(config, key) or ()
        for pattern in [given] if isinstance(given, str) else given:
            if not NAME.fullmatch(pattern):
                raise ValueError(f"expected names of modules, got the expression {pattern!r:.60}")
    if isinstance(config.target_modules, str) or isinstance(config.exclude_modules, str):
        names = {name.rpartition(".lora_")[0].removeprefix(PREFIX) for name in shapes}
        for old, new in renames.items():
            names = {re.sub(old, new, name) for name in names}
        config.target_modules = names
        config.exclude_modules = None
