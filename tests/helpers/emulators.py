"""What serving engines make of a folder of Medusa heads, restated from the facts of their loaders:
which names they look for, rename, drop without a word, or leave as memory happened to be.

Source: medusa.md, section 4.4: vLLM 0.32 (0.33 has no Medusa any more).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]


class EngineError(Exception):
    """The engine does not start."""


@dataclass
class Served:
    """A head as an engine has it. parameters: what it makes. loaded: what it finds. dropped: names
    in the file that it passes over. facts: what else it believes.
    """

    parameters: Shapes
    loaded: dict[str, Tensor] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def uninitialised(self) -> set[str]:
        """Parameters that stay what they were."""
        return set(self.parameters) - set(self.loaded)

    def put(self, name: str, tensor: Tensor) -> None:
        """Load one; engines check shapes."""
        if tuple(tensor.shape) != self.parameters[name]:
            raise EngineError(f"{name}: {tuple(tensor.shape)} into {self.parameters[name]}")
        self.loaded[name] = tensor


def read(folder: Path, file: str = "model.safetensors") -> tuple[Config, dict[str, Tensor]]:
    if not (folder / file).is_file():
        raise EngineError(f"no {file}")
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / file)


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def vllm_medusa(folder: Path) -> Served:
    """MedusaConfig takes any key with "num" and "heads" (or "layers") in it; what the file has
    besides is skipped, what it lacks is not missed.
    """
    config, tensors = read(folder)
    if config.get("model_type") != "medusa":
        raise EngineError("MedusaConfig is chosen by model_type")
    said: Config = {"num_heads": 5, "num_hidden_layers": 1, "truncated_vocab_size": None}
    for key, value in config.items():
        short = "num_heads" if "num" in key and "heads" in key else key
        short = "num_hidden_layers" if "num" in key and "layers" in key else short
        said[short] = value
    width, whole = said["hidden_size"], said["vocab_size"]
    rows = said["truncated_vocab_size"] or whole
    block: Shapes = {"weight": (width, width)}
    if said.get("medusa_fc_bias", False):
        block["bias"] = (width,)
    served = Served({})
    for k in range(said["num_heads"]):
        for j in range(said["num_hidden_layers"]):
            served.parameters |= under(f"blocks.{k}.layers.{j}", block)
        if not said.get("original_lm_head", False):
            served.parameters[f"lm_heads.{k}.weight"] = (rows, width)
    if said.get("original_lm_head", False):
        served.parameters["lm_head.weight"] = (rows, width)
    if rows < whole:  # as it is in real ones
        raise EngineError("AssertionError: org_vocab_size of vocab_parallel_embedding")
    for name, tensor in tensors.items():
        plain = name.replace("medusa_heads.", "")
        if plain == "lm_heads.0.weight" and plain not in served.parameters:
            plain = "lm_head.weight"
        if plain not in served.parameters:
            served.dropped.add(name)
            continue
        served.put(plain, tensor)
    return served
