"""Stored tensors and values of a head, checked before they determine its shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftheads.heads.files import CONFIG

Known = TypeVar("Known")

POINTER = b"version https://git-lfs.github.com/spec/"


def check_finite(file: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError naming the file and its first tensor with numbers that are not finite."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            # torch has no aminmax for fp8
            whole = tensor if tensor.element_size() > 1 else tensor.float()
            if not torch.stack(whole.aminmax()).isfinite().all():  # in one pass, without a copy
                raise ValueError(
                    f"{file}: expected finite numbers, got others in {name}; get the head again, "
                    "or an earlier checkpoint of its training"
                )


def differences(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    """Names the tensors that are missing, unexpected or of other shapes or kinds, by name."""
    faults = []
    for name in sorted(expected.keys() | got.keys()):
        wanted = _form(expected.get(name))
        found = _form(got.get(name))
        if wanted != found:
            faults.append(f"{name}: expected {wanted}, got {found}")
    return faults


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    kind = "numbers" if tensor.is_floating_point() else "integers"
    return f"{kind} {tuple(tensor.shape)}"


def dtype_name(dtype: torch.dtype | str) -> str:
    """ "float32" for torch.float32: the name in options, configs and reports."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. Raises ValueError naming it when it is damaged, OSError if it may
    not be read.
    """
    file.open("rb").close()  # safetensors says that there is none
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


LIMITS = {
    "num_hidden_layers": 1 << 9,
    "hidden_size": 1 << 17,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
}
"""Of a model's sizes, well above those that any has."""


def check_sizes(config: Any) -> None:
    """Raise ValueError for a model's text config with sizes that no model has, before anything of
    these sizes is built.
    """
    if not hasattr(config, "model_type"):
        raise ValueError(f"expected an object of settings as text_config, got {config!r:.60}")
    for key, most in LIMITS.items():
        size = getattr(config, key, None)
        if size is not None and not 0 < size <= most:
            raise ValueError(f"expected {key} from 1 to {most:,}, got {size:,}")
    if not isinstance(config.dtype, torch.dtype | None):
        raise ValueError(f"expected the name of a dtype, got {config.dtype!r:.60}")


def require(target: Known | None, reason: str) -> Known:
    """The target. Raises ValueError, with the reason why it is needed, for None."""
    if target is None:
        raise ValueError(
            f"expected the target ({reason}), got none; pass it: load_head(..., target=target) or "
            "--target"
        )
    return target


def needed(config: dict[str, Any], *keys: str) -> list[Any]:
    """The values of keys that cannot be read from tensor shapes. Raises ValueError naming those
    missing.
    """
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"expected {', '.join(missing)} in {CONFIG}, got none")
    return [config[key] for key in keys]
