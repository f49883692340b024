"""Every layout of head folders that this project reads, and every one that it writes: the one place
that knows who calls what how.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftheads.heads.formats import eagle, medusa
from draftheads.heads.formats.eagle import (
    from_eagle,
    from_speculators,
    is_eagle,
    is_speculators,
    speculators_config,
)
from draftheads.heads.formats.medusa import from_hydra, is_hydra
from draftheads.heads.formats.stored import Stored, Written, check_design, read_files
from draftheads.heads.target import Target

Knows = Callable[[Stored], bool]
Reads = Callable[[Stored, Target | None], Stored]
Writes = Callable[[Stored, Target | None], Written]


def is_ours(stored: Stored) -> bool:
    """Whether a run of ours wrote it; what was converted for others says no format."""
    return "format" in stored.facts


def as_it_is(stored: Stored, target: Target | None) -> Stored:
    """Our own words."""
    return stored


def as_ours(stored: Stored, target: Target | None) -> Written:
    """Our own words, and for EAGLE-3 the keys with which `vllm serve FOLDER` finds the target."""
    config = stored.config
    if stored.facts["kind"] == "eagle3" and stored.facts["target"].get("name"):
        config = {**config, **speculators_config(config)}
    return Written(config, {"model.safetensors": stored.tensors})


READERS: list[tuple[str, Knows, Reads]] = [
    ("draftheads", is_ours, as_it_is),
    ("Hydra, Hydra++", is_hydra, from_hydra),
    ("speculators EAGLE-3", is_speculators, from_speculators),
    ("vLLM Medusa", medusa.is_vllm, medusa.from_vllm),
    ("Medusa v0.1, v1.0, version 2, TGI, TensorRT-LLM", medusa.is_numbered, medusa.from_numbered),
    ("EAGLE-1, EAGLE-3 of EAGLE, SpecForge, vLLM, SGLang", is_eagle, from_eagle),
]
"""What is read: name, how it is known, how it is put into our words. The first that knows it."""

WRITERS: dict[str, dict[str, Writes]] = {
    "draftheads": dict.fromkeys(("medusa", "sequential", "eagle", "eagle3"), as_ours),
    "vllm": {"medusa": medusa.to_vllm, "eagle": eagle.to_vllm, "eagle3": eagle.to_vllm},
    "sglang": {"eagle": eagle.to_sglang, "eagle3": eagle.to_sglang},
    "tgi": {"medusa": medusa.to_tgi},
    "speculators": {"eagle3": eagle.to_speculators},
    "fasterdecoding": {"medusa": medusa.to_fasterdecoding},
    "eagle": {"eagle": eagle.to_eagle, "eagle3": eagle.to_eagle},
    "specforge": {"eagle3": eagle.to_specforge},
}
"""What is written: destination -> kind of head -> how our words are put into its own."""


def read_stored(folder: Path, config: dict[str, Any], target: Target | None) -> Stored:
    """A head folder in our own words, whoever wrote it. target: for layouts that leave something
    to it.

    Raises FileNotFoundError where there are no weights, ValueError for what cannot be read.
    """
    return translated(read_files(folder, config), target)


def translated(stored: Stored, target: Target | None) -> Stored:
    """What was read, in our own words. Raises ValueError where it is no head, or one that we
    cannot run.
    """
    with stored.named():
        if not is_ours(stored):
            check_design(stored)
        for _, knows, read in READERS:
            if knows(stored):
                return read(stored, target)
    known = "; ".join(name for name, *_ in READERS)
    raise stored.refuse(
        f"expected a head in one of the layouts {known}; got tensors "
        f"{sorted(stored.tensors)[:3]}; is this a head folder?"
    )


def written(stored: Stored, to: str, target: Target | None) -> Written:
    """A head in our own words as others want it. Raises ValueError for what they cannot be told."""
    if to not in WRITERS:
        raise ValueError(f"--to: expected one of {', '.join(WRITERS)}, got {to!r}")
    kind = stored.facts["kind"]
    if kind not in WRITERS[to]:
        raise stored.refuse(
            f"expected a head of kind {' or '.join(WRITERS[to])} for {to}, got {kind}; "
            f"{kind} heads go to {', '.join(name for name in WRITERS if kind in WRITERS[name])}"
        )
    if to == "draftheads":
        return as_ours(stored, target)
    facts = {key: value for key, value in stored.facts.items() if key != "format"}
    return WRITERS[to][kind](
        stored.having({**stored.config, "draftheads": facts}, stored.tensors), target
    )
