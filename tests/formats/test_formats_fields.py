"""The promise: no field of a config that changes what a head computes is passed over in silence. It
is read as its own program reads it, or refused in one line.

Sources: configurations of transformers 5.23; llama_eagle3.py and qwen3_eagle3.py of vLLM 0.33;
modeling_speculative.py of TensorRT-LLM; modeling of deepseek-ai/DeepSpec; speculators 0.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from converted_heads import same
from layouts import HEADLESS, LLAMA, SPECULATORS, eagle3, folder_of, refusal, renamed
from layouts_block import block, block_of
from tiny_heads import drafts_of
from tiny_targets import some_prompts, tiny_target
from trained_heads import FEW, trained

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.eagle import AUX_LAYERS
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.scripts.convert import converted


def written(path: Path, config: dict[str, Any], head: DraftHead | None = None) -> Path:
    head = eagle3() if head is None else head
    said = {**LLAMA, **HEADLESS, **config}
    return folder_of(path / "head", "model.safetensors", dict(head.state_dict()), said)


# Windows

SAID = {"sliding_window": 512, "use_sliding_window": True}


@pytest.mark.parametrize("write", [written, lambda path, config: block_of(path, **config)])
def test_a_window_that_no_layer_is_said_to_have_is_refused(tmp_path, write):
    folder = write(tmp_path, SAID)
    message = refusal(folder)
    assert "expected layer_types in config.json, got use_sliding_window without them" in message
    assert 'add "layer_types": ["sliding_attention"] for layers with the window of 512' in message


WINDOWS: list[tuple[dict[str, Any], int | None]] = [
    ({**SAID, "layer_types": ["sliding_attention"]}, 512),
    ({**SAID, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": 512, "use_sliding_window": False}, None),
    ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, 512),
    ({"sliding_window": 512}, None),  # left over from a target
]


@pytest.mark.parametrize(("config", "window"), WINDOWS)
def test_a_window_is_read_as_its_layers_have_it(tmp_path, config, window):
    assert load_head(written(tmp_path, config)).window == window


def test_what_disagrees_about_windows_is_refused(tmp_path):
    disagrees = {**SAID, "layer_types": ["sliding_attention"], "use_sliding_window": False}
    assert "expected use_sliding_window and layer_types to agree" in refusal(
        written(tmp_path, disagrees)
    )
    chunked = {"layer_types": ["chunked_attention"], "attention_chunk_size": 8192}
    assert "expected layer_types: full_attention, sliding_attention; got 'chunked_attention'" in (
        refusal(written(tmp_path, chunked))
    )


# RoPE

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, tuple[dict[str, Any], float, str | None]] = {
    "new": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
    "new before old": ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
    "inside the scaling": (
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        5e5,
        None,
    ),
    "old name of the type": ({"rope_parameters": {"type": "yarn", **YARN}}, 1e4, "yarn"),
    "scaling": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}}, 5e5, "yarn"),
    "of a type of layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}}},
        5e5,
        "yarn",
    ),
}


@pytest.mark.parametrize(("config", "theta", "kind"), ROPES.values(), ids=ROPES)
def test_rope_is_read_wherever_it_stands(tmp_path, config, theta, kind):
    """With the precedence of transformers."""
    rope = load_head(written(tmp_path, config)).rope
    assert rope.theta == theta
    scaling = rope.scaling or {}
    assert (scaling.get("rope_type") or scaling.get("type")) == kind


def test_the_epsilon_of_norms_is_that_of_transformers_where_none_is_said(tmp_path):
    silent = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | HEADLESS
    folder = folder_of(tmp_path / "head", "model.safetensors", dict(eagle3().state_dict()), silent)
    assert load_head(folder).design.shape.eps == 1e-6


# What our layers do not have

FIELDS: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "mlp_bias": True,
    "attention_bias": True,
    "attention_sink_bias": True,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "logit_scale": 0.5,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "is_neox_style": False,
    "quantization_config": {"bits": 4},
    "target_hidden_size": 64,
    "eagle_config": {"eh_proj_before_attn": True},
    "rope_parameters": {"partial_rotary_factor": 0.25},
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    "kv_lora_rank": 512,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_our_layers_do_not_have_is_refused(tmp_path, field):
    inside = FIELDS[field] if isinstance(FIELDS[field], dict) else {}
    named = [field] if field == "quantization_config" else [*inside, field]
    message = refusal(written(tmp_path, {field: FIELDS[field]}))
    assert any(f"expected {name}: " in message for name in named), message


SHARED = set(FIELDS) - {"target_hidden_size", "eagle_config"}


@pytest.mark.parametrize("field", sorted(SHARED))
def test_a_field_that_our_block_heads_do_not_have_is_refused(tmp_path, field):
    assert "expected " in refusal(block_of(tmp_path, **{field: FIELDS[field]}))


def test_modelopts_name_of_norm_output_is_read(tmp_path):
    config = {"eagle_config": {"return_hidden_post_norm": True}}
    assert load_head(written(tmp_path, config)).design.norm_output


def test_the_norms_of_llama_4_are_its_targets(tmp_path):
    """They have no weights, and engines make Llama's layer of such a config."""
    config = {"model_type": "llama4_text", "use_qk_norm": True, "no_rope_layers": [1, 1, 1, 0]}
    head = eagle3()
    again = load_head(written(tmp_path, config, head))
    assert same(again.state_dict(), head.state_dict()) and not again.design.qk_norm
    assert "expected use_qk_norm: absent, False; got True" in refusal(
        written(tmp_path, {**config, "model_type": "llama"})
    )


# EAGLE-3 with Qwen3's layer

NESTED = {**LLAMA, "model_type": "qwen3", "head_dim": 8}


@pytest.mark.parametrize("architecture", ["Eagle3DraftModel", "Eagle3Speculator"])
def test_the_default_layer_of_speculators(tmp_path, architecture):
    """Eagle3DraftModel is what its save_pretrained writes; keys with defaults may be left out."""
    head = eagle3(qk_norm=True, norm_before_residual=True, vocabulary=FEW, head_dim=8, heads=4)
    tensors = renamed(head, "midlayer.", "layers.0.")
    left_out = ("num_attention_heads", "rms_norm_eps", "rope_theta")
    layer = {key: value for key, value in NESTED.items() if key not in left_out}
    config = {**SPECULATORS, "architectures": [architecture], "transformer_layer_config": layer}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, config)
    again = load_head(folder)
    assert same(again.state_dict(), head.state_dict())
    shape = again.design.shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.eps) == (4, 2, 8, 1e-6)
    assert again.design.qk_norm and again.design.norm_before_residual


def test_layers_that_speculators_has_and_we_do_not_are_refused(tmp_path):
    config = {**SPECULATORS, "transformer_layer_config": {**LLAMA, "model_type": "qwen3_next"}}
    tensors = renamed(eagle3(norm_before_residual=True), "midlayer.", "layers.0.")
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, config)
    assert "expected layers of model_type llama or qwen3, got 'qwen3_next'" in refusal(folder)


@pytest.mark.parametrize("architecture", ["Qwen3Eagle3Model", "Eagle3Qwen3ForCausalLM"])
def test_deepspecs_eagle_3_has_five_features_by_the_layers_whose_outputs_they_are(
    tmp_path, architecture
):
    target, five = tiny_target(), [1, 1, 1, 2, 2]
    head = trained("eagle3", feature_layers=five, intermediate_size=48, qk_norm=True)
    tensors = renamed(head, "midlayer.", "layers.0.")
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach()
    config = {
        **LLAMA, "architectures": [architecture], "model_type": "qwen3", "num_target_layers": 3,
        "target_layer_ids": [0, 0, 0, 1, 1], "ttt_length": 7, "step_loss_decay": 0.8,
        "layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False,
        "draft_num_hidden_layers": 1, "max_window_layers": 36,
    }  # fmt: skip
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, config)
    again = load_head(folder, target=target)
    assert again.feature_layers == tuple(five)
    assert same(again.state_dict(), head.state_dict())
    prompts = some_prompts(6)
    assert drafts_of(again, target, prompts, 2, head.tree) == drafts_of(head, target, prompts, 2)


# Block heads


def test_a_confidence_head_without_a_bias_has_one_of_zero(tmp_path):
    head = block()
    torch.nn.init.zeros_(head.confidence_head["proj"].bias)
    tensors = dict(head.state_dict())
    del tensors["confidence_head.proj.bias"]
    again = load_head(block_of(tmp_path, tensors), target=tiny_target())
    assert same(again.state_dict(), head.state_dict())


def test_deepspecs_dflash_is_a_dspark_head_without_its_heads(tmp_path):
    """It predicts from the anchor's slot, though its name begins as DFlash's."""
    head = block(conditioning="none", confidence=False)
    less = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    config = {**less, "architectures": ["DFlashQwen3DSparkModel"]}
    again = load_head(block_of(tmp_path, dict(head.state_dict()), **config), target=tiny_target())
    assert same(again.state_dict(), head.state_dict())
    assert again.design.sample_from_anchor and again.architecture == "Qwen3DSparkModel"


def test_vllms_name_of_the_anchors_prediction_is_read(tmp_path):
    section = {"mask_token_id": 7, "target_layer_ids": [0, 1], "query_zero_predicts_next": True}
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": section}
    head = load_head(block_of(tmp_path, **config), target=tiny_target())
    assert head.design.sample_from_anchor


FOREIGN = {
    "PEagleDraftModel": ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE, which drafts all"),
    "peagle": ({"speculators_model_type": "peagle"}, "P-EAGLE, which drafts all"),
    "parallel": ({"parallel_drafting": True}, "P-EAGLE, which drafts all"),
    "DFlash2DraftModel": ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2, which mixes"),
    "dflash2": ({"speculators_model_type": "dflash2"}, "DFlash 2, which mixes"),
    "DominoDraftModel": ({"architectures": ["DominoDraftModel"]}, "Domino, whose logits a GRU"),
    "domino": ({"dflash_config": {"projector_type": "domino"}}, "Domino, whose logits a GRU"),
    "lilicorr": ({"dflash_config": {"projector_type": "lilicorr"}}, "LiLiCorr, whose logits"),
    "Gemma4Eagle3Model": ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma 4's layers, which our"),
    "Gemma4DSparkModel": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4's layers, which our"),
}


@pytest.mark.parametrize(("config", "reason"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("write", [written, lambda path, config: block_of(path, **config)])
def test_kinds_that_we_do_not_have_are_refused_by_their_names(tmp_path, write, config, reason):
    message = refusal(write(tmp_path, config))
    assert "expected an EAGLE-3, DSpark or DFlash head, got " in message and reason in message
    assert message.endswith("these are not supported, train or get another head")


def test_one_base_of_rope_is_written(tmp_path):
    """transformers, and so engines, would take one in the scaling before the one beside it."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    head = eagle3(rope_scaling=scaling)
    assert (head.rope.theta, head.config()["rope_theta"]) == (500.0, 500.0)
    assert "rope_theta" not in head.config()["rope_scaling"]
    assert eagle3(rope_scaling=scaling, rope_theta=700.0).config()["rope_theta"] == 700.0


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_rope_of_a_part_of_each_head_is_refused_in_a_recipe_too(kind):
    scaling = {"rope_type": kind, **YARN, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="expected RoPE that turns whole heads, got a partial"):
        eagle3(rope_scaling=scaling)


def test_a_scaling_is_read_without_a_warning(tmp_path, caplog):
    """Of another context than the head's, which has none of its own."""
    config = {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 40.0}}
    load_head(written(tmp_path, config))
    assert not [each.message for each in caplog.records if "rope" in each.message.lower()]


def test_an_eagle3_head_may_read_the_last_state_alone(tmp_path):
    """As a published one for gpt-oss, whose file has no matrix fc; it was called incomplete."""
    head = eagle3()
    head.fc = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.eye_(head.fc.weight)
    head.feature_layers = (-1,)
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "fc.weight"}
    said = {"eagle_config": {"use_aux_hidden_state": False, "layer_ids": [], AUX_LAYERS: []}}
    target, prompts = tiny_target(), some_prompts(9, 14)
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **said})
    expected = drafts_of(head, target, prompts, 8, head.tree)
    loaded = load_head(folder, target=target)
    assert drafts_of(loaded, target, prompts, 8, head.tree) == expected
    save_head(loaded, tmp_path / "ours", target=target)
    ours = load_head(tmp_path / "ours", target=target)
    assert drafts_of(ours, target, prompts, 8, head.tree) == expected
    with pytest.raises(ValueError, match="the last state as a feature"):
        converted(tmp_path / "ours", tmp_path / "vllm", "vllm", target)
