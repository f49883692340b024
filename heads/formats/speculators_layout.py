"""EAGLE-3 heads of the speculators library, which vLLM also reads: a Llama config nested in one
that names the target.

Source: src/speculators/models/eagle3 of vllm-project/speculators; vLLM
transformers_utils/configs/speculators.
"""

from __future__ import annotations

import re
from typing import Any

from draftheads.heads.eagle3 import SWITCHES
from draftheads.heads.formats.eagle_layouts import from_eagle
from draftheads.heads.formats.head_config import needed
from draftheads.heads.formats.refusals import check_design
from draftheads.heads.formats.stored import Stored, target_name
from draftheads.heads.shape import tree_from_json
from draftheads.heads.target import Target

OUTSIDE = {
    "architectures",
    "draft_vocab_size",
    "eagle_config",
    "num_aux_hidden_states",
    "dtype",
    "draftheads",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    *SWITCHES,
}
"""Keys of ours that say nothing of the layer."""


def is_speculators(stored: Stored) -> bool:
    """Whether its config says so."""
    return "speculators_model_type" in stored.config


def from_speculators(stored: Stored, target: Target | None) -> Stored:
    """As any other EAGLE-3 head, once the nested config is spread out.

    Raises ValueError for other kinds, and where `norm_before_residual` is not said: the library and
    vLLM take opposite things for granted.
    """
    config, kind = stored.config, stored.config["speculators_model_type"]
    if kind != "eagle3":
        raise stored.refuse(f"expected speculators_model_type eagle3, got {kind}; it is not read")
    if "norm_before_residual" not in config:
        raise stored.refuse(
            "expected norm_before_residual in config.json, got none: the speculators library takes "
            "it for false, vLLM for true; write the one it was trained with"
        )
    (layer,) = needed(config, "transformer_layer_config")
    spread = stored.having({**layer, **config}, stored.tensors)
    check_design(spread)
    return from_eagle(spread, target)


def names_of_speculators(name: str) -> str:
    """Of a tensor of ours."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that make a config of ours one of speculators'; `transformer_layer_config` stands
    for what a Llama config says. speculative_tokens: as deep as the head's tree.

    Raises ValueError where the target is not known.
    """
    name = target_name(config)
    if name is None:
        raise ValueError("speculators must be told the target, nothing names it; pass --target")
    target = config["draftheads"]["target"]
    architectures = [target["architecture"]] if "architecture" in target else []
    tree = tree_from_json(config["draftheads"]["tree"])
    layer = {key: value for key, value in config.items() if key not in OUTSIDE}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tree.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
    }
