"""The promise: a head folder is complete or absent, loads strictly, and goes to the Hub and back
unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_heads import drafts_of, make_head, random_head
from tiny_targets import VOCABULARY, random_model, some_prompts, tiny_target
from trained_heads import CHOICES, trained
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.formats.hub import HEADS, load_head, open_head, record_tuned, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.heads.tree import StaticTree

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CHOICES)
def test_saved_and_loaded_is_the_same_head(tmp_path, name):
    head, target = trained(name), tiny_target()
    save_head(head, tmp_path / "head", target=target, training={"steps": 3})
    again = load_head(tmp_path / "head", target=target)
    assert again.tree == head.tree
    assert again.feature_layers == head.feature_layers
    state = again.state_dict()
    assert list(state) == list(head.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())
    prompts = some_prompts(11, 6)
    drafted = drafts_of(head, target, prompts, 12)
    assert drafts_of(again, target, prompts, 12) == drafted
    assert drafted != drafts_of(random_head(head.kind, target), target, prompts, 12, head.tree)


def test_untrained_heads_compute_the_targets_own_logits():
    target = tiny_target()
    features = torch.randn(4, 32)
    expected = target.unembed(features)
    for choices in ({}, {"lm_head": "shared"}, {"layers": 3}):
        head = make_head(MedusaHead, target, **choices)
        logits = head.unembed(head.hidden(features, 2), target)
        assert torch.equal(logits, torch.stack([expected, expected]))


def test_layers_are_distinct_modules():
    """Published code repeats one block: `[ResBlock(h)] * n`."""
    head = make_head(MedusaHead, tiny_target(), layers=3)
    layers = [id(layer) for block in head.blocks for layer in block.layers]
    assert len(set(layers)) == len(layers) == 4 * 3


@pytest.mark.parametrize("change", ["missing", "extra"])
@pytest.mark.parametrize("kind", HEADS)
def test_loading_is_strict(tmp_path, kind, change):
    save_head(trained(kind), tmp_path / "head", target=tiny_target())
    weights = tmp_path / "head" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith((".bias", "layernorm.weight")))
    if change == "missing":
        del tensors[name]
    else:
        tensors[f"{name}.scale"] = torch.ones(1)
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=re.escape(name)):
        load_head(tmp_path / "head")


@pytest.mark.parametrize("name", ["medusa", "medusa-reduced", "eagle3", "eagle3-reduced", "eagle"])
def test_a_head_of_another_size_is_refused_naming_both(tmp_path, name):
    save_head(trained(name), tmp_path / "head", target=tiny_target())
    model = random_model("llama")
    model.resize_token_embeddings(VOCABULARY + 4, mean_resizing=False)
    larger = Target(model, name="other/model")
    message = r"vocabulary 19 \(tiny-llama\), target has 23 \(other/model\)"
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", target=larger)
    config = LlamaConfig(vocab_size=19, hidden_size=64, intermediate_size=48, num_hidden_layers=3)
    wider = Target(LlamaForCausalLM(config), name="wide/model")
    message = r"hidden size 32 \(tiny-llama\), target has 64 \(wide/model\)"
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", target=wider)


def test_a_head_of_other_weights_warns(tmp_path):
    save_head(trained(), tmp_path / "head", target=tiny_target())
    model = random_model("llama")
    model.model.norm.weight.data.mul_(1.5)
    with pytest.warns(UserWarning, match="trained on other weights"):
        load_head(tmp_path / "head", target=Target(model))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_fingerprint_is_the_same_for_every_dtype_of_one_checkpoint(tmp_path, kind, stored):
    """float16 rounds to other numbers: what it says is compared with other float16 models alone."""
    model = random_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[:1] *= 1e-5
    model.to(stored).save_pretrained(tmp_path)
    known, same, half, again = (
        Target.load(tmp_path, dtype=dtype).fingerprint()
        for dtype in ("float32", "bfloat16", "float16", "float16")
    )
    assert known == same and half == again
    assert same_weights(known, half) and same_weights(half, known)
    changed = Target.load(tmp_path, dtype="float16").model
    changed.get_output_embeddings().weight.data[0] += 1
    assert not same_weights(Target(changed).fingerprint(), half)


def test_a_fingerprint_is_what_it_was():
    """What heads and answers have recorded since there were any."""
    for dtype in ("float32", "bfloat16"):
        demo = Target.load(ROOT / "recipes" / "demo-target", dtype=dtype)
        assert demo.fingerprint() == "6e4603154f133dea-dde629e4---e327eb52"
    early = "6e4603154f133dea-dde629e4"  # without what a target without layers has, too
    skeleton = Target.load(ROOT / "recipes" / "demo-target", placement="skeleton").fingerprint()
    assert skeleton == "----e327eb52"
    assert same_weights(early, demo.fingerprint()) and same_weights(skeleton, demo.fingerprint())
    assert not same_weights(skeleton, demo.fingerprint()[:-1] + "0")


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    save_head(trained(), tmp_path / "head", target=tiny_target())
    before = (tmp_path / "head" / "model.safetensors").read_bytes()

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftheads.heads.formats.hub.render_card", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_head(trained(depth=2), tmp_path / "head", target=tiny_target())
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before


@pytest.mark.mend("tune threw an edited model card away")
def test_a_tree_is_written_into_a_card_without_what_people_wrote_being_lost(tmp_path):
    folder = save_head(trained(), tmp_path / "head", target=tiny_target())
    card = folder / "README.md"
    mine = card.read_text().replace("## Tree", "## Thanks\n\nTo all.\n\n## Tree")
    card.write_text(mine.replace("## Training\n", "## Training\n\nOn my desk.\n"))
    for width in (3, 5):
        record_tuned(folder, StaticTree.from_widths((width,)), {"machine": "this one"})
        text = card.read_text()
        assert "## Thanks\n\nTo all." in text and "On my desk." in text
        assert f"{width} draft nodes, 1 deep" in text
    assert "3 draft nodes" not in text


@pytest.mark.mend("save_head deleted whatever was in the folder")
@pytest.mark.parametrize("there", ["photo.png", "trainer/optimizer.pt", "config.json"])
def test_a_folder_with_anything_but_a_head_is_not_replaced(tmp_path, there):
    path = tmp_path / "mine" / there
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(
        FileExistsError, match=f"mine: expected a new .* with {there.split('/')[0]};"
    ):
        save_head(trained(), tmp_path / "mine", target=tiny_target())
    assert path.read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


def test_a_run_folder_stands_for_its_best_or_newest_step(tmp_path):
    for step in (20, 100):
        save_head(trained(), tmp_path / f"step-{step:06d}", target=tiny_target())
    assert open_head(tmp_path).path.name == "step-000100"
    (tmp_path / "best").symlink_to("step-000020")
    assert open_head(tmp_path).path.resolve().name == "step-000020"


def test_missing_heads_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: expected a head, got nothing"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected a head, got an empty folder"):
        load_head(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_the_card_says_what_the_head_is(tmp_path, kind):
    target = Target(random_model("llama"), name="user/model")
    save_head(
        trained(kind), tmp_path / "head", target=target, training={"tokens": 9, "hardware": "a | b"}
    )
    card = ModelCard.load(tmp_path / "head" / "README.md")
    assert card.data.base_model == "user/model"
    assert card.data.library_name == "draftheads"
    assert card.data.tags[-1] == kind
    tree = {"medusa": "3 draft nodes, 2 deep, fixed"}
    dynamic = "9 draft nodes, 3 deep, rebuilt at each step"
    assert f"## Tree\n\n{tree.get(kind, dynamic)}.\n" in card.text
    assert "| tokens | 9 |" in card.text
    assert "| hardware | a \\| b |" in card.text


@pytest.mark.parametrize(
    ("decoding", "bars"),
    [
        ({"prompts": 8, "tokens_per_step": 1.75, "acceptance": [0.5, 0.25, 0.0]}, 3),
        ({"prompts": 8, "tokens_per_step": 1.75, "acceptance": "many"}, 0),
        ({"prompts": 8, "acceptance": [0.5]}, 0),
        (0.5, 0),
        (None, 0),
    ],
)
def test_the_card_draws_how_many_drafts_are_accepted(tmp_path, decoding, bars):
    """If training has measured it, and the section is as training writes it."""
    training = {"decoding": decoding} if decoding is not None else {}
    save_head(trained(), tmp_path / "head", target=tiny_target(), training=training)
    card = (tmp_path / "head" / "README.md").read_text()
    assert ("## Accepted drafts" in card) == bool(bars)
    if bars:
        assert "τ 1.75 on 8 held-out prompts" in card
        assert f" 1   50 %  {'█' * 20}\n 2   25 %  {'█' * 10}\n 3    0 %" in card


def test_a_tree_is_added_without_touching_the_rest(tmp_path):
    folder = save_head(trained(), tmp_path / "head", target=tiny_target(), training={"a": 1})
    (folder / "trainer").mkdir()
    record_tuned(folder, StaticTree.from_widths((3,)), {"machine": "this one"})
    assert "3 draft nodes, 1 deep" in (folder / "README.md").read_text()
    assert load_head(folder, target=tiny_target()).depth == 4
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "custom_generate", "trainer"
    }  # fmt: skip
