"""GGUF files of the demo target, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from draftheads.heads.target.model import Target

DEMO = Path(__file__).parents[2] / "recipes" / "demo-target"
Q8 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(target: Target, file: Path) -> None:
    """Matrices in Q8_0, rows of queries and keys in llama.cpp's order."""
    config = target.model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(target.tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(target.eos_ids[0])  # transformers 5.17 cannot read a file without
    writer.add_eos_token_id(target.eos_ids[0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in target.model.state_dict().items():
        if name == "lm_head.weight":
            continue  # the embeddings
        new = names.get_name(name, try_suffixes=(".weight",))
        data = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = data.reshape(-1, 2, config.head_dim // 2, data.shape[1])
            data = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(data.shape))
        if data.ndim > 1:
            writer.add_tensor(new, gguf.quantize(data, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(new, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
