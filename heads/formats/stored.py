"""Contents of a head folder, read from safetensors or from pickles without running their code;
and helpers for translating layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.files import CONFIG, read_json, write_json
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.tensors import _damaged, check_finite, differences, opened

Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]

WEIGHT_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "hydra_lm_head.pt",
)
"""Possible names of the file with the tensors; the first is our own."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
CANDIDATES = (*WEIGHT_FILES, *INDEXES)
INSIDE = "medusa_head."
"""Prefix of heads in one checkpoint with their target (Medusa v1.0)."""


@dataclass(frozen=True)
class Stored:
    """Contents of a head folder. file: name of the file with the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = WEIGHT_FILES[0]

    @property
    def facts(self) -> HeadFacts:
        """The record of draftheads; nothing for other layouts."""
        return HeadFacts(self.config.get("draftheads") or {})

    def check(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for tensors that are missing, unexpected, of other shapes or kinds, or
        with numbers that are not finite.
        """
        if faults := differences(expected, self.tensors):
            raise ValueError(
                f"{self.file} does not match its head: {'; '.join(faults[:3])}; was it made for "
                "another target?"
            )
        check_finite(self.file, self.tensors.items())

    def save(self, folder: Path) -> None:
        """Write config.json and tensors into an existing folder."""
        save_file(self.tensors, folder / self.file, metadata={"format": "pt"})
        write_json(folder / CONFIG, self.config)


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Turn every ValueError raised inside into one line that names the folder."""
    try:
        yield
    except ValueError as error:
        line = " ".join(str(error).splitlines())
        raise ValueError(line if str(folder) in line else f"{folder}: {line}") from error


def read_files(folder: Path, config: dict[str, Any]) -> Stored:
    """The config and the tensors of a folder, unchanged; of a checkpoint that also contains the
    target, only the heads.

    Raises FileNotFoundError for missing weights, ValueError for unreadable ones.
    """
    name = next((name for name in CANDIDATES if (folder / name).is_file()), None)
    if name is None:
        raise FileNotFoundError(f"{folder}: expected one of {', '.join(WEIGHT_FILES)}, found none")
    tensors: dict[str, Tensor] = {}
    files = shards(folder / name) if name in INDEXES else [name]
    for file in files:
        tensors |= _tensors(folder / file)
    return Stored(config, tensors, name)


def shards(index: Path) -> list[str]:
    """Names of the files in a checkpoint's index that contain a head. Raises ValueError for an
    index without files, or with files in other folders.
    """
    weight_map = read_json(index).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict):
        raise ValueError(
            f"{index}: expected a weight_map of tensors to files, got {weight_map!r:.60}; get the "
            "head again"
        )
    files = {weight_map[name] for name in _head_names(weight_map)}
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*", file):
            raise ValueError(
                f"{index}: expected names of files next to it, got {file!r:.60}; get the head again"
            )
    return sorted(files)


def _head_names(names: Iterable[str]) -> list[str]:
    """The tensors of a head in a checkpoint that also contains its target; else all."""
    names = list(names)
    return [name for name in names if name.startswith(INSIDE)] or names


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with opened(file) as stored:
            return {name: stored.get_tensor(name) for name in _head_names(stored.keys())}
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(file, error) from error
    if not isinstance(loaded, dict) or not all(map(_is_plain, loaded.values())):
        got = sorted(map(str, loaded))[:4] if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(
            f"{file}: expected a plain state dict of tensors, got {got}; get the head again"
        )
    tensors = {str(name): tensor for name, tensor in loaded.items()}
    return {name: tensors[name] for name in _head_names(tensors)}


def _is_plain(value: Any) -> bool:
    """True if this is a dense tensor whose storage holds all of its elements; shapes can lie."""
    if not torch.is_tensor(value) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def target_name(config: dict[str, Any]) -> str | None:
    """The target that a head's config.json names, in any layout."""
    ours = HeadFacts(config.get("draftheads") or {}).target.name
    served = (config.get("speculators_config") or {}).get("verifier") or {}
    name = ours or config.get("base_model_name_or_path") or served.get("name_or_path")
    return str(name) if name else None


MERGED = "adapted"
"""Where cards let `draftheads merge` write a target with what it was adapted by."""


def renamed(tensors: dict[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    """Tensors under other names, by (pattern, replacement) for `re.sub`, in order. A tensor whose
    name becomes empty is dropped. Raises ValueError where two names become one.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, replacement in renames:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"expected one tensor {new}, got a second one in {name}")
        if new:
            result[new] = tensor
    return result


def check_values(config: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a key with a value not in `allowed`; None is an absent key."""
    for key, values in allowed.items():
        if config.get(key) not in values:
            choices = ", ".join("absent" if value is None else str(value) for value in values)
            raise ValueError(f"expected {key}: {choices}; got {config.get(key)!r:.60}")
