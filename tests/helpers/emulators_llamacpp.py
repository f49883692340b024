"""What llama.cpp makes of the GGUF file of a head, restated from the facts of its loader: the
tensors that it looks for, their shapes, and what it believes. Names in a Served are ours.

Source: src/models/eagle3.cpp and dflash.cpp, common/speculative.cpp of llama.cpp b11434.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from emulators import EngineError, Served, Shapes, under
from emulators_block import PlainBlock, dflash2_shapes
from emulators_eagle import llama_layer
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from torch import Tensor

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
BARE = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}
SELECTOR = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
"""Names without an ending on one side."""
WHOLE = {
    "output_norm": "norm",
    "output": "lm_head",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
INTEGERS = (GGMLQuantizationType.I64,)


def llamacpp(file: Path) -> Served:
    """A head's file, as it is loaded next to a target's."""
    read = GGUFReader(file)
    keys = {name: field.contents() for name, field in read.fields.items()}
    arch = keys["general.architecture"]
    own = {name.removeprefix(f"{arch}."): value for name, value in keys.items()}
    tensors = {each.name: _tensor(each) for each in read.tensors}
    vocab, width = len(keys["tokenizer.ggml.tokens"]), own["embedding_length"]
    config = {
        "hidden_size": width,
        "intermediate_size": own["feed_forward_length"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["attention.key_length"],
    }
    ids = tensors.pop("d2t", None)
    draft, count = vocab if ids is None else len(ids), len(own["target_layers"])
    norms = ["hidden_norm"] if arch == "eagle3" else ["self_attn.q_norm", "self_attn.k_norm"]
    layer = llama_layer(config, 2 * width if arch == "eagle3" else width)
    layer["input_layernorm.weight"] = (width,)
    layer |= {f"{each}.weight": (config["head_dim"],) for each in norms}
    layer |= {"hidden_norm.weight": (width,)} if arch == "eagle3" else {}
    shapes: Shapes = {"fc.weight": (width, count * width), "norm.weight": (width,)}
    for number in range(own["block_count"]):
        shapes |= under(f"layers.{number}", layer)
    if arch == "eagle3":
        if count != 3 or own["block_count"] != 1:
            raise EngineError("eagle3 has three extract layers, and one layer")
        encoder = "input_norm" if own["norm_before_fc"] else ""
        wide = count * width
    else:
        encoder, wide = "hidden_norm", width
        shapes |= _markov(tensors, vocab, draft, width)
        if "selector_hidden.weight" in tensors:
            sizes = {"vocab_size": vocab, "num_hidden_layers": own["block_count"]}
            shapes |= dflash2_shapes({**config, **sizes}, own)
            if width < own["selector_top_k"] * (own["selector_top_k"] + 1):
                raise EngineError("hidden size is too small for the selector lattice")
    if encoder:
        shapes[f"{encoder}.weight"] = (wide,)
    if "output.weight" in tensors:  # else the target's
        shapes["lm_head.weight"] = (draft, width)
    served = Served(shapes, facts=_facts(own, keys, ids))
    served.facts["factors"] = tensors.pop("rope_freqs.weight", torch.ones(config["head_dim"] // 2))
    for name, tensor in tensors.items():
        ours = _name(name, encoder)
        if ours not in shapes:
            served.dropped.add(name)
        elif tensor.ndim != 2 and tensor.dtype != torch.float32:
            raise EngineError(f"{name}: a norm or a kernel is float32")
        else:
            served.put(ours, tensor)
    return served


def _tensor(stored: Any) -> Tensor:
    if stored.tensor_type in INTEGERS:
        return torch.tensor(stored.data)
    return torch.tensor(dequantize(stored.data, stored.tensor_type))


def _name(name: str, encoder: str) -> str:
    if name in SELECTOR:
        return SELECTOR[name]
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", name):
        return f"layers.{found[1]}.{BARE.get(found[2], '?')}"
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"layers.{found[1]}.{LAYER.get(found[2], '?')}.weight"
    stem, _, end = name.rpartition(".")
    return f"{({'enc.output_norm': encoder} | WHOLE).get(stem, stem)}.{end}"


def _markov(tensors: dict[str, Tensor], vocab: int, draft: int, width: int) -> Shapes:
    if "markov_w1.weight" not in tensors:
        return {}
    rank = tensors["markov_w1.weight"].shape[1]
    shapes: Shapes = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (draft, rank)}
    shapes = under("markov_head", shapes)
    if "conf_proj.weight" in tensors:
        shapes |= under("confidence_head.proj", {"weight": (1, width + rank), "bias": (1,)})
    return shapes


def _facts(own: dict[str, Any], keys: dict[str, Any], ids: Tensor | None) -> dict[str, Any]:
    switches = ("norm_before_residual", "norm_before_fc")
    return {
        "aux": own["target_layers"],
        "ids": None if ids is None else ids.tolist(),
        "rope": (own["rope.freq_base"], None),
        "attention_factor": own["rope.scaling.attn_factor"],
        "eps": own["attention.layer_norm_rms_epsilon"],
        "heads": (own["attention.key_length"], own["attention.head_count_kv"]),
        "switches": {name: own.get(name) for name in switches},
        "window": own.get("attention.sliding_window"),
        "causal": own.get("attention.causal"),
        "anchored": own.get("sample_from_anchor", True),
        "slots": own.get("block_size", 16),
        "mask": keys.get("tokenizer.ggml.mask_token_id"),
        "candidates": own.get("selector_top_k"),
        "scale": own.get("embedding_scale"),
    }


class LlamacppBlock(PlainBlock):
    """Its chain; angles are divided by what the file says."""

    def frequency(self, pair: int) -> float:
        theta, width = self.facts["rope"][0], self.facts["heads"][0]
        return float(theta ** (-2 * pair / width) / self.facts["factors"][pair])
