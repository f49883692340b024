"""The promise: wherever a target's weights stand, heads get the same from it; and what is freed is
gone.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hybrid_targets import MULTIMODAL, multimodal_model
from launching import ROOT, outputs_of_two_forks
from placement_worker import random_batch
from safetensors.torch import load_file, save_file
from tiny_heads import decode, overfitted, written_by
from tiny_targets import (
    CONFIGS,
    OTHER_LOGITS,
    UNEVEN,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)
from tiny_training import (
    VOCABULARY,
    assert_same,
    random_answers,
    recipe_of,
    run,
    tiny_recipe,
    weights,
    write_answers,
    write_target,
)
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.train.launch import make_accelerator
from draftheads.train.metrics import read_metrics
from draftheads.train.setup import frozen_target

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def write_llama(folder: Path, **options: Any) -> Path:
    """A random Llama of two layers, wide enough for the blocks of 64 that quantisation works on."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "vocab_size": VOCABULARY, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """target, one with tied embeddings and sizes that two processes cannot halve, and data."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_llama(folder / "tied", tie_word_embeddings=True, hidden_size=40, intermediate_size=47)
    write_answers(folder / "data", random_answers(60))
    return folder


@pytest.fixture(scope="module")
def by_two(made, tmp_path_factory) -> Path:
    """whole and sharded: recipes, and what two processes made of them; rank-*.json: comparisons."""
    folder = tmp_path_factory.mktemp("two")
    recipes = []
    for placement in ("whole", "sharded"):
        values = tiny_recipe(made, "eagle3", output=str(folder / placement), steps=2)
        values["data"]["rows_per_batch"] = 1
        recipes.append(folder / f"{placement}.yaml")
        recipes[-1].write_text(yaml.safe_dump({**values, "target_placement": placement}))
    worker = str(ROOT / "tests" / "helpers" / "placement_worker.py")
    targets = [str(made / "tied"), str(made / "target")]
    outputs_of_two_forks(folder, worker, *targets, *map(str, recipes))
    return folder


@pytest.mark.mend(
    "a sharded target whose processes hold unequal numbers of long documents waited for ever"
)
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tied", "untied"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_target_equals_a_whole_one(by_two, rank, folder):
    found = json.loads((by_two / f"rank-{rank}.json").read_text())[folder]
    differing = [what for what, same in found.items() if same is False]
    assert not differing
    whole, *others = [name for name in found["fingerprints"] if name]
    assert set(others) == {whole}
    assert found["tokens"][0] == found["tokens"][1], "greedy text"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tied", "untied"])
def test_processes_share_the_layers_of_a_sharded_target(by_two, folder):
    ranks = [json.loads((by_two / f"rank-{n}.json").read_text())[folder] for n in (0, 1)]
    whole, parts = ranks[0]["sizes"][0], [rank["sizes"][1] for rank in ranks]
    assert sum(part["layers"] for part in parts) == whole["layers"]
    assert max(part["layers"] for part in parts) < 0.53 * whole["layers"]
    assert {part["others"] for part in parts} == {whole["others"]}
    for rank, part in zip(ranks, parts, strict=True):
        assert rank["released"] == part["layers"]
        assert rank["left in a storage"] == 0


@pytest.mark.slow
def test_a_head_learns_the_same_from_a_sharded_target(by_two):
    whole, sharded = (read_metrics(by_two / name) for name in ("whole", "sharded"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (whole, sharded)]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert_same(weights(by_two / "whole", 2), weights(by_two / "sharded", 2))


PARTS = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


def test_a_target_in_parts_equals_a_whole_one(made):
    whole = Target.load(made / "target")
    parts = Target.load(made / "target", placement=PARTS)
    assert parts.model.get_parameter("model.layers.1.mlp.up_proj.weight").is_meta
    batch = random_batch(VOCABULARY)
    features_BTD = parts.features(batch, [0, 1, 2])
    assert torch.equal(features_BTD, whole.features(batch, [0, 1, 2]))
    assert torch.equal(parts.unembed_weight(), whole.unembed_weight())
    digits, matrices, *rest = whole.fingerprint().split("-")
    assert parts.fingerprint().split("-") == [digits, "", *rest]  # not of what is on disk
    assert matrices
    prompts = some_prompts(9, 5)
    texts = [decode(target, None, prompts, max_new_tokens=6)[0] for target in (parts, whole)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head"])
def test_heads_need_embeddings_and_lm_head_at_hand(made, part):
    with pytest.raises(ValueError, match="expected embeddings and lm_head to fit .* got them off"):
        Target.load(made / "target", placement={**PARTS, part: "disk"})


def test_a_target_beside_zero_3_is_whole(made):
    pytest.importorskip("deepspeed")
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    target = Target.load(made / "target")
    assert is_deepspeed_zero3_enabled(), "whoever comes after finds what was there"
    del config
    assert not is_deepspeed_zero3_enabled()
    assert target.fingerprint() == Target.load(made / "target").fingerprint()
    assert target.embed(torch.tensor([3])).shape == (1, target.hidden_size)


@pytest.mark.parametrize(
    ("choices", "processes", "message"),
    [
        ({"target_placement": "split"}, 2, "split: expected one process .* got 2; use sharded"),
        ({"target_placement": "split"}, 1, "split: expected GPUs, got none; use whole"),
        ({"target_placement": "sharded"}, 1, "expected several processes, got 1; launch one"),
        (
            {"target_placement": "sharded", "target_bits": 4},
            2,
            "expected target_bits=null, got 4",
        ),
    ],  # fmt: skip
)
def test_a_placement_that_cannot_be_is_refused(made, monkeypatch, choices, processes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = recipe_of({**tiny_recipe(made), **choices})
    accelerator = make_accelerator(recipe)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    with pytest.raises(ValueError, match=message) as error:
        frozen_target(recipe, accelerator)
    assert "\n" not in str(error.value)


def test_bits_without_bitsandbytes_are_refused(made, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="bits=8: expected .* bitsandbytes, .* pip install"):
        Target.load(made / "target", bits=8)


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_heads_stand_on_a_quantised_target(tmp_path, bits):
    folder = write_llama(tmp_path / "target")
    whole, target = Target.load(folder), Target.load(folder, bits=bits)
    for name, parameter in target.model.named_parameters():
        is_matrix = "_proj" in name
        assert parameter.is_floating_point() != is_matrix, name
        assert is_matrix or torch.equal(parameter, whole.model.get_parameter(name)), name
    assert whole.fingerprint().startswith(f"{target.fingerprint()}-")
    assert same_weights(whole.fingerprint(), target.fingerprint())
    assert torch.equal(target.unembed_weight(), whole.unembed_weight())
    batch = random_batch(VOCABULARY)
    near, exact = target.features(batch, [2]), whole.features(batch, [2])
    assert 0 < (near - exact).norm() / exact.norm() < {4: 0.5, 8: 0.1}[bits]


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_output_equals_greedy_decoding_of_the_quantised_target(tmp_path, bits):
    target = Target.load(write_llama(tmp_path / "target"), bits=bits)
    prompts = some_prompts(7)
    text = written_by(target, prompts, 24)
    head = overfitted("sequential", target, text, updates=60, depth=3, nodes=8, prefix=True)
    tokens, statistics = decode(target, head, prompts, max_new_tokens=24)
    assert tokens == [greedy(target, prompts[0], 24)]
    assert statistics[0].tokens_per_step > 1.5


@needs_bitsandbytes
def test_a_head_is_trained_on_a_quantised_target(made, tmp_path):
    folder = write_llama(tmp_path / "target")
    output = tmp_path / "run"
    assert run(made, output, f"target={folder}", "target_bits=4", "run.steps=2") == 0
    assert len([line for line in read_metrics(output) if "loss" in line]) == 2


def reconfigured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def without_a_shard(folder: Path, *, index: bool) -> None:
    """index: the list of shards does not mention it either."""
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink()
    _, second, *_ = sorted(folder.glob("model-*.safetensors"))
    second.unlink()
    listed = folder / "model.safetensors.index.json"
    if index:
        content = json.loads(listed.read_text())
        kept = {k: v for k, v in content["weight_map"].items() if v != second.name}
        listed.write_text(json.dumps({**content, "weight_map": kept}))


def rewritten(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def rewrite_weights(folder: Path, more: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, {"format": "pt"})


def end_tokens(value: Any) -> Any:
    return rewritten("generation_config.json", json.dumps({"eos_token_id": value}).encode())


def failing_tokenizer(folder: Path) -> None:
    demo = Path(__file__).parents[2] / "recipes" / "demo-target"
    shutil.copy(demo / "tokenizer.json", folder)
    settings = json.loads((demo / "tokenizer_config.json").read_text())
    settings["model_max_length"] = {"a": 4}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


QUERY_BIAS = "model.layers.0.self_attn.q_proj.bias"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16060\n"
BROKEN: dict[str, tuple[Any, str]] = {
    "no lm_head": (
        lambda folder: reconfigured(folder, tie_word_embeddings=False),
        r"expected the weights of a LlamaForCausalLM, got none for 1 of them \(lm_head.weight\)",
    ),
    "too few layers": (
        lambda folder: reconfigured(folder, num_hidden_layers=4),
        r"got none for 18 of them \(model.layers.2.input_layernorm.weight, .*\); download",
    ),
    "too many layers": (
        lambda folder: reconfigured(folder, num_hidden_layers=1),
        r"got 9 for which its 1 decoder layers have no place \(model.layers.1.*\); .* config.json",
    ),
    "parts of layers that the config switches off": (
        lambda folder: rewrite_weights(folder, {QUERY_BIAS: torch.ones(64)}),
        rf"got 1 for which its 2 decoder layers have no place \({QUERY_BIAS}\)",
    ),
    "a layer too many of the decoder alone": (
        lambda folder: rewrite_weights(folder, {"layers.2.mlp.up_proj.weight": torch.ones(2, 2)}),
        r"got 1 for which its 2 decoder layers have no place",
    ),
    "other shapes": (
        lambda folder: reconfigured(folder, intermediate_size=96),
        r"got other shapes for 6 of them \(model.layers.0.mlp.down_proj.weight \(64, 128\), ",
    ),
    "a shard is absent": (
        lambda folder: without_a_shard(folder, index=False),
        "No such file or directory: .*model-00002-of-",
    ),
    "a shard is absent, also in the index": (
        lambda folder: without_a_shard(folder, index=True),
        "got none for .* of them .*; download it again",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 9000),
        "cannot be read: .*incomplete metadata, file not fully covered; download it again",
    ),
    "empty": (rewritten("model.safetensors", b""), "cannot be read: .*header too small"),
    "git-lfs": (rewritten("model.safetensors", POINTER), "cannot be read: .*header too large"),
    "no JSON": (rewritten("config.json", b"{"), "is not a valid JSON file"),
    "no UTF-8": (rewritten("config.json", b"\xff\xfe{}"), "is not a valid JSON file"),
    "no object": (rewritten("config.json", b"null"), "cannot be read: .*; download it again, or"),
    "no model_type": (rewritten("config.json", b"{}"), "cannot be read: Unrecognized model"),
    "another model_type": (
        lambda folder: reconfigured(folder, model_type="nix"),
        "cannot be read: .* model type `nix`",
    ),
    "a word for a number": (
        lambda folder: reconfigured(folder, vocab_size="many"),
        "cannot be read: .*'vocab_size' expected int, got str",
    ),
    "no layers": (
        lambda folder: reconfigured(folder, num_hidden_layers=0),
        "cannot be read: expected num_hidden_layers from 1 to 512, got 0; download it again",
    ),
    "a million layers": (
        lambda folder: reconfigured(folder, num_hidden_layers=10**6),
        "cannot be read: expected num_hidden_layers from 1 to 512, got 1,000,000",
    ),
    "a billion tokens": (
        lambda folder: reconfigured(folder, vocab_size=10**9),
        "cannot be read: expected vocab_size from 1 to 4,194,304, got 1,000,000,000",
    ),
    "far more weights than there are": (
        lambda folder: reconfigured(folder, intermediate_size=10**12),
        "cannot be read: its config describes 384,000,000,031,104 numbers, which files of .*",
    ),
    "a number for the text part": (
        lambda folder: reconfigured(folder, text_config=5),
        "cannot be read: expected an object of settings as text_config, got 5",
    ),
    "a number for a dtype": (
        lambda folder: reconfigured(folder, dtype=7),
        "cannot be read: expected the name of a dtype, got 7",
    ),
    "an empty quantisation": (
        lambda folder: reconfigured(folder, quantization_config={}),
        "cannot be read: .* no `quant_method`",
    ),
    "no heads": (
        lambda folder: reconfigured(folder, num_attention_heads=0),
        "cannot be read: .*zero; download it again",
    ),
    "a broken generation config": (
        rewritten("generation_config.json", b'{"eos_token_id": 5'),
        r"generation_config\.json: expected a JSON object, got invalid JSON \(.*Expecting",
    ),
    "a generation config without names": (
        rewritten("generation_config.json", b"[5]"),
        r"generation_config\.json: expected a JSON object, got '\[5\]'; .*; download it again",
    ),
    "end tokens that are words": (end_tokens(["a"]), "token ids from 0 to .*, got 'a'; correct it"),
    "a negative end token": (end_tokens(-1), "token ids from 0 to .*, got -1"),
    "an end token that is true": (end_tokens([5, True]), "token ids from 0 to .*, got True"),
    "a fraction of an end token": (end_tokens(5.0), "token ids from 0 to .*, got 5.0"),
    "an end token beyond the vocabulary": (end_tokens([5, 1000]), "ids from 0 to 96, got 1000"),
    "a broken tokenizer": (rewritten("tokenizer.json", b"{"), "cannot be read: .*; download"),
    "a tokenizer that fails for every text": (
        failing_tokenizer,
        "cannot be read: '>' not supported .*; download",
    ),
}


@pytest.mark.mend(
    "sizes in a config that took gigabytes, or for ever, before anything was compared"
)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(tmp_path, name):
    damage, message = BROKEN[name]
    folder = write_llama(tmp_path / "target", tie_word_embeddings=True)
    Target.load(folder)  # whose lm_head is in no file, as it is tied
    damage(folder)
    with pytest.raises((ValueError, OSError), match=f"^target {folder}: .*{message}") as error:
        Target.load(folder)
    assert "\n" not in str(error.value)


def test_tensors_that_checkpoints_have_besides_their_layers_are_left_out(tmp_path):
    """Buffers of older versions, layers for multi-token prediction, an eye, a scale."""
    folder = write_llama(tmp_path / "target", tie_word_embeddings=True)
    reconfigured(folder, num_nextn_predict_layers=1)
    names = {
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_scale",
        "model.layers.2.mlp.up_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "vision_tower.layers.7.mlp.up_proj.weight",
    }
    rewrite_weights(folder, {name: torch.ones(2) for name in names})
    assert Target.load(folder).layers == 2


@pytest.mark.mend(
    "Gemma 3's embeddings were not found in its checkpoint, so its layers could not run on a server"
)
@pytest.mark.parametrize("kind", MULTIMODAL)
@pytest.mark.parametrize("tied", [True, False])
def test_a_skeleton_has_what_surrounds_the_layers_of_a_multimodal_model(tmp_path, kind, tied):
    """Checkpoints name it in other orders than models: Gemma 3's language_model.model.embed_tokens
    is its model.language_model.embed_tokens.
    """
    model = multimodal_model(kind)
    config = model.config
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    model = type(model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    skeleton, whole = (Target.load(tmp_path, placement=place) for place in ("skeleton", "auto"))
    for part in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = (getattr(target.model, part)().weight for target in (skeleton, whole))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_masks_that_old_checkpoints_hold_as_biases_are_left_out(tmp_path, name):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    kind = {"gpt2": "transformer.h.0.attn", "gpt-neox": "gpt_neox.layers.0.attention"}[name]
    rewrite_weights(tmp_path, {f"{kind}.{end}": torch.ones(1) for end in ("bias", "masked_bias")})
    assert Target.load(tmp_path).layers == 3


@pytest.mark.parametrize(
    "choice",
    [
        {"placement": {"": "cpu"}},
        {"placement": {**PARTS, "model.layers.2": "cpu"}},
        pytest.param({"bits": 4}, marks=needs_bitsandbytes),
        pytest.param({"bits": 8}, marks=needs_bitsandbytes),
    ],
)
def test_missing_weights_are_refused_however_they_are_loaded(tmp_path, choice):
    folder = write_llama(tmp_path / "target")
    reconfigured(folder, num_hidden_layers=3)
    with pytest.raises(ValueError, match="got none for 9 of them"):
        Target.load(folder, **choice)


@pytest.mark.slow
def test_all_processes_refuse_a_broken_sharded_target(tmp_path):
    folder = write_llama(tmp_path / "target", num_hidden_layers=1)
    reconfigured(folder, num_hidden_layers=2)
    worker = str(ROOT / "tests" / "helpers" / "placement_worker.py")
    outputs = outputs_of_two_forks(tmp_path, worker, str(folder))
    assert ["got none for 9 of them" in output for output in outputs] == [True, True]


def test_a_bert_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=48, vocab_size=VOCABULARY))
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="not causal"):
        Target.load(tmp_path / "target")


def test_attention_that_a_config_asks_for_is_replaced_by_one_that_takes_masks(tmp_path):
    folder = write_llama(tmp_path / "target")
    reconfigured(folder, attn_implementation="flash_attention_2")
    assert Target.load(folder).model.config._attn_implementation == "sdpa"


def all_bytes(target: Target) -> int:
    return sum(p.numel() * p.element_size() for p in target.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *UNEVEN])
def test_released_layers_are_gone_and_missed(name):
    target, batch = Target(random_model(name)), random_batch(19)
    kept, before = tiny_target(name), all_bytes(target)
    hidden_BTD = kept.features(batch, [3])
    gone = [weakref.ref(p) for n, p in target.model.named_parameters() if ".1." in n]
    freed = target.release(layers=True)
    gc.collect()
    assert gone and not any(reference() for reference in gone)
    assert freed == before - all_bytes(target) > before / 2
    with pytest.raises(RuntimeError, match="that Target.release has freed"):
        target.features(batch, [1])
    with pytest.raises(RuntimeError, match="that Target.release has freed"):
        target.prefill([[3, 4]], target.new_cache(1, 8), [])
    assert torch.equal(target.embed(batch.tokens_BT), kept.embed(batch.tokens_BT))
    assert target.fingerprint() == kept.fingerprint()
    assert (target.vocab_size, target.hidden_size) == (kept.vocab_size, kept.hidden_size)
    if name in OTHER_LOGITS:  # as before
        with pytest.raises(ValueError, match="is not this model's logits"):
            target.unembed(hidden_BTD)
    else:
        assert torch.equal(target.unembed(hidden_BTD), kept.unembed(hidden_BTD))
    assert target.release(layers=True) == 0


def test_a_released_lm_head_is_gone_and_missed():
    target, kept, batch = Target(random_model("llama")), tiny_target(), random_batch(19)
    gone = weakref.ref(target.unembed_weight())
    assert target.release(lm_head=True) == 4 * target.vocab_size * target.hidden_size
    gc.collect()
    assert gone() is None
    hidden_BTD = target.features(batch, [3])
    assert torch.equal(hidden_BTD, kept.features(batch, [3]))
    for missing in (lambda: target.unembed(hidden_BTD), target.unembed_weight):
        with pytest.raises(RuntimeError, match="that Target.release has freed"):
            missing()
    target.release(lm_head=True, layers=True)
    assert target.fingerprint() == kept.fingerprint()


def test_tied_embeddings_survive(made):
    target = Target.load(made / "tied")
    assert target.release(lm_head=True) == 0
    assert (
        target.unembed_weight().data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    )
