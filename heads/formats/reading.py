"""What the readers of foreign layouts share: other names for tensors, values that a config must
have, and what only the target knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from draftheads.heads.target import Target

Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]


def renamed(tensors: dict[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    """Tensors under other names, by (pattern, replacement) for `re.sub`, in order; a name that
    becomes empty is dropped. Raises ValueError where two become one.
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
    """Raise ValueError for a key with another value than `allowed` has; None stands for absent."""
    for key, values in allowed.items():
        if config.get(key) not in values:
            known = ", ".join("absent" if value is None else str(value) for value in values)
            raise ValueError(f"expected {key}: {known}; got {config[key]!r:.60}")


def require(target: Target | None, reason: str) -> Target:
    """The target. Raises ValueError, with the reason why it is needed, for None."""
    if target is None:
        raise ValueError(
            f"expected the target, {reason}, got none; pass it: load_head(..., target=target) or "
            "--target"
        )
    return target


def vocabulary_of(config: dict[str, Any], target: Target | None) -> int:
    """Size of the target's vocabulary."""
    size = config.get("vocab_size")
    return int(size or require(target, "as config.json has no vocab_size").vocab_size)
