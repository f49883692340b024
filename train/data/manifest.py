"""What a distillation was begun with, and whether a call resumes just that."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftheads.train.data.answers import BY_CONTENT, FORMAT
from draftheads.train.data.prompts import Prompt

if TYPE_CHECKING:
    from draftheads.train.data.distill import DistillOptions

BEFORE = {"reasoning": "keep"}
"""What folders that do not record these options were made with."""


def identify(prompts: Sequence[Prompt]) -> list[str]:
    """An id for each prompt: a hash of what it says, numbered where several are equal."""
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.sha256(_said(prompt)).hexdigest()[:32]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def _said(prompt: Prompt) -> bytes:
    return json.dumps([prompt.messages, prompt.text]).encode()


def describe(
    origin: dict[str, Any], prompts: Sequence[Prompt], options: DistillOptions
) -> dict[str, Any]:
    """The manifest of a distillation that begins. origin: of who answers, see `Answerer.origin`.

    Raises ValueError for no prompts, or prompts that are not numbered from 0.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, got none; check --prompts")
    if [prompt.index for prompt in prompts] != list(range(len(prompts))):
        raise ValueError("prompts: expected the indices 0, 1, 2, ...; use read_prompts")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_said(prompt) + b"\n")
    packages = ("draftheads", "torch", "transformers", "tokenizers")
    sampling = {"temperature", "top_p", "top_k", "max_new_tokens", "max_turns", "template_args"}
    sampling |= set(BEFORE)
    return {
        "format": BY_CONTENT,
        "target": origin,
        "sampling": options.model_dump(mode="json", include=sampling),
        "seed": options.seed,
        "batch_size": options.batch_size,
        "prompts": {
            "source": options.source,
            "count": len(prompts),
            "sha256": digest.hexdigest(),
        },
        "complete": False,
        "counts": {},
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def refuse_other(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError, naming each difference between two manifests that would change answers.

    Prompts may differ, except in folders of format 1, which know them by their numbers.
    """
    was_by, now_by = _answered_by(old["target"]), _answered_by(new["target"])
    pairs = [("answers come from", was_by, now_by), ("seed", old["seed"], new["seed"])]
    was = BEFORE | old["sampling"]
    pairs += [(key, was.get(key), value) for key, value in new["sampling"].items()]
    if was_by == now_by:
        pairs += _differing(old, new, "target", ("fingerprint", "dtype"))
    if old["format"] == FORMAT:
        pairs += _differing(old, new, "prompts", ("count", "sha256"))
    different = [f"{key}: expected {was!r}, got {now!r}" for key, was, now in pairs if was != now]
    if different:
        raise ValueError(
            f"{out} was begun with other options (target {old['target']['name']}, prompts "
            f"{old['prompts']['source'] or 'unnamed'}): {'; '.join(different)}. "
            "Use another --out, or the same options to resume"
        )


def _answered_by(target: dict[str, Any]) -> str:
    """A server's address is left out: it may move, its model may not."""
    server = target.get("server")
    if server is None:
        return "this process"
    return (
        f"a server with model {server['model']}, context {server['context']}, target "
        f"{target['name']}"
    )


def _differing(
    old: dict[str, Any], new: dict[str, Any], part: str, keys: tuple[str, ...]
) -> list[tuple[str, Any, Any]]:
    return [(f"{part} {key}", old[part][key], new[part][key]) for key in keys]
