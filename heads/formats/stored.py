"""Contents of a head folder, read from safetensors or from pickles without running their code;
and helpers for translating layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.formats.config import CONFIG, read_json

Known = TypeVar("Known")
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
PLACES = (*WEIGHT_FILES, *INDEXES)
POINTER = b"version https://git-lfs.github.com/spec/"
INSIDE = "medusa_head."
"""Prefix of heads in one checkpoint with their target (Medusa v1.0)."""


@dataclass(frozen=True)
class Stored:
    """Contents of a head folder. file: name of the file with the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = WEIGHT_FILES[0]

    @property
    def facts(self) -> dict[str, Any]:
        """The metadata that draftheads recorded; {} for other layouts."""
        facts: dict[str, Any] = self.config.get("draftheads") or {}
        return facts

    def check(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for tensors that are missing, unexpected or of other shapes or kinds."""
        faults = []
        for name in sorted(expected.keys() | self.tensors.keys()):
            wanted, got = _form(expected.get(name)), _form(self.tensors.get(name))
            if wanted != got:
                faults.append(f"{name}: expected {wanted}, got {got}")
        if faults:
            raise ValueError(
                f"{self.file} does not match its head: {'; '.join(faults[:3])}; was it made for "
                "another target?"
            )

    def check_finite(self) -> None:
        """Raise ValueError for a tensor with numbers that are not finite."""
        check_finite(self.file, self.tensors.items())

    def save(self, folder: Path) -> None:
        """Write config.json and tensors into an existing folder."""
        save_file(self.tensors, folder / self.file, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    kind = "numbers" if tensor.is_floating_point() else "integers"
    return f"{kind} {tuple(tensor.shape)}"


def check_finite(file: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError naming the file and its first tensor with numbers that are not finite."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            whole = (
                tensor if tensor.element_size() > 1 else tensor.float()
            )  # torch lacks it for fp8
            if not torch.stack(whole.aminmax()).isfinite().all():  # in one pass, without a copy
                raise ValueError(
                    f"{file}: expected finite numbers, got others in {name}; get the head again, "
                    "or an earlier checkpoint of its training"
                )


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
    found = next((name for name in PLACES if (folder / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{folder}: expected one of {', '.join(WEIGHT_FILES)}, found none")
    tensors: dict[str, Tensor] = {}
    for file in shards(folder / found) if found in INDEXES else [found]:
        tensors |= _tensors(folder / file)
    return Stored(config, tensors, found)


def shards(index: Path) -> list[str]:
    """Names of the files in a checkpoint's index that contain a head. Raises ValueError for an
    index without files, or with files in other folders.
    """
    places = read_json(index).get("weight_map")
    if not places or not isinstance(places, dict):
        raise ValueError(
            f"{index}: expected a weight_map of tensors to files, got {places!r:.60}; get the head "
            "again"
        )
    files = {places[name] for name in _head_names(places)}
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
    """Whether this is a dense tensor whose storage holds all of its elements; shapes can lie."""
    if not torch.is_tensor(value) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. Raises ValueError naming it when it is damaged."""
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ValueError:
    with file.open("rb") as content:
        is_pointer = content.read(len(POINTER)) == POINTER
    got = f"{file.stat().st_size:,} bytes that are damaged, or a pickle that contains code"
    return ValueError(
        f"{file}: expected complete weights, got {'a git-lfs pointer' if is_pointer else got} "
        f"({type(error).__name__}); fetch them with `git lfs pull`, or download the file again"
    )


def count_of(names: Iterable[str], pattern: str) -> int:
    """The number of different indices in names that begin with `pattern`, which has one group.
    Not the largest index: one damaged name would then create thousands of layers.
    """
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def matrix(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A tensor whose shape determines the head's. Raises ValueError if it is not a matrix."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 2 or not tensor.numel():
        got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise ValueError(f"expected a matrix {name}, got {got}; the file is incomplete")
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
    """The target that a head's config.json names, in any layout."""
    ours = (config.get("draftheads") or {}).get("target") or {}
    served = (config.get("speculators_config") or {}).get("verifier") or {}
    name = ours.get("name") or config.get("base_model_name_or_path") or served.get("name_or_path")
    return str(name) if name else None


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
            known = ", ".join("absent" if value is None else str(value) for value in values)
            raise ValueError(f"expected {key}: {known}; got {config[key]!r:.60}")


def require(target: Known | None, reason: str) -> Known:
    """The target. Raises ValueError, with the reason why it is needed, for None."""
    if target is None:
        raise ValueError(
            f"expected the target ({reason}), got none; pass it: load_head(..., target=target) or "
            "--target"
        )
    return target
