"""Reads the MTP head in a target's own checkpoint by the names of its tensors.

transformers does not load these tensors with the model. Each family keeps them in another place
(`families`). How a family stores the layer itself (each expert alone, say) follows the model, so
transformers converts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel

from draftheads.heads.mtp.families import FAMILIES, Family
from draftheads.heads.mtp.head import MtpDesign, MtpHead
from draftheads.heads.mtp.layer import empty_model, text_config
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers, name_in
from draftheads.heads.target.skeleton import stored_tensors, tensor_files
from draftheads.heads.tensors import check_finite, differences
from draftheads.heads.vocabulary import token_map

NATIVE = "target"
"""Its name in a recipe's head.from."""
BLOCK = "mtp_block."


class NoLayer(ValueError):
    """Raised for a checkpoint without an MTP layer."""


def native_head(target: Target, tokens: int | None = None) -> MtpHead:
    """The target's own MTP layer as a head, on its device and in its dtype. tokens: draft only the
    first so many ids and the end tokens; byte-pair vocabularies begin with frequent tokens. None:
    draft all.

    Raises ValueError for a checkpoint without such a layer, with several, with only a part of one,
    or with one that is quantised or has an lm_head or embeddings of its own.
    """
    files = tensor_files(str(target.name), target.revision)
    _, aliases = aliases_in(files, target)
    tensors = stored_tensors(str(target.name), target.revision, files, aliases)
    check_finite(str(target.name), tensors.items())
    shared = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    for name in shared.keys() & tensors.keys():  # copies of the target's own tensors
        theirs, own = tensors.pop(name), shared[name]
        rows = slice(None, None, max(1, len(theirs) // 64))
        dtype = own.dtype
        if theirs.shape != own.shape or not torch.equal(theirs[rows].to(dtype), own[rows].cpu()):
            raise ValueError(
                f"target {target.name}: expected an MTP layer that shares the model's {name}, got "
                "one with its own, which is not supported; leave head.from out"
            )
    head = _empty(target, tensors)
    head.load_state_dict(_converted(target, head, tensors))
    if tokens is not None:
        first = range(min(tokens, target.vocab_size))
        head.limit_to(token_map(sorted({*first, *target.eos_ids}), target.vocab_size))
    head.to(target.device, target.dtype).eval()
    head.check_layer(target)
    return head


def native_shape(target: Target) -> MtpHead:
    """The same head on the meta device. Raises the ValueErrors of `native_head` that names and
    shapes show.
    """
    files = tensor_files(str(target.name), target.revision)
    _, aliases = aliases_in(files, target)
    return shape_in(target, aliases)


def shape_in(target: Target, names: Iterable[str]) -> MtpHead:
    """A head on the meta device for tensors of these names, which are ours."""
    with torch.device("meta"):
        return _empty(target, names)


def aliases_in(files: Iterable[str], target: Target) -> tuple[Family, dict[str, str]]:
    """The family of a checkpoint, and its name for each of our tensors. Raises `NoLayer` where
    there is no MTP layer, ValueError for several.
    """
    kind = target.config.model_type
    for family in sorted(FAMILIES, key=lambda each: kind not in each.types):
        found = [(name, family.ours(name, target.layers)) for name in files]
        layers = {ours[0] for _, ours in found if ours is not None}
        if len(layers) > 1:
            raise ValueError(
                f"target {target.name}: expected one MTP layer, got {len(layers)}; several layers "
                "of their own are not supported: leave head.from out, which trains a new one"
            )
        if layers:
            return family, {ours[1]: name for name, ours in found if ours is not None}
    raise NoLayer(
        f"target {target.name}: expected an MTP layer in its checkpoint, found none of the layouts "
        "of DeepSeek, Qwen and transformers; train a new one: head.kind=mtp without "
        "head.from"
    )


def _empty(target: Target, names: Iterable[str]) -> MtpHead:
    states_first = getattr(target.config, "mtp_hidden_states_first", False)
    design = MtpDesign.of(target)
    return MtpHead(replace(design, states_first=states_first, bias="eh_proj.bias" in names))


def _converted(target: Target, head: MtpHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the layout of the head. Raises ValueError for missing, unexpected and
    misshapen ones.
    """
    model, prefix, inner, result = in_model(head, tensors)
    options = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model),
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )
    info, _ = convert_and_load_state_dict_in_model(
        model=model, state_dict=inner, load_config=options
    )
    mismatched = [name for name, *_ in info.mismatched_keys]
    unexpected = sorted({*info.unexpected_keys, *mismatched, *info.conversion_errors})
    block = model.get_submodule(prefix).state_dict()
    result |= {BLOCK + name: tensor for name, tensor in block.items() if not tensor.is_meta}
    faults = differences(head.state_dict(), result)
    faults += [f"{name} is unexpected" for name in unexpected]
    if faults:
        raise ValueError(
            f"target {target.name}: expected a whole MTP layer in its checkpoint, but "
            f"{'; '.join(faults[:3])}; download it again, or leave head.from out"
        )
    return result


def in_model(
    head: MtpHead, tensors: dict[str, Tensor]
) -> tuple[PreTrainedModel, str, dict[str, Tensor], dict[str, Tensor]]:
    """An empty model that contains the head's layer, the layer's name in it, the head's tensors
    under their names in it, and the remaining tensors. transformers converts only the tensors of
    whole models.
    """
    origin = head.design.origin
    model = empty_model(text_config(origin.config))
    prefix = name_in(model, decoder_layers(model)[origin.number])
    inner, others = {}, {}
    for name, tensor in tensors.items():
        if name.startswith(BLOCK):
            inner[f"{prefix}.{name.removeprefix(BLOCK)}"] = tensor
        else:
            others[name] = tensor
    return model, prefix, inner, others
