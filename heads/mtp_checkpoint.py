"""The MTP head that a target's own checkpoint contains, read by name.

transformers does not load these tensors with the model. Where a family keeps them is a list here;
how it keeps the layer itself (each expert alone, say) is the model's, so transformers converts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel

from draftheads.heads.mtp import MtpDesign, MtpHead
from draftheads.heads.pretrained import decoder_layers
from draftheads.heads.skeleton import checkpoint_file, tensor_files
from draftheads.heads.target import Target
from draftheads.heads.target_layer import LayerOrigin, empty_model, text_config
from draftheads.heads.tensors import check_finite

NATIVE = "target"
"""What a recipe's head.from names it."""
BLOCK = "mtp_block."


@dataclass(frozen=True)
class Family:
    """Where checkpoints keep MTP layers. Names begin with those of the decoder, unless `is_beside`.

    layer: prefix of a layer's tensors, with {n} for its number. inside, outside: our names of parts
    -> the checkpoint's, in a layer and beside the only one. block: prefix of the decoder layer's
    own tensors, in the layer. models: their types, to whose checkpoints a layer can be added.
    """

    layer: str
    inside: dict[str, str]
    outside: dict[str, str] = field(default_factory=dict)
    block: str = ""
    models: tuple[str, ...] = ()
    states_first: bool = False
    follows: bool = False  # numbers continue those of the model's layers
    is_beside: bool = False

    @property
    def has_norm(self) -> bool:
        """Whether a norm follows the layer."""
        return "post_norm" in {**self.inside, **self.outside}

    def ours(self, name: str, first: int) -> tuple[int, str] | None:
        """The number of the layer that a tensor belongs to, from 0, and our name for it."""
        name = re.sub(f"^{DECODER}", "", name)
        pattern = re.escape(self.layer).replace(r"\{n\}", r"(\d+)")
        match = re.match(pattern, name)
        parts, number = self.outside, 0
        if match is not None:
            parts, number = self.inside, int(match[1]) - (first if self.follows else 0)
            name = name[match.end() :]
        part, _, kind = name.rpartition(".")
        for own, theirs in parts.items():
            if part == theirs and number >= 0:
                return number, f"{own}.{kind}"
        if match is None or number < 0 or not name.startswith(self.block):
            return None
        return number, BLOCK + name.removeprefix(self.block)

    def theirs(self, name: str, first: int, base: str) -> str:
        """The name in a checkpoint, of the only layer, for a name of ours. base: of its decoder."""
        base = "" if self.is_beside else base
        layer = base + self.layer.format(n=first if self.follows else 0)
        part, _, kind = name.rpartition(".")
        if part in self.outside:
            return f"{base}{self.outside[part]}.{kind}"
        if part in self.inside:
            return f"{layer}{self.inside[part]}.{kind}"
        return f"{layer}{self.block}{name.removeprefix(BLOCK)}"


DECODER = r"(?:model\.)?(?:language_model\.)?"
"""What names begin with."""
PLAIN = {name: name for name in ("enorm", "hnorm", "eh_proj")}
SHARED = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}
"""Copies of the target's own."""

FAMILIES = [
    # transformers' MtpModel
    Family(
        "mtp.layers.{n}.",
        {**PLAIN, "post_norm": "post_norm"},
        block=BLOCK,
        is_beside=True,
    ),
    # Qwen3-Next, Qwen3.5, EXAONE, Mellum
    Family(
        "mtp.layers.{n}.",
        {},
        {
            "eh_proj": "mtp.fc",
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "post_norm": "mtp.norm",
        },
        models=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        is_beside=True,
    ),
    # DeepSeek, GLM, Step
    Family(
        "layers.{n}.",
        {**PLAIN, "post_norm": "shared_head.norm", **SHARED},
        models=("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
        follows=True,
    ),
    # MiMo
    Family(
        "mtp_layers.{n}.",
        {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "post_norm": "final_layernorm",
        },
        states_first=True,
    ),
    # Ernie 4.5
    Family(
        "mtp_block.{n}.",
        {},
        {
            "enorm": "mtp_emb_norm.0",
            "hnorm": "mtp_hidden_norm.0",
            "eh_proj": "mtp_linear_proj.0",
        },
        models=("ernie4_5_moe",),
    ),
]


def native_head(target: Target) -> MtpHead:
    """The target's own MTP layer as a head, on its device and in its dtype.

    Raises ValueError for a checkpoint without such a layer, with several, with a part of one, or
    with one that is quantised or has an lm_head or embeddings of its own.
    """
    files = tensor_files(str(target.name), target.revision)
    family, places = _places(files, target)
    tensors = _read(target, files, places)
    check_finite(str(target.name), tensors.items())
    _check_shared(target, tensors)
    head = _empty(target, family, tensors)
    head.load_state_dict(_converted(target, head, tensors))
    head.to(target.device, target.dtype).eval()
    head.check_layer(target)
    return head


def native_shape(target: Target) -> MtpHead:
    """The same on the meta device. Raises ValueError as far as names and shapes show."""
    files = tensor_files(str(target.name), target.revision)
    family, places = _places(files, target)
    with torch.device("meta"):
        return _empty(target, family, dict.fromkeys(places, torch.empty(0)))


def _places(files: Iterable[str], target: Target) -> tuple[Family, dict[str, str]]:
    """The family of a checkpoint, and its name for each of our tensors."""
    family, layers = layers_in(files, target)
    if family is None:
        raise ValueError(
            f"target {target.name}: expected an MTP layer in its checkpoint, found none of the "
            "layouts of DeepSeek, Qwen, MiMo, Ernie and transformers; train a new one: "
            "head.kind=mtp without head.from"
        )
    if len(layers) > 1:
        raise ValueError(
            f"target {target.name}: expected one MTP layer, got {len(layers)}, each for one depth, "
            "which is not supported; train a new one that serves all depths: head.kind=mtp without "
            "head.from"
        )
    return family, layers.popitem()[1]


def layers_in(
    files: Iterable[str], target: Target
) -> tuple[Family | None, dict[int, dict[str, str]]]:
    """The family of a checkpoint, and by number, for each MTP layer, our names -> the checkpoint's;
    None and nothing where it has none.
    """
    for family in FAMILIES:
        layers: dict[int, dict[str, str]] = {}
        for name in files:
            if place := family.ours(name, target.layers):
                layers.setdefault(place[0], {})[place[1]] = name
        if layers:
            return family, layers
    return None, {}


def _read(target: Target, files: dict[str, str], places: dict[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name, theirs in places.items():
        by_file.setdefault(files[theirs], []).append(name)
    for file, names in by_file.items():
        place = checkpoint_file(str(target.name), file, target.revision)
        if place is None:
            raise ValueError(
                f"target {target.name}: expected {file}, which has its MTP layer, found none; "
                "download it again"
            )
        with safe_open(place, framework="pt") as stored:
            for name in names:
                tensors[name] = stored.get_tensor(places[name])
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2 or "weight_scale" in name:
            raise ValueError(
                f"target {target.name}: expected its MTP layer in floating point of 16 or 32 bits, "
                f"got {places[name]} quantised; use a checkpoint that does not quantise it"
            )
    return tensors


def _check_shared(target: Target, tensors: dict[str, Tensor]) -> None:
    """Remove the copies of the target's embeddings and lm_head; refuse others."""
    shared = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.lm_head_weight(),
    }
    for name in shared.keys() & tensors.keys():
        theirs, own = tensors.pop(name), shared[name]
        rows = slice(None, None, max(1, len(theirs) // 64))
        dtype = own.dtype
        if theirs.shape != own.shape or not torch.equal(theirs[rows].to(dtype), own[rows].cpu()):
            raise ValueError(
                f"target {target.name}: expected an MTP layer that shares the model's {name}, got "
                "one with its own, which is not supported; leave head.from out"
            )


def _empty(target: Target, family: Family, tensors: dict[str, Tensor]) -> MtpHead:
    sparse = any(name.startswith(BLOCK) and ".experts." in name for name in tensors)
    design = MtpDesign.of(target, LayerOrigin.of(target.model.config, sparse))
    states_first = getattr(target.config, "mtp_hidden_states_first", family.states_first)
    return MtpHead(
        replace(
            design,
            states_first=states_first,
            norm_output="post_norm.weight" in tensors,
            bias="eh_proj.bias" in tensors,
        )
    )


def _converted(target: Target, head: MtpHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the head has them. Raises ValueError for missing, unexpected and misshapen
    ones.
    """
    model, layer, prefix = _model_of(head.design)
    result, inner = _divided(tensors, prefix)
    unexpected = _convert(model, inner)
    block = layer.state_dict()
    result |= {BLOCK + name: tensor for name, tensor in block.items() if not tensor.is_meta}
    wanted = head.state_dict()
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - result.keys())]
    faults += [f"{name} is unexpected" for name in sorted(result.keys() - wanted.keys())]
    faults += [f"{name} is unexpected" for name in unexpected]
    for name in sorted(wanted.keys() & result.keys()):
        expected, got = tuple(wanted[name].shape), tuple(result[name].shape)
        if expected != got:
            faults.append(f"{name} has shape {got}, not {expected}")
    if faults:
        raise ValueError(
            f"target {target.name}: expected a whole MTP layer in its checkpoint, but "
            f"{'; '.join(faults[:3])}; download it again, or leave head.from out"
        )
    return result


def as_stored(design: MtpDesign, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors as its family's checkpoints divide them, still by names of ours."""
    model, _, prefix = _model_of(design)
    result, inner = _divided(tensors, prefix)
    for name, tensor in revert_weight_conversion(model, inner).items():
        # experts are views of one tensor, which safetensors does not save
        result[BLOCK + name.removeprefix(prefix)] = tensor.clone().contiguous()
    return result


def _divided(
    tensors: dict[str, Tensor], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A head's tensors around its decoder layer, and those of the layer under the model's names."""
    outer, inner = {}, {}
    for name, tensor in tensors.items():
        if name.startswith(BLOCK):
            inner[prefix + name.removeprefix(BLOCK)] = tensor
        else:
            outer[name] = tensor
    return outer, inner


def _model_of(design: MtpDesign) -> tuple[PreTrainedModel, nn.Module, str]:
    """The empty model that a layer is like, that layer in it, and the prefix of its tensors."""
    model = empty_model(text_config(design.origin.config))
    layer = decoder_layers(model)[design.origin.number]
    place = next(name for name, module in model.named_modules() if module is layer)
    return model, layer, f"{place}."


def _convert(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[str]:
    """Load tensors of a checkpoint into an empty model; returns the names that it does not have."""
    options = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model),
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )
    info, _ = convert_and_load_state_dict_in_model(
        model=model, state_dict=tensors, load_config=options
    )
    mismatched = [name for name, *_ in info.mismatched_keys]
    return sorted({*info.unexpected_keys, *mismatched, *info.conversion_errors})
