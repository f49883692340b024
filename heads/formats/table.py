"""Every layout of head folders that this project reads, and every one that it writes: the one place
that knows who calls what how.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from draftheads.heads.formats import eagle, medusa
from draftheads.heads.formats.reading import check_values
from draftheads.heads.formats.stored import Stored
from draftheads.heads.target import Target

Translates = Callable[[Stored, Target | None], Stored]


def as_is(stored: Stored, target: Target | None) -> Stored:
    """SGLang, and vLLM for EAGLE-3, read our layout."""
    return stored


def as_ours(stored: Stored, target: Target | None) -> Stored:
    """Our layout; for EAGLE-3 with the keys by which `vllm serve FOLDER` finds the target."""
    config = stored.config
    if stored.facts["kind"] == "eagle3" and stored.facts["target"].get("name"):
        config = {**config, **eagle.speculators_config(config)}
    return Stored(config, stored.tensors)


READERS: list[tuple[str, str, Translates]] = [
    ("Hydra", r"^hydra_", medusa.from_hydra),
    ("speculators EAGLE-3", r"^speculators_model_type$", eagle.from_speculators),
    ("vLLM Medusa", r"^(medusa_heads?\.)?blocks\.0\.layers\.0\.weight$", medusa.from_vllm),
    (
        "Medusa (FasterDecoding, TGI, TensorRT-LLM)",
        r"^(medusa_heads?\.)?\d+\.\d+\.linear\.weight$",
        medusa.from_numbered,
    ),
    ("EAGLE-1 and EAGLE-3", r"^(model\.)?fc\.weight$", eagle.from_eagle),
]
"""What is read beside our own: name, a config key or tensor name that only it has, its reader."""

WRITERS: dict[str, dict[str, Translates]] = {
    "draftheads": dict.fromkeys(("medusa", "sequential", "eagle", "eagle3"), as_ours),
    "vllm": {"medusa": medusa.to_vllm, "eagle": eagle.to_vllm, "eagle3": as_is},
    "sglang": {"eagle": as_is, "eagle3": as_is},
    "tgi": {"medusa": medusa.to_tgi},
    "speculators": {"eagle3": eagle.to_speculators},
}
"""What is written: destination -> kind of head -> its writer."""

REMOVED = {"eagle": "sglang", "specforge": "sglang", "fasterdecoding": "tgi"}
"""Destinations of earlier versions -> the one that has the same tensors."""

EXPRESSES: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = {
    ("vllm", "medusa"): {"truncated_vocab_size": (None,)},
    ("tgi", "medusa"): {"truncated_vocab_size": (None,), "blocks that share lm_head": (0, 1)},
    ("vllm", "eagle"): {"sliding_window": (None,), "bias of fc": (False,)},
    ("sglang", "eagle"): {"sliding_window": (None,)},
    ("vllm", "eagle3"): {"last state as a feature": (False,)},
    ("sglang", "eagle3"): {
        "norm_before_residual": (False,),
        "num_hidden_layers": (1,),
        "sliding_window": (None,),
        "a single feature": (False,),
        "embeddings as a feature": (False,),
        "last state as a feature": (False,),
    },
    ("speculators", "eagle3"): {
        "fc_norm and norm_before_fc": (False,),
        "last state as a feature": (False,),
    },
}
"""(destination, kind) -> config key or trait -> the values that the destination has. SGLang, for
one, takes features after layers (so no embeddings) and before the final norm, adds residuals before
the norm, and leaves fc out for a single feature; vLLM has no fc.bias and, for Medusa, stops at an
assertion where there is a draft vocabulary.
"""


def loss(to: str, stored: Stored) -> str | None:
    """What a destination cannot express of a head of ours; None where nothing is lost."""
    config, bias = stored.config, stored.tensors.get("fc.bias")
    features = config.get("eagle_aux_hidden_state_layer_ids") or [None]
    traits = {
        **config,
        "blocks that share lm_head": bool(config.get("original_lm_head"))
        and config["num_hidden_layers"],
        "bias of fc": bias is not None and bool(bias.any()),
        "fc_norm and norm_before_fc": config.get("fc_norm") and config.get("norm_before_fc"),
        "a single feature": len(features) == 1,
        "embeddings as a feature": 0 in features,
        "last state as a feature": features[-1] in (-1, stored.facts["target"].get("layers")),
    }
    try:
        check_values(traits, EXPRESSES.get((to, stored.facts["kind"]), {}))
    except ValueError as error:
        return str(error)
    return None


def translated(stored: Stored, target: Target | None) -> Stored:
    """A head folder, whoever wrote it, in our own layout. target: for layouts that leave something
    to it.

    Raises ValueError for a folder without a head, or with one that we cannot run.
    """
    if "format" in stored.facts:  # what was converted for others has none
        return stored
    names = [*stored.config, *stored.tensors]
    for _, pattern, read in READERS:
        if any(re.search(pattern, name) for name in names):
            return read(stored, target)
    known = ", ".join(name for name, *_ in READERS)
    raise ValueError(
        f"expected a head in one of the layouts draftheads, {known}; got tensors "
        f"{sorted(stored.tensors)[:3]}; is this a head folder?"
    )


def written(stored: Stored, to: str, target: Target | None) -> Stored:
    """A head of ours in the layout of `to`. Raises ValueError for what it cannot express."""
    kind = stored.facts["kind"]
    if to not in WRITERS:
        hint = f"; --to {REMOVED[to]} writes the same tensors" if to in REMOVED else ""
        raise ValueError(f"--to: expected one of {', '.join(WRITERS)}, got {to!r}{hint}")
    if kind not in WRITERS[to]:
        known = ", ".join(name for name in WRITERS if kind in WRITERS[name])
        raise ValueError(
            f"expected a head of kind {' or '.join(WRITERS[to])} for {to}, got {kind}; {kind} "
            f"heads go to {known}"
        )
    if to == "draftheads":
        return as_ours(stored, target)
    if kind == "eagle3" and stored.facts["target"].get("layers") is None:
        raise ValueError(
            "expected a head that records how many layers its target has, so that features are "
            "told from its last state, got none; pass --target"
        )
    if reason := loss(to, stored):
        raise ValueError(
            f"{to} cannot express this {kind} head: {reason}; nothing was written, choose another "
            "destination or train another head"
        )
    facts = {key: value for key, value in stored.facts.items() if key != "format"}
    return WRITERS[to][kind](Stored({**stored.config, "draftheads": facts}, stored.tensors), target)
