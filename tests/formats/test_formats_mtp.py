"""The promise: an MTP head goes back into its target's checkpoint, bit by bit, under the names of
its family; nothing else changes, and transformers decodes with it as we do.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from mtp_targets import FAMILIES, load_mtp_target, write_mtp_target
from safetensors import safe_open
from tiny_heads import drafts_of, new_head
from tiny_targets import generated, some_prompts, tiny_target
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from draftheads.heads.formats.hub import save_head
from draftheads.heads.formats.mtp import SHARD, counted, family_of
from draftheads.heads.mtp_checkpoint import FAMILIES as LAYOUTS
from draftheads.heads.mtp_checkpoint import native_head
from draftheads.heads.tree import StaticTree
from draftheads.scripts.cli import main
from draftheads.scripts.convert import converted

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What some families repeat in the layer, and no engine needs."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return tensors


def changed_head(target, folder):
    """The target's own MTP layer after a training, and its folder."""
    head = native_head(target)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return head, save_head(head, folder, target=target)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_layer_changes_and_it_is_the_head(tmp_path, name):
    write_mtp_target(tmp_path / "target", name)
    target = load_mtp_target(tmp_path / "target")
    head, folder = changed_head(target, tmp_path / "head")
    out = converted(folder, tmp_path / "out", "mtp", target)
    before, after = tensors_of(tmp_path / "target"), tensors_of(out)
    left_out = before.keys() - after.keys()
    assert after.keys() <= before.keys() and all(each.endswith(COPIES) for each in left_out)
    with safe_open(out / SHARD, framework="pt") as file:
        layer = set(file.keys())
    assert all(torch.equal(after[each], before[each]) for each in after.keys() - layer)
    again = load_mtp_target(out)
    theirs, (prompt,) = native_head(again).state_dict(), some_prompts(9)
    assert all(torch.equal(tensor, theirs[each]) for each, tensor in head.state_dict().items())
    assert generated(again, prompt, 8) == generated(target, prompt, 8)


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5"])
def test_links_are_the_very_files_of_a_target_in_shards(tmp_path, name):
    """Of a target without such a layer, to which one is added."""
    write_mtp_target(tmp_path / "whole", name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "target", max_shard_size="40KB")
    shards = sorted((tmp_path / "target").glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].chmod(0o400)
    target = load_mtp_target(tmp_path / "target")
    head = new_head("mtp", target)
    folder = save_head(head, tmp_path / "head", target=target)
    out = converted(folder, tmp_path / "out", "mtp", target, link=True)
    assert all((out / shard.name).samefile(shard) for shard in shards)
    assert shards[0].stat().st_mode & 0o777 == 0o400
    theirs = native_head(load_mtp_target(out)).state_dict()
    assert all(torch.equal(tensor, theirs[each]) for each, tensor in head.state_dict().items())


def test_transformers_drafts_with_the_folder_what_we_draft(tmp_path, monkeypatch):
    """It finds GLM's layer in models of 46 layers alone."""
    write_mtp_target(
        tmp_path / "target", "glm4-moe", num_hidden_layers=46, first_k_dense_replace=45
    )
    target, (prompt,) = load_mtp_target(tmp_path / "target"), some_prompts(9)
    head, folder = changed_head(target, tmp_path / "head")
    out = converted(folder, tmp_path / "out", "mtp", target)
    drafts, candidates = [], MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, **arguments):
        ids, logits = candidates(self, input_ids, **arguments)
        drafts.extend(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([prompt])
    text = model.generate(ids, max_new_tokens=16, do_sample=False, use_mtp=True, eos_token_id=None)
    assert text[0, len(prompt) :].tolist() == generated(target, prompt, 16)
    trees = drafts_of(head, target, [prompt], 16, StaticTree.from_widths((1,)))
    ours = [tokens[0][1] for tokens, _ in trees]
    assert len(drafts) >= 8 and ours[: len(drafts)] == drafts[: len(ours)]


def test_configs_of_models_with_parts_tell_of_the_layer_in_their_text():
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    family = family_of("qwen3_5_text")
    text = counted(config, "qwen3_5_text", family)["text_config"]
    assert text["mtp_num_hidden_layers"] == 1
    inside = LAYOUTS[2].theirs("enorm.weight", 4, "model.language_model.")
    assert inside == "model.language_model.layers.4.enorm.weight"
    assert LAYOUTS[2].ours(inside, 4) == (0, "enorm.weight")
    assert family.theirs("enorm.weight", 4, "model.") == "mtp.pre_fc_norm_embedding.weight"


def test_a_target_that_cannot_take_the_head_is_refused_in_one_line(tmp_path):
    write_mtp_target(tmp_path / "ernie", "ernie-4.5")
    quantised, llama = copy.copy(tiny_target()), copy.copy(tiny_target())
    quantised.bits = 8
    cases = [
        ("llama", llama, "expected a target whose MTP layer engines know"),
        ("bits", quantised, "expected a target in safetensors as it was trained"),
        ("norm", load_mtp_target(tmp_path / "ernie"), "expected a head like the MTP layer of"),
    ]
    for name, target, reason in cases:
        target.model.save_pretrained(tmp_path / name)
        target.name = str(tmp_path / name)
        folder = save_head(new_head("mtp", target), tmp_path / f"{name}-head", target=target)
        with pytest.raises(ValueError, match=reason) as refusal:
            converted(folder, tmp_path / "out", "mtp", target)
        assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--to mtp needs --target"):
        converted(folder, tmp_path / "out", "mtp")
    other = save_head(new_head("eagle3", llama), tmp_path / "eagle3", target=llama)
    with pytest.raises(ValueError, match="expected a head of kind mtp for mtp, got eagle3"):
        converted(other, tmp_path / "out", "mtp", llama)


def test_a_person_gets_the_folder_and_the_next_command(tmp_path, monkeypatch, capsys):
    write_mtp_target(tmp_path / "target", "qwen3.5")
    target = load_mtp_target(tmp_path / "target")
    _, folder = changed_head(target, tmp_path / "head")
    command = ["draftheads", "convert", str(folder), str(tmp_path / "out"), "--to", "mtp"]
    monkeypatch.setattr("sys.argv", [*command, "--target", target.name, "--link"])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert not ended.value.code and output.out == f"{tmp_path / 'out'}\n"
    assert f"chat --target {tmp_path / 'out'} --head mtp" in output.err
    plain = tmp_path / "plain"
    tiny_target().model.save_pretrained(plain)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "a"}) + "\n")
    command = ["draftheads", "bench", "--target", str(plain), "--head", "mtp"]
    monkeypatch.setattr("sys.argv", [*command, "--prompts", str(prompts)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "expected an MTP layer in its checkpoint" in capsys.readouterr().err
