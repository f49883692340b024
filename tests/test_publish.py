"""The promise: what is published is whole, says what it is, and is found again by its name."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from test_custom_generate import modules_cache  # noqa: F401
from test_hub import trained
from tiny_chat import llama
from tiny_heads import drafts_of, random_head
from tiny_targets import random_model, some_prompts, tiny_target

from draftheads.heads.hub import HEADS, head_target, load_head, load_pair, save_head
from draftheads.heads.target import Target
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
    assert head_target("me/heads") == ("tiny-llama", None)


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
    with pytest.raises(FileNotFoundError, match=r"me/heads.*got deep.*") as missing:
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
    "no card": (lambda folder: (folder / "README.md").unlink(), "README.md missing"),
    "nan": (not_finite, "blocks.1.layers.0.bias has numbers that are not finite"),
    "strange tensor": (not_strict, "blocks.0.gate"),
    "tree too deep": (
        lambda folder: change_config(folder, tree=[[0], [0, 0], [0] * 3, [0] * 4, [0] * 5]),
        "depth",
    ),
    "no tree": (lambda folder: change_config(folder, tree=None), "does not say its tree"),
    "adapter": (
        lambda folder: change_config(folder, adapter={"rank": 4, "alpha": 8}),
        "speaks of an adapter",
    ),
    "metadata": (edit_card("library_name: draftheads\n", ""), "lacks library_name"),
    "yaml": (edit_card("library_name: draftheads", "library_name: [a"), "YAML"),
    "section": (edit_card("## Use from transformers", "## More"), "'Use from transformers'"),
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


def test_all_faults_are_named_together(hub, folder):
    not_finite(folder)
    edit_card("## Measured", "## Speed")(folder)
    with pytest.raises(ValueError, match=r"not finite; .*'Measured'"):
        prepare(folder, "me/heads")


@pytest.mark.parametrize("name", ["heads", "a/b/c", "me/he ads", "me/-x"])
def test_what_is_no_repository_is_refused(folder, name):
    with pytest.raises(ValueError, match="user/name"):
        prepare(folder, name)


def test_a_hub_that_does_not_let_us_in_is_one_line(hub, folder, run):
    hub.refuses = True
    code, _, errors = run("publish", folder, "me/heads")
    assert code == 2
    assert "hf auth login" in errors[-1]


def test_a_pair_is_found_by_one_name(hub, chat_folder):
    publish(prepare(chat_folder, "me/heads"))
    target, head = load_pair("me/heads")
    assert Path(target.name) == chat_folder.parent / "target"
    prompts = some_prompts(9, 4)
    expected = drafts_of(random_head("medusa", target), target, prompts, 8)
    assert drafts_of(head, target, prompts, 8) == expected


def test_a_target_that_has_changed_is_noticed(chat_folder):
    model = llama().model
    model.model.norm.weight.data.mul_(1.5)
    model.save_pretrained(chat_folder.parent / "target")
    with pytest.warns(UserWarning, match="trained on other weights"):
        load_pair(chat_folder)


def test_a_pair_brings_the_adapter_that_heads_were_trained_with(hub, tmp_path):
    pytest.importorskip("peft")
    llama().model.save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target")
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
    assert "*adapted*" in text and "97.12%" in text and "0.0123 nats" in text
    assert "draftheads merge me/jointly adapted" in text
    assert 'custom_generate=speculative("adapted/heads")' in text
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


def test_chat_by_name(hub, chat_folder, run, monkeypatch):
    assert run("publish", chat_folder, "me/heads")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    code, printed, _ = run("chat", "--head", "me/heads", "--max-new-tokens", 5)
    assert code == 0 and "tokens/s" in printed


@pytest.mark.usefixtures("modules_cache")
def test_the_python_of_the_card_runs_as_written(hub, chat_folder, capsys):
    publish(prepare(chat_folder, "me/heads"))
    blocks = re.findall(r"```python\n(.*?)```", ModelCard.load("me/heads").text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out, "the first one prints what is written"


SERVED = {
    "medusa": ["vLLM 0.9.2 to 0.22", '"method": "medusa"', "--to tgi"],
    "sequential": ["No engine"],
    "eagle": ["--to vllm", "--speculative-algorithm EAGLE "],
    "eagle3": ['"method": "eagle3"', "--speculative-algorithm EAGLE3 "],
}


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
