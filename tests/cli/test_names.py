"""The promise: the name of a model or a head that leads nowhere is explained in one line, which
says where it was looked up and what to do; nobody waits for retries.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny_chat import llama
from tiny_heads import make_head
from typed_commands import failed

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.train.data.prompts import read_prompts


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model(empty_folder):
    target = llama(eos=())
    target.model.save_pretrained(empty_folder / "out" / "model")
    target.tokenizer.save_pretrained(empty_folder / "out" / "model")
    save_head(make_head(MedusaHead, target), empty_folder / "run" / "step-000002", target=target)
    return target


def chat(run, target: object, head: object = "ngram"):
    return run("chat", "--target", target, "--head", head)


@pytest.mark.parametrize(("target", "head"), [("them/model", "ngram"), ("out/model", "them/model")])
@pytest.mark.usefixtures("model")
def test_a_gated_repository_names_its_licence_and_the_login(run, hub, target, head):
    hub.gated.add("them/model")
    said = f"accept its licence at {hub.url}/them/model, then log in: hf auth login"
    failed(chat(run, target, head), "them/model: expected access to a gated repository", said)


@pytest.mark.parametrize(("target", "head"), [("out/modl", "ngram"), ("out/model", "out/modl")])
@pytest.mark.usefixtures("model")
def test_a_folder_that_does_not_exist_is_not_silently_a_hub_id(run, hub, target, head):
    said = f"out/modl: expected a folder here or a repository on {hub.url}, found neither"
    failed(chat(run, target, head), said, "(did you mean out/model?)", "hf auth login")


@pytest.mark.parametrize(("target", "head"), [("them/model", "ngram"), ("out/model", "them/head")])
@pytest.mark.usefixtures("model")
def test_without_a_network_nobody_waits(run, monkeypatch, caplog, target, head):
    """transformers would ask for each file six times, with pauses between them."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "huggingface_hub"):
        said = "http://127.0.0.1:9 cannot be reached; check the network, or pass a folder"
        failed(chat(run, target, head), "expected a folder, or its files in", said)
    assert "Retrying" not in caplog.text


@pytest.mark.parametrize("name", ["mt-bench", "them/prompts"])
def test_without_a_network_a_ready_set_is_not_waited_for(monkeypatch, caplog, name):
    """`datasets` would ask for each file six times, too."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with (
        caplog.at_level(logging.WARNING, "huggingface_hub"),
        pytest.raises(ValueError, match=rf"{name} .*: expected a file.* on the Hub"),
    ):
        read_prompts(name)
    assert "Retrying" not in caplog.text
    assert not constants.HF_HUB_OFFLINE, "for this set alone"


def test_with_the_hub_switched_off_that_is_the_reason(run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    failed(chat(run, "them/model"), "HF_HUB_OFFLINE is set; unset it to load them once, or")


def test_a_target_in_the_cache_is_loaded_without_a_network(hub, monkeypatch, model):
    files = {path.name: path.read_bytes() for path in Path("out/model").iterdir()}
    hub.repos["them/model"] = {"private": False, "files": files, "branches": {}}
    assert Target.load("them/model").fingerprint() == model.fingerprint()
    hub.close()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Target.load("them/model").fingerprint() == model.fingerprint()


@pytest.mark.usefixtures("model")
def test_a_head_is_not_a_target(run):
    for head in ("run", "run/step-000002"):
        failed(chat(run, head), f"target {head}: expected a model", "got a draft head; pass it")


@pytest.mark.usefixtures("model")
def test_a_model_is_not_a_head(run):
    said = "expected a head, got a whole model; pass it as --target, or let it draft: --head model:"
    failed(chat(run, "out/model", "out/model"), said)


def test_a_gguf_file_that_does_not_exist_is_no_hub_id(run):
    failed(chat(run, "them/model.gguf"), "expected a model", "got nothing; pass")
