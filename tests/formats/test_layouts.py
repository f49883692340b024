"""The promise: a head in a layout that others publish is read as what it is, strictly, whichever
place the layout has for a fact, and is the same head in ours. What changes a head and cannot be
read is refused in one line that says why.

Sources: medusa.md and eagle.md, section 4; configurations of transformers 5.23; llama_eagle3.py and
qwen3_eagle3.py of vLLM 0.33; modeling_speculative.py of TensorRT-LLM; modeling of
deepseek-ai/DeepSpec; speculators 0.9.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulators_block import block_shapes, confidence_shapes, domino_shapes, markov_shapes
from layouts import (
    BASE,
    BLOCK_CONFIG,
    CONVOLUTIONS,
    DEEPSPEC,
    EAGLE4,
    HEADLESS,
    LAYER,
    LLAMA,
    NEMOS_DOMINO,
    PLAIN,
    SELECTOR,
    SHARED,
    SHIFTED,
    SPECFORGES_DOMINO,
    SPECULATORS,
    V01,
    VLLM,
    ZLAB,
    ZLAB2,
    block,
    block_of,
    candidate_head,
    eagle3,
    folder_of,
    head_of,
    kept,
    numbered,
    refusal,
    renamed,
    tensors_of,
)
from tiny_heads import drafts_of
from tiny_targets import VOCABULARY, some_prompts, tiny_target
from torch import Tensor
from trained_heads import DOMINO, FEW, same, trained

from draftheads.heads.base import DraftHead
from draftheads.heads.block import feature_layers, layer_ids
from draftheads.heads.formats.eagle import AUX_LAYERS
from draftheads.heads.formats.hub import HEADS, load_head, open_head, save_head
from draftheads.heads.formats.stored import Stored
from draftheads.heads.formats.table import translated
from draftheads.scripts.convert import converted

GONE = None
"""The value of a key or a tensor that is left out."""


@dataclass(frozen=True)
class Layout:
    """A head, its tensors and config as another project writes them. facts: of the head that is
    read, by attribute; targets: with which it is read, None for without one.
    """

    head: DraftHead
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    file: str = "model.safetensors"
    targets: tuple[Any, ...] = (None,)

    def write(self, path: Path) -> Path:
        tensors = {**(self.tensors or self.head.state_dict())}
        config = {key: value for key, value in self.config.items() if value is not GONE}
        return folder_of(path, self.file, kept(tensors), config)

    def but(
        self, config: dict[str, Any], tensors: dict[str, Tensor | None] | None = None
    ) -> Layout:
        """With other keys and tensors."""
        changed = {**(self.tensors or self.head.state_dict()), **(tensors or {})}
        present = {name: tensor for name, tensor in changed.items() if tensor is not GONE}
        return replace(self, config={**self.config, **config}, tensors=present)


EAGLE3 = {**LLAMA, **HEADLESS}
TARGET = tiny_target()
MATRICES = TARGET.model.get_input_embeddings().weight.detach()


def third(config: dict[str, Any] | None = None, **facts: Any) -> Layout:
    """EAGLE-3 as its authors write it, with these keys of the config."""
    return Layout(eagle3(), {**EAGLE3, **(config or {})}, facts=facts)


def fourth(config: dict[str, Any] | None = None, **facts: Any) -> Layout:
    """A DSpark head with a confidence head."""
    return Layout(block(), {**BLOCK_CONFIG, **(config or {})}, facts=facts, targets=(TARGET,))


def medusa(prefix: str, choices: dict[str, Any], file: str, config: dict[str, Any]) -> Layout:
    """FasterDecoding's module list."""
    head = trained("medusa", **choices)
    tensors = numbered(head, choices.get("layers", 1), prefix)
    facts = {"depth": head.depth, "layers": head.layers}
    return Layout(head, config, tensors, facts, file, (TARGET,))


def of_speculators(config: dict[str, Any] | None = None, **choices: Any) -> Layout:
    head = eagle3(norm_before_residual=True, **choices)
    facts = {"design.norm_before_residual": True}
    tensors = renamed(head, "midlayer.", "layers.0.")
    return Layout(head, {**SPECULATORS, **(config or {})}, tensors, facts)


def default_of_speculators(architecture: str) -> Layout:
    """Qwen3's layer; keys with defaults may be left out."""
    sizes = {"heads": 4, "head_dim": 8, "vocabulary": FEW}
    left_out = ("num_attention_heads", "rms_norm_eps", "rope_theta")
    nested = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
    layer = {key: value for key, value in nested.items() if key not in left_out}
    config = {"architectures": [architecture], "transformer_layer_config": layer}
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "eps": 1e-6}
    facts = {f"design.shape.{name}": value for name, value in shape.items()}
    layout = of_speculators(config, qk_norm=True, **sizes)
    return replace(layout, facts={**layout.facts, **facts, "design.qk_norm": True})


def deepspecs_third(architecture: str) -> Layout:
    """Five features, by the layers whose outputs they are."""
    five = [1, 1, 1, 2, 2]
    head = trained("eagle3", feature_layers=five, intermediate_size=48, qk_norm=True)
    tensors = renamed(head, "midlayer.", "layers.0.") | {"embed_tokens.weight": MATRICES}
    config = {
        **LLAMA, "architectures": [architecture], "model_type": "qwen3", "num_target_layers": 3,
        "target_layer_ids": [0, 0, 0, 1, 1], "ttt_length": 7, "step_loss_decay": 0.8,
        "layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False,
        "draft_num_hidden_layers": 1, "max_window_layers": 36,
    }  # fmt: skip
    return Layout(head, config, tensors, {"feature_layers": tuple(five)}, targets=(TARGET,))


def norms_of_angelslim() -> Layout:
    """Norms are told by their names, other switches by either place."""
    head = eagle3(fc_norm=True, norm_before_residual=True)
    tensors = renamed(head, "fc_norm.0.", "aux_norm_low.")
    tensors["aux_norm_mid.weight"] = tensors.pop("fc_norm.1.weight")
    switches = {"fc_norm": True, "norm_before_residual": True}
    switches |= {"norm_output": False, "norm_before_fc": False}
    facts = {f"design.{name}": value for name, value in switches.items()}
    nested = {"eagle_config": {"norm_before_residual": True}}
    return Layout(head, {**EAGLE3, **nested}, tensors, facts)


def eagle4(ids: list[int] | None) -> Layout:
    """EAGLE-3.1 with a window and a candidate head. ids: of layers, in either way of counting."""
    switches = {"fc_norm": True, "norm_output": True}
    head = eagle3(sliding_window=5, **switches)
    tensors = renamed(head, "midlayer.", "layers.0.") | candidate_head()
    tensors["embed_tokens.weight"] = MATRICES
    facts = {"window": 5, "feature_layers": (1, 2), "architecture": "LlamaForCausalLMEagle3"}
    facts |= {f"design.{name}": value for name, value in switches.items()}
    return Layout(head, {**EAGLE4, AUX_LAYERS: ids}, tensors, facts, targets=(TARGET,))


def sizes_of_eagle() -> Layout:
    """Those of its tensors, whatever the config says."""
    head = trained("eagle", heads=2, kv_heads=1, head_dim=24, intermediate_size=40, layers=2)
    lies = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "bias": True}
    leftover = {"sliding_window": 7, "use_sliding_window": False}
    tensors = {name: each for name, each in head.state_dict().items() if name != "fc.bias"}
    tensors["embed_tokens.weight"] = MATRICES
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    shape = head.design.shape.__class__(32, 2, 1, 24, 40, 1e-5, 64)
    facts = {"design.shape": shape, "window": None}
    config = {**LLAMA, **lies, **leftover}
    return Layout(head, config, tensors, facts, "pytorch_model.bin", (None, TARGET))


def shared_medusa(name: str) -> Layout:
    """vLLM's, with the target's matrix under a name of its own."""
    head = trained("medusa", lm_head="shared")
    tensors = {**head.state_dict(), name: TARGET.unembed_weight().detach().clone()}
    config = {**VLLM, "original_lm_head": True}
    return Layout(head, config, tensors, {"own_lm_head": False}, targets=(None, TARGET))


def unused_maps() -> Layout:
    maps = {
        "d2t": torch.zeros(VOCABULARY, dtype=torch.int64),
        "t2d": torch.ones(VOCABULARY, dtype=torch.bool),
    }
    return third().but({}, maps)


def without_a_bias() -> Layout:
    """A confidence head, whose bias is then zero."""
    layout = fourth()
    torch.nn.init.zeros_(layout.head.confidence_head["proj"].bias)
    return layout.but({}, {"confidence_head.proj.bias": GONE})


def deepspecs_dflash() -> Layout:
    """A DSpark head without its heads: it predicts from the anchor's slot, though it is called
    DFlash.
    """
    less = {"markov_rank": 0, "markov_head_type": GONE, "enable_confidence_head": False}
    config = {**BLOCK_CONFIG, **less, "architectures": ["DFlashQwen3DSparkModel"]}
    facts = {"design.sample_from_anchor": True, "architecture": "Qwen3DSparkModel"}
    head = block(conditioning="none", confidence=False)
    return Layout(head, config, facts=facts, targets=(TARGET,))


CHOOSES = {"candidates": 5, "rank": 6}
SPECFORGE = {
    **LAYER, "architectures": ["DSparkDraftModel"], "block_size": 5, "num_target_layers": 3,
    "dflash_config": {
        **SHARED, "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 6
    },
}  # fmt: skip
DSPARK = {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 5,
    "transformer_layer_config": LAYER, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 7,
    "draft_vocab_size": VOCABULARY, "sample_from_anchor": True, "markov_rank": 6,
    "speculators_config": {"verifier": {"name_or_path": "tiny-llama", "architectures": []}},
}  # fmt: skip
DFLASH = {
    **{key: value for key, value in DSPARK.items() if key != "sample_from_anchor"},
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
SWA = {**SHARED, "use_swa": True, "swa_window_size": 6}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
QUERY = {"mask_token_id": 7, "target_layer_ids": [0, 1], "query_zero_predicts_next": True}
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "nemo": (PLAIN, {**ZLAB, "architectures": ["Qwen3DFlashDraftModel"]}),
    "domino": (DOMINO, SPECFORGES_DOMINO),
    "domino-nemo": ({**DOMINO, "sample_from_anchor": False}, NEMOS_DOMINO),
    "speculators": ({}, DSPARK),
    "speculators-dflash": (PLAIN, DFLASH),
    "z-lab-2": ({**PLAIN, "design": {**CHOOSES, "convolutions": True}}, ZLAB2),
    "z-lab-2-inside": (
        {**PLAIN, "design": {**CHOOSES, "convolutions": True}},
        {
            **ZLAB2, "block_size": None,
            "dflash_config": {**ZLAB2["dflash_config"], "block_size": 5, "is_causal": False},
        },
    ),
    "nemo-2": (
        {**PLAIN, "design": {**CHOOSES, "convolutions": True}},
        {**ZLAB2, "architectures": ["Qwen3DFlash2DraftModel"]},
    ),
    "selector": (
        {**PLAIN, "design": CHOOSES}, {**ZLAB2, "dflash_config": {**SHARED, **SELECTOR}}
    ),
    "convolutions": (
        {**PLAIN, "design": {"convolutions": True}},
        {**ZLAB, "dflash_config": {**SHARED, **CONVOLUTIONS, "selector_rank": 0}},
    ),
    "speculators-dflash2": (
        {**PLAIN, "design": {**CHOOSES, "convolutions": True}},
        {
            **DFLASH, **CONVOLUTIONS, **SELECTOR, "speculators_model_type": "dflash2",
            "architectures": ["DFlash2DraftModel"],
        },
    ),
}  # fmt: skip


def published_block(name: str, prefix: str) -> Layout:
    choices, config = BLOCKS[name]
    head = head_of(choices)
    shape = head.design.shape.__class__(**{**vars(head.design.shape), "eps": 1e-6})
    design = {**vars(head.design), "shape": shape}
    facts = {f"design.{key}": value for key, value in design.items() if key != "rope"}
    facts |= {"rope.theta": head.rope.theta, "rope.scaling": head.rope.scaling}
    return Layout(head, config, tensors_of(head, prefix), facts, targets=(TARGET,))


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
OLD = {"rope_type": "yarn", **YARN}
FULL = {"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}}
SAID = {"sliding_window": 512, "use_sliding_window": True}
AUX = "eagle_aux_hidden_state_layer_ids"
PT, SAFE, BIN = "medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"
OWN = {"lm_head": "own", "embeddings": "own"}
LLAMA4 = {"model_type": "llama4_text", "use_qk_norm": True, "no_rope_layers": [1, 1, 1, 0]}

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "medusa v0.1": lambda: medusa("", {"depth": 5}, PT, V01),
    "medusa v0.1 deep": lambda: medusa("", {"depth": 3, "layers": 2}, PT, V01),
    "medusa pull request 1": lambda: medusa("", {"depth": 5}, SAFE, V01),
    "medusa version 2": lambda: medusa("", {"lm_head": "shared"}, SAFE, {**V01, "version": "2"}),
    "medusa model-optimizer": lambda: medusa(
        "medusa_heads.", {}, "model.safetensors", {**LLAMA, **BASE}
    ),
    **{
        f"medusa vllm {name}": lambda name=name: shared_medusa(name)
        for name in ("lm_head.weight", "lm_heads.0.weight")
    },
    "medusa vllm with an unused map": lambda: Layout(
        trained("medusa", depth=2), VLLM, facts={"token_map": None}
    ).but({}, {"token_map": torch.tensor(FEW)}),
    "eagle sizes": sizes_of_eagle,
    **{
        f"eagle3 {prefix} {file}": lambda prefix=prefix, file=file: Layout(
            head := eagle3(vocabulary=FEW), EAGLE3, renamed(head, "midlayer.", prefix),
            {"vocab_size": VOCABULARY, "feature_layers": (1, 2), "rope.theta": 1e4,
             "rope.scaling": None}, file,
        )
        for file in (BIN, "model.safetensors")
        for prefix in ("midlayer.", "layers.0.", "model.layers.0.")
    },
    # at the top: hidden states; nested: outputs of layers; nowhere: the field's default
    "eagle3 layers at the top": lambda: third({AUX: [0, 3]}, feature_layers=(0, 3)),
    "eagle3 layers nested": lambda: third(
        {AUX: GONE, "eagle_config": {AUX: [0, 1]}}, feature_layers=(1, 2)
    ),
    "eagle3 layers in both": lambda: third(
        {AUX: [1, 3], "eagle_config": {AUX: [0, 1]}}, feature_layers=(1, 3)
    ),
    "eagle3 layers nowhere": lambda: replace(
        third({AUX: GONE}, feature_layers=(1, 2)), targets=(TARGET,)
    ),
    "eagle3 maps that change nothing": unused_maps,
    "eagle3 norms": norms_of_angelslim,
    "eagle3 zero biases": lambda: third().but(
        {}, {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}
    ),
    "eagle3 norm_output": lambda: third(
        {"eagle_config": {"return_hidden_post_norm": True}}, **{"design.norm_output": True}
    ),
    # they have no weights, and engines make Llama's layer of such a config
    "eagle3 norms of llama 4": lambda: third(LLAMA4, **{"design.qk_norm": False}),
    "eagle3 no epsilon": lambda: third({"rms_norm_eps": GONE}, **{"design.shape.eps": 1e-6}),
    **{
        f"eagle3 window {name}": lambda config=config, window=window: third(config, window=window)
        for name, config, window in (
            ("said", {**SAID, "layer_types": ["sliding_attention"]}, 512),
            ("of no layer", {**SAID, "layer_types": ["full_attention"]}, None),
            ("not used", {"sliding_window": 512, "use_sliding_window": False}, None),
            ("by layers", {"sliding_window": 512, "layer_types": ["sliding_attention"]}, 512),
            ("left over from a target", {"sliding_window": 512}, None),
        )
    },
    # with the precedence of transformers
    **{
        f"eagle3 rope {name}": lambda config=config, theta=theta, kind=kind: third(
            config, **{"rope.theta": theta, "rope.kind": kind}
        )
        for name, config, theta, kind in (
            ("new", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
            ("both", {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
            ("inside", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
            ("old name", {"rope_parameters": {"type": "yarn", **YARN}}, 1e4, "yarn"),
            ("beside", {"rope_theta": 5e5, "rope_scaling": OLD}, 5e5, "yarn"),
            ("of a type of layers", {"rope_parameters": FULL}, 5e5, "yarn"),
        )
    },
    "eagle3 speculators": lambda: of_speculators(vocabulary=FEW),
    # Eagle3DraftModel is what its save_pretrained writes
    **{
        f"eagle3 {name}": lambda name=name: default_of_speculators(name)
        for name in ("Eagle3DraftModel", "Eagle3Speculator")
    },
    **{
        f"eagle3 {name}": lambda name=name: deepspecs_third(name)
        for name in ("Qwen3Eagle3Model", "Eagle3Qwen3ForCausalLM")
    },
    # hidden states, outputs of layers, and none
    **{f"eagle4 {ids}": lambda ids=ids: eagle4(ids) for ids in ([1, 2], [0, 1], GONE)},
    **{
        f"block {name} {prefix}": lambda name=name, prefix=prefix: published_block(name, prefix)
        for name in BLOCKS
        for prefix in ("", "model.")
    },
    "block of its own matrices": lambda: Layout(
        head_of(OWN), DEEPSPEC, targets=(None, TARGET),
        facts={"design.own_lm_head": True, "design.own_embeddings": True},
    ),
    **{
        f"block vocabulary without {missing}": lambda missing=missing: Layout(
            head_of({"vocabulary": FEW}), DEEPSPEC
        ).but({}, {missing: GONE})
        for missing in ("", "t2d")  # vLLM needs no t2d
    },
    "block confidence without a bias": without_a_bias,
    "block deepspec dflash": deepspecs_dflash,
    "block anchor": lambda: fourth(
        {"architectures": ["DFlashDraftModel"], "dflash_config": QUERY},
        **{"design.sample_from_anchor": True},
    ),
}  # fmt: skip


def fact(head: DraftHead, name: str) -> Any:
    if name == "rope.kind":
        scaling = head.rope.scaling or {}
        return scaling.get("rope_type") or scaling.get("type")
    return attrgetter(name)(head)


@pytest.mark.mend("DFlash heads of NeMo Automodel were refused by the name of their class")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_what_it_is_and_becomes_ours(tmp_path, name):
    layout = LAYOUTS[name]()
    folder = layout.write(tmp_path / "theirs")
    for target in layout.targets:
        head = load_head(folder, target=target)
        assert same(head.state_dict(), layout.head.state_dict())
        assert {name: fact(head, name) for name in layout.facts} == layout.facts
    ours = converted(folder, tmp_path / "ours", "draftheads", target)
    again = load_head(ours, target=target)
    assert same(again.state_dict(), head.state_dict())
    assert (
        vars(getattr(again, "design", again)).keys() == vars(getattr(head, "design", head)).keys()
    )
    assert {name: fact(again, name) for name in layout.facts} == layout.facts
    if "speculators_config" in layout.config or "base_model_name_or_path" in layout.config:
        assert open_head(folder).target == ("tiny-llama", None)


# what is refused

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
    "rope_parameters": {"partial_rotary_factor": 0.25},
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    "kv_lora_rank": 512,
}
"""What our layers do not have."""
THIRD_FIELDS = {
    **FIELDS,
    "target_hidden_size": 64,
    "eagle_config": {"eh_proj_before_attn": True},
}
FOREIGN = {
    "PEagleDraftModel": ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE, which drafts all"),
    "peagle": ({"speculators_model_type": "peagle"}, "P-EAGLE, which drafts all"),
    "parallel": ({"parallel_drafting": True}, "P-EAGLE, which drafts all"),
    "lilicorr": ({"dflash_config": {"projector_type": "lilicorr"}}, "LiLiCorr, whose logits"),
    "Gemma4Eagle3Model": ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma 4's layers, which our"),
    "Gemma4DSparkModel": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4's layers, which our"),
}
"""Kinds that we do not have, by their names in either layout."""
NOT_OURS = "expected an EAGLE-3, DSpark or DFlash head, got "
ANOTHER = "these are not supported, train or get another head"
WINDOW = "expected layer_types in config.json, got use_sliding_window without them"
ADD_TYPES = 'add "layer_types": ["sliding_attention"] for layers with the window of 512'
WEIGHT = "layers.0.self_attn.q_norm.weight"
CONV = "layers.0.attention_conv.{}"
DISAGREES = {**SAID, "layer_types": ["sliding_attention"], "use_sliding_window": False}
CHUNKED = {"layer_types": ["chunked_attention"], "attention_chunk_size": 8192}
NEXT = {"transformer_layer_config": {**LLAMA, "model_type": "qwen3_next"}}
QBIAS = {"midlayer.self_attn.q_proj.bias": torch.full((32,), 0.1)}

BASES: dict[str, Callable[[], Layout]] = {
    "medusa": lambda: Layout(trained("medusa"), VLLM),
    "medusa of a module list": lambda: medusa("", {"lm_head": "shared"}, PT, V01),
    "eagle3": third,
    "eagle3 with few tokens": lambda: Layout(eagle3(vocabulary=FEW), EAGLE3),
    "eagle4": lambda: eagle4([1, 2]),
    "speculators": of_speculators,
    "block": lambda: Layout(head_of({}), DEEPSPEC),
    "block with few tokens": lambda: Layout(head_of({"vocabulary": FEW}), DEEPSPEC),
    "dspark": fourth,
    "domino": lambda: Layout(head_of(DOMINO), SPECFORGES_DOMINO),
    "block of speculators": lambda: published_block("speculators", ""),
    "dflash of speculators": lambda: published_block("speculators-dflash", ""),
    "dflash 2": lambda: published_block("z-lab-2", ""),
}
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("medusa", {"truncated_vocab_size": 6}, "expected truncated_vocab_size: absent, 19; got 6"),
    ("medusa", {"logit_scale": 0.5}, "expected logit_scale: absent, 1.0; got 0.5"),
    ("medusa of a module list", {}, "pass it: load_head(..., target=target) or --target"),
    ("eagle3", {AUX: GONE}, "its number of layers determines which states this head reads"),
    ("eagle3", {"num_attention_heads": GONE}, "num_attention_heads in config.json"),
    ("eagle3", {AUX: [1, 2, 3]}, "fc.weight: expected"),
    ("eagle3", {"layer_types": ["full_attention", "sliding_attention"]}, "all have a window"),
    ("eagle3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "change with the length"),
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act: absent, silu, swish; got 'gelu'"),
    ("eagle3", {"architectures": ["MyForCausalLM"]}, "got MyForCausalLM"),
    ("eagle3", DISAGREES, "expected use_sliding_window and layer_types to agree"),
    ("eagle3", CHUNKED, "layer_types: full_attention, sliding_attention; got 'chunked_attention'"),
    ("eagle3", {**LLAMA4, "model_type": "llama"}, "expected use_qk_norm: absent, False; got True"),
    ("eagle3", {"fc_norm": True}, "fc_norm.0.weight: expected numbers (32,), got none"),
    ("eagle3", {"norm_before_fc": True}, "input_norm.weight: expected numbers (64,), got none"),
    ("eagle4", {"draft_tree_cost": 1}, "documents for EAGLE-4, got draft_tree_cost; remove"),
    ("eagle4", {"norm_output": GONE}, "expected norm_output: True; got None"),
    ("eagle4", {"fc_norm": False}, "expected fc_norm: True; got False"),
    ("eagle4", {"sliding_window": GONE}, "expected sliding_window in config.json, got none"),
    ("eagle4", {"num_hidden_layers": 2}, "expected num_hidden_layers: 1; got 2"),
    ("eagle4", {"draft_vocab_size": 6}, "expected draft_vocab_size: absent, 19; got 6"),
    ("eagle4", {AUX: [0, 2]}, "to be [1, 2], or [0, 1] if they count outputs of layers, got [0"),
    ("speculators", {"norm_before_residual": GONE}, "assumes false and vLLM true"),
    (
        "speculators",
        {"speculators_model_type": "mtp"},
        "expected speculators_model_type: eagle3; got 'mtp'",
    ),
    ("speculators", NEXT, "expected layers of model_type llama or qwen3, got 'qwen3_next'"),
    *(
        (base, {}, "config.json does not say how many layers it has), got none")
        for base in ("block of speculators", "dflash of speculators")
    ),
    *((base, SAID, said) for base in ("eagle3", "dspark") for said in (WINDOW, ADD_TYPES)),
    *(
        (base, config, said)
        for base in ("eagle3", "dspark")
        for config, reason in FOREIGN.values()
        for said in (NOT_OURS, reason, ANOTHER)
    ),
    *(
        (base, {key: value}, f"expected {inner}: ")
        for base, fields in (("eagle3", THIRD_FIELDS), ("dspark", FIELDS))
        for key, value in fields.items()
        for inner in [
            [*value][-1] if isinstance(value, dict) and key != "quantization_config" else key
        ]
    ),
    # the default of NeMo is 0, with which it corrects the first prediction, too; SGLang has 1 alone
    *(
        ("domino", {"dflash_config": {**SHIFTED, key: value}}, said)
        for key, value, said in (
            ("pure_draft_prefix_len", GONE, "expected pure_draft_prefix_len in config.json, got"),
            ("pure_draft_prefix_len", 0, "expected pure_draft_prefix_len: 1; got 0"),
            ("shift_label", GONE, "expected shift_label in config.json, got none"),
            ("shift_label", "yes", "expected shift_label: True, False; got 'yes'"),
            ("projector_type", "causal_v5", "dflash, dspark, domino; got 'causal_v5'"),
            ("projector_type", "dflash", "prefix_gru.weight_hh_l0: expected none"),
        )
    ),
    (
        "block",
        {"projector_type": "domino", **SHIFTED},
        "a matrix prefix_gru.weight_hh_l0, got none",
    ),
    ("block", {"rope_parameters": {"mrope_section": [1]}}, "expected mrope_section: absent"),
    ("block", {"model_type": "deepseek_v4"}, "expected model_type: absent, qwen3, dflash"),
    ("block", {"dflash_config": {"conv_kernel_size": 2}}, "attention_conv.base_kernel: expected"),
    ("block", {"dflash_config": {"selector_rank": 256}}, "expected selector_top_k in config.json"),
    *(
        ("dflash 2", {"dflash_config": {**ZLAB2["dflash_config"], **keys}}, said)
        for keys, said in (
            ({"selector_rank": 7}, "predecessor_codebook: expected numbers (19, 7), got"),
            ({"selector_rank": 0}, "predecessor_codebook: expected none, got numbers (19, 6)"),
            (
                {"selector_top_k": 20},
                "of at most all 19 tokens of the target, got a selector_top_k of 20",
            ),
            ({"conv_kernel_size": 0}, "base_kernel: expected none, got numbers (2, 2, 32)"),
            ({"output_multiplier": 2.0}, "expected output_multiplier: absent, 1, 1.0; got 2.0"),
            ({"projector_type": "domino"}, "expected shift_label, pure_draft_prefix_len in config"),
        )
    ),
    ("block", {"dflash_config": {"attention_sink_bias": True}}, "expected attention_sink_bias"),
    ("block", {"hidden_act": "gelu"}, "expected hidden_act: absent, silu, swish; got 'gelu'"),
    ("block", {"is_causal": True}, "whose slots see each other both ways, got causal"),
    ("block", {"dflash_config": {"causal": True}}, "see each other both ways, got causal"),
    ("block", SLIDING, "or a sliding window that does not say otherwise"),
    (
        "block",
        {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]},
        "all have a window",
    ),
    ("block", {**SLIDING, "sliding_window": GONE, "is_causal": False}, "sliding_window in"),
    ("block", {"rope_theta": GONE}, "expected rope_theta in config.json, got none"),
    ("block", {"mask_token_id": GONE}, "expected mask_token_id in config.json, got none"),
    ("block", {"mask_token_id": VOCABULARY}, "a mask token from 0 to 18, got 19"),
    ("block", {"target_layer_ids": GONE}, "expected target_layer_ids in config.json"),
    ("block", {"target_layer_ids": [0, 1, 2]}, "fc.weight: expected numbers (32, 96)"),
    ("block", {"block_size": GONE}, "expected block_size in config.json, got none"),
    (
        "block",
        {
            "speculators_model_type": "dspark",
            "sample_from_anchor": False,
            "markov_head_type": "rnn",
        },
        "expected an rnn that begins after the anchor's slot",
    ),
    (
        "block",
        {"speculators_model_type": "dspark"},
        "speculators library assumes true and vLLM false",
    ),
]
"""Layout, keys of its config, a part of the line."""
TENSORS: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("eagle3", QBIAS, "q_proj.bias: expected none"),
    (
        "eagle3",
        {"embed_tokens.weight": torch.randn(VOCABULARY, 32)},
        "got other ones in embed_tokens.weight",
    ),
    (
        "eagle3 with few tokens",
        {"d2t": GONE},
        "which maps the 6 draft tokens to the target's, got none",
    ),
    ("eagle3 with few tokens", {"d2t": torch.tensor(FEW)}, "were absolute ids stored?"),
    ("eagle4", {"lm_head.weight": GONE}, "expected a matrix lm_head.weight, got none"),
    ("eagle4", {"scorer.weight": torch.ones(1)}, "scorer.weight: expected none"),
    # engines take d2t and its lm_head together
    *(
        ("block with few tokens", {name: GONE}, "got none; the file is incomplete")
        for name in ("d2t", "lm_head.weight")
    ),
    ("dflash 2", {CONV.format("base_kernel"): torch.zeros(2, 3, 32)}, "(2, 2, 32), got"),
    ("dflash 2", {CONV.format("kernel_projection.weight"): torch.zeros(16, 32)}, "(8, 32), got"),
    ("block", {WEIGHT: GONE}, "expected norms of queries and keys, as Qwen3 has"),
    ("domino", {"embed_proj.0.weight": GONE}, "expected a matrix embed_proj.0.weight, got none"),
    ("domino", {"prefix_gru.bias_ih_l0": torch.zeros(72)}, "prefix_gru.bias_ih_l0: expected none"),
]
"""Layout, tensors, a part of the line."""
WITH_TARGET = {"block", "block with few tokens", "dflash 2", "eagle4"}


@pytest.mark.mend("P-EAGLE")
@pytest.mark.mend("norms that a config has and the file lacks were left out")
@pytest.mark.mend("a window without layer_types")
@pytest.mark.mend("fields of configs that change the layer")
@pytest.mark.parametrize(
    ("base", "config", "tensors", "said"),
    [
        *((base, config, {}, said) for base, config, said in CONFIGS),
        *((base, {}, tensors, said) for base, tensors, said in TENSORS),
    ],
)
def test_what_is_not_read_is_refused_in_one_line(tmp_path, base, config, tensors, said):
    folder = BASES[base]().but(config, tensors).write(tmp_path / "head")
    is_with = base in WITH_TARGET or "embed_tokens.weight" in tensors
    assert said in refusal(folder, TARGET if is_with else None)


def test_every_name_of_medusa_must_be_there_and_no_other(tmp_path):
    whole = medusa("", {"depth": 3}, PT, V01)
    for name in whole.tensors:
        message = refusal(whole.but({}, {name: GONE}).write(tmp_path / "head"))
        is_named = message.count(": expected") == 1 and "got none" in message
        assert is_named or "expected none" in message
    for name in ("0.0.linear.scale", "lm_head.weight"):
        message = refusal(whole.but({}, {name: torch.ones(1)}).write(tmp_path / "head"))
        assert "expected none, got" in message or "second one" in message


# what no row says


@pytest.mark.parametrize("parts", [1, 2])
def test_heads_in_one_folder_with_their_target(tmp_path, parts):
    """Medusa v1.0: a backbone with heads, perhaps in several files of which some hold no head."""
    head = trained("medusa", depth=3)
    inside = numbered(head, 1, "medusa_head.")
    backbone = dict(TARGET.model.state_dict())
    config = {**LLAMA, "num_hidden_layers": 3, "medusa_num_heads": 3, "medusa_num_layers": 1}
    file = "model.safetensors" if parts == 1 else "model-00002-of-00002.safetensors"
    folder = folder_of(tmp_path / "whole", file, {**inside, "extra": torch.ones(1)}, config)
    others = dict.fromkeys(backbone, "model-00001-of-00002.safetensors")
    if parts == 2:  # the first part is not even there
        index = {"metadata": {}, "weight_map": dict.fromkeys(inside, file) | others}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
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
    zeros = {name: tensors.get(name, torch.zeros(32)) for name in head.state_dict()}
    assert same(again.state_dict(), zeros) and again.depth == 3


def test_fc_of_eagle_1_may_have_a_bias(tmp_path):
    tensors = {**trained("eagle").state_dict(), "fc.bias": torch.randn(32)}
    head = load_head(folder_of(tmp_path / "head", "model.safetensors", tensors, LLAMA))
    assert torch.equal(head.fc.bias, tensors["fc.bias"])
    assert "bias" not in dict(head.fc.named_parameters())


def test_what_eagle_3_leaves_to_the_target(tmp_path):
    layout = Layout(eagle3(vocabulary=FEW), EAGLE3)
    folder = layout.but({}, {"lm_head.weight": GONE, "t2d": GONE}).write(tmp_path / "head")
    again = load_head(folder, target=TARGET)
    assert torch.equal(again.lm_head.weight, TARGET.unembed_weight()[sorted(FEW)])
    assert torch.equal(again.t2d, layout.head.t2d)
    assert "this head uses its lm_head), got none" in refusal(folder)


def test_of_both_norms_the_one_of_all_features_comes_first(tmp_path):
    """As in vLLM and SGLang; no recipe makes such heads."""
    head = eagle3(fc_norm=True, unchecked={"norm_before_fc": True})
    again, tensors = load_head(Layout(head, EAGLE3).write(tmp_path / "head")), head.state_dict()
    features = torch.randn(1, 3, 2 * 32) * torch.tensor([1.0, 9.0]).repeat_interleave(32)

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{name}.weight"]

    low, high = norm("input_norm", features).split(32, dim=-1)
    parts = torch.cat([norm("fc_norm.0", low), norm("fc_norm.1", high)], dim=-1)
    torch.testing.assert_close(again.fuse(features), parts @ tensors["fc.weight"].T)


@pytest.mark.parametrize("architecture", ["Qwen3Eagle3Model", "Eagle3Qwen3ForCausalLM"])
def test_a_head_of_another_layout_drafts_the_same(tmp_path, architecture):
    layout, prompts = deepspecs_third(architecture), some_prompts(6)
    again = load_head(layout.write(tmp_path / "head"), target=TARGET)
    trees = [drafts_of(head, TARGET, prompts, 2, layout.head.tree) for head in (again, layout.head)]
    assert trees[0] == trees[1]


def test_one_base_of_rope_is_written():
    """transformers, and so engines, would take one in the scaling before the one beside it."""
    head = eagle3(rope_scaling=LINEAR)
    assert (head.rope.theta, head.config()["rope_theta"]) == (500.0, 500.0)
    assert "rope_theta" not in head.config()["rope_scaling"]
    assert eagle3(rope_scaling=LINEAR, rope_theta=700.0).config()["rope_theta"] == 700.0


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_rope_of_a_part_of_each_head_is_refused_in_a_recipe_too(kind):
    scaling = {"rope_type": kind, **YARN, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="expected RoPE that turns whole heads, got a partial"):
        eagle3(rope_scaling=scaling)


def test_a_scaling_is_read_without_a_warning(tmp_path, caplog):
    """Of another context than the head's, which has none of its own."""
    config = {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 40.0}}
    head = load_head(third(config).write(tmp_path / "head"))
    assert head.rope.scaling["rope_type"] == "yarn"
    assert not [each.message for each in caplog.records if "rope" in each.message.lower()]


@pytest.mark.mend("EAGLE-3 heads of the last state alone were called incomplete")
def test_an_eagle3_head_may_read_the_last_state_alone(tmp_path):
    """As a published one for gpt-oss, whose file has no matrix fc; it was called incomplete."""
    head = eagle3()
    head.fc = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.eye_(head.fc.weight)
    head.feature_layers = (-1,)
    said = {"eagle_config": {"use_aux_hidden_state": False, "layer_ids": [], AUX_LAYERS: []}}
    folder = Layout(head, {**LLAMA, **said}).but({}, {"fc.weight": GONE}).write(tmp_path / "head")
    prompts = some_prompts(9, 14)
    expected = drafts_of(head, TARGET, prompts, 8, head.tree)
    loaded = load_head(folder, target=TARGET)
    assert drafts_of(loaded, TARGET, prompts, 8, head.tree) == expected
    save_head(loaded, tmp_path / "ours", target=TARGET)
    ours = load_head(tmp_path / "ours", target=TARGET)
    assert drafts_of(ours, TARGET, prompts, 8, head.tree) == expected
    with pytest.raises(ValueError, match="the last state as a feature"):
        converted(tmp_path / "ours", tmp_path / "vllm", "vllm", TARGET)


def test_ids_of_layers_are_one_less_than_indices_into_the_hidden_states(tmp_path):
    assert layer_ids([0, 2, 36]) == [-1, 1, 35] and feature_layers([-1, 1, 35]) == (0, 2, 36)
    said = {}
    for kind, to in (("eagle3", "vllm"), ("block", "vllm"), ("block", "speculators")):
        head = trained("eagle3", feature_layers=[1, 2]) if kind == "eagle3" else head_of({})
        ours = save_head(head, tmp_path / f"{kind}-{to}", target=TARGET)
        theirs = converted(ours, tmp_path / f"{kind}-for-{to}", to, TARGET)
        said[kind, to] = json.loads((theirs / "config.json").read_text())
    assert said["eagle3", "vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert said["block", "vllm"]["target_layer_ids"] == [0, 1]
    assert said["block", "speculators"]["aux_hidden_state_layer_ids"] == [1, 2]


@pytest.mark.mend("heads of others on targets that scale their embeddings")
def test_embeddings_are_shared_only_where_the_target_scales_them_the_same_way(tmp_path):
    """Else a head would read rows that are sqrt(D) times too large or too small, in silence."""
    head, name = block(), "embed_tokens.weight"
    for target, is_scaled in ((TARGET, False), (tiny_target("gemma3-window"), True)):
        rows_VD = target.model.get_input_embeddings().weight.detach().clone()
        folder = block_of(tmp_path, {**head.state_dict(), name: rows_VD})
        assert load_head(folder, target=target).design.own_embeddings == is_scaled


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
    "Huang2020/Qwen3-8B-Domino-b16": (
        {
            **QWEN3_8B, "architectures": ["DFlashDraftModel"], "block_size": 16,
            "dflash_config": {**SHIFTED, **IDS, "emb_dim": 256, "gru_hidden_dim": 1024},
        },
        (True, 16, "domino", 256, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_load_by_name(name):
    config, expected = PUBLISHED[name]
    shapes = block_shapes(config, 5)
    if "markov_rank" in config:
        shapes |= markov_shapes(config, 256) | confidence_shapes(config)
        shapes |= {f"{each}.weight": (151936, 4096) for each in ("embed_tokens", "lm_head")}
    if "gru_hidden_dim" in config.get("dflash_config", {}):
        shapes |= domino_shapes(config, config["dflash_config"])
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
    assert (design.sample_from_anchor, head.depth, *found) == expected
    assert head.feature_layers == (2, 10, 18, 26, 34)
    assert (head.rope.theta, design.mask_token, design.layers) == (1e6, 151669, 5)
    assert not design.own_lm_head and not design.own_embeddings
