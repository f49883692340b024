"""A target by name: its model, its tokenizer and what is known of them; its layout for a CPU."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftheads.heads.cpu.linear import PackedBits, can_pack, input_sizes, pack_layers
from draftheads.heads.target import onnx_decoder
from draftheads.heads.target.lora import Lora
from draftheads.heads.target.placement import (
    Loading,
    LoadOptions,
    is_gguf,
    load_model,
    quantisation,
    quantised_by,
    read_config,
    read_tokenizer,
)
from draftheads.heads.target.pretrained import decoder_layers, describe
from draftheads.heads.target.skeleton import load_skeleton
from draftheads.heads.tensors import dtype_name
from draftheads.heads.terminal import said_if_long

logger = logging.getLogger("draftheads")

Engine = Literal["onnx", "torch"]
"""What runs the layers of a target in int8."""
TEMPLATE_OPTIONS = {"tools", "documents", "chat_template"}
"""Parameters of `apply_chat_template` that may be given as variables of the template."""


def load(
    path: str, lora: str | Path | None, options: LoadOptions
) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """Model, tokenizer and what else `Target` takes of a checkpoint; see `Target.load`."""
    options["dtype"] = dtype_name(options.get("dtype") or "auto")
    how = Loading(**options, lora=Lora.open(lora) if lora else None)
    fingerprint = None
    with said_if_long(f"loading {path}", logger.warning):
        if how.placement == "skeleton" and how.lora is None:
            model = load_skeleton(path, how)
        else:
            model, fingerprint = load_model(path, how)
    saved = read_config(path, how.revision).get_text_config(decoder=True).dtype
    tokenizer = _tokenizer(path, how)
    facts = {
        "name": path,
        "revision": how.revision or getattr(model.config, "_commit_hash", None),
        "fingerprint": fingerprint,
        "lora": how.lora.name if how.lora else None,
        "saved_dtype": dtype_name(saved or torch.float32),
    }
    return model, tokenizer, facts


def _tokenizer(path: str, how: Loading) -> Any:
    """The tokenizer of a target, or of its LoRA if that brings one; None without any."""
    revision = how.revision
    if how.lora and any(how.lora.folder.glob("tokenizer*")):
        path = str(how.lora.folder)
        revision = None
    local = Path(os.path.expanduser(path))
    if local.is_dir() and not any(local.glob("tokenizer*")) and not any(local.glob("vocab*")):
        return None
    return read_tokenizer(path, revision)


def template_variables(given: Any) -> dict[str, Any]:
    """The same, as `Target.template_args`. Raises ValueError unless these are variables of a chat
    template, by name, without those that rendering sets itself.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"expected a JSON object, got {given!r:.80}; write it as in "
            '{"enable_thinking": false}'
        )
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    taken = sorted(given.keys() & {"messages", *own} - TEMPLATE_OPTIONS)
    if taken:
        raise ValueError(
            f"expected variables of the chat template, got {', '.join(taken)}, which is always "
            "set; leave it out"
        )
    return {**given}


NATIVE_WIDTH = 512
"""Hidden size below which bfloat16 saves a CPU no time."""


def answering_dtype(path: str, revision: str | None) -> str:
    """The dtype for a target on a CPU that learns or writes data. By rule, not by a measurement, as
    results must not depend on timing: bfloat16 where oneDNN multiplies it and it rounds nothing
    that was trained, else float32.
    """
    config = read_config(path, revision)
    text = config.get_text_config(decoder=True)
    is_half = is_gguf(path) or text.dtype == torch.bfloat16
    can = can_pack(torch.device("cpu"), torch.bfloat16) and text.hidden_size >= NATIVE_WIDTH
    return "bfloat16" if can and is_half and not quantised_by(config) else "float32"


def can_pack_model(model: PreTrainedModel, name: str, bits: PackedBits | None) -> bool:
    """True if `pack_model` has a layout for the weights of target `name`. Raises ValueError as
    `Target.pack` does.
    """
    is_quantised = quantised_by(model.config) not in (None, "gguf")  # that is dequantised
    if bits and is_quantised:
        raise ValueError(
            f"{name}: bits=8: expected weights as they were trained, got "
            f"{quantisation(model.config, name)}; leave bits out"
        )
    if bits:
        layers = decoder_layers(model)
        linear = [each.weight.numel() for each in layers.modules() if type(each) is nn.Linear]
        if 2 * sum(linear) < sum(parameter.numel() for parameter in layers.parameters()):
            raise ValueError(
                f"{describe(model)}: bits=8: expected linear layers, got others (such as experts) "
                "for most weights; leave bits out"
            )
    return not is_quantised and (bits is not None or can_pack(model.device, model.dtype))


SAMPLE = """In spring the river rises, and the farmers move their sheep to the hills. What does a \
good answer look like? It says what was asked, gives a reason, and stops. def add(a, b): return a \
+ b. For example, 3 * 7 = 21 and 21 / 7 = 3. Dear Ms Lee, thank you for your letter of 4 May. 1. \
Wash the rice. 2. Boil the water. 3. Wait. {"name": "Ann", "age": 42}"""
"""A text of many kinds, about a hundred tokens: how large inputs are differs little by text."""


def pack_model(
    model: PreTrainedModel, tokenizer: Any, bits: PackedBits | None, engine: Engine | None
) -> None:
    """Pack the linear layers of a model; with bits=8 all of them, after it has read SAMPLE, and the
    rest becomes float32. Raises ValueError for layers that cannot run in `engine`.
    """
    head = model.get_output_embeddings()
    if bits:
        ids = tokenizer(SAMPLE)["input_ids"] if tokenizer else range(len(head.weight))
        tokens_1T = torch.tensor([[*ids[:128]]])
        with torch.no_grad():  # in its own dtype: all of it in float32 may not fit
            sizes = input_sizes(lambda: model(tokens_1T, use_cache=False), model)
            if engine != "torch" and onnx_decoder.decoder_of(model) is None:
                _try_onnx(model, tokens_1T, sizes, is_chosen=engine is not None)
        pack_layers(model, bits, small=True, keep={head}, sizes=sizes)
        nn.Module.float(model)  # not transformers' own, which refuses what was a GGUF file
    else:
        pack_layers(model, None, keep={head})
    for parameter in model.parameters():  # views of a file would keep all of it in memory
        parameter.data = parameter.data.clone()


def _try_onnx(
    model: PreTrainedModel, tokens_1T: Tensor, sizes: Mapping[nn.Module, Tensor], is_chosen: bool
) -> None:
    """Run the layers in ONNX Runtime if that is possible; if not, say why, or, if it was chosen,
    raise ValueError.
    """
    fault = onnx_decoder.why_not(model) or onnx_decoder.run_layers(model, tokens_1T, sizes)
    if fault and is_chosen:
        raise ValueError(f"engine=onnx: {fault}; leave the engine out, or use torch")
    if fault:
        logger.warning("int8 layers run in torch, not in ONNX Runtime: %s", fault)
