"""The promise: OpenVINO GenAI generates our text with our EAGLE-3 and DFlash heads and accepts the
same drafts, as a chain and of EAGLE-3 as a dynamic tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from real_engines import place_of
from tiny_heads import random_head
from tiny_targets import CONFIGS, VOCABULARY, scaled_up, some_prompts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from draftheads.heads.formats.hub import open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.benchmarks.engines import Job, Outcome, ours, theirs
from draftheads.scripts.openings import opening_ids

pytestmark = pytest.mark.engines
PLACE = place_of("openvino")
TREE = {"nodes": 16, "depth": 4, "top_k": 3}
SHORT = ["run.epochs=1.0", "head.vocabulary=null"]
SIZES = ["head.heads=4", "head.kv_heads=1", "head.head_dim=16", "head.feature_layers=[2,3,4]"]
HEADS = {"reduced": [], "full": SHORT, "sizes": [*SHORT, *SIZES]}
DFLASH = ["run.epochs=null", "run.steps=60", "head.vocabulary=null", "head.lm_head=shared"]
DFLASH += ["head.embeddings=shared", "head.conditioning=none", "head.sample_from_anchor=false"]
BLOCKS = {"dflash": ["head.mask=0"], "window": ["head.mask=0", "head.sliding_window=9"]}


@pytest.fixture(scope="module")
def job(demo_target) -> Job:
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), 24)
    return Job(str(demo_target.name), prompts, method="eagle3")


@pytest.fixture(scope="module")
def plain(job, demo_target) -> Outcome:
    return ours(job.plain, demo_target)


def same(
    mine: Outcome, their: Outcome, plain: Outcome, eos: list[int], *, least: float = 0.5
) -> None:
    """Texts, drafts and accepted tokens are equal. least: tokens accepted per draft, on average, or
    equal counts would not tell much.
    """
    print(f"\n{their.version}: {their.drafts} drafts, accepted {their.accepted}")
    assert their.equal(plain, eos) == len(plain.answers)
    assert (their.drafts, their.accepted) == (mine.drafts, mine.accepted)
    assert sum(their.accepted) > least * their.drafts


def test_plain_text_is_ours(job, plain, demo_target):
    eos = list(demo_target.eos_ids)
    assert theirs("openvino", PLACE, job.plain).equal(plain, eos) == len(job.prompts)


@pytest.mark.parametrize("name", HEADS)
def test_a_chain_is_accepted_as_ours(job, plain, demo_target, trained, name):
    chain = replace(job, head=str(trained("eagle3", *HEADS[name])))
    mine = ours(chain, demo_target, "openvino")
    same(mine, theirs("openvino", PLACE, chain), plain, list(demo_target.eos_ids))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_accepted_as_ours(job, plain, demo_target, trained, name):
    folder = trained("block", *DFLASH, *BLOCKS[name]) / "best"
    count = open_head(folder).read()[0].depth  # slots see each other, so a block is whole
    block = replace(job, head=str(folder), method="dflash", draft_tokens=count)
    mine, their = ours(block, demo_target, "openvino"), theirs("openvino", PLACE, block)
    assert their.equal(plain, list(demo_target.eos_ids)) == len(plain.answers)
    assert (their.drafts, their.accepted) == (mine.drafts, mine.accepted)
    assert sum(their.accepted) > 0


def test_a_dynamic_tree_is_accepted_as_ours(job, plain, demo_target, trained):
    tree = replace(job, head=str(trained("eagle3")), tree=TREE)
    mine = ours(tree, demo_target, "openvino")
    same(mine, theirs("openvino", PLACE, tree), plain, list(demo_target.eos_ids))


# Targets of other architectures

RELATIVES = ("qwen2", "qwen3")
FEW = ("run.epochs=null", "run.steps=60")


@dataclass(frozen=True)
class Relative:
    """A target of another architecture, and what it writes."""

    target: Target
    job: Job
    plain: Outcome

    def check(self, job: Job, least: float) -> None:
        mine = ours(job, self.target, "openvino")
        eos = list(self.target.eos_ids)
        same(mine, theirs("openvino", PLACE, job), self.plain, eos, least=least)


@pytest.fixture(scope="module", params=RELATIVES)
def related(request, relative) -> Relative:
    target = relative(request.param)
    prompts = opening_ids(target, str(RECIPES / "demo-prompts.jsonl"), 24)
    job = Job(str(target.name), prompts, method="eagle3")
    return Relative(target, job, ours(job.plain, target))


@pytest.mark.parametrize("shape", [None, TREE], ids=["chain", "tree"])
def test_eagle3_on_another_target(related, trained, shape):
    head = trained("eagle3", *FEW, target=related.target)
    job = replace(related.job, head=str(head), tree=shape)
    related.check(job, least=0.2)


def test_dflash_on_another_target(related, trained):
    folder = trained("block", *DFLASH, *BLOCKS["dflash"], target=related.target) / "best"
    count = open_head(folder).read()[0].depth
    job = replace(related.job, head=str(folder), method="dflash", draft_tokens=count)
    related.check(job, least=0.05)


# Random heads, whose drafts are seldom right, on random targets of further architectures

FURTHER = {
    "phi3": CONFIGS["phi3"],
    "mistral-window": CONFIGS["mistral-window"],
    "smollm3": ("smollm3", CONFIGS["llama"][1]),
    "granite": ("granite", CONFIGS["llama"][1]),
}


@pytest.mark.parametrize("name", FURTHER)
def test_a_random_head_on_a_random_target(name, tmp_path):
    target = random_target(name, tmp_path / "target")
    head = random_head("eagle3", target, feature_layers=[1, 3, 5])
    save_head(head, tmp_path / "head", target=target)
    prompts = some_prompts(*range(4, 28))
    job = Job(target.name, prompts, str(tmp_path / "head"), "eagle3", new_tokens=48)
    plain, mine = ours(job.plain, target), ours(job, target, "openvino")
    same(mine, theirs("openvino", PLACE, job), plain, list(target.eos_ids), least=0.03)


def random_target(name: str, folder: Path) -> Target:
    """Of six layers, with a tokenizer, which the engine demands."""
    kind, options = FURTHER[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**options, "num_hidden_layers": 6})
    model = scaled_up(AutoModelForCausalLM.from_config(config))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    model.save_pretrained(folder)
    words = {f"w{place}": place for place in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return Target.load(folder, dtype="float32")
