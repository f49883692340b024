"""The promise: `init` writes a recipe for a target on this machine that trains as it is."""

from __future__ import annotations

import pytest
import tiny_chat
import torch
import yaml
from tiny_training import random_answers, write_answers
from transformers import AutoConfig

from draftheads.heads.cpu.linear import can_pack
from draftheads.scripts import training
from draftheads.train.advice.suggest import WHY_KIND, suggest
from draftheads.train.data.answers import Answer
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe


@pytest.mark.parametrize("kind", WHY_KIND)
def test_a_recipe_of_each_kind_is_valid(kind, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(suggest("demo-target", kind, None))
    recipe = load_recipe(path)
    assert (recipe.head.kind, recipe.target) == (kind, "demo-target")
    assert recipe.head.draft_vocabulary == 1024


def test_choices_have_reasons(tmp_path):
    lines = suggest("demo-target", "sequential", None).splitlines()
    plain = ("target", "path", "output")
    values = [line for line in lines if not line.endswith(":")]
    reasons = [line for line in values if " # " in line]
    assert reasons
    assert [line for line in values if not line.strip().startswith(plain)] == reasons


def test_it_follows_the_answers_that_are_there(tmp_path, monkeypatch):
    data = write_answers(tmp_path / "data", random_answers(40))
    values = yaml.safe_load(suggest("demo-target", "medusa", data))
    assert values["data"] | {"rows_per_batch": 0} == {
        "path": str(data),
        "sequence_length": 256,
        "cache_gb": 1,
        "rows_per_batch": 0,
    }
    assert values["run"]["epochs"] == 12, "many passes over so little"


def test_a_large_target_has_a_draft_vocabulary(tmp_path):
    config = AutoConfig.for_model(
        "qwen3", vocab_size=151_936, hidden_size=1024, num_hidden_layers=4, intermediate_size=3072
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.max_position_embeddings = 128
    config.save_pretrained(tmp_path / "target")
    values = yaml.safe_load(suggest(str(tmp_path / "target"), "sequential", None))
    assert values["head"]["vocabulary"] == 8_192
    assert (values["head"]["lm_head"], values["optim"]["lr"]) == ("shared", 3e-3)
    assert values["run"]["minutes"] == 30 and "epochs" not in values["run"]
    data = write_answers(tmp_path / "data", [Answer([*range(3_000)], [(1, 3_000)])])
    counted = yaml.safe_load(suggest(str(tmp_path / "target"), "sequential", data))
    assert counted["head"]["vocabulary"] == 4_096, "97 % of 2,999 are more than 2,048"
    assert "target_dtype" not in values, "its checkpoint is in float32"
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "target")
    half = yaml.safe_load(suggest(str(tmp_path / "target"), "sequential", data))
    can = can_pack(torch.device("cpu"), torch.bfloat16)
    assert half.get("target_dtype") == ("bfloat16" if can else None)
    assert half["run"].get("precision") == ("bf16" if can else None)
    assert counted["data"]["cache_gb"] == 1 and "cache_gb" not in values["data"]
    assert values["head"]["rank"] == 256
    assert values["data"]["sequence_length"] == 128, "its context"
    assert values["data"]["rows_per_batch"] in (1, 2, 4, 8, 16)
    assert values["optim"]["lr"] == 3e-3


@pytest.mark.mend("init wrote no head.mask, and engines refused the trained head")
def test_a_block_head_has_a_mask_that_engines_read(tmp_path):
    target = tiny_chat.llama()
    target.tokenizer.add_tokens(["<file>", "<|user|>"], special_tokens=True)
    target.tokenizer.chat_template = "<|user|>{{ messages }}"
    target.model.resize_token_embeddings(len(target.tokenizer))
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    values = yaml.safe_load(suggest(str(tmp_path / "target"), "block", None))
    assert values["head"]["mask"] == target.tokenizer.convert_tokens_to_ids("<file>")
    assert "mask" not in yaml.safe_load(suggest("demo-target", "block", None))["head"], "none spare"


@pytest.mark.parametrize("layers", [0, 1])
def test_an_mtp_layer_is_tuned_where_the_target_has_one(tmp_path, layers):
    config = AutoConfig.for_model("qwen3", vocab_size=4_096, hidden_size=512)
    config.num_nextn_predict_layers = layers
    config.save_pretrained(tmp_path / "target")
    (tmp_path / "mine.yaml").write_text(suggest(str(tmp_path / "target"), "mtp", None))
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.head.source == ("target" if layers else None)
    assert recipe.optim.lr == (5e-5 if layers else 3e-4)


def test_unknown_kinds_and_existing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--kind: expected sequential, medusa, eagle3, block, mtp"):
        suggest("demo-target", "eagle4", None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHY_KIND)
def test_what_init_writes_trains_as_it_is(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    write_answers(tmp_path / "data", random_answers(40))
    training.init("demo-target", tmp_path / "mine.yaml", tmp_path / "data", kind)
    assert "next: draftheads plan" in capsys.readouterr().err
    recipe = load_recipe(tmp_path / "mine.yaml", ["run.steps=2", "eval.every=0"])
    assert fit(recipe).finished
