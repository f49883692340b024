"""The promise: `convert --to openvino`, `--to mlx` and `--to lmdeploy` write what OpenVINO's
exporter and its engine, mlx-vlm's drafters and LMDeploy read right; what they would pass over
without a word, or could not verify exactly, is an error. Real engines: tests/engines.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emulators import EngineError
from emulators_block import mlx_block
from emulators_eagle import lmdeploy_eagle3, mlx_eagle3, openvino_eagle3
from safetensors.torch import load_file
from tiny_heads import random_head
from tiny_targets import CONFIGS, scaled_up
from trained_heads import FEW, SCALED, forget, same
from trained_heads import saved as saved_block
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftheads.heads.formats.card import render_card
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.scripts.benchmarks.engine_runs.openvino import tell_layers
from draftheads.scripts.convert import converted

LAYERS = 8
READ = {"feature_layers": [2, 4, 5]}


@cache
def deep(name: str) -> Target:
    """Deep enough for three features below the last state."""
    torch.manual_seed(0)
    kind, options = CONFIGS[name]
    config = CONFIG_MAPPING[kind](**{**options, "num_hidden_layers": LAYERS})
    return Target(scaled_up(AutoModelForCausalLM.from_config(config)), name=f"tiny-{name}")


def target() -> Target:
    return deep("llama")


def saved(folder: Path, **choices: Any) -> Path:
    head = random_head("eagle3", target(), **{**READ, **choices})
    return save_head(head, folder / "ours", target=target())


EXPORTS: dict[str, list[dict[str, Any]]] = {
    "openvino": [
        {},
        {"vocabulary": FEW},
        {"rope_theta": 5e5},
        {"rope_scaling": SCALED},
        {"head_dim": 16},
        {"feature_layers": [4, 1, 2]},
    ],
    "lmdeploy": [
        {},
        {"vocabulary": FEW},
        {"rope_theta": 5e5},
        {"rope_scaling": SCALED},
        {"head_dim": 16},
    ],
    "mlx": [
        {},
        {"rope_theta": 5e5},
        {"head_dim": 16},
        {"layers": 2},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
}


@pytest.mark.parametrize(
    ("to", "choices"), [(to, choices) for to, heads in EXPORTS.items() for choices in heads]
)
def test_an_export_is_complete_and_comes_back(tmp_path, to, choices):
    ours = saved(tmp_path, **choices)
    theirs = converted(ours, tmp_path / "theirs", to, target())
    read = load_head(ours, target=target())
    if to == "openvino":  # code in it, such as custom_generate/, would be run by the exporter
        files = ["README.md", "config.json", "model.safetensors"]
        assert sorted(path.name for path in theirs.iterdir()) == files
        head = openvino_eagle3(theirs, LAYERS)
        # the target's, and not used
        assert head.uninitialised <= {"embed_tokens.weight", "t2d"}
    elif to == "lmdeploy":
        head = lmdeploy_eagle3(theirs, LAYERS)
        assert head.uninitialised == set()
    else:
        head = mlx_eagle3(theirs)
        assert head.uninitialised == set()
        switches = {name: getattr(read.design, name) for name in head.facts["switches"]}
        assert head.facts["switches"] == switches
    assert head.dropped == set()
    if to != "mlx":
        assert head.facts["ids"] == sorted(choices.get("vocabulary") or range(read.vocab_size))
    assert head.facts["aux"] == read.feature_layers
    assert head.facts["rope"] == (read.rope.theta, read.rope.scaling)
    back = converted(theirs, tmp_path / "back", "draftheads", target())
    assert same(*(load_file(folder / "model.safetensors") for folder in (back, ours)))
    forget(theirs)
    assert same(load_head(theirs, target=target()).state_dict(), read.state_dict())


BOTH: dict[str, dict[str, Any]] = {
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norms of queries and keys": {"qk_norm": True},
    "sliding_window": {"sliding_window": 5},
    "other than three features": {"feature_layers": [1, 3]},
    "the same feature twice": {"feature_layers": [1, 3, 3]},
    "embeddings as a feature": {"feature_layers": [0, 1, 2]},
    "the last state as a feature": {"feature_layers": [1, 3, LAYERS]},
}
OTHER_FEATURES = ("other than three features", "embeddings as", "the last state as")
TURNED = "features in another order than the target's"
REFUSED = {
    "openvino": BOTH
    | {
        "norm_before_fc": {"norm_before_fc": True},
        "norm_before_residual": {"norm_before_residual": True},
        "more than one layer": {"layers": 2},
    },
    "lmdeploy": {name: each for name, each in BOTH.items() if not name.startswith(OTHER_FEATURES)}
    | {
        r"other features than \[2, n // 2, n - 3\]": {"feature_layers": [1, 4, 5]},
        "norm_before_fc": {"norm_before_fc": True},
        "norm_before_residual": {"norm_before_residual": True},
        "more than one layer": {"layers": 2},
    },
    "mlx": BOTH
    | {
        "a scaling of RoPE": {"rope_scaling": SCALED},
        "a reduced vocabulary": {"vocabulary": FEW},
        f"{TURNED} layers": {"feature_layers": [4, 1, 2]},
    },
    # they append a feature when they have computed its layer
    "vllm": {TURNED: {"feature_layers": [4, 1, 2]}},
    "sglang": {TURNED: {"feature_layers": [4, 1, 2]}},
}


@pytest.mark.parametrize(
    ("to", "trait"), [(to, trait) for to, traits in REFUSED.items() for trait in traits]
)
def test_what_would_be_lost_is_an_error_and_nothing_is_written(tmp_path, to, trait):
    ours = saved(tmp_path, **REFUSED[to][trait])
    with pytest.raises(ValueError, match=f"{to} does not support .*: it has {trait}.*; nothing"):
        converted(ours, tmp_path / "theirs", to, target())
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    if to == "openvino":
        card = render_card(open_head(ours).config)
        assert f"OpenVINO GenAI (2026.4) does not support this head: it has {trait}." in card


# LMDeploy


def test_of_our_own_folder_lmdeploy_finds_no_class_and_of_any_without_d2t_drafts_one_token(
    tmp_path,
):
    ours = saved(tmp_path)
    with pytest.raises(EngineError, match="Eagle3LlamaForCausalLMEagle3 has no model class"):
        lmdeploy_eagle3(ours, LAYERS)
    bare = converted(ours, tmp_path / "vllm", "vllm")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert set(lmdeploy_eagle3(bare, LAYERS).facts["ids"]) == {0}


def test_of_other_targets_than_llama_lmdeploy_gathers_no_states(tmp_path):
    ours = saved_for(deep("qwen3"), tmp_path, {})
    with pytest.raises(ValueError, match="it has a target other than Llama; nothing"):
        converted(ours, tmp_path / "theirs", "lmdeploy")


# mlx-vlm


def test_without_the_section_that_convert_adds_dspark_is_not_found(tmp_path):
    with pytest.raises(EngineError, match="DSpark requires a dflash_config object"):
        mlx_block(saved_block("block-markov", tmp_path / "ours"))


# OpenVINO

BLOCK = {"feature_layers": [1, 2], "mask": 7, "block_size": 5, "conditioning": "none"}
DFLASH = {**BLOCK, "sample_from_anchor": False}
UNFOUND = "it has a target whose states the engine does not"


def test_what_the_exporter_leaves_out_is_what_convert_writes(tmp_path):
    """d2t, or memory stays as it was; the layers, or the engine reads others."""
    assert "d2t" in openvino_eagle3(saved(tmp_path), LAYERS).uninitialised
    theirs = converted(tmp_path / "ours", tmp_path / "theirs", "openvino")
    with pytest.raises(EngineError, match="at least 10"):
        openvino_eagle3(theirs, LAYERS, has_layers=False)
    assert openvino_eagle3(theirs, 16, has_layers=False).facts["aux"] == (3, 9, 14)


def saved_for(target: Target, folder: Path, choices: dict[str, Any]) -> Path:
    """An EAGLE-3 head, or, with choices, a block head."""
    head = random_head("block" if choices else "eagle3", target, **{**READ, **choices})
    return save_head(head, folder / "ours", target=target)


@pytest.mark.mend("OpenVINO targets without gated layers")
@pytest.mark.parametrize("choices", [{}, DFLASH], ids=["eagle3", "dflash"])
@pytest.mark.parametrize("name", ["gpt-neox", "gpt2", "opt", "olmo2", "mixtral"])
def test_a_target_whose_states_the_engine_does_not_find_is_refused(tmp_path, name, choices):
    """It would stop at the first token, with a line about a missing port."""
    ours = saved_for(deep(name), tmp_path, choices)
    with pytest.raises(ValueError, match=UNFOUND):
        converted(ours, tmp_path / "theirs", "openvino")
    assert not (tmp_path / "theirs").exists()
    card = render_card(open_head(ours).config)
    assert "OpenVINO GenAI (2026.4) does not support this head" in card


def test_of_qwen3s_experts_only_dflash_heads_find_the_states(tmp_path):
    name, options = "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}
    shape = {**CONFIGS["qwen3"][1], "num_hidden_layers": LAYERS, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**shape, **options))
    target = Target(scaled_up(model), name="tiny-qwen3-moe")
    eagle3, dflash = (tmp_path / kind for kind in ("eagle3", "dflash"))
    with pytest.raises(ValueError, match=UNFOUND):
        converted(saved_for(target, eagle3, {}), eagle3 / "theirs", "openvino")
    ours = saved_for(target, dflash, {**DFLASH, "lm_head": "shared", "embeddings": "shared"})
    assert converted(ours, dflash / "theirs", "openvino").is_dir()


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("fc_norm", {f"fc_norm.{place}.weight" for place in range(3)}),
        ("norm_before_fc", {"input_norm.weight"}),
    ],
)
def test_the_exporter_drops_what_it_does_not_know_and_ends_well(tmp_path, name, dropped):
    assert openvino_eagle3(saved(tmp_path, **{name: True}), LAYERS).dropped == dropped


def test_other_kinds_are_refused(tmp_path):
    ours = save_head(random_head("medusa", target()), tmp_path / "ours", target=target())
    with pytest.raises(ValueError, match="head of kind eagle3 or block for openvino, got medusa"):
        converted(ours, tmp_path / "theirs", "openvino")


def test_the_card_of_a_dflash_head_asks_for_whole_blocks(tmp_path):
    for name, is_dflash in (("dflash", True), ("dspark", False)):
        head = random_head("block", target(), **BLOCK, sample_from_anchor=not is_dflash)
        card = render_card(open_head(save_head(head, tmp_path / name, target=target())).config)
        call = "generate('Hello', max_new_tokens=100, num_assistant_tokens=4)"
        reason = "(2026.4) does not support this head: it has slots or heads of DSpark"
        assert (call in card) == is_dflash == (reason not in card)
        assert "hidden_layers_list" not in card


def test_card_and_runner_tell_the_same_layers(tmp_path):
    card = render_card(open_head(saved(tmp_path)).config)
    assert "draftheads convert THIS_FOLDER_OR_REPO for-openvino --to openvino" in card
    assert "hidden_layers_list value=\\'1 3 4\\'" in card
    theirs = converted(tmp_path / "ours", tmp_path / "theirs", "openvino")
    model = theirs / "openvino_model.xml"
    model.write_text('<rt_info><eagle3_mode value="True" /></rt_info>')
    tell_layers(theirs)
    told = '<hidden_layers_list value="1 3 4" /><eagle3_mode value="True" />'
    assert model.read_text() == f"<rt_info>{told}</rt_info>"
    model.write_text("<rt_info></rt_info>")
    with pytest.raises(ValueError, match="expected <eagle3_mode once, got 0; is this a head"):
        tell_layers(theirs)
