"""What a head folder holds, and how its files are read: safetensors, or pickles whose code is never
run.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

WEIGHT_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "hydra_lm_head.pt",
)
"""Where a folder's tensors may be; the first is our own."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""What lists the parts where there are several."""
INSIDE = "medusa_head."
"""Names of heads that stand in one file with their whole target."""


@dataclass(frozen=True)
class Stored:
    """What a head folder holds. file: where the tensors were read from."""

    file: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """What we said of the head, where it is one of ours or was one once."""
        facts: dict[str, Any] = self.config.get("draftheads") or {}
        return facts

    def having(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> Stored:
        """The same folder in other words."""
        return replace(self, config=config, tensors=tensors)

    def refuse(self, problem: str) -> ValueError:
        """An error that names the folder."""
        return ValueError(f"{self.file.parent}: {problem}")

    def check_names(self, expected: set[str]) -> None:
        """Raise ValueError, naming them, where tensors are missing or too many."""
        got = set(self.tensors)
        if expected != got:
            raise ValueError(
                f"{self.file}: missing tensors {sorted(expected - got)[:4]}, "
                f"unexpected {sorted(got - expected)[:4]}; the file does not match its own head"
            )

    def check_shapes(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for a tensor of another shape."""
        for name, tensor in expected.items():
            wanted, got = tuple(tensor.shape), tuple(self.tensors[name].shape)
            if wanted != got:
                raise ValueError(
                    f"{self.file}: expected {name} of shape {wanted}, got {got}; "
                    "was the head made for another target?"
                )


@dataclass(frozen=True)
class Written:
    """A folder in others' words: config.json, and the tensors of each file. with_tokenizer: whether
    its readers look there for the target's tokenizer too.
    """

    config: dict[str, Any]
    files: dict[str, dict[str, Tensor]]
    with_tokenizer: bool = False

    def save(self, folder: Path) -> None:
        """Write the files into a folder that is there."""
        for name, tensors in self.files.items():
            if name.endswith(".safetensors"):
                save_file(tensors, folder / name, metadata={"format": "pt"})
            else:
                torch.save(tensors, folder / name)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")


def read_files(folder: Path, config: dict[str, Any]) -> Stored:
    """Config and tensors as they stand in the folder; heads that stand in one file with a whole
    model are read alone.

    Raises FileNotFoundError where there are no weights, ValueError for what cannot be read.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return Stored(folder / name, config, _tensors(folder / name))
    for name in INDEXES:
        if (folder / name).is_file():
            tensors: dict[str, Tensor] = {}
            for part in parts_of(folder / name):
                tensors |= _tensors(folder / part)
            return Stored(folder / name, config, tensors)
    raise FileNotFoundError(
        f"{folder}: expected {', '.join(WEIGHT_FILES[:-1])} or {WEIGHT_FILES[-1]} beside its "
        "config, found none of them"
    )


def parts_of(index: Path) -> list[str]:
    """The files, of those that an index lists, that hold a head."""
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    inside = {file for name, file in places.items() if name.startswith(INSIDE)}
    return sorted(inside or set(places.values()))


def target_name(config: dict[str, Any]) -> str | None:
    """The target that a head's config.json names, in any of the words for it."""
    ours = (config.get("draftheads") or {}).get("target") or {}
    served = (config.get("speculators_config") or {}).get("verifier") or {}
    name = ours.get("name") or config.get("base_model_name_or_path") or served.get("name_or_path")
    return str(name) if name else None


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        tensors = _unpickled(file)
        inside = {name: each for name, each in tensors.items() if name.startswith(INSIDE)}
        return inside or tensors
    with safe_open(file, framework="pt") as stored:
        names = list(stored.keys())
        inside_names = [name for name in names if name.startswith(INSIDE)]
        return {name: stored.get_tensor(name) for name in inside_names or names}


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A state dict that torch saved; no code in it is run."""
    hint = "it must come from torch.save(head.state_dict(), ...)"
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its many lines advise to run the code in the file
        raise ValueError(
            f"{file}: expected a plain state dict, got a file that holds code, or no pickle; {hint}"
        ) from error
    except (EOFError, OSError, RuntimeError) as error:  # none of them names the file
        reason = str(error).partition(".")[0] or "end of file"
        raise ValueError(
            f"{file}: expected a whole state dict, torch cannot read it ({reason}); if it was cut "
            "short, download it again"
        ) from error
    named = isinstance(tensors, dict) and all(map(torch.is_tensor, tensors.values()))
    if not named:
        got = sorted(map(str, tensors))[:4] if isinstance(tensors, dict) else type(tensors).__name__
        raise ValueError(f"{file}: expected a plain state dict of tensors, got {got}; {hint}")
    return dict(tensors)
