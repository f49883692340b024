"""The promise: every draft model whose config is public is read as what it is, or refused with the
reason.

The configs are those of AngelSlim, EAGLE, GRIFFIN, HASS, Model-Optimizer, SpecForge, TorchSpec and
a Medusa repository; their tensors are made here, as large as they say, but without memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulators_block import block_shapes, confidence_shapes, domino_shapes, markov_shapes

from draftheads.heads.formats.block import flat
from draftheads.heads.formats.hub import HEADS
from draftheads.heads.formats.stored import Stored
from draftheads.heads.formats.table import translated
from draftheads.heads.tensors import differences

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "draft-configs"
FILES = sorted(FOLDER.rglob("*.json"))
TARGET: Any = SimpleNamespace(layers=32, hidden_size=3072, vocab_size=256000, name="their target")

REFUSED = {
    "qwen3.6-27b-dflash": "expected layers that all have a window or all have none",
    "dflash_draft_config": "expected block_size in config.json",
    "peagle": "got 'PEagleDraftModel': P-EAGLE, which drafts all tokens in one pass",
    "_mla.": "expected kv_lora_rank: absent",
    "mrope": "expected mrope_section: absent",
    "qwen2-5-vl-7b": "expected mrope_section: absent",
    "qwen2.5-vl-32b": "expected mrope_section: absent",
    "hunyuan-": "expected use_qk_norm: absent, False; got True",
    "GRIFFIN/train__qwen2_7b": "expected qkv_bias: absent, False",
    "cosyvoice3": "got CosyVoice3Eagle3LlamaForCausalLM",
    "ds_config": "expected a head in one of the layouts",
    "CR2_eagle_config": "expected a head in one of the layouts",
}
"""Part of a path -> part of the reason."""
COUNTS = {"medusa": 1, "eagle": 16, "eagle3": 43, "block": 16, "refused": 21}


def layer(config: dict[str, Any], wide: int) -> dict[str, tuple[int, ...]]:
    """Of a Llama layer, as published."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config.get("attention_head_dim") or width // heads
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    return {
        "self_attn.q_proj.weight": (q, wide),
        "self_attn.k_proj.weight": (kv, wide),
        "self_attn.v_proj.weight": (kv, wide),
        "self_attn.o_proj.weight": (width, q),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "post_attention_layernorm.weight": (width,),
    }


def published(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that a head of this config has: of EAGLE-3 if its vocabulary is reduced or its
    architecture says so, else of EAGLE-1.
    """
    if "medusa_num_heads" in config:
        count, width = config["medusa_num_heads"], TARGET.hidden_size
        shapes = {f"{k}.0.linear.weight": (width, width) for k in range(count)}
        shapes |= {f"{k}.0.linear.bias": (width,) for k in range(count)}
        shapes |= {f"{k}.1.weight": (TARGET.vocab_size, width) for k in range(count)}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if "hidden_size" not in config:
        return {}
    if said := flat(config).get("target_layer_ids"):
        shapes = block_shapes(config, len(said))
        if "markov_rank" in flat(config):
            shapes |= markov_shapes(config, flat(config)["markov_rank"])
            shapes |= confidence_shapes(flat(config))
        if flat(config).get("projector_type") == "domino":
            shapes |= domino_shapes(config, flat(config))
        return {name: torch.ones(()).expand(shape) for name, shape in shapes.items()}
    width, vocab = config["hidden_size"], config["vocab_size"]
    draft = config.get("draft_vocab_size") or vocab
    if draft == vocab and "Eagle3" not in config["architectures"][0]:
        shapes = {f"layers.0.{name}": shape for name, shape in layer(config, width).items()}
        shapes |= {"fc.weight": (width, 2 * width), "embed_tokens.weight": (vocab, width)}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    shapes = {f"midlayer.{name}": shape for name, shape in layer(config, 2 * width).items()}
    shapes |= {f"midlayer.{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm")}
    shapes |= {"fc.weight": (width, 3 * width), "norm.weight": (width,)}
    shapes["lm_head.weight"] = (draft, width)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(3)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    known = torch.zeros(vocab, dtype=torch.bool)
    known[:draft] = True
    return tensors | {"d2t": torch.zeros(draft, dtype=torch.int64), "t2d": known}


def read(path: Path) -> str:
    """The kind, once the head has been made and its shapes agree; or the reason why not."""
    config = json.loads(path.read_text())
    stored = Stored(config, published(config))
    is_third = any("hidden_norm" in name for name in stored.tensors)
    try:
        ours = translated(stored, TARGET if is_third else None)
    except ValueError as error:
        return str(error)
    with torch.device("meta"):
        head = HEADS[ours.facts.kind].from_config(ours.config, ours.tensors)
    assert not differences(head.state_dict(), ours.tensors)
    return head.kind


@pytest.mark.skipif(not FILES, reason=f"no configs at {FOLDER}")
def test_every_public_config_is_read_or_refused_with_the_reason():
    counts = dict.fromkeys(COUNTS, 0)
    for path in FILES:
        name, result = str(path.relative_to(FOLDER)), read(path)
        expected = next((why for part, why in REFUSED.items() if part in name), None)
        if expected is not None:
            assert expected in result and "\n" not in result, f"{name}: {result}"
        counts[result if result in HEADS else "refused"] += 1
        if result not in HEADS and expected is None:
            pytest.fail(f"{name}: {result}")
    assert counts == COUNTS


@pytest.mark.skipif(not FILES, reason=f"no configs at {FOLDER}")
def test_sizes_that_configs_leave_out_are_the_fields():
    config = json.loads((FOLDER / "EAGLE" / "eagle__traineagle3__config.json").read_text())
    ours = translated(Stored(config, published(config)), TARGET)
    with torch.device("meta"):
        head = HEADS["eagle3"].from_config(ours.config, ours.tensors)
    assert head.rope.theta == 10000.0 and head.rope.scaling is None
    assert (head.design.shape.head_dim, head.design.shape.kv_heads) == (128, 8)
    assert head.feature_layers == (2, 16, 29)
    config = json.loads((FOLDER / "SpecForge" / "configs__gemma3-1b-eagle3.json").read_text())
    ours = translated(Stored(config, published(config)), TARGET)
    assert config["sliding_window"] == 512 and not config["use_sliding_window"]
    assert ours.config["sliding_window"] is None
