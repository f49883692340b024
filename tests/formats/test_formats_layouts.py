"""The promise: heads in the layouts that others publish are read from their tensors' names and
shapes, strictly, and what cannot be read is refused in one line that says why.

Source: medusa.md, section 4; eagle.md, section 4.
"""

from __future__ import annotations

import json

import pytest
import torch
from converted_heads import same
from layouts import (
    BASE,
    HEADLESS,
    LLAMA,
    SPECULATORS,
    V01,
    VLLM,
    eagle3,
    folder_of,
    numbered,
    refusal,
    renamed,
)
from tiny_targets import VOCABULARY, tiny_target
from torch import Tensor
from trained_heads import FEW, trained

from draftheads.heads.formats.hub import load_head, open_head

# Medusa


MEDUSAS = {
    "v0.1": ("medusa_lm_head.pt", "", {"depth": 5}, V01),
    "v0.1-deep": ("medusa_lm_head.pt", "", {"depth": 3, "layers": 2}, V01),
    "pull-request-1": ("medusa_lm_head.safetensors", "", {"depth": 5}, V01),
    "version-2": (
        "medusa_lm_head.safetensors", "", {"lm_head": "shared"}, {**V01, "version": "2"},
    ),
    "model-optimizer": ("model.safetensors", "medusa_heads.", {}, {**LLAMA, **BASE}),
}  # fmt: skip


@pytest.mark.parametrize(("file", "prefix", "choices", "config"), MEDUSAS.values(), ids=MEDUSAS)
def test_medusa_heads_with_numbers_for_names(tmp_path, file, prefix, choices, config):
    head = trained("medusa", **choices)
    tensors = numbered(head, choices.get("layers", 1), prefix)
    folder = folder_of(tmp_path / "head", file, tensors, config)
    again = load_head(folder, target=tiny_target())
    assert same(again.state_dict(), head.state_dict())
    assert (again.depth, again.layers) == (head.depth, head.layers)
    assert open_head(folder).target == ("tiny-llama", None)


def test_a_head_that_shares_its_last_matrix_needs_the_vocabulary(tmp_path):
    tensors = numbered(trained("medusa", lm_head="shared"), 1)
    folder = folder_of(tmp_path / "head", "medusa_lm_head.pt", tensors, V01)
    assert "pass it: load_head(..., target=target) or --target" in refusal(folder)


@pytest.mark.parametrize("parts", [1, 2])
def test_heads_in_one_folder_with_their_target(tmp_path, parts):
    """Medusa v1.0: a backbone with heads, perhaps in several files of which some hold no head."""
    head = trained("medusa", depth=3)
    inside = numbered(head, 1, "medusa_head.")
    backbone = dict(tiny_target().model.state_dict())
    config = {**LLAMA, "num_hidden_layers": 3, "medusa_num_heads": 3, "medusa_num_layers": 1}
    file = "model.safetensors" if parts == 1 else "model-00002-of-00002.safetensors"
    folder = folder_of(tmp_path / "whole", file, {**inside, "extra": torch.ones(1)}, config)
    places = dict.fromkeys(inside, file) | dict.fromkeys(
        backbone, "model-00001-of-00002.safetensors"
    )
    if parts == 2:  # the first part is not even there
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(index)
    assert same(load_head(folder).state_dict(), head.state_dict())
    assert open_head(folder).target == (str(folder), None)


def test_only_the_parts_with_heads_are_fetched(hub, tmp_path):
    inside = numbered(trained("medusa", depth=3), 1, "medusa_head.")
    second = "model-00002-of-00002.safetensors"
    config = {**LLAMA, "medusa_num_heads": 3}
    folder = folder_of(tmp_path / "whole", second, inside, config)
    places = {**dict.fromkeys(inside, second), "lm_head.weight": "model-00001-of-00002.safetensors"}
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": places}).encode()
    files["model-00001-of-00002.safetensors"] = b"not wanted"
    hub.repos["them/whole"] = {"private": False, "files": files}
    assert load_head("them/whole").depth == 3
    assert open_head("them/whole").target == ("them/whole", None)


def test_vllm_heads_without_biases_get_zeros(tmp_path):
    head = trained("medusa", depth=3)
    tensors = {name: each for name, each in head.state_dict().items() if ".bias" not in name}
    again = load_head(folder_of(tmp_path / "head", "model.safetensors", tensors, VLLM))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, tensors.get(name, torch.zeros(32)))
    assert again.depth == 3


def test_a_draft_vocabulary_of_vllm_is_refused_and_an_unused_map_ignored(tmp_path):
    tensors = {**trained("medusa", depth=2).state_dict(), "token_map": torch.tensor(FEW)}
    config = {**VLLM, "truncated_vocab_size": len(FEW)}
    folder = folder_of(tmp_path / "cut", "model.safetensors", tensors, config)
    assert "expected truncated_vocab_size: absent, 19; got 6" in refusal(folder)
    unused = folder_of(tmp_path / "unused", "model.safetensors", tensors, VLLM)
    assert load_head(unused).token_map is None


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_heads_with_the_targets_matrix_share_it(tmp_path, name):
    head, target = trained("medusa", lm_head="shared"), tiny_target()
    tensors = {**head.state_dict(), name: target.unembed_weight().detach().clone()}
    config = {**VLLM, "original_lm_head": True}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, config)
    for again in (load_head(folder), load_head(folder, target=target)):
        assert not again.own_lm_head and same(again.state_dict(), head.state_dict())


def test_every_name_of_medusa_must_be_there_and_no_other(tmp_path):
    whole = numbered(trained("medusa", depth=3), 1)
    for name in whole:
        rest = {other: each for other, each in whole.items() if other != name}
        message = refusal(folder_of(tmp_path / "head", "medusa_lm_head.pt", rest, V01))
        assert (
            message.count(": expected") == 1 and "got none" in message or "expected none" in message
        )
    for name in ("0.0.linear.scale", "lm_head.weight"):
        folder = folder_of(
            tmp_path / "head", "medusa_lm_head.pt", {**whole, name: torch.ones(1)}, V01
        )
        assert "expected none, got" in refusal(folder) or "second one" in refusal(folder)
    folder = folder_of(tmp_path / "head", "model.safetensors", trained("medusa").state_dict(),
                       {**VLLM, "logit_scale": 0.5})  # fmt: skip
    assert "expected logit_scale: absent, 1.0; got 0.5" in refusal(folder)


# EAGLE


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("new", ["midlayer.", "layers.0.", "model.layers.0."])
def test_prefixes_of_eagle_3(tmp_path, file, new):
    head = eagle3(vocabulary=FEW)
    tensors = renamed(head, "midlayer.", new)
    again = load_head(folder_of(tmp_path / "head", file, tensors, {**LLAMA, **HEADLESS}))
    assert same(again.state_dict(), head.state_dict())
    assert (again.vocab_size, again.feature_layers) == (VOCABULARY, (1, 2))
    assert again.rope.theta == 10000.0 and again.rope.scaling is None


def test_sizes_of_eagle_are_those_of_its_tensors(tmp_path):
    head = trained("eagle", heads=2, kv_heads=1, head_dim=24, intermediate_size=40, layers=2)
    lies = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "bias": True}
    leftover = {"sliding_window": 7, "use_sliding_window": False}
    tensors = {name: each for name, each in head.state_dict().items() if name != "fc.bias"}
    tensors["embed_tokens.weight"] = tiny_target().model.get_input_embeddings().weight.detach()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    folder = folder_of(
        tmp_path / "head", "pytorch_model.bin", tensors, {**LLAMA, **lies, **leftover}
    )
    for target in (None, tiny_target()):
        again = load_head(folder, target=target)
        assert same(again.state_dict(), head.state_dict())
        assert again.design.shape == head.design.shape.__class__(32, 2, 1, 24, 40, 1e-5, 64)
        assert again.window is None


def test_fc_of_eagle_1_may_have_a_bias(tmp_path):
    tensors = {**trained("eagle").state_dict(), "fc.bias": torch.randn(32)}
    head = load_head(folder_of(tmp_path / "head", "model.safetensors", tensors, LLAMA))
    assert torch.equal(head.fc.bias, tensors["fc.bias"])
    assert "bias" not in dict(head.fc.named_parameters())


LAYERS = [
    ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, (0, 3)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, (1, 2)),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3],
      "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, (1, 3)),
    ({}, (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), LAYERS)
def test_feature_layers_are_counted_as_their_place_says(tmp_path, config, expected):
    """At the top: hidden states. Nested: outputs of layers. Nowhere: the field's default."""
    folder = folder_of(
        tmp_path / "head", "model.safetensors", eagle3().state_dict(), {**LLAMA, **config}
    )
    assert load_head(folder, target=tiny_target()).feature_layers == expected
    if not config:
        assert "its number of layers determines which states this head reads" in refusal(folder)


def test_what_eagle_3_leaves_to_the_target(tmp_path):
    head, target = eagle3(vocabulary=FEW), tiny_target()
    tensors = dict(head.state_dict())
    del tensors["lm_head.weight"], tensors["t2d"]
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
    again = load_head(folder, target=target)
    assert torch.equal(again.lm_head.weight, target.unembed_weight()[sorted(FEW)])
    assert torch.equal(again.t2d, head.t2d)
    assert "this head uses its lm_head), got none" in refusal(folder)


def test_maps_that_change_nothing_are_no_draft_vocabulary(tmp_path):
    head = eagle3()
    maps = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64),
            "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}  # fmt: skip
    tensors = {**head.state_dict(), **maps}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
    assert same(load_head(folder).state_dict(), head.state_dict())


def test_norms_are_told_by_names_and_other_switches_by_either_place(tmp_path):
    head = eagle3(fc_norm=True, norm_before_residual=True)
    tensors = renamed(head, "fc_norm.0.", "aux_norm_low.")
    tensors["aux_norm_mid.weight"] = tensors.pop("fc_norm.1.weight")
    nested = {"eagle_config": {"norm_before_residual": True}}
    folder = folder_of(
        tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS, **nested}
    )
    again = load_head(folder)
    assert same(again.state_dict(), head.state_dict())
    assert again.design.fc_norm and again.design.norm_before_residual
    assert not again.design.norm_output and not again.design.norm_before_fc


def test_of_both_norms_the_one_of_all_features_comes_first(tmp_path):
    """As in vLLM and SGLang; no recipe makes such heads."""
    head = eagle3(fc_norm=True, unchecked={"norm_before_fc": True})
    folder = folder_of(
        tmp_path / "head", "model.safetensors", dict(head.state_dict()), {**LLAMA, **HEADLESS}
    )
    again, tensors = load_head(folder), head.state_dict()
    features = torch.randn(1, 3, 2 * 32) * torch.tensor([1.0, 9.0]).repeat_interleave(32)

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{name}.weight"]

    low, high = norm("input_norm", features).split(32, dim=-1)
    parts = torch.cat([norm("fc_norm.0", low), norm("fc_norm.1", high)], dim=-1)
    torch.testing.assert_close(again.fuse(features), parts @ tensors["fc.weight"].T)


def test_zero_biases_are_nothing_and_others_are_refused(tmp_path):
    head, name = eagle3(), "midlayer.self_attn.q_proj.bias"
    for value in (0.0, 0.1):
        tensors = {**head.state_dict(), name: torch.full((32,), value)}
        folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
        if value:
            assert "q_proj.bias: expected none" in refusal(folder)
        else:
            assert same(load_head(folder).state_dict(), head.state_dict())


def test_embeddings_that_are_not_the_targets_are_refused(tmp_path):
    tensors = {**eagle3().state_dict(), "embed_tokens.weight": torch.randn(VOCABULARY, 32)}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
    assert "got other ones in embed_tokens.weight" in refusal(folder, tiny_target())


def test_speculators(tmp_path):
    head = eagle3(norm_before_residual=True, vocabulary=FEW)
    tensors = renamed(head, "midlayer.", "layers.0.")
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, SPECULATORS)
    again = load_head(folder)
    assert same(again.state_dict(), head.state_dict())
    assert again.design.norm_before_residual and open_head(folder).target == ("tiny-llama", None)
    silent = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, silent)
    assert "assumes false and vLLM true" in refusal(folder)
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors,
                       {**SPECULATORS, "speculators_model_type": "mtp"})  # fmt: skip
    assert "expected speculators_model_type: eagle3; got 'mtp'" in refusal(folder)


REFUSED = {
    "no-heads": ({"num_attention_heads": None}, "num_attention_heads in config.json"),
    "wrong-count": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "fc.weight: expected"),
    "mixed": ({"layer_types": ["full_attention", "sliding_attention"]}, "all have a window"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "change with the length"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act: absent, silu, swish; got 'gelu'"),
    "other": ({"architectures": ["MyForCausalLM"]}, "got MyForCausalLM"),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_eagle_heads_that_are_not_read(tmp_path, config, reason):
    said = {**LLAMA, **HEADLESS, **config}
    said = {key: value for key, value in said.items() if value is not None}
    folder = folder_of(tmp_path / "head", "model.safetensors", eagle3().state_dict(), said)
    with pytest.raises(ValueError, match=reason):
        load_head(folder)


def test_a_draft_vocabulary_without_a_map_is_not_whole(tmp_path):
    tensors = dict(eagle3(vocabulary=FEW).state_dict())
    del tensors["d2t"]
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
    assert "which maps the 6 draft tokens to the target's, got none" in refusal(folder)
    tensors["d2t"] = torch.tensor(FEW)
    folder = folder_of(tmp_path / "head", "model.safetensors", tensors, {**LLAMA, **HEADLESS})
    assert "were absolute ids stored?" in refusal(folder)
