"""Hydra and Hydra++ heads as they were published (arXiv 2402.05109; names as in
github.com/zankner/Hydra, hydra/model/hydra_heads).

Legend: K heads, L layers of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftheads.heads.decoder import LayerShape
from draftheads.heads.formats.stored import Stored, count_of
from draftheads.heads.target import Target

CONFIG = {
    "hydra_head_arch": ("mlp", "prefix-mlp"),
    "grounded_heads": (True,),
    "hidden_state_offset": (0,),
}
"""What we read of its config, and the values that heads of ours can have."""
PREFIX = "prefix_embeding_layer"  # as it is spelled
UNUSED = {
    f"{PREFIX}.embed_tokens.weight",  # the layer is fed with states
    f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq",
}
LLAMA_LAYER = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
]


def is_hydra(stored: Stored) -> bool:
    """Whether this is a published Hydra head."""
    return any(name.startswith("hydra_") for name in (*stored.config, *stored.tensors))


def from_hydra(stored: Stored, target: Target | None) -> Stored:
    """K, L and whether there is a prefix layer are told by the names; the sizes of that layer are
    the target's.
    """
    for key, allowed in CONFIG.items():
        value = stored.config.get(key, allowed[0])
        if value not in allowed:
            raise stored.refuse(
                f"expected {key} to be {' or '.join(map(str, allowed))}, got {value!r}; such Hydra "
                "heads are not read, train one of kind sequential instead"
            )
    tensors = {name: each for name, each in stored.tensors.items() if name not in UNUSED}
    has_prefix = any(name.startswith(PREFIX) for name in tensors)
    ours = dict(_names(set(tensors), has_prefix))
    stored.having(stored.config, tensors).check_names(set(ours))
    config = {
        "norm_embeddings": False,
        "prefix_layer": _layer_of(stored, target) if has_prefix else None,
        "draftheads": {
            "kind": "sequential",
            "target": {"name": stored.config.get("base_model_name_or_path", "its target")},
        },
    }
    return stored.having(config, {ours[name]: each for name, each in tensors.items()})


def _names(got: set[str], has_prefix: bool) -> Iterator[tuple[str, str]]:
    """Each name that a file with the K and L of this one has, and ours for it. Heads behind a
    prefix layer have dropout, a module without tensors, in front of every other module.
    """
    step, first, last = (2, 1, ".1") if has_prefix else (1, 0, "")
    depth = count_of(got, r"hydra_\w+\.(\d+)\.")
    layers = count_of(got, r"hydra_mlp\.\d+\.(\d+)\.linear\.")
    for k in range(depth):
        yield f"hydra_lm_head.{k}{last}.weight", f"lm_heads.{k}.weight"
        yield f"hydra_lm_head.{k}{last}.bias", f"biases.{k}"
        for part in ("weight", "bias"):
            yield f"hydra_mlp.{k}.{first}.res_connection.{part}", f"blocks.{k}.residual.{part}"
            for j in range(layers):
                theirs = f"hydra_mlp.{k}.{first + step * j}.linear.{part}"
                yield theirs, f"blocks.{k}.layers.{j}.{part}"
    if has_prefix:
        yield f"{PREFIX}.norm.weight", "prefix.norm.weight"
        for part in LLAMA_LAYER:
            yield f"{PREFIX}.layers.0.{part}.weight", f"prefix.layer.{part}.weight"


def _layer_of(stored: Stored, target: Target | None) -> dict[str, Any]:
    """config.json keys of a layer like the target's own."""
    if target is None:
        name = stored.config.get("base_model_name_or_path", "the target")
        raise stored.refuse(
            "expected the target, whose sizes this head's prefix layer has, got none; load "
            f"{name} and pass it: load_head(..., target=target)"
        )
    rope = getattr(target.config, "rope_parameters", None) or {}
    shape = LayerShape.of(target, {}).config()
    return {**shape, "rope_parameters": rope.get("full_attention", rope)}
