"""What a head folder holds, and how its files are read: safetensors, or pickles whose code is never
run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.formats.config import CONFIG, read_json

WEIGHT_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "hydra_lm_head.pt",
)
"""Where a folder's tensors may be; the first is our own."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
POINTER = b"version https://git-lfs.github.com/spec/"
INSIDE = "medusa_head."
"""Prefix of heads that are in one file with their whole target."""


@dataclass(frozen=True)
class Stored:
    """What a head folder holds. file: name of the file with the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = WEIGHT_FILES[0]

    @property
    def facts(self) -> dict[str, Any]:
        """What draftheads recorded of the head; {} for one that it never saw."""
        facts: dict[str, Any] = self.config.get("draftheads") or {}
        return facts

    def check(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for tensors that are missing, too many, or of another shape or kind."""
        wanted, got = _forms(expected), _forms(self.tensors)
        faults = [
            f"{name}: expected {wanted.get(name, 'none')}, got {got.get(name, 'none')}"
            for name in sorted(wanted.keys() | got.keys())
            if wanted.get(name) != got.get(name)
        ]
        if faults:
            raise ValueError(
                f"{self.file} does not match its head: {'; '.join(faults[:3])}; was it made for "
                "another target?"
            )

    def save(self, folder: Path) -> None:
        """Write config.json and tensors into an existing folder."""
        save_file(self.tensors, folder / self.file, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")


def _forms(tensors: dict[str, Tensor]) -> dict[str, str]:
    kinds = {True: "numbers", False: "integers"}
    return {
        name: f"{kinds[tensor.is_floating_point()]} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Inside, every ValueError is one line that names the folder."""
    try:
        yield
    except ValueError as error:
        line = " ".join(str(error).splitlines())
        raise ValueError(line if str(folder) in line else f"{folder}: {line}") from error


def read_files(folder: Path, config: dict[str, Any]) -> Stored:
    """Config and tensors as they are in the folder; of heads in one file with a whole model, the
    heads alone.

    Raises FileNotFoundError where there are no weights, ValueError for what cannot be read.
    """
    found = [name for name in (*WEIGHT_FILES, *INDEXES) if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder}: expected one of {', '.join(WEIGHT_FILES)}, found none")
    tensors: dict[str, Tensor] = {}
    for part in parts_of(folder / found[0]) if found[0] in INDEXES else found[:1]:
        tensors |= _tensors(folder / part)
    inside = {name: each for name, each in tensors.items() if name.startswith(INSIDE)}
    return Stored(config, inside or tensors, found[0])


def parts_of(index: Path) -> list[str]:
    """The files in an index that hold a head. Raises ValueError for one that lists none, or files
    that are not beside it.
    """
    places = read_json(index).get("weight_map")
    if not places or not isinstance(places, dict):
        raise ValueError(f"{index}: expected a weight_map of tensors to files, got {places!r:.60}")
    inside = {file for name, file in places.items() if name.startswith(INSIDE)}
    files = inside or set(places.values())
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*", file):
            raise ValueError(
                f"{index}: expected names of files beside it, got {file!r:.60}; get the head again"
            )
    return sorted(files)


def count_of(names: Iterable[str], pattern: str) -> int:
    """How many different numbers are in names that begin with `pattern`, which has one group.
    Never the largest number, which would make one name a thousand layers.
    """
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def matrix(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A tensor whose two sizes tell those of the head. Raises ValueError where it is none."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 2 or not tensor.numel():
        got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise ValueError(f"expected a matrix {name}, got {got}; the file is not whole")
    return tensor


def integers(tensors: dict[str, Tensor], name: str) -> Tensor | None:
    """A list of integers or booleans, or None. Raises ValueError for any other tensor."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype not in (torch.int64, torch.int32, torch.uint8, torch.bool) or (
        tensor.ndim != 1 or not len(tensor)
    ):
        raise ValueError(
            f"expected {name} as a list of integers, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}; the file does not match its own head"
        )
    return tensor


def target_name(config: dict[str, Any]) -> str | None:
    """The target that a head's config.json names, in any of the words for it."""
    ours = (config.get("draftheads") or {}).get("target") or {}
    served = (config.get("speculators_config") or {}).get("verifier") or {}
    name = ours.get("name") or config.get("base_model_name_or_path") or served.get("name_or_path")
    return str(name) if name else None


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        return _unpickled(file)
    with opened(file) as stored:
        names = list(stored.keys())
        inside = [name for name in names if name.startswith(INSIDE)]
        return {name: stored.get_tensor(name) for name in inside or names}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises ValueError, naming it, where it is none or not whole."""
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A state dict that torch saved; no code in it is run."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.values())):
        got = sorted(map(str, tensors))[:4] if isinstance(tensors, dict) else type(tensors).__name__
        raise ValueError(f"{file}: expected a plain state dict of tensors, got {got}")
    return {str(name): tensor for name, tensor in tensors.items()}


def _damaged(file: Path, error: Exception) -> ValueError:
    with file.open("rb") as content:
        is_pointer = content.read(len(POINTER)) == POINTER
    got = f"{file.stat().st_size:,} bytes that are damaged, or a pickle that holds code"
    return ValueError(
        f"{file}: expected whole weights, got {'a git-lfs pointer' if is_pointer else got} "
        f"({type(error).__name__}); fetch them with `git lfs pull`, or download the file again"
    )


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor with all its numbers in the file: one may say that it has more."""
    if not torch.is_tensor(value) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()
