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


NOBODY = "http://127.0.0.1:9"
STATES = {
    "online": lambda hub, patch: None,
    "gated": lambda hub, patch: hub.gated.add("them/model"),
    "no network": lambda hub, patch: patch.setattr(constants, "ENDPOINT", NOBODY),
    "switched off": lambda hub, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True),
}
GATED = (
    "them/model: expected access to a gated repository",
    "accept its licence at {url}/them/model, then log in: hf auth login",
)
NEITHER = (
    "out/modl: expected a folder here or a repository on {url}, found neither",
    "(did you mean out/model?)",
    "hf auth login",
)
ALONE = (
    "expected a folder, or its files in",
    f"{NOBODY} cannot be reached; check the network, or pass a folder",
)
LEADS_NOWHERE = [
    ("gated", "them/model", "ngram", *GATED),
    ("gated", "out/model", "them/model", *GATED),
    ("online", "out/modl", "ngram", *NEITHER),
    ("online", "out/model", "out/modl", *NEITHER),
    ("no network", "them/model", "ngram", *ALONE),
    ("no network", "out/model", "them/head", *ALONE),
    ("switched off", "them/model", "ngram", "HF_HUB_OFFLINE is set; unset it to load them once, "),
    ("online", "run", "ngram", "target run: expected a model", "got a draft head; pass it"),
    ("online", "run/step-000002", "ngram", "expected a model", "got a draft head; pass it"),
    (
        "online", "out/model", "out/model", "expected a head, got a whole model; pass it as "
        "--target, or let it draft: --head model:",
    ),
    ("online", "them/model.gguf", "ngram", "expected a model", "got nothing; pass"),
]  # fmt: skip
"""State of the Hub, target, head, parts of the line."""


@pytest.mark.mend("a gated target or head")
@pytest.mark.mend("a mistyped folder taken for a Hub id")
@pytest.mark.mend("half a minute of retries without a network")
@pytest.mark.mend("a head as --target")
@pytest.mark.mend("a model as --head")
@pytest.mark.mend("a missing .gguf")
@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("state", "target", "head", "said"), [(*r[:3], r[3:]) for r in LEADS_NOWHERE]
)
def test_a_name_that_leads_nowhere_is_one_line(
    run, hub, monkeypatch, caplog, state, target, head, said
):
    """Nobody waits: transformers would ask for each file six times, with pauses between them."""
    STATES[state](hub, monkeypatch)
    with caplog.at_level(logging.WARNING, "huggingface_hub"):
        answer = run("chat", "--target", target, "--head", head)
    failed(answer, *(words.format(url=hub.url) for words in said))
    assert "Retrying" not in caplog.text


@pytest.mark.mend("a ready set was asked for during half a minute without a network")
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


@pytest.mark.mend("a target in the cache, offline")
def test_a_target_in_the_cache_is_loaded_without_a_network(hub, monkeypatch, model):
    files = {path.name: path.read_bytes() for path in Path("out/model").iterdir()}
    hub.repos["them/model"] = {"private": False, "files": files, "branches": {}}
    assert Target.load("them/model").fingerprint() == model.fingerprint()
    hub.close()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Target.load("them/model").fingerprint() == model.fingerprint()
