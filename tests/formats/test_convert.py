"""The promise: a head converted for others and back is the same head, bit by bit, and drafts the
same trees; what a destination cannot be told is an error, and nothing is written. In what training
wrote or convert did, every engine finds all that it looks for, passes over nothing, and believes
what is true. Engines are those of `emulators`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import assert_drafts_our_chain
from emulators import EngineError, Served, vllm_medusa
from emulators_block import PlainBlock, mlx_block, openvino_block, sglang_block, vllm_block
from emulators_eagle import sglang_eagle1, sglang_eagle3, vllm_eagle1, vllm_eagle3
from plain_hydra import awake
from safetensors.torch import load_file, save_file
from tiny_heads import drafts_of
from tiny_targets import random_model, some_prompts, tiny_target
from trained_heads import CHOICES, FEW, POSSIBLE, forget, original, same, saved, trained
from typer.testing import CliRunner

from draftheads.heads.formats.hub import load_head, open_head, refusals, save_head
from draftheads.heads.formats.table import WRITERS, destinations, loss
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree
from draftheads.scripts.cli import app, main
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
        assert head.facts.get("slots", ours.design.block_size) == ours.design.block_size
    if kind == "eagle3":
        assert head.facts["switches"] == {
            switch: getattr(ours.design, switch) for switch in head.facts["switches"]
        }


DRAFTING = ["medusa-shared", "eagle-scaled", "eagle3-reduced", "eagle3-residual", "block-rnn",
            "eagle3-qk-norm", "eagle3-qk-norm-window",
            "block-domino", "block-dflash", "block-dflash-markov", "block-none", "block-reduced",
            "block-window", "block-own-head"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), POSSIBLE)
def test_there_and_back_nothing_has_changed(tmp_path, name, to):
    """And in between an engine finds all that it looks for, and others draft the same."""
    target, ours = tiny_target(), saved(name, tmp_path / "ours")
    theirs = converted(ours, tmp_path / "theirs", to, target)
    back = converted(theirs, tmp_path / "back", "draftheads", target)
    assert same(load_file(back / "model.safetensors"), load_file(ours / "model.safetensors"))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (back, ours)]
    assert configs[0] == configs[1]
    assert (back / "README.md").read_text() == (ours / "README.md").read_text()
    if to in ENGINES:
        found = served(name, to, theirs)
        assert complete(found)
        believed(name, theirs, found)
        assert len({tensor.data_ptr() for tensor in found.loaded.values()}) == len(found.loaded)
    if name in DRAFTING:
        head, prompts = load_head(ours, target=target), some_prompts(6)
        if to != "draftheads":
            forget(theirs)
        again = load_head(theirs, target=target)
        assert same(again.state_dict(), head.state_dict())
        drafts = [drafts_of(each, target, prompts, 2, head.tree) for each in (again, head)]
        assert drafts[0] == drafts[1]


SILENT = ["block-none", "block-state"]  # DSpark folders without a Markov head
WRITTEN = [
    *(
        (name, partial(vllm_eagle3, style=style))
        for name, (_, ways) in CHOICES.items()
        for style in ("plain", "speculators")
        if name.startswith("eagle3") and "vllm" in ways
    ),
    *(
        (name, ENGINES["sglang"][name.partition("-")[0]])
        for name, (_, ways) in CHOICES.items()
        if "sglang" in ways and name not in SILENT
    ),
    ("medusa-own", vllm_medusa),
    ("medusa-deep", vllm_medusa),
]
"""Heads, and the engines that read what training writes of them."""


@pytest.mark.parametrize(("name", "engine"), WRITTEN)
def test_what_training_writes_is_complete_for_its_engines(tmp_path, name, engine):
    ours = saved(name, tmp_path / "ours")
    found = engine(ours)
    assert complete(found)
    believed(name, ours, found)
    if engine is vllm_medusa:
        assert set(found.loaded) >= set(load_head(ours).state_dict())


@pytest.mark.mend("which programs take a head, said before it is trained")
@pytest.mark.parametrize("name", CHOICES)
def test_what_is_said_before_training_is_what_convert_refuses(name):
    head, stored = open_head(original(name)).read()
    expected: dict[str, list[str]] = {}
    for to in WRITERS:
        if reason := loss(to, stored):
            expected.setdefault(reason, []).append(to)
    said = "; ".join(f"{', '.join(each)}: {reason}" for reason, each in expected.items())
    assert refusals(head, tiny_target()) == said


REASONS = {
    ("eagle3-residual", "sglang"): "it has norm_before_residual; nothing",
    ("eagle3-qk-norm", "sglang"): "it has norms of queries and keys; nothing",
    ("eagle3-qk-norm", "gguf"): "it has norms of queries and keys; nothing",
    ("eagle3-deep", "sglang"): "it has more than one layer",
    ("medusa-reduced", "vllm"): "it has truncated_vocab_size",
    ("eagle3-one", "sglang"): "it has a single feature",
    ("eagle3-last", "vllm"): "it has the last state as a feature",
    ("eagle3-both-norms", "speculators"): "it has fc_norm and norm_before_fc",
    ("block-rnn", "vllm"): "it has rnn conditioning; nothing",
    ("block-reduced", "sglang"): "it has an lm_head of its own",
    ("eagle3-two", "gguf"): "it has other than three features; nothing",
    ("eagle3-norms", "gguf"): "it has fc_norm, norm_output; nothing",
    ("eagle-plain", "llamacpp"): "got 'llamacpp'",
    ("block-learned-mask", "vllm"): "it has a learned mask vector, rnn conditioning",
    ("block-last", "gguf"): "it has the last state as a feature",
    ("block-dflash-rnn", "speculators"): "it has rnn conditioning of DFlash's slots; nothing",
    ("block-window", "speculators"): "it has sliding_window",
    **{
        ("block-domino", to): "it has Domino's conditioning; nothing"
        for to in ("vllm", "openvino", "mlx", "gguf", "speculators")
    },
    ("block-domino-reduced", "sglang"): "it has an lm_head of its own; nothing",
    ("block-selector", "gguf"): "it has one of convolutions and a selector, or slots or heads of",
    ("block-convolutions", "sglang"): "it has one of convolutions and a selector, or slots",
    ("block-dflash2-anchor", "vllm"): "or slots or heads of DSpark beside them; nothing",
    ("block-dflash2", "speculators"): "it has convolutions or a selector; nothing",
    ("block-dflash2", "mlx"): "it has convolutions or a selector; nothing",
    ("block-convolutions", "openvino"): "it has slots or heads of DSpark, convolutions or a sel",
    ("sequential-hydra", "vllm"): "got sequential; use --to draftheads$",
    ("medusa-own", "sglang"): "got medusa; use --to draftheads, vllm$",
    ("medusa-own", "fasterdecoding"): "got 'fasterdecoding'",
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_cannot_be_told_is_an_error_and_nothing_is_written(tmp_path, name):
    ours = saved(name, tmp_path / "ours")
    why = {to: reason for (each, to), reason in REASONS.items() if each == name}
    for to in {*destinations(), *why} - CHOICES[name][1] - {"draftheads"}:
        with pytest.raises(ValueError, match=why.get(to, "expected|support")) as caught:
            converted(ours, tmp_path / "theirs", to, tiny_target())
        message = str(caught.value)
        assert "\n" not in message and str(ours) in message and len(message) < 400
        assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_bias_that_vllm_would_drop_is_an_error(tmp_path):
    ours = saved("eagle-plain", tmp_path / "ours")
    tensors = load_file(ours / "model.safetensors")
    tensors["fc.bias"][3] = 0.5
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(ValueError, match="it has a bias in fc"):
        converted(ours, tmp_path / "theirs", "vllm")
    theirs = converted(ours, tmp_path / "theirs", "sglang")  # which reads it
    assert torch.equal(load_head(theirs).fc.bias, tensors["fc.bias"])


@pytest.mark.mend("weights that are not finite")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_heads_full_of_nan_are_neither_converted_nor_loaded(tmp_path, number, dtype):
    """Of bench, chat and all that load a head, too."""
    head = trained("medusa", depth=2).to(dtype)
    head.state_dict()["blocks.1.layers.0.weight"][3, 4] = number
    ours = save_head(head, tmp_path / "ours", target=tiny_target())
    said = "expected finite numbers, got others in blocks.1.layers.0.weight; get the head again"
    for to in ("vllm", "draftheads"):
        with pytest.raises(ValueError, match=said) as caught:
            converted(ours, tmp_path / "theirs", to, tiny_target())
        assert str(ours) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=said):
        load_head(ours)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_weights_keep_their_dtype(tmp_path):
    head = trained("medusa", depth=2).bfloat16()
    ours = save_head(head, tmp_path / "ours", target=tiny_target())
    converted(ours, tmp_path / "vllm", "vllm")
    back = converted(tmp_path / "vllm", tmp_path / "back", "draftheads")
    assert same(load_file(back / "model.safetensors"), dict(head.state_dict()))
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


REDUCED = [(torch.float32, "bfloat16"), (torch.float32, "float16"), (torch.bfloat16, "float32")]
OTHERS = {(name.partition("-")[0], to): (name, to) for name, to in POSSIBLE}.values()
"""A head of each kind for each destination."""


@pytest.mark.mend("convert --dtype changed no weight")
@pytest.mark.parametrize(("had", "dtype"), REDUCED)
@pytest.mark.parametrize(("name", "to"), OTHERS)
def test_the_weights_have_the_dtype_that_was_asked_for(tmp_path, name, to, had, dtype):
    """GGUF files: `test_formats_llamacpp`."""
    target, head = tiny_target(), trained(name).to(had)
    ours = save_head(head, tmp_path / "ours", target=target)
    theirs = converted(ours, tmp_path / "theirs", to, target, dtype=dtype)
    [file] = theirs.glob("*.safetensors")
    kinds = {each.dtype for each in load_file(file).values() if each.is_floating_point()}
    assert kinds == {getattr(torch, dtype)}
    back = load_head(theirs, target=target, dtype=torch.float32)
    for key, weight in load_head(ours, target=target, dtype=torch.float32).state_dict().items():
        rounded = weight.to(getattr(torch, dtype)).float() if weight.is_floating_point() else weight
        assert torch.equal(back.state_dict()[key], rounded)


@pytest.mark.mend("weights beyond float16 would have become infinite")
def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    head = trained("medusa", depth=2)
    head.state_dict()["blocks.1.layers.0.weight"][3, 4] = 1e5
    ours = save_head(head, tmp_path / "ours", target=tiny_target())
    with pytest.raises(ValueError, match=r"--dtype float16: expected numbers .*layers.0.wei"):
        converted(ours, tmp_path / "theirs", "vllm", dtype="float16")
    assert not (tmp_path / "theirs").exists()


PRIVATE = ["10.0.0.5", "gpu-7", "acme-llm", "ACME_KEY", "/srv", "/mnt", "customers-of"]


@pytest.mark.mend(
    "convert wrote servers' addresses, served names and paths into config.json and card"
)
@pytest.mark.parametrize(("name", "to"), OTHERS)
def test_nothing_of_this_machine_or_network_is_converted(tmp_path, name, to):
    """speculators looks for a target on this machine by its path, in a key of their own."""
    kind, _, _ = name.partition("-")
    target = Target(random_model("llama"), name="/srv/llama-of-us")
    served = {"server": ["http://10.0.0.5:8000/v1", "http://gpu-7.corp:80"], "path": "/mnt/states"}
    served |= {"server_model": "acme-llm", "api_key_env": "ACME_KEY", "exchange": "/mnt/x"}
    recipe = {"target": "/srv/llama-of-us", "features": served, "data": {"path": "/srv/data"}}
    data = {"target": {"name": "/srv/llama-of-us", "server": [{"url": served["server"][0]}]}}
    data["prompts"] = {"source": "customers-of/us.jsonl"}
    training = {"steps": 9, "recipe": recipe, "data": data}
    head = trained(name)
    ours = save_head(head, tmp_path / "ours", target=target, training=training)
    theirs = converted(ours, tmp_path / "theirs", to, target)
    config = json.loads((theirs / "config.json").read_text())
    assert config["draftheads"]["training"]["steps"] == 9
    for mine in ("base_model_name_or_path", "speculators_config"):
        if to != "draftheads" and config.pop(mine, None):
            assert load_head(theirs, target=target).kind == kind
    text = json.dumps(config) + (theirs / "README.md").read_text()
    assert [word for word in PRIVATE if word in text] == []
    assert "`llama-of-us`" in text, "the card says which target it is"


def test_the_target_is_asked_for_where_it_is_needed(tmp_path):
    ours = saved("medusa-shared", tmp_path / "ours")
    with pytest.raises(ValueError, match="vLLM requires its lm_head .* or --target"):
        converted(ours, tmp_path / "theirs", "vllm")
    with pytest.raises(ValueError, match="speculators requires its embeddings .* or --target"):
        converted(saved("eagle3-usual", tmp_path / "eagle"), tmp_path / "theirs", "speculators")
    old = saved("eagle3-one", tmp_path / "old")  # it does not say how many layers its target has
    config = json.loads((old / "config.json").read_text())
    del config["draftheads"]["target"]["layers"]
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="records the number of layers .* --target"):
        converted(old, tmp_path / "theirs", "vllm")
    converted(old, tmp_path / "served", "vllm", tiny_target())


def test_nothing_is_replaced(tmp_path):
    ours = saved("medusa-own", tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    with pytest.raises(FileExistsError, match="already exists"):
        converted(ours, tmp_path / "theirs", "vllm")


def test_the_command_prints_the_folder_and_mistakes_in_one_line(tmp_path, monkeypatch, capsys):
    ours = saved("medusa-own", tmp_path / "ours")
    command = ["draftheads", "convert", str(ours), str(tmp_path / "theirs"), "--to"]
    monkeypatch.setattr("sys.argv", [*command, "vllm"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out == f"{tmp_path / 'theirs'}\n"
    monkeypatch.setattr("sys.argv", [*command, "llama.cpp"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "already exists" in capsys.readouterr().err
    command[3] = str(tmp_path / "other")
    monkeypatch.setattr("sys.argv", [*command, "llama.cpp"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert capsys.readouterr().err.count("--to: expected one of draftheads, vllm,")


def test_the_help_names_every_destination():
    text = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output
    assert [to for to in destinations() if to not in text] == []


# emulated engines


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


CHAINS = [(name, to) for name, to in POSSIBLE if name.startswith("block") and to in ENGINES]


@pytest.mark.parametrize(("name", "to"), CHAINS)
@torch.no_grad()
@pytest.mark.slow
def test_an_engine_drafts_our_chain_from_what_it_reads(tmp_path, name, to):
    target = tiny_target()
    head = awake(trained(name)).eval()
    ours = save_head(head, tmp_path / "ours", target=target)
    plain = PlainBlock(
        served(name, to, converted(ours, tmp_path / "theirs", to, target)),
        target.model.get_input_embeddings().weight,
        target.unembed_weight(),
    )
    assert_drafts_our_chain(plain, head, target)


def test_vllm_makes_whole_blocks_for_a_tree_that_is_less_deep(tmp_path):
    """Seen in vLLM 0.32: blocks of three slots of a head with seven drafted other tokens."""
    for name in ("block-markov", "block-dflash"):
        head = trained(name)
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
    "block-domino-key-gone": ("block-domino", "sglang", "gone", "embed_proj.0.weight", {}),
    "block-domino-gone": ("block-domino", "sglang", "", "", {"dflash_config": LESS}),
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
