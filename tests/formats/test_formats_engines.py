"""The promise: in a folder that training wrote, or that was converted, every engine finds all that
it looks for, passes over nothing, and believes what is true. Engines are those of `emulators`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import features_of, our_chain
from converted_heads import CHOICES, saved
from emulators import EngineError, Served, vllm_medusa
from emulators_block import PlainBlock, mlx_block, openvino_block, sglang_block, vllm_block
from emulators_eagle import (
    sglang_eagle1,
    sglang_eagle3,
    vllm_eagle1,
    vllm_eagle3,
)
from plain_hydra import awake
from safetensors.torch import load_file, save_file
from tiny_targets import some_prompts, tiny_target
from trained_heads import FEW, trained

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.tree import DynamicTree
from draftheads.scripts.convert import converted

ENGINES = {
    "vllm": {
        "medusa": vllm_medusa,
        "eagle": vllm_eagle1,
        "eagle3": vllm_eagle3,
        "block": vllm_block,
    },
    "sglang": {"eagle": sglang_eagle1, "eagle3": sglang_eagle3, "block": sglang_block},
    "openvino": {"block": openvino_block},
    "mlx": {"block": mlx_block},
    "speculators": {
        "eagle3": partial(vllm_eagle3, style="speculators"),
        "block": partial(vllm_block, style="speculators"),
    },
}
EXPORTS = [(name, to) for name, (_, ways) in CHOICES.items() for to in sorted(ways & set(ENGINES))]


def served(name: str, to: str, folder: Path) -> Served:
    return ENGINES[to][name.partition("-")[0]](folder)


def complete(head: Served) -> bool:
    return head.uninitialised == set() and head.dropped == set()


def believed(name: str, folder: Path, head: Served) -> None:
    """What the engine believes is what the head is."""
    ours = load_head(folder, target=tiny_target())
    kind = name.partition("-")[0]
    if "ids" in head.facts:
        ids = ours.token_map
        assert head.facts["ids"] == (None if ids is None else ids.tolist())
    if kind != "medusa":
        assert head.facts["rope"] == (ours.rope.theta, ours.rope.scaling)
        assert head.facts.get("window") == ours.window
    if kind in ("eagle3", "block"):
        assert tuple(head.facts["aux"]) == ours.feature_layers
    if kind == "block":
        assert head.facts["anchored"] == ours.design.sample_from_anchor
        assert not head.facts["causal"] and head.facts["mask"] == ours.design.mask_token
    if kind == "eagle3":
        assert head.facts["switches"] == {
            switch: getattr(ours.design, switch) for switch in head.facts["switches"]
        }


@pytest.mark.parametrize(("name", "to"), EXPORTS)
def test_an_export_is_complete_for_its_engine(tmp_path, name, to):
    ours = saved(name, tmp_path / "ours")
    theirs = converted(ours, tmp_path / "theirs", to, tiny_target())
    head = served(name, to, theirs)
    assert complete(head)
    believed(name, theirs, head)
    loaded = {tensor.data_ptr() for tensor in head.loaded.values()}
    assert len(loaded) == len(head.loaded)


THIRD = [name for name, (_, ways) in CHOICES.items() if name[:6] == "eagle3" and "vllm" in ways]


@pytest.mark.parametrize("name", THIRD)
@pytest.mark.parametrize("style", ["plain", "speculators"])
def test_what_training_writes_of_eagle_3_is_complete_for_vllm(tmp_path, name, style):
    ours = saved(name, tmp_path / "ours")
    head = vllm_eagle3(ours, style=style)
    assert complete(head)
    believed(name, ours, head)


SILENT = ["block-none", "block-state"]  # DSpark folders without a Markov head


@pytest.mark.parametrize(
    "name", [name for name, (_, ways) in CHOICES.items() if "sglang" in ways and name not in SILENT]
)
def test_what_training_writes_is_complete_for_sglang(tmp_path, name):
    ours = saved(name, tmp_path / "ours")
    head = served(name, "sglang", ours)
    assert complete(head)
    believed(name, ours, head)


@pytest.mark.parametrize("name", ["medusa-own", "medusa-deep"])
def test_what_training_writes_of_medusa_is_complete_for_vllm(tmp_path, name):
    ours = saved(name, tmp_path / "ours")
    assert complete(vllm_medusa(ours))
    assert set(vllm_medusa(ours).loaded) >= set(load_head(ours).state_dict())


@pytest.mark.parametrize("name", ["medusa-reduced", "medusa-shared-reduced"])
def test_vllm_stops_at_a_draft_vocabulary_of_medusa(tmp_path, name):
    with pytest.raises(EngineError, match="org_vocab_size"):
        vllm_medusa(saved(name, tmp_path / "ours"))


def test_shared_heads_need_the_matrix_that_convert_adds(tmp_path):
    ours = saved("medusa-shared", tmp_path / "ours")
    assert vllm_medusa(ours).uninitialised == {"lm_head.weight"}
    head = vllm_medusa(converted(ours, tmp_path / "theirs", "vllm", tiny_target()))
    assert torch.equal(head.loaded["lm_head.weight"], tiny_target().unembed_weight())


def test_vllm_reads_eagle_1_under_another_name_and_without_its_bias(tmp_path):
    ours = saved("eagle-plain", tmp_path / "ours")
    with pytest.raises(EngineError, match="EagleLlamaForCausalLMEagle is not registered"):
        vllm_eagle1(ours)
    theirs = converted(ours, tmp_path / "theirs", "vllm")
    assert "fc.bias" not in load_file(theirs / "model.safetensors")
    assert complete(vllm_eagle1(theirs))


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_a_dspark_folder_needs_the_markov_head_that_convert_adds(tmp_path, name, to):
    with pytest.raises(EngineError, match="markov_rank > 0|rows of no numbers"):
        served(name, to, saved(name, tmp_path / "ours"))


CHAINS = [(name, to) for name, to in EXPORTS if name.startswith("block")]


@pytest.mark.parametrize(("name", "to"), CHAINS)
@torch.no_grad()
@pytest.mark.slow
def test_an_engine_drafts_our_chain_from_what_it_reads(tmp_path, name, to):
    target = tiny_target()
    head = awake(trained("block", **CHOICES[name][0])).eval()
    ours = save_head(head, tmp_path / "ours", target=target)
    plain = PlainBlock(
        served(name, to, converted(ours, tmp_path / "theirs", to, target)),
        target.model.get_input_embeddings().weight,
        target.unembed_weight(),
    )
    for prompt in some_prompts(3, 9):
        tokens = torch.tensor(prompt)
        drafts, logits = our_chain(head, target, tokens)
        # the engine's states are those after the tokens, ours those before them
        states_TX = features_of(target, tokens, plain.facts["aux"])[0, 1:]
        expected, scores = plain.chain(states_TX, prompt[-1])
        assert drafts == expected
        torch.testing.assert_close(logits.double(), scores, rtol=1e-4, atol=1e-4)


def test_vllm_makes_whole_blocks_for_a_tree_that_is_less_deep(tmp_path):
    """Seen in vLLM 0.32: blocks of three slots of a head with seven drafted other tokens."""
    for name in ("block-markov", "block-dflash"):
        head = trained("block", **CHOICES[name][0])
        head.tree = DynamicTree(2, 2, 1)
        ours = save_head(head, tmp_path / name, target=tiny_target())
        theirs = converted(ours, tmp_path / f"{name}-theirs", "speculators", tiny_target())
        assert vllm_block(theirs, style="speculators").facts["slots"] == head.design.block_size
        assert f'"num_speculative_tokens": {head.depth}' in (ours / "README.md").read_text()


def broken(folder: Path, change: str, name: str, config: dict[str, Any]) -> None:
    """The folder with one tensor renamed or gone, and other words in its config."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    if change == "renamed":
        tensors[f"{name}.renamed"] = tensors[name]
    if change in ("renamed", "gone"):
        del tensors[name]
    save_file(tensors, file)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))


LESS = {"target_layer_ids": [1], "mask_token_id": 7}
FAULTS = {
    "medusa-bias-renamed": ("medusa-own", "vllm", "renamed", "blocks.0.layers.0.bias", {}),
    "medusa-key-gone": ("medusa-own", "vllm", "gone", "lm_heads.1.weight", {}),
    "medusa-more-heads": ("medusa-own", "vllm", "", "", {"num_heads": 4}),
    "medusa-fewer-heads": ("medusa-own", "vllm", "", "", {"num_heads": 2}),
    "medusa-biases-denied": ("medusa-own", "vllm", "", "", {"medusa_fc_bias": False}),
    "medusa-map": ("medusa-own", "vllm", "", "", {"truncated_vocab_size": 6}),
    "eagle-bias-renamed": ("eagle-plain", "sglang", "renamed", "fc.bias", {}),
    "eagle-bias-gone": ("eagle-plain", "sglang", "gone", "fc.bias", {}),
    "eagle-key-gone": ("eagle-plain", "vllm", "gone", "fc.weight", {}),
    "eagle-bias-key": ("eagle-plain", "sglang", "", "", {"bias": True}),
    "eagle-bias-key-vllm": ("eagle-plain", "vllm", "", "", {"bias": True}),
    "eagle-more-layers": ("eagle-plain", "sglang", "", "", {"num_hidden_layers": 2}),
    "eagle3-norm-renamed": ("eagle3-usual", "sglang", "renamed", "norm.weight", {}),
    "eagle3-key-gone": ("eagle3-usual", "vllm", "gone", "midlayer.hidden_norm.weight", {}),
    "eagle3-unknown-key": ("eagle3-usual", "vllm", "renamed", "norm.weight", {}),
    "eagle3-wrong-vocabulary": ("eagle3-reduced", "vllm", "", "", {"draft_vocab_size": 9}),
    "block-norm-renamed": ("block-markov", "sglang", "renamed", "hidden_norm.weight", {}),
    "block-key-gone": ("block-markov", "vllm", "gone", "layers.1.self_attn.q_norm.weight", {}),
    "block-fewer-features": ("block-dflash", "vllm", "", "", {"dflash_config": LESS}),
    "block-bias": ("block-dflash", "sglang", "", "", {"attention_bias": True}),
    "block-more-layers": ("block-rnn", "speculators", "", "", {"markov_head_type": "vanilla"}),
    "openvino-not-dflash": ("block-dflash", "openvino", "", "", {"architectures": ["Qwen3"]}),
    "mlx-no-section": ("block-markov", "mlx", "", "", {"dflash_config": None}),
    "mlx-key-gone": ("block-dflash", "mlx", "gone", "hidden_norm.weight", {}),
    "eagle3-fewer-features": ("eagle3-usual", "sglang", "", "", {"num_aux_hidden_states": 2}),
}


@pytest.mark.parametrize(("name", "to", "change", "tensor", "config"), FAULTS.values(), ids=FAULTS)
def test_the_emulators_notice(tmp_path, name, to, change, tensor, config):
    ours = saved(name, tmp_path / "ours")
    theirs = converted(ours, tmp_path / "theirs", to, tiny_target())
    assert complete(served(name, to, theirs))
    broken(theirs, change, tensor, config)
    try:
        head = served(name, to, theirs)
    except EngineError:
        return
    assert not complete(head)


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        {"norm_before_residual": True},
        {"rope_theta": 5e5},
    ],
    ids=str,
)
def test_the_emulators_notice_what_is_believed(tmp_path, config):
    ours = saved("eagle3-usual", tmp_path / "ours")
    believed("eagle3-usual", ours, vllm_eagle3(ours))
    said = json.loads((ours / "config.json").read_text())
    right = vllm_eagle3(ours)
    (ours / "config.json").write_text(json.dumps(said | config))
    assert vllm_eagle3(ours).facts != right.facts


def test_offsets_taken_for_ids_are_noticed(tmp_path):
    head = trained("eagle3", vocabulary=FEW, feature_layers=[1, 2])
    ours = save_head(head, tmp_path / "ours", target=tiny_target())
    assert sglang_eagle3(ours).facts["ids"] == sorted(FEW)
    tensors = load_file(ours / "model.safetensors")
    tensors["d2t"] = torch.tensor(sorted(FEW))
    save_file(tensors, ours / "model.safetensors")
    assert sglang_eagle3(ours).facts["ids"] != sorted(FEW)
    with pytest.raises(ValueError, match="were absolute ids stored"):
        load_head(ours)
