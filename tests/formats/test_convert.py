"""The promise: a head converted for others and back is the same head, bit by bit, and drafts the
same trees; what a destination cannot be told is an error, and nothing is written.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from converted_heads import CHOICES, POSSIBLE, forget, same, saved
from safetensors.torch import load_file, save_file
from tiny_heads import drafts_of
from tiny_targets import random_model, some_prompts, tiny_target
from trained_heads import trained
from typer.testing import CliRunner

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.formats.table import destinations
from draftheads.heads.target.model import Target
from draftheads.scripts.cli import app, main
from draftheads.scripts.convert import converted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), POSSIBLE)
def test_there_and_back_nothing_has_changed(tmp_path, name, to):
    target, ours = tiny_target(), saved(name, tmp_path / "ours")
    converted(ours, tmp_path / "theirs", to, target)
    back = converted(tmp_path / "theirs", tmp_path / "back", "draftheads", target)
    assert same(load_file(back / "model.safetensors"), load_file(ours / "model.safetensors"))
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (ours / "config.json").read_text()
    )
    assert (back / "README.md").read_text() == (ours / "README.md").read_text()


DRAFTING = ["medusa-shared", "eagle-scaled", "eagle3-reduced", "eagle3-residual", "block-rnn",
            "eagle3-qk-norm", "eagle3-qk-norm-window",
            "block-dflash", "block-dflash-markov", "block-none", "block-reduced",
            "block-window", "block-own-head"]  # fmt: skip


@pytest.mark.parametrize(("name", "to"), [pair for pair in POSSIBLE if pair[0] in DRAFTING])
def test_a_converted_head_drafts_the_same_without_our_facts(tmp_path, name, to):
    target, ours = tiny_target(), saved(name, tmp_path / "ours")
    head, prompts = load_head(ours, target=target), some_prompts(6)
    theirs = converted(ours, tmp_path / "theirs", to, target)
    if to != "draftheads":
        forget(theirs)
    again = load_head(theirs, target=target)
    assert same(again.state_dict(), head.state_dict())
    assert drafts_of(again, target, prompts, 2, head.tree) == drafts_of(head, target, prompts, 2)


@pytest.mark.parametrize("name", CHOICES)
def test_what_cannot_be_told_is_an_error_and_nothing_is_written(tmp_path, name):
    ours = saved(name, tmp_path / "ours")
    for to in set(destinations()) - CHOICES[name][1] - {"draftheads"}:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is the test
            converted(ours, tmp_path / "theirs", to, tiny_target())
        message = str(caught.value)
        assert "\n" not in message and str(ours) in message and len(message) < 400
        assert [path.name for path in tmp_path.iterdir()] == ["ours"]


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
    ("sequential-hydra", "vllm"): "got sequential; use --to draftheads$",
    ("medusa-own", "sglang"): "got medusa; use --to draftheads, vllm$",
    ("medusa-own", "fasterdecoding"): "got 'fasterdecoding'",
}


@pytest.mark.parametrize(("name", "to"), REASONS)
def test_the_error_says_why(tmp_path, name, to):
    with pytest.raises(ValueError, match=REASONS[name, to]):
        converted(saved(name, tmp_path / "ours"), tmp_path / "theirs", to, tiny_target())


def test_a_bias_that_vllm_would_drop_is_an_error(tmp_path):
    ours = saved("eagle-plain", tmp_path / "ours")
    tensors = load_file(ours / "model.safetensors")
    tensors["fc.bias"][3] = 0.5
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(ValueError, match="it has a bias in fc"):
        converted(ours, tmp_path / "theirs", "vllm")
    theirs = converted(ours, tmp_path / "theirs", "sglang")  # which reads it
    assert torch.equal(load_head(theirs).fc.bias, tensors["fc.bias"])


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


@pytest.mark.parametrize(("had", "dtype"), REDUCED)
@pytest.mark.parametrize(("name", "to"), OTHERS)
def test_the_weights_have_the_dtype_that_was_asked_for(tmp_path, name, to, had, dtype):
    """GGUF files: `test_formats_llamacpp`."""
    kind, _, _ = name.partition("-")
    target, head = tiny_target(), trained(kind, **CHOICES[name][0]).to(had)
    ours = save_head(head, tmp_path / "ours", target=target)
    theirs = converted(ours, tmp_path / "theirs", to, target, dtype=dtype)
    [file] = theirs.glob("*.safetensors")
    kinds = {each.dtype for each in load_file(file).values() if each.is_floating_point()}
    assert kinds == {getattr(torch, dtype)}
    back = load_head(theirs, target=target, dtype=torch.float32)
    for key, weight in load_head(ours, target=target, dtype=torch.float32).state_dict().items():
        rounded = weight.to(getattr(torch, dtype)).float() if weight.is_floating_point() else weight
        assert torch.equal(back.state_dict()[key], rounded)


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    head = trained("medusa", depth=2)
    head.state_dict()["blocks.1.layers.0.weight"][3, 4] = 1e5
    ours = save_head(head, tmp_path / "ours", target=tiny_target())
    with pytest.raises(ValueError, match=r"--dtype float16: expected numbers .*layers.0.wei"):
        converted(ours, tmp_path / "theirs", "vllm", dtype="float16")
    assert not (tmp_path / "theirs").exists()


PRIVATE = ["10.0.0.5", "gpu-7", "acme-llm", "ACME_KEY", "/srv", "/mnt", "customers-of"]


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
    head = trained(kind, **CHOICES[name][0])
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


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    ours = saved("medusa-own", tmp_path / "ours")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftheads.heads.formats.stored.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        converted(ours, tmp_path / "theirs", "vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


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
