"""What is done with a target's weights apart from running them: naming, finding and freeing."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> str:
    """Hex digits that name a model's weights, the same for every device they are loaded on, and in
    float32 and bfloat16; compare them with `same_weights`.

    16 digits are a hash of parameter names and, in bfloat16, of the one-dimensional parameters and
    64 embedding rows: those are never quantised. After a dash, 8 are one of the first row of every
    matrix, which also tells apart what an adapter was merged into; they are missing where matrices
    are quantised or not in memory. What was rounded to float16 has other numbers: its digits come
    after two dashes, so that they are compared with those of other float16 models alone.
    """
    digest, matrices = hashlib.sha256(), hashlib.sha256()
    dense = not getattr(model.config, "quantization_config", None)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(name.encode())
        if parameter.ndim == 1:
            module = model.get_submodule(name.rpartition(".")[0])
            with align_module_device(module):  # it may be on disk
                hash_tensor(digest, model.get_parameter(name))
        elif parameter.is_meta:
            dense = False
        elif dense:
            hash_tensor(matrices, parameter[(0,) * (parameter.ndim - 1)])
    embeddings = model.get_input_embeddings().weight
    for row in range(0, len(embeddings), max(1, len(embeddings) // 64)):
        hash_tensor(digest, embeddings[row])
    digits = digest.hexdigest()[:16] + (f"-{matrices.hexdigest()[:8]}" if dense else "")
    return f"--{digits}" if embeddings.dtype == torch.float16 else digits


def same_weights(known: str | None, now: str | None) -> bool:
    """Whether two fingerprints may be of the same weights: they agree in all that both say."""
    said = zip((known or "").split("-"), (now or "").split("-"), strict=False)
    return all(not a or not b or a == b for a, b in said)


def hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's numbers, in bfloat16, to a hash."""
    digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head."""
    found: nn.Module = model.get_decoder()  # takes an lm_head for it that is named decoder
    return model.base_model if found is model.get_output_embeddings() else found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder(model).modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__}: expected a list of {count} decoder layers, found none; "
        "use target_placement=whole"
    )


class Released(nn.Module):
    """Takes the place of weights that have been freed; raises RuntimeError when it is used."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError(
            "expected weights of the target that Target.release has freed; load the target again, "
            "or do not release what is still needed"
        )

    weight = property(forward)


def release(model: PreTrainedModel, *, lm_head: bool, layers: bool) -> int:
    """Free the lm_head, unless it is the embeddings, and all decoder layers; returns the bytes
    freed on this process.
    """
    size, head, embeddings = 0, model.get_output_embeddings(), model.get_input_embeddings()
    if lm_head and not isinstance(head, Released) and head.weight is not embeddings.weight:
        size += sum(parameter.nbytes for parameter in head.parameters())
        model.set_output_embeddings(Released())
    stack = decoder_layers(model) if layers else nn.ModuleList()
    for number, layer in enumerate(stack):
        for parameter in layer.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            size += local.nbytes
            if local is not parameter:  # fully_shard's root still refers to it
                local.untyped_storage().resize_(0)
        stack[number] = Released()
    return size
