"""Head folders as others write them, known by their config keys and tensor names and turned into
the config and tensors of our own kinds. What is foreign about a layout stands here alone.

Legend: K heads, L layers of each.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftheads.heads.decoder import LayerShape
from draftheads.heads.target import Target

WEIGHT_FILES = ("model.safetensors", "hydra_lm_head.pt")
"""Where a folder's tensors may be; the first is our own."""


@dataclass(frozen=True)
class Stored:
    """What a head folder holds. file: where the tensors were read from."""

    file: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def check_names(self, expected: set[str]) -> None:
        """Raise ValueError, naming them, where tensors are missing or too many."""
        got = set(self.tensors)
        if expected != got:
            raise ValueError(
                f"{self.file}: missing tensors {sorted(expected - got)[:4]}, "
                f"unexpected {sorted(got - expected)[:4]}; the file does not match its own head"
            )

    def check_shapes(self, expected: dict[str, Tensor]) -> None:
        """Raise ValueError for a tensor of another shape."""
        for name, tensor in expected.items():
            wanted, got = tuple(tensor.shape), tuple(self.tensors[name].shape)
            if wanted != got:
                raise ValueError(
                    f"{self.file}: expected {name} of shape {wanted}, got {got}; "
                    "was the head made for another target?"
                )


def read_stored(folder: Path, config: dict[str, Any], target: Target | None) -> Stored:
    """A head folder in our own words, whoever wrote it. target: for layouts that leave sizes to it.

    Raises FileNotFoundError where there are no weights, ValueError for what cannot be read.
    """
    files = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not files:
        raise FileNotFoundError(
            f"{folder}: expected {' or '.join(WEIGHT_FILES)} beside its config, found neither"
        )
    file = files[0]
    tensors = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    stored = Stored(file, config, tensors)
    for knows, translate in FORMATS:
        if knows(stored):
            return translate(stored, target)
    return stored


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A state dict that torch saved; no code in it is run."""
    hint = "it must come from torch.save(head.state_dict(), ...)"
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its many lines advise to run the code in the file
        raise ValueError(
            f"{file}: expected a plain state dict, got a file that holds code, or no pickle; {hint}"
        ) from error
    except (EOFError, OSError, RuntimeError) as error:  # none of them names the file
        reason = str(error).partition(".")[0] or "end of file"
        raise ValueError(
            f"{file}: expected a whole state dict, torch cannot read it ({reason}); if it was cut "
            "short, download it again"
        ) from error
    named = isinstance(tensors, dict) and all(map(torch.is_tensor, tensors.values()))
    if not named:
        got = sorted(map(str, tensors))[:4] if isinstance(tensors, dict) else type(tensors).__name__
        raise ValueError(f"{file}: expected a plain state dict of tensors, got {got}; {hint}")
    return dict(tensors)


# Hydra and Hydra++, arXiv 2402.05109: github.com/zankner/Hydra, hydra/model/hydra_heads

HYDRA_CONFIG = {
    "hydra_head_arch": ("mlp", "prefix-mlp"),
    "grounded_heads": (True,),
    "hidden_state_offset": (0,),
}
"""What we read of its config, and the values that heads of ours can have."""
HYDRA_PREFIX = "prefix_embeding_layer"  # as it is spelled
HYDRA_UNUSED = {
    f"{HYDRA_PREFIX}.embed_tokens.weight",  # the layer is fed with states
    f"{HYDRA_PREFIX}.layers.0.self_attn.rotary_emb.inv_freq",
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
    for key, allowed in HYDRA_CONFIG.items():
        value = stored.config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{stored.file.parent}: expected {key} to be {' or '.join(map(str, allowed))}, got "
                f"{value!r}; such Hydra heads are not read, train one of kind sequential instead"
            )
    tensors = {name: each for name, each in stored.tensors.items() if name not in HYDRA_UNUSED}
    has_prefix = any(name.startswith(HYDRA_PREFIX) for name in tensors)
    ours = dict(_hydra_names(set(tensors), has_prefix))
    Stored(stored.file, stored.config, tensors).check_names(set(ours))
    config = {
        "norm_embeddings": False,
        "prefix_layer": _layer_of(stored, target) if has_prefix else None,
        "draftheads": {
            "kind": "sequential",
            "target": {"name": stored.config.get("base_model_name_or_path", "its target")},
        },
    }
    return Stored(stored.file, config, {ours[name]: each for name, each in tensors.items()})


def _hydra_names(got: set[str], has_prefix: bool) -> Iterator[tuple[str, str]]:
    """Each name that a file with the K and L of this one has, and ours for it. Heads behind a
    prefix layer have dropout, a module without tensors, in front of every other module.
    """
    heads = [match for name in got if (match := re.match(r"hydra_\w+\.(\d+)\.", name))]
    places = [match for name in got if (match := re.match(r"hydra_mlp\.\d+\.(\d+)\.", name))]
    step, first, last = (2, 1, ".1") if has_prefix else (1, 0, "")
    depth = 1 + max((int(match[1]) for match in heads), default=0)
    layers = 1 + (max((int(match[1]) for match in places), default=first) - first) // step
    for k in range(depth):
        yield f"hydra_lm_head.{k}{last}.weight", f"lm_heads.{k}.weight"
        yield f"hydra_lm_head.{k}{last}.bias", f"biases.{k}"
        for part in ("weight", "bias"):
            yield f"hydra_mlp.{k}.{first}.res_connection.{part}", f"blocks.{k}.residual.{part}"
            for j in range(layers):
                theirs = f"hydra_mlp.{k}.{first + step * j}.linear.{part}"
                yield theirs, f"blocks.{k}.layers.{j}.{part}"
    if has_prefix:
        yield f"{HYDRA_PREFIX}.norm.weight", "prefix.norm.weight"
        for part in LLAMA_LAYER:
            yield f"{HYDRA_PREFIX}.layers.0.{part}.weight", f"prefix.layer.{part}.weight"


def _layer_of(stored: Stored, target: Target | None) -> dict[str, Any]:
    """config.json keys of a layer like the target's own."""
    if target is None:
        name = stored.config.get("base_model_name_or_path", "the target")
        raise ValueError(
            f"{stored.file.parent}: expected the target, whose sizes this head's prefix layer has, "
            f"got none; load {name} and pass it: load_head(..., target=target)"
        )
    rope = getattr(target.config, "rope_parameters", None) or {}
    shape = LayerShape.of(target, {}).config()
    return {**shape, "rope_parameters": rope.get("full_attention", rope)}


FORMATS = [(is_hydra, from_hydra)]
"""Every foreign layout: how it is known, and how it is translated."""
