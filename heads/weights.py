"""What is done with a target's weights apart from running them: naming, finding and freeing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


def fingerprint(model: PreTrainedModel) -> str:
    """Hex digits that name a model's weights, the same for every dtype and device they are loaded
    in, unless divided over processes; compare them with `same_weights`.

    16 digits are a hash of parameter names and, in bfloat16, of the one-dimensional parameters and
    64 embedding rows: those are never quantised. Behind a dash, 8 are one of the first row of every
    matrix, which also tells apart what an adapter was merged into; they are missing where matrices
    are quantised or not in memory. All of it is read in milliseconds. What was rounded to float16
    is read from the checkpoint's safetensors, as bfloat16 of it differs; where there are none of
    these names, the digits do.
    """
    digest, matrices = hashlib.sha256(), hashlib.sha256()
    unrounded = _Unrounded(model)
    dense = not getattr(model.config, "quantization_config", None)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(name.encode())
        if parameter.ndim == 1:
            module = model.get_submodule(name.rpartition(".")[0])
            with align_module_device(module):  # it may be on disk
                hash_tensor(digest, unrounded(name, model.get_parameter(name), slice(None)))
        elif parameter.is_meta:
            dense = False
        elif dense:
            hash_tensor(matrices, unrounded(name, parameter, (0,) * (parameter.ndim - 1)))
    embeddings = model.get_input_embeddings().weight
    name = next((name for name, each in model.named_parameters() if each is embeddings), "")
    for row in range(0, len(embeddings), max(1, len(embeddings) // 64)):
        hash_tensor(digest, unrounded(name, embeddings, row))
    parts = [digest.hexdigest()[:16], *([matrices.hexdigest()[:8]] if dense else [])]
    return "-".join(parts)


class _Unrounded:
    """Parts of a model's parameters, as its checkpoint has them where the model has their roundings
    to float16.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._files: dict[str, Any] | None = None

    def __call__(self, name: str, parameter: Tensor, part: int | slice | tuple[int, ...]) -> Tensor:
        """parameter[part], which has this name."""
        loaded = parameter.detach()[part]
        if loaded.dtype != torch.float16:
            return loaded
        if self._files is None:
            try:
                self._files = _tensor_files(self.model)
            except (OSError, SafetensorError):  # a model that was made here, or whose files moved
                self._files = {}
        prefix = f"{self.model.base_model_prefix}."
        for known in (name, name.removeprefix(prefix), prefix + name):
            if known in self._files:
                stored = self._files[known].get_slice(known)
                if stored.get_shape() == list(parameter.shape):
                    number: Tensor = stored[part]
                    if torch.equal(number.half(), loaded.cpu()):  # nobody has changed it since
                        return number
        return loaded


def _tensor_files(model: PreTrainedModel) -> dict[str, Any]:
    """Name -> the open safetensors file, of the checkpoint that a model was loaded from."""

    def find(name: str) -> str | None:
        found: str | None = cached_file(
            model.config.name_or_path,
            name,
            revision=getattr(model.config, "_commit_hash", None),
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return found

    index, files = find(SAFE_WEIGHTS_INDEX_NAME), {SAFE_WEIGHTS_NAME}
    if index:
        files = set(json.loads(Path(index).read_bytes())["weight_map"].values())
    opened: list[Any] = [safe_open(path, framework="pt") for path in map(find, files) if path]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def same_weights(known: str | None, now: str | None) -> bool:
    """Whether two fingerprints may be of the same weights: they agree in all that both say."""
    said = zip((known or "").split("-"), (now or "").split("-"), strict=False)
    return all(not a or not b or a == b for a, b in said)


class Released(nn.Module):
    """Stands where weights were that have been freed, and says so to whoever needs them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError(
            f"expected the target's {self.what}, which Target.release has freed; load the target "
            "again, or do not release what is still needed"
        )

    @property
    def weight(self) -> Tensor:
        """Raises RuntimeError."""
        return self.forward()


def release_lm_head(model: PreTrainedModel) -> int:
    """Free the lm_head, unless it is the embeddings; returns the bytes freed on this process."""
    lm_head = model.get_output_embeddings()
    if isinstance(lm_head, Released) or lm_head.weight is model.get_input_embeddings().weight:
        return 0
    model.set_output_embeddings(Released("lm_head"))
    return _size(lm_head)


def release_layers(model: PreTrainedModel) -> int:
    """Free all decoder layers; returns the bytes freed on this process."""
    layers, size = decoder_layers(model), 0
    for number, layer in enumerate(layers):
        size += _size(layer)
        for parameter in layer.parameters():
            if isinstance(parameter, DTensor):  # fully_shard's root keeps references to it
                parameter.to_local().untyped_storage().resize_(0)
        layers[number] = Released("decoder layers")
    return size


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head."""
    found: nn.Module = model.get_decoder()  # takes an lm_head for it that is named decoder
    return model.base_model if found is model.get_output_embeddings() else found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    modules = decoder(model).modules()  # outer ones first
    found = [each for each in modules if isinstance(each, nn.ModuleList) and len(each) == count]
    if not found:
        raise ValueError(
            f"{type(model).__name__}: expected a list of {count} decoder layers, found none; "
            "use target_placement=whole"
        )
    return found[0]


def _size(module: nn.Module) -> int:
    """Bytes of a module's parameters on this process."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's numbers, in bfloat16, to a hash."""
    digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())
