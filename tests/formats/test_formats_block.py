"""The promise: block heads that others publish are read as what they are, whichever place their
layout has for a fact, and what our heads cannot express is refused in one line that says why.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from converted_heads import same
from emulators_block import block_shapes, confidence_shapes, markov_shapes
from layouts import folder_of, refusal
from layouts_block import (
    DEEPSPEC,
    LAYER,
    PLAIN,
    SHARED,
    ZLAB,
    block,
    block_of,
    head_of,
    kept,
    tensors_of,
)
from tiny_targets import VOCABULARY, tiny_target
from trained_heads import FEW, trained

from draftheads.heads.block import feature_layers, layer_ids
from draftheads.heads.formats.hub import HEADS, load_head, open_head, save_head
from draftheads.heads.formats.stored import Stored
from draftheads.heads.formats.table import translated
from draftheads.scripts.convert import converted

SPECFORGE = {
    **LAYER, "architectures": ["DSparkDraftModel"], "block_size": 5, "num_target_layers": 3,
    "dflash_config": {
        **SHARED, "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 6
    },
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 5,
    "transformer_layer_config": LAYER, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 7,
    "draft_vocab_size": VOCABULARY, "sample_from_anchor": True, "markov_rank": 6,
    "speculators_config": {"verifier": {"name_or_path": "tiny-llama", "architectures": []}},
}  # fmt: skip
DFLASH = {
    **{key: value for key, value in SPECULATORS.items() if key != "sample_from_anchor"},
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
SWA = {**SHARED, "use_swa": True, "swa_window_size": 6}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepspec": ({}, DEEPSPEC),
    "deepspec-rnn": (
        {"conditioning": "rnn", "confidence": True}, {**DEEPSPEC, "markov_head_type": "rnn"}
    ),
    "deepspec-window": ({"sliding_window": 6}, {**DEEPSPEC, **SLIDING, "is_causal": False}),
    "deepspec-rope": (
        {"rope_theta": 500.0, "rope_scaling": LINEAR},
        {**DEEPSPEC, "rope_theta": None, "rope_parameters": LINEAR},
    ),
    "specforge": ({}, SPECFORGE),
    "bonus-anchor": ({"sample_from_anchor": False}, {**SPECFORGE, "sample_from_anchor": False}),
    "z-lab": (PLAIN, ZLAB),
    "z-lab-window": ({**PLAIN, "sliding_window": 6}, {**ZLAB, "dflash_config": SWA}),
    "speculators": ({}, SPECULATORS),
    "speculators-dflash": (PLAIN, DFLASH),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", READ)
def test_layouts_of_block_heads(tmp_path, name, prefix):
    choices, config = READ[name]
    head = head_of(choices)
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors_of(head, prefix), config)
    again = load_head(folder, target=tiny_target())
    assert same(again.state_dict(), head.state_dict())
    shape = head.design.shape.__class__(**{**vars(head.design.shape), "eps": 1e-6})
    differs = {"shape": shape, "rope": again.design.rope}
    assert vars(again.design) == {**vars(head.design), **differs}
    assert (again.rope.theta, again.rope.scaling) == (head.rope.theta, head.rope.scaling)
    if "speculators_config" in config:
        assert open_head(folder).target == ("tiny-llama", None)
        assert "config.json does not say how many layers it has), got none" in refusal(folder)


def test_matrices_that_are_not_the_targets_are_the_heads_own(tmp_path):
    head = head_of({"lm_head": "own", "embeddings": "own"})
    folder = folder_of(tmp_path / "head", "model.safetensors", head.state_dict(), DEEPSPEC)
    for target in (None, tiny_target()):
        again = load_head(folder, target=target)
        assert same(again.state_dict(), head.state_dict())
        assert again.design.own_lm_head and again.design.own_embeddings


@pytest.mark.parametrize("missing", ["", "t2d", "d2t", "lm_head.weight"])
def test_draft_vocabularies_of_block_heads(tmp_path, missing):
    """vLLM needs no t2d, and engines take d2t and its lm_head together."""
    head = head_of({"vocabulary": FEW})
    tensors = {name: each for name, each in head.state_dict().items() if name != missing}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, DEEPSPEC)
    if missing in ("", "t2d"):
        assert same(load_head(folder).state_dict(), head.state_dict())
    else:
        assert "got none; the file is incomplete" in refusal(folder, tiny_target())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "domino": ({"architectures": ["DominoDraftModel"]}, "got 'DominoDraftModel': Domino, whose"),
    "deepseek": ({"model_type": "deepseek_v4"}, "expected model_type: absent, qwen3, dflash"),
    "projector": ({"projector_type": "domino"}, "got 'domino': Domino, whose logits"),
    "convolutions": ({"dflash_config": {"conv_kernel_size": 2}}, "expected conv_kernel_size"),
    "selector": ({"dflash_config": {"selector_rank": 256}}, "expected selector_rank: absent, 0"),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, "expected attention_sink_bias"),
    "bias": ({"attention_bias": True}, "expected attention_bias: absent, False; got True"),
    "gelu": ({"hidden_act": "gelu"}, "expected hidden_act: absent, silu, swish; got 'gelu'"),
    "interleaved": ({"is_neox_style": False}, "expected is_neox_style: absent, True"),
    "mrope": ({"rope_parameters": {"mrope_section": [1]}}, "expected mrope_section: absent"),
    "causal": ({"is_causal": True}, "whose slots see each other both ways, got causal"),
    "causal-dflash": ({"dflash_config": {"causal": True}}, "see each other both ways, got causal"),
    "causal-window": (SLIDING, "or a sliding window that does not say otherwise"),
    "mixed": (
        {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}, "all have a window"
    ),
    "no-window": ({**SLIDING, "sliding_window": None, "is_causal": False}, "sliding_window in"),
    "no-theta": ({"rope_theta": None}, "expected rope_theta in config.json, got none"),
    "no-mask": ({"mask_token_id": None}, "expected mask_token_id in config.json, got none"),
    "mask": ({"mask_token_id": VOCABULARY}, "a mask token from 0 to 18, got 19"),
    "no-layers": ({"target_layer_ids": None}, "expected target_layer_ids in config.json"),
    "layers": ({"target_layer_ids": [0, 1, 2]}, "fc.weight: expected numbers (32, 96)"),
    "no-block": ({"block_size": None}, "expected block_size in config.json, got none"),
    "dflash2": ({"speculators_model_type": "dflash2"}, "got 'dflash2': DFlash 2, which mixes"),
    "rnn-after-anchor": (
        {
            "speculators_model_type": "dspark",
            "sample_from_anchor": False,
            "markov_head_type": "rnn",
        },
        "expected an rnn that begins after the anchor's slot",
    ),
    "anchor": (
        {"speculators_model_type": "dspark"}, "speculators library assumes true and vLLM false"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_block_heads_that_are_not_read(tmp_path, config, reason):
    said = {key: value for key, value in {**DEEPSPEC, **config}.items() if value is not None}
    tensors = kept(head_of({}).state_dict())
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, said)
    assert reason in refusal(folder, tiny_target())


def test_a_layer_without_norms_of_queries_is_not_qwens(tmp_path):
    tensors = kept(head_of({}).state_dict())
    del tensors["layers.0.self_attn.q_norm.weight"]
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, DEEPSPEC)
    assert "expected norms of queries and keys, as Qwen3 has" in refusal(folder)


def test_ids_of_layers_are_one_less_than_indices_into_the_hidden_states(tmp_path):
    assert layer_ids([0, 2, 36]) == [-1, 1, 35] and feature_layers([-1, 1, 35]) == (0, 2, 36)
    target, said = tiny_target(), {}
    for kind, to in (("eagle3", "vllm"), ("block", "vllm"), ("block", "speculators")):
        head = trained(kind, feature_layers=[1, 2], **({} if kind == "eagle3" else {"mask": 7}))
        if kind == "block":
            head = head_of({})
        ours = save_head(head, tmp_path / f"{kind}-{to}", target=target)
        theirs = converted(ours, tmp_path / f"{kind}-for-{to}", to, target)
        said[kind, to] = json.loads((theirs / "config.json").read_text())
    assert said["eagle3", "vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert said["block", "vllm"]["target_layer_ids"] == [0, 1]
    assert said["block", "speculators"]["aux_hidden_state_layer_ids"] == [1, 2]


QWEN3_8B = {
    **LAYER, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None,
    "num_target_layers": 36, "layer_types": ["full_attention"] * 5, "attention_bias": False,
}  # fmt: skip
IDS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
RANK = {"markov_rank": 256, "confidence_head_with_markov": True}
PUBLISHED: dict[str, tuple[dict[str, Any], Any]] = {
    "deepseek-ai/dspark_qwen3_8b_block7": (
        {
            **QWEN3_8B, **IDS, **RANK, "architectures": ["Qwen3DSparkModel"], "block_size": 7,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "num_anchors": 512,
        },
        (True, 7, "markov", 256, "state+token"),
    ),
    "z-lab/Qwen3-8B-DFlash-b16": (
        {
            **QWEN3_8B, "architectures": ["DFlashDraftModel"], "block_size": 16,
            "dflash_config": IDS,
        },
        (False, 15, None, 0, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_load_by_name(name):
    config, expected = PUBLISHED[name]
    shapes = block_shapes(config, 5)
    if "markov_rank" in config:
        shapes |= markov_shapes(config, 256) | confidence_shapes(config)
        shapes |= {f"{each}.weight": (151936, 4096) for each in ("embed_tokens", "lm_head")}
    tensors = {key: torch.ones(()).expand(shape) for key, shape in shapes.items()}
    assert tensors["fc.weight"].shape == (4096, 20480)
    ones_VD = SimpleNamespace(weight=torch.ones(()).expand(8, 4096))  # some rows are enough
    model = SimpleNamespace(
        get_input_embeddings=lambda: ones_VD, get_output_embeddings=lambda: ones_VD
    )
    target: Any = SimpleNamespace(
        model=model, vocab_size=151936, layers=36, device="cpu", embed=lambda ids: ones_VD.weight
    )
    ours = translated(Stored(config, tensors), target)
    with torch.device("meta"):
        head = HEADS["block"].from_config(ours.config, ours.tensors)
    ours.check(head.state_dict())
    design = head.design
    found = (design.conditioning, design.rank, design.confidence)
    assert (design.sample_from_anchor, head.depth, *found) == expected and head.feature_layers == (
        2,
        10,
        18,
        26,
        34,
    )
    assert (head.rope.theta, design.mask_token, design.layers) == (1e6, 151669, 5)
    assert not design.own_lm_head and not design.own_embeddings


def test_embeddings_are_shared_only_where_the_target_scales_them_the_same_way(tmp_path):
    """Else a head would read rows that are sqrt(D) times too large or too small, in silence."""
    head, name = block(), "embed_tokens.weight"
    for target, is_scaled in ((tiny_target(), False), (tiny_target("gemma3-window"), True)):
        rows_VD = target.model.get_input_embeddings().weight.detach().clone()
        folder = block_of(tmp_path, {**head.state_dict(), name: rows_VD})
        assert load_head(folder, target=target).design.own_embeddings == is_scaled
