"""The promise: what is published is whole, says what it is, and is found again by its name."""

from __future__ import annotations

import io
import json
import re
import sys
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from test_convert import CHOICES as LAYOUTS
from test_convert import forget, saved
from test_custom_generate import modules_cache  # noqa: F401
from test_hub import trained
from tiny_chat import llama
from tiny_heads import drafts_of, random_head
from tiny_targets import random_model, some_prompts, tiny_target

from draftheads.heads.card import install_command
from draftheads.heads.hub import HEADS, load_head, load_pair, open_head, save_head
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree
from draftheads.scripts import cli
from draftheads.scripts.publish import prepare, publish

FILES = {
    "config.json", "model.safetensors", "README.md",
    "custom_generate/generate.py", "custom_generate/requirements.txt",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """Type a command; gives (exit code, output, error lines)."""

    def typed(*words: object) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["draftheads", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err.splitlines()

    return typed


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_head(trained(), tmp_path / "head", target=tiny_target(), training={"steps": 9})


@pytest.fixture
def chat_folder(tmp_path) -> Path:
    """Heads of a target that stands in a folder with its tokenizer."""
    tiny = llama()
    tiny.model.save_pretrained(tmp_path / "target")
    tiny.tokenizer.save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target")
    return save_head(random_head("medusa", target), tmp_path / "head", target=target)


def with_a_hub_name(target: Target, monkeypatch, tmp_path: Path) -> Target:
    """Once its heads are published, `monkeypatch` can go to where its name is that of a folder."""
    (tmp_path / "elsewhere" / "them").mkdir(parents=True)
    (tmp_path / "elsewhere" / "them" / "target").symlink_to(tmp_path / "target")
    target.name = "them/target"
    return target


@pytest.fixture
def published(hub, chat_folder, monkeypatch, tmp_path) -> Path:
    """Heads at me/heads, whose target others find by its name."""
    target = with_a_hub_name(Target.load(tmp_path / "target"), monkeypatch, tmp_path)
    folder = save_head(random_head("medusa", target), tmp_path / "public", target=target)
    publish(prepare(folder, "me/heads"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def change_config(folder: Path, **facts: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["draftheads"] |= facts
    (folder / "config.json").write_text(json.dumps(config))


def test_published_and_loaded_by_id(hub, tmp_path):
    head = trained()
    save_head(head, tmp_path / "run" / "step-000010", target=tiny_target())
    (tmp_path / "run" / "step-000010" / "trainer").mkdir()
    (tmp_path / "run" / "step-000010" / "trainer" / "optimizer.pt").write_bytes(b"private")
    address = publish(prepare(tmp_path / "run", "me/heads"))
    assert address.startswith(f"{hub.url}/me/heads")
    assert hub.repos["me/heads"]["private"]
    assert set(hub.repos["me/heads"]["files"]) == FILES
    again = load_head("me/heads", target=tiny_target())
    assert all(map(torch.equal, again.state_dict().values(), head.state_dict().values()))
    assert open_head("me/heads").target == ("tiny-llama", None)


def test_the_published_card_names_its_repository_and_licence(hub, folder):
    publish(prepare(folder, "me/heads", licence="apache-2.0"), public=True)
    assert not hub.repos["me/heads"]["private"]
    card = ModelCard.load("me/heads")
    assert card.data.license == "apache-2.0"
    assert 'load_pair("me/heads")' in card.text
    assert 'custom_generate="me/heads"' in card.text
    assert "draftheads chat --head me/heads" in card.text
    assert "THIS_FOLDER" not in card.text
    assert "THIS_FOLDER" in (folder / "README.md").read_text(), "the folder stays as it was"


def test_a_dry_run_prints_everything_and_sends_nothing(hub, folder, run):
    code, printed, errors = run("publish", folder, "me/heads", "--dry-run", "--license", "mit")
    assert code == 0
    assert hub.requests == []
    size = (folder / "model.safetensors").stat().st_size
    assert re.search(rf"^ *{size:,} bytes  model\.safetensors$", printed, re.MULTILINE)
    assert all(name in printed for name in FILES)
    assert "license: mit" in printed and "## Measured" in printed
    assert any("draftheads bench --card" in line for line in errors), "what a reader will miss"
    assert not any("--license" in line for line in errors)


def test_revisions_are_branches_of_their_own(hub, tmp_path):
    heads = [trained(), trained(depth=2)]
    for head, name, revision in zip(heads, ("a", "b"), ("main", "shallow"), strict=True):
        save_head(head, tmp_path / name, target=tiny_target())
        publish(prepare(tmp_path / name, "me/heads"), revision=revision)
    assert load_head("me/heads").depth == 4
    assert load_head("me/heads", revision="shallow").depth == 2
    assert load_head("me/heads@shallow").depth == 2
    commit = next(line for line in hub.requests if "/tree/" in line).split("/tree/")[1][:40]
    assert load_head("me/heads", revision=commit).depth == 4
    with pytest.raises(FileNotFoundError, match="head me/heads at deep: not found") as missing:
        load_head("me/heads", revision="deep")
    assert "\n" not in str(missing.value)


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.1.layers.0.bias"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def not_strict(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "blocks.0.gate": torch.ones(1)}, folder / "model.safetensors")


def edit_card(pattern: str, new: str) -> Any:
    def edit(folder: Path) -> None:
        card = (folder / "README.md").read_text()
        assert re.search(pattern, card)
        (folder / "README.md").write_text(re.sub(pattern, new, card))

    return edit


FAULTS = {
    "no card": (lambda folder: (folder / "README.md").unlink(), "README.md"),
    "nan": (not_finite, "blocks.1.layers.0.bias has numbers that are not finite"),
    "strange tensor": (not_strict, "blocks.0.gate"),
    "tree too deep": (
        lambda folder: change_config(folder, tree=[[0], [0, 0], [0] * 3, [0] * 4, [0] * 5]),
        "depth",
    ),
    "no facts": (lambda folder: forget(folder), "expected a head in this project"),
    "adapter": (
        lambda folder: change_config(folder, adapter={"rank": 4, "alpha": 8, "fingerprint": "ab"}),
        "adapter/adapter_model.safetensors",
    ),
    "metadata": (edit_card("library_name: draftheads\n", ""), "metadata lacks library_name"),
    "yaml": (edit_card("library_name: draftheads", "library_name: [a"), "YAML"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_unfit_folder_is_not_published(hub, folder, run, name):
    spoil, word = FAULTS[name]
    spoil(folder)
    code, _, errors = run("publish", folder, "me/heads")
    assert code == 2
    assert [line for line in errors if line.startswith("error:")] == errors and len(errors) == 1
    assert word in errors[0]
    assert hub.requests == []


SECRET = ["/srv/secret", "10.0.0.7", "customers-of", "/home/me", "~/private", "C:\\Users"]


def test_nothing_of_this_machine_or_network_is_published(hub, tmp_path):
    target = Target(random_model("llama"), name="/srv/secret/llama-of-us")
    training = {
        "data": {
            "target": {
                "name": "/srv/secret/llama-of-us",
                "server": {"url": "http://10.0.0.7:8000/v1", "model": "/srv/secret/llama-of-us"},
            },
            "prompts": {"source": "customers-of/us.jsonl", "count": 3},
        },
        "recipe": {
            "target": "/srv/secret/llama-of-us",
            "data": {"path": "/srv/secret/data"},
            "run": {
                "output": "~/private/run",
                "notes": "as in /home/me/notes.txt, see C:\\Users\\me",
            },
        },
    }
    folder = save_head(trained("eagle3"), tmp_path / "head", target=target, training=training)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    upload = prepare(folder, "me/heads")
    publish(upload)
    for name, content in hub.repos["me/heads"]["files"].items():
        found = [secret for secret in SECRET if secret.encode() in content]
        assert found == [], name
    config = json.loads(hub.repos["me/heads"]["files"]["config.json"])
    facts = config["draftheads"]
    assert facts["target"]["name"] == "" and facts["training"]["recipe"]["run"]["output"] == "run"
    assert facts["training"]["data"]["prompts"] == {"source": "us.jsonl", "count": 3}
    assert "# EAGLE-3 draft head for `llama-of-us`" in upload.card
    assert "datasets" not in ModelCard(upload.card).data.to_dict()
    assert {path: path.read_bytes() for path in before} == before, "the folder stays as it was"
    with pytest.raises(ValueError, match="which target it was trained for; pass --target"):
        load_pair("me/heads")


def test_a_card_that_the_hub_refuses_is_one_line(hub, folder, run):
    hub.card_errors = [{"message": '"license" must be one of [apache-2.0, ...]'}]
    code, _, errors = run("publish", folder, "me/heads", "--license", "apache2")
    assert code == 2 and hub.repos["me/heads"]["files"] == {}
    assert [line for line in errors if line.startswith("error:")] == errors[-1:]
    assert 'Invalid metadata in README.md. - "license" must be one of' in errors[-1]


@pytest.mark.parametrize("name", ["heads", "a/b/c", "me/he ads", "me/-x"])
def test_what_is_no_repository_is_refused(folder, name):
    with pytest.raises(ValueError, match="user/name"):
        prepare(folder, name)


def test_a_hub_that_does_not_let_us_in_is_one_line(hub, folder, run):
    hub.refuses = True
    code, _, errors = run("publish", folder, "me/heads")
    assert code == 2
    assert "hf auth login" in errors[-1]


@pytest.mark.usefixtures("published")
def test_a_pair_is_found_by_one_name():
    target, head = load_pair("me/heads")
    assert target.name == "them/target"
    prompts = some_prompts(9, 4)
    expected = drafts_of(random_head("medusa", target), target, prompts, 8)
    assert drafts_of(head, target, prompts, 8) == expected


def test_a_target_that_has_changed_is_noticed(chat_folder):
    model = llama().model
    model.model.norm.weight.data.mul_(1.5)
    model.save_pretrained(chat_folder.parent / "target")
    with pytest.warns(UserWarning, match="trained on other weights"):
        load_pair(chat_folder)


def test_a_pair_brings_the_adapter_that_heads_were_trained_with(hub, monkeypatch, tmp_path):
    pytest.importorskip("peft")
    llama().model.save_pretrained(tmp_path / "target")
    target = with_a_hub_name(Target.load(tmp_path / "target"), monkeypatch, tmp_path)
    adapter = target.adapt(rank=2, alpha=4.0)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    adapter.drift = {"agreement": 0.9712, "kl": 0.0123, "tokens": 4096}
    save_head(random_head("medusa", target), tmp_path / "head", target=target)
    publish(prepare(tmp_path / "head", "me/jointly"))
    assert set(hub.repos["me/jointly"]["files"]) >= {
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
    }  # fmt: skip
    text = ModelCard.load("me/jointly").text
    assert "*adapted*" in text and "| drift.agreement | 0.9712 |" in text
    assert "draftheads merge me/jointly adapted" in text
    assert 'custom_generate=speculative("adapted/heads")' in text
    monkeypatch.chdir(tmp_path / "elsewhere")
    again, _ = load_pair("me/jointly")
    tokens = torch.tensor(some_prompts(7))
    torch.testing.assert_close(again.model(tokens).logits, target.model(tokens).logits)
    assert not torch.allclose(again.model(tokens).logits, llama().model(tokens).logits, atol=1e-3)


def test_after_one_download_the_hub_is_not_needed(hub, folder, monkeypatch):
    publish(prepare(folder, "me/heads"))
    load_head("me/heads")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert load_head("me/heads", target=tiny_target()).depth == 4
    with pytest.raises(
        FileNotFoundError, match=r"me/others.*HF_HUB_OFFLINE.*load it once"
    ) as error:
        load_head("me/others")
    assert "\n" not in str(error.value)
    assert hub.requests == []


def test_a_missing_repository_is_one_line(hub):
    with pytest.raises(FileNotFoundError, match=r"me/nothing.*hf auth login") as error:
        load_head("me/nothing")
    assert "\n" not in str(error.value)


def test_chat_by_name(published, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run("publish", published, "me/heads")[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    code, printed, _ = run("chat", "--head", "me/heads", "--max-new-tokens", 5)
    assert code == 0 and "tokens/s" in printed


@pytest.mark.usefixtures("modules_cache", "published")
def test_the_python_of_the_card_runs_as_written(capsys):
    blocks = re.findall(r"```python\n(.*?)```", ModelCard.load("me/heads").text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out, "the first one prints what is written"


SERVED = {
    "medusa": ["vLLM (0.33; for Medusa 0.9.2 to 0.32)", '"method": "medusa"', "--to tgi"],
    "sequential": ["No serving engine"],
    "eagle": ["--to vllm", "--speculative-algorithm EAGLE "],
    "eagle3": ['"method": "eagle3"', "--speculative-algorithm EAGLE3 "],
    "block": ["SGLang (0.5.23) does not support this head: it has a learned mask vector"],
}
UNSERVED = {
    "medusa-reduced": (") does not support this head: it has truncated_vocab_size", "```"),
    "medusa-deep-shared": ("text-generation-inference does not support this head", "--to tgi"),
    "eagle3-deep": (
        "SGLang (0.5.23) does not support this head: it has more than one layer",
        "sglang.launch",
    ),
    "eagle3-two": ("llama.cpp does not support this head: it has other than", "llama-server"),
    "eagle3-last": (") does not support this head: it has the last state", "vllm serve"),
    "block-rnn": ("llama.cpp does not support this head: it has gated or rnn", "llama-server"),
    "block-reduced": (
        "SGLang (0.5.23) does not support this head: it has an lm_head of its own",
        "launch_server",
    ),
    "block-last": (") does not support this head: it has the last state", "vllm serve"),
    "eagle-window": (") does not support this head: it has sliding_window", "--to vllm"),
}


BLOCKS = {
    "block-markov": (["dspark", "DSPARK", "draft-dspark"], 5),
    "block-none": (["dspark", "DSPARK", "draft-dspark"], 5),
    "block-dflash": (["dflash", "DFLASH", "draft-dflash"], 4),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_card_serves_a_block_head_where_it_can_be_loaded(tmp_path, name):
    (vllm, sglang, llamacpp), drafts = BLOCKS[name]
    head = trained("block", **LAYOUTS[name][0])
    head.tree = DynamicTree(9, drafts, 3)
    folder = save_head(head, tmp_path / "head", target=Target(random_model("llama"), name="us/x"))
    serve = (folder / "README.md").read_text().partition("## Serve")[2].partition("\n## ")[0]
    assert f'"method": "{vllm}"' in serve and f'"num_speculative_tokens": {drafts}}}' in serve
    assert f"--speculative-algorithm {sglang} " in serve and "--speculative-num-steps" not in serve
    assert f"--spec-type {llamacpp} --spec-draft-n-max {drafts}" in serve
    assert ("--to vllm" in serve) == ("--to sglang" in serve) == (name == "block-none")
    assert "head.gguf --to gguf --target target.gguf" in serve and "for-gguf" not in serve
    refused = [] if name == "block-dflash" else ["OpenVINO GenAI (2026.4)"]
    assert re.findall("(?m)^(.*) does not support", serve) == refused
    assert "verifies a tree" not in serve


@pytest.mark.parametrize("name", UNSERVED)
def test_the_card_prints_no_command_that_an_engine_refuses(tmp_path, name):
    said, command = UNSERVED[name]
    card = (saved(name, tmp_path / "head") / "README.md").read_text()
    serve = card.partition("## Serve")[2].partition("\n## ")[0]
    assert said in serve and command not in serve


def test_no_registry_is_asked_for_a_package_of_our_name(folder, monkeypatch):
    texts = [
        path.read_text() for path in folder.rglob("*") if path.suffix in (".md", ".py", ".txt")
    ]
    assert len(texts) == 3
    assert [
        line for text in texts for line in re.findall(r"pip install draftheads\b.*", text)
    ] == []
    requirements = (folder / "custom_generate" / "requirements.txt").read_text().splitlines()
    assert all(line.startswith("#") for line in requirements), "or transformers would look for it"
    assert "pip install ./draftheads" in (folder / "README.md").read_text()
    metadata = Message()
    metadata["Project-URL"] = "Repository, https://example.org/us/draftheads"
    monkeypatch.setattr("draftheads.heads.card.metadata", lambda _: metadata)
    assert install_command() == "pip install git+https://example.org/us/draftheads"


@pytest.mark.parametrize("kind", HEADS)
def test_the_card_knows_the_target_and_who_serves_the_kind(tmp_path, kind):
    target = Target(random_model("llama"), name="user/model")
    recipe = {"target": "user/model", "run": {"steps": 3}}
    training = {"data": {"prompts": {"source": "them/questions"}}, "recipe": recipe}
    save_head(trained(kind), tmp_path / "head", target=target, training=training)
    card = ModelCard.load(tmp_path / "head" / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("user/model", "adapter")
    assert card.data.datasets == ["them/questions"]
    assert card.data.license is None, "only what is known is said"
    assert "```yaml\ntarget: user/model\nrun:\n  steps: 3\n```" in card.text
    assert all(word in card.text for word in SERVED[kind])
    assert [each for each in prepare(tmp_path / "head", "me/x").notes if "machine" in each] == []


def test_a_target_in_a_folder_is_not_taken_for_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    target = Target(random_model("llama"), name="models/mine")
    save_head(trained(), tmp_path / "head", target=target)
    assert ModelCard.load(tmp_path / "head" / "README.md").data.base_model is None
    assert "others cannot load it" in prepare(tmp_path / "head", "me/heads").notes[0]
