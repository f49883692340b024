"""The promise: a head folder has the tensors and config keys that the field's engines read.

Source: eagle.md, sections 4.1 and 4.6 to 4.9.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import make_head
from tiny_targets import VOCABULARY, tiny_target

from draftheads.heads.formats import table
from draftheads.heads.formats.hub import HEADS, load_head, save_head
from draftheads.heads.formats.stored import Stored
from draftheads.heads.tree import DynamicTree

ATTENTION = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
MLP = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
LAYER = ATTENTION | MLP | {"input_layernorm.weight", "post_attention_layernorm.weight"}
FIRST = LAYER | {"hidden_norm.weight"}
EAGLE3 = {"fc.weight", "norm.weight", "lm_head.weight"}
FEW = [5, 3, 11, 0]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def under(prefix: str, names: set[str]) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


def saved(folder: Path, kind: str, **choices: Any) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and config of a head on the tiny Llama (width 32, 3 layers, 4 heads, 2 of them for
    keys).
    """
    target = tiny_target()
    save_head(make_head(HEADS[kind], target, **choices), folder, target=target)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


NAMES = {
    "medusa": (
        "medusa",
        {"depth": 3, "layers": 2},
        {f"lm_heads.{k}.weight" for k in range(3)}
        | {
            f"blocks.{k}.layers.{j}.{part}"
            for k in range(3)
            for j in range(2)
            for part in ("weight", "bias")
        },
    ),
    "eagle3": ("eagle3", {}, EAGLE3 | under("midlayer", FIRST)),
    "eagle3-draft-vocabulary": (
        "eagle3",
        {"vocabulary": FEW},
        EAGLE3 | {"d2t", "t2d"} | under("midlayer", FIRST),
    ),
    "eagle3-fc-norm": (
        "eagle3",
        {"fc_norm": True, "feature_layers": [0, 1, 2]},
        EAGLE3 | under("midlayer", FIRST) | {f"fc_norm.{i}.weight" for i in range(3)},
    ),
    "eagle3-qk-norm": (
        "eagle3",
        {"qk_norm": True},
        EAGLE3 | under("midlayer", FIRST | {f"self_attn.{each}_norm.weight" for each in "qk"}),
    ),
    "eagle3-norm-before-fc": (
        "eagle3",
        {"norm_before_fc": True},
        EAGLE3 | under("midlayer", FIRST) | {"input_norm.weight"},
    ),
    "eagle3-two-layers": (
        "eagle3",
        {"layers": 2},
        EAGLE3 | under("layers.0", FIRST) | under("layers.1", LAYER),
    ),
    "eagle": (
        "eagle",
        {},
        {"fc.weight", "fc.bias"} | under("layers.0", LAYER - {"input_layernorm.weight"}),
    ),
    "eagle-two-layers": (
        "eagle",
        {"layers": 2},
        {"fc.weight", "fc.bias"}
        | under("layers.0", LAYER - {"input_layernorm.weight"})
        | under("layers.1", LAYER),
    ),
}

for conditioning, own in {
    "recurrent": {"down.{k}.weight", "down.{k}.bias", "up.{k}.weight", "carry.0.weight"},
    "hydra": {"blocks.{k}.residual.weight", "blocks.{k}.residual.bias", "biases.{k}"},
}.items():
    heads = {name.format(k=k) for name in own for k in range(2)}
    heads |= {f"blocks.{k}.layers.0.{part}" for k in range(2) for part in ("weight", "bias")}
    NAMES[f"sequential-{conditioning}"] = (
        "sequential",
        {"conditioning": conditioning, "depth": 2, "prefix": True},
        heads
        | {f"lm_heads.{k}.weight" for k in range(2)}
        | under("prefix.layer", LAYER)
        | {"prefix.norm.weight"},
    )


@pytest.mark.parametrize(("kind", "choices", "names"), NAMES.values(), ids=NAMES)
def test_tensor_names_are_those_of_the_field(tmp_path, kind, choices, names):
    tensors, _ = saved(tmp_path / "head", kind, **choices)
    assert set(tensors) == names


def test_the_draft_vocabulary_is_stored_as_offsets_and_a_mask(tmp_path):
    tensors, config = saved(tmp_path / "head", "eagle3", vocabulary=FEW)
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(4)).tolist() == sorted(FEW)
    assert tensors["t2d"].dtype == torch.bool and len(tensors["t2d"]) == VOCABULARY
    assert tensors["t2d"].nonzero()[:, 0].tolist() == sorted(FEW)
    assert tensors["lm_head.weight"].shape == (4, 32)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCABULARY, 4)


EAGLE_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3,
    "sliding_window": 7,
    "dtype": "float32",
}


OF_EAGLE = {
    "head_dim": 16, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "sliding_window": 7
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": (  # as in vLLM
        {"depth": 3, "layers": 2},
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": 3,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "vocab_size": VOCABULARY,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        },
    ),
    "eagle3": (  # engines differ in defaults of switches and RoPE, and in how they count layers
        {**OF_EAGLE, "feature_layers": [1, 2, 3], "norm_output": True},
        {
            **EAGLE_CONFIG,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "draft_vocab_size": VOCABULARY,
            "target_hidden_size": 32,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": True,
            "num_aux_hidden_states": 3,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # hidden states, 0 = embeddings
            "eagle_config": {  # outputs of layers
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            },
        },
    ),
    "eagle": (  # as in SGLang
        {**OF_EAGLE, "layers": 2},
        {
            **EAGLE_CONFIG,
            "architectures": ["LlamaForCausalLMEagle"],
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_says_what_engines_read_and_leaves_nothing_to_defaults(tmp_path, kind):
    choices, expected = CONFIGS[kind]
    _, config = saved(tmp_path / "head", kind, **choices)
    assert {key: config[key] for key in expected} == expected
    assert "bias" not in config, "vLLM and SGLang would make biases in the attention"


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_dynamic_tree_stands_in_the_config(tmp_path, kind):
    _, config = saved(tmp_path / "head", kind, nodes=12, depth=3, top_k=4)
    assert config["draftheads"]["tree"] == {"draft_nodes": 12, "depth": 3, "top_k": 4}
    assert load_head(tmp_path / "head").tree == DynamicTree(12, 3, 4)


LIES = {
    "medusa": ({"depth": 3, "layers": 2}, {"num_heads": 7, "num_hidden_layers": 1}),
    "sequential": (
        {"depth": 3, "conditioning": "recurrent", "rank": 5},
        {"num_heads": 7, "conditioning": "hydra", "vocab_size": 5},
    ),
    "eagle3": ({"layers": 2, "vocabulary": FEW}, {"num_hidden_layers": 5, "draft_vocab_size": 9}),
    "eagle": ({"layers": 2}, {"num_hidden_layers": 1}),
    "block": (
        {"layers": 1, "rank": 5, "conditioning": "markov", "vocabulary": list(range(9))},
        {"num_hidden_layers": 5, "markov_rank": 9, "markov_head_type": "rnn"},
    ),
    "mtp": ({}, {"hidden_size": 7}),
}


@pytest.mark.parametrize(("kind", "choices", "lies"), [(k, *LIES[k]) for k in HEADS], ids=HEADS)
def test_shape_comes_from_the_tensors_not_from_a_lying_config(tmp_path, kind, choices, lies):
    tensors, config = saved(tmp_path / "head", kind, **choices)
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | lies))
    head = load_head(tmp_path / "head")
    assert {name: tensor.shape for name, tensor in head.state_dict().items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


@pytest.mark.mend("a misspelt trait counted as supported")
def test_every_trait_that_a_destination_lacks_has_a_name(monkeypatch):
    """A misspelt one is an error, and not "supported"."""
    for to, kind in table.UNSUPPORTED:
        table.loss(to, Stored({"draftheads": {"kind": kind}}, {}))
    monkeypatch.setitem(table.UNSUPPORTED, ("vllm", "medusa"), ["truncated_vocabulary_size"])
    with pytest.raises(KeyError):
        table.loss("vllm", Stored({"draftheads": {"kind": "medusa"}}, {}))
