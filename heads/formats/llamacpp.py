"""EAGLE-3 and block heads as GGUF files, which llama.cpp loads next to a target's.

llama.cpp compares the tokenizers of both files, so a head's gets a copy of the target's. Matrices
keep their type; all else is float32, as llama.cpp requires.

Sources: src/models/eagle3.cpp, src/models/dflash.cpp and common/speculative.cpp of llama.cpp
b11434; conversion/llama.py and conversion/qwen.py for the order of rows; gguf 0.19.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from draftheads.extras import extras
from draftheads.heads.block import feature_layers
from draftheads.heads.files import renaming
from draftheads.heads.formats.block import DFLASH2, flat, to_engine
from draftheads.heads.formats.eagle import AUX_LAYERS
from draftheads.heads.formats.facts import TargetFacts
from draftheads.heads.formats.stored import Renames, Stored, renamed
from draftheads.heads.layers import Rope
from draftheads.heads.target.placement import location
from draftheads.heads.tensors import matrix

QUANTS = ("q8_0", "q4_0")
"""Quantisations of llama.cpp that a head may have."""
BLOCK = 32
"""Numbers of a row that have one scale in them."""
HOW = "llama.cpp's convert_hf_to_gguf.py makes one of a folder of the target"
REWRITTEN = 0.1
"""Largest share of tokens that llama.cpp's converter may write in another way."""
MASK = "tokenizer.ggml.mask_token_id"
ARCHITECTURES = {"eagle3": "eagle3", "block": "dflash"}
RENAMES: Renames = [
    (r"^t2d$", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^layers\.0\.hidden_norm\.", "blk.0.attn_norm_2."),
    (r"^layers\.", "blk."),
    (r"\.attention_conv\.", ".attn_conv."),
    (r"\.mlp_conv\.", ".ffn_conv."),
    (r"_conv\.base_kernel$", "_conv_base"),
    (r"_conv\.kernel_projection\.", "_conv_proj."),
    (r"^candidate_selector\.(predecessor|successor)_codebook$", r"selector_\1.weight"),
    (r"^candidate_selector\.hidden_projection\.", "selector_hidden."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.([qk])_norm\.", r".attn_\1_norm."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
    (r"^(hidden|input)_norm\.", "enc.output_norm."),
    (r"^norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^markov_head\.markov_", "markov_"),
    (r"^confidence_head\.proj\.", "conf_proj."),
]


@dataclass(frozen=True)
class TargetFile:
    """The GGUF file of a target, which may be quantised."""

    path: Path
    fields: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> TargetFile:
        """Raises ImportError without the gguf package, ValueError for another kind of file."""
        with extras():
            from gguf import GGUFReader
        if not Path(path).is_file():
            raise ValueError(f"--target: expected a GGUF file for --to gguf, got {path}; {HOW}")
        try:
            return cls(Path(path), dict(GGUFReader(path).fields))
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(f"--target: {path} is no whole GGUF file ({error}); {HOW}") from error

    def value(self, key: str) -> Any:
        """The value of a key, or None."""
        return self.fields[key].contents() if key in self.fields else None

    def number(self, key: str) -> int:
        """The value of a key of the architecture, or 0."""
        return int(self.value(f"{self.architecture}.{key}") or 0)

    @property
    def architecture(self) -> str:
        return str(self.value("general.architecture"))

    @property
    def layers(self) -> int:
        return self.number("block_count") - self.number("nextn_predict_layers")

    def check(self, stored: Stored) -> None:
        """Raise ValueError for a head of another target: by sizes, architecture and, where the
        recorded target's tokenizer is on this machine, tokens.
        """
        from gguf import MODEL_ARCH_NAMES

        config = stored.config
        about = stored.facts.target
        tokens = self.value("tokenizer.ggml.tokens") or []
        sizes = (config["hidden_size"], config["vocab_size"], about.layers)
        own_sizes = (self.number("embedding_length"), len(tokens), self.layers)
        # llama.cpp's name of a model class; where none is the same, it may read it as another one
        kind = re.sub(r"For\w+$|LMHeadModel$", "", about.architecture or "").lower()
        known = [name for name in MODEL_ARCH_NAMES.values() if name.replace("-", "") == kind]
        architecture = known[0] if known else self.architecture
        for what, expected, got in (
            ("hidden size, tokens and layers", sizes, own_sizes),
            ("architecture", architecture, self.architecture),
            ("tokens", *_different_tokens(about, tokens)),
        ):
            if got != expected:
                raise ValueError(
                    f"expected a target of {what} {expected} ({about.name}), got {got} in "
                    f"{self.path}; pass the target this head was trained for"
                )


def _different_tokens(about: TargetFacts, tokens: list[str]) -> tuple[list[str], list[str]]:
    """The first tokens of the recorded target, and those of a file in their place, that differ;
    none if nearly all are equal or the target's tokenizer is not on this machine.
    """
    source, file = location(str(about.name), offline=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=about.revision, trust_remote_code=False, **file
        )
    except (OSError, ValueError, KeyError):  # not here, or of a kind that needs other packages
        return [], []
    known = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(tokens)))))
    pairs = [pair for pair in zip(known, tokens, strict=False) if pair[0] != pair[1]]
    if len(pairs) <= REWRITTEN * len(known):
        pairs = []
    return [pair[0] for pair in pairs[:3]], [pair[1] for pair in pairs[:3]]


def server_options(kind: str, eos_ids: Sequence[int]) -> list[str]:
    """Words for the command line of `llama-server`, for heads of this kind on a target with these
    end tokens: a GGUF file has one of each sort, and llama.cpp's converter may write another one.
    """
    words = []
    for sort, token in zip(("eos", "eot", "eom"), eos_ids, strict=False):
        words += ["--override-kv", f"tokenizer.ggml.{sort}_token_id=int:{token}"]
    if kind == "eagle3":  # requests decoded together would get drafts of each other
        words.append("--no-spec-draft-backend-sampling")
    return words


def write_gguf(stored: Stored, target: TargetFile, file: Path, quant: str | None = None) -> None:
    """Write a head of ours for that target, completely or not at all. quant: of QUANTS, for
    matrices whose rows can be divided into its blocks.

    Raises ValueError for a head of another target.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    target.check(stored)
    keys = _keys(stored)
    keys["context_length"] = target.number("context_length")
    if target.architecture.startswith("gemma") and stored.facts.kind == "block":
        keys["embedding_scale"] = math.sqrt(stored.config["hidden_size"])
    architecture = ARCHITECTURES[stored.facts.kind]
    with renaming(file) as part, closing(GGUFWriter(part, architecture)) as writer:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key, value in keys.items():
            add.get(type(value), writer.add_array)(f"{writer.arch}.{key}", value)
        for name, field in target.fields.items():
            if name.startswith("tokenizer.") and name != MASK:
                kind, *inner = field.types
                writer.add_key_value(name, field.contents(), kind, *inner[-1:])
        if "block_size" in keys:
            writer.add_uint32(MASK, flat(stored.config)["mask_token_id"])
        for name, tensor in _tensors(stored).items():
            is_matrix = tensor.is_floating_point() and tensor.ndim == 2
            raw = None
            if is_matrix and quant and tensor.shape[-1] % BLOCK == 0:
                raw = GGMLQuantizationType[quant.upper()]
            elif is_matrix and tensor.dtype == torch.bfloat16:  # numpy has no such type
                raw = GGMLQuantizationType.BF16
            if raw is not None:
                writer.add_tensor(name, quantize(tensor.float().numpy(), raw), raw_dtype=raw)
            else:
                is_small = tensor.is_floating_point() and not is_matrix
                writer.add_tensor(name, (tensor.float() if is_small else tensor).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _keys(stored: Stored) -> dict[str, Any]:
    """The keys that llama.cpp reads of config.json, without the architecture's name in front."""
    config = flat(stored.config)
    rope = Rope.read(config, config["head_dim"])
    keys = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": rope.theta,
        "rope.scaling.attn_factor": float(rope.attention_factor),
    }
    if stored.facts.kind == "eagle3":
        return keys | {
            "target_layers": config[AUX_LAYERS],
            "target_hidden_size": config["hidden_size"],
            "norm_before_residual": config["norm_before_residual"],
            "norm_before_fc": config["norm_before_fc"],
        }
    if config["sliding_window"]:
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = [True] * config["num_hidden_layers"]
    return keys | {
        "target_layers": list(feature_layers(config["target_layer_ids"])),
        "block_size": config["block_size"],
        "sample_from_anchor": config["sample_from_anchor"],
        "has_confidence_head": config["enable_confidence_head"],
        "attention.causal": False,
        **{key: config[key] for key in DFLASH2 if config.get(key)},
    }


def _tensors(stored: Stored) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names and in its order.

    Angles of a scaled RoPE are stored as what llama.cpp divides those without a scaling by.
    """
    config = stored.config
    if stored.facts.kind == "eagle3":
        tensors = renamed(stored.tensors, RENAMES)
        for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            # rows of queries and keys reordered: it rotates neighbours here, Llama halves
            weight_OI = tensors[name]
            half = config["head_dim"] // 2
            heads_H2WI = weight_OI.view(-1, 2, half, weight_OI.shape[1])
            tensors[name] = heads_H2WI.transpose(1, 2).reshape(weight_OI.shape)
    else:
        tensors = renamed(to_engine(stored, None).tensors, RENAMES)
    if "conf_proj.weight" in tensors:  # it reads the Markov head's code, too
        proj, code = (matrix(tensors, f"{name}.weight") for name in ("conf_proj", "markov_w1"))
        unread = proj.new_zeros(1, config["hidden_size"] + code.shape[1] - proj.shape[1])
        tensors["conf_proj.weight"] = torch.cat([proj, unread], dim=1)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    rope = Rope.read(config, config["head_dim"])
    if rope.scaling:
        plain = Rope(config["head_dim"], rope.theta, None).frequencies
        tensors["rope_freqs.weight"] = (plain / rope.frequencies)[: config["head_dim"] // 2]
    return tensors
