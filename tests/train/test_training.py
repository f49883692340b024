"""The promise: training resumes exactly, says what is wrong, and what it saves is what decodes."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import decode, make_head
from tiny_training import (
    assert_same,
    conversation,
    recipe_of,
    run,
    tiny_recipe,
    tiny_target,
    weights,
    write_answers,
    write_target,
)
from torch.utils._python_dispatch import TorchDispatchMode

from draftheads.heads.formats.hub import HEADS, load_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.engine import Speculator
from draftheads.train import loop
from draftheads.train.engines import Learner, TorchEngine, learning_rate
from draftheads.train.medusa import fit
from draftheads.train.metrics import read_metrics
from draftheads.train.recipe import OptimChoices
from draftheads.train.run import Run

BY_HEART = {
    "eagle3": {"labels": "hard"},
    "mtp": {"steps": 4},
    "eagle": {"steps": 3, "layers": 2},
}
"""Choices with which a head learns a text to the last token."""


@pytest.fixture(params=HEADS)
def kind(request) -> str:
    return request.param


@pytest.mark.slow
def test_the_loss_falls_and_a_checkpoint_says_how_it_was_made(made, tmp_path, kind):
    assert run(made, tmp_path / "run", "run.steps=30", "optim.lr=1e-2", kind=kind) == 0
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 30
    assert losses[-1] < (0.9 if kind == "eagle" else 0.8) * losses[0]
    config = json.loads((tmp_path / "run" / "step-000030" / "config.json").read_text())
    training = config["draftheads"]["training"]
    assert config["draftheads"]["kind"] == kind
    assert training["steps"] == 30
    assert training["recipe"]["optim"]["lr"] == 1e-2
    assert len(training["heldout_top1"]) == 3
    assert training["predicted_tokens_per_step"] >= 1
    assert training["data"]["documents"] == 60
    assert load_head(tmp_path / "run").tree.draft_nodes <= 7


@pytest.mark.slow
def test_what_is_random_in_a_step_is_drawn_from_the_seed(made, tmp_path):
    def first_loss(name: str, *overrides: str) -> float:
        assert run(made, tmp_path / name, "run.steps=1", *overrides, kind="block") == 0
        return read_metrics(tmp_path / name)[0]["loss"]

    drawn = first_loss("drawn", "head.anchors=3")
    assert drawn == first_loss("again", "head.anchors=3")
    assert drawn != first_loss("nothing", "head.anchors=64")


def test_a_finished_run_says_so_and_may_be_lengthened(made, tmp_path, capsys):
    assert run(made, tmp_path / "run") == 0
    assert run(made, tmp_path / "run") == 0
    assert "this run is finished; raise run.steps" in capsys.readouterr().out
    assert run(made, tmp_path / "run", f"data.path={tmp_path / 'gone'}") == 0
    assert run(made, tmp_path / "run", "run.steps=8") == 0
    assert (tmp_path / "run" / "step-000008").is_dir()


def test_rotation_keeps_the_newest_and_the_best(made, tmp_path):
    output = tmp_path / "run"
    assert run(made, output, "run.save_every=1", "run.keep=2", "optim.schedule=constant") == 0
    kept = {path.name for path in output.glob("step-*")}
    assert {"step-000005", "step-000006"} <= kept
    best = (output / "best").resolve()
    assert kept == {"step-000005", "step-000006", best.name}
    lines = [x for x in read_metrics(output) if "heldout_tokens_per_step" in x]
    top = max(line["heldout_tokens_per_step"] for line in lines)
    (found,) = [x for x in lines if f"step-{x['step']:06d}" == best.name]
    assert found["heldout_tokens_per_step"] == top
    assert load_head(output).depth == 3


# the compiler looks at the gradients of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("medusa", ["run.precision=bf16"]),
        ("medusa", ["head.labels=soft", "head.layers=2"]),
        ("medusa", ["head.lm_head=shared"]),
        ("medusa", ["head.vocabulary=40"]),
        ("medusa", ["data.pack=false", "optim.weight_decay=0.1"]),
        ("medusa", ["run.epochs=0.5", "run.steps=null"]),
        ("medusa", ["run.gradient_checkpointing=true"]),
        ("sequential", ["run.precision=bf16"]),
        ("sequential", ["run.precision=bf16", "head.conditioning=hydra", "head.rank=null"]),
        ("sequential", ["head.lm_head=shared", "head.vocabulary=40", "head.top_k=3"]),
        ("sequential", ["head.lm_head=shared", "head.labels=soft"]),
        ("sequential", ["head.layers=2", "head.heads=2", "head.head_dim=24", "head.kv_heads=1"]),
        ("eagle3", ["run.precision=bf16"]),
        ("eagle3", ["run.gradient_checkpointing=true", "run.precision=bf16"]),
        ("eagle3", ["data.cache_gb=1"]),
        ("eagle3", ["features.mode=cached", "head.labels=hard"]),
        ("eagle3", ["head.labels=hard", "head.layers=2"]),
        ("eagle3", ["head.norm_output=true", "head.fc_norm=true"]),
        (
            "eagle3",
            ["head.norm_before_fc=true", "head.norm_before_residual=true", "head.qk_norm=true"],
        ),
        ("eagle3", ["head.sliding_window=5", "head.vocabulary=null", "data.pack=false"]),
        ("eagle3", ["head.feature_layers=[1]", "head.heads=2", "head.head_dim=24"]),
        ("eagle", ["run.precision=bf16"]),
        ("eagle", ["head.layers=2", "head.sliding_window=5", "head.steps=1"]),
        ("eagle", ["head.labels=hard", "head.rope_theta=500000"]),
        ("mtp", ["head.vocabulary=40", "run.precision=bf16"]),
        ("block", ["run.precision=bf16", "head.confidence=true", "head.conditioning=markov"]),
        ("block", ["features.mode=cached", "head.labels=soft"]),
        ("block", ["run.gradient_checkpointing=true"]),
        ("block", ["head.vocabulary=40", "head.lm_head=own", "features.mode=cached"]),
        ("block", ["head.sample_from_anchor=false", "head.conditioning=none", "head.nodes=6"]),
        ("block", ["head.mask=3", "head.embeddings=own", "head.sliding_window=17"]),
        ("block", ["head.feature_layers=[0]", "head.heads=2", "head.top_k=null"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_every_choice_trains_a_head_that_decodes(made, tmp_path, kind, overrides):
    overrides = [*overrides, f"features.path={tmp_path / 'features'}"]
    assert run(made, tmp_path / "run", "run.steps=2", *overrides, kind=kind) == 0
    target = Target.load(made / "target")
    head = load_head(tmp_path / "run", target=target)
    assert all(torch.isfinite(parameter).all() for parameter in head.parameters())
    (plain, _), (drafted, _) = (
        decode(target, drafts, [[5, 6, 7]], max_new_tokens=20) for drafts in (None, head)
    )
    assert drafted == plain


def test_only_the_head_is_trained(made, tmp_path, monkeypatch, capsys, kind):
    before = load_file(made / "target" / "model.safetensors")
    seen: list[Run] = []
    original = loop.train_step
    monkeypatch.setattr(
        loop, "train_step", lambda run, *rest: seen.append(run) or original(run, *rest)
    )
    assert run(made, tmp_path / "run", kind=kind) == 0
    after = seen[0].target.model.state_dict()
    released = {"lm_head.weight"} - after.keys()
    assert bool(released) is not seen[0].head.needs_unembed
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - released)
    said = capsys.readouterr().out
    assert f"parameters of the {kind} head; the target is frozen" in said
    assert set(weights(tmp_path / "run", 6)) == set(seen[0].head.state_dict())


@pytest.mark.parametrize(
    ("answers", "fingerprint", "message"),
    [
        ([([1, 2, 3], [])] * 4, None, "expected tokens written by the target, got none"),
        ([([1, 2, 300], [(1, 3)])] * 4, None, "expected token ids below 97"),
        ([([1, 2, 3], [(1, 3)])] * 4, "0" * 16, "got answers of tiny (0000000000000000)"),
    ],
)
def test_data_that_teaches_nothing_is_refused(
    made, tmp_path, capsys, answers, fingerprint, message
):
    from draftheads.train.data.answers import Answer

    data = write_answers(tmp_path / "data", [Answer(*answer) for answer in answers], fingerprint)
    assert run(made, tmp_path / "run", f"data.path={data}") == 2
    assert message in capsys.readouterr().err


BY_FIT = ("medusa", "eagle3", "block")
"""Kinds to which training gives other rows; all learn one by heart in test_contract.py."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in BY_FIT)) for kind in HEADS],
)
def test_heads_trained_on_a_conversation_are_right_about_it(tmp_path, kind):
    """Training and decoding obey one alignment law: what was learned by heart is accepted whole."""
    target = Target.load(write_target(tmp_path / "target"))
    answer = conversation(target, [3, 14, 15, 92], 60)
    assert len(set(answer.tokens)) > 15, "the text must not be a loop"
    write_answers(tmp_path / "data", [answer], target.fingerprint())
    values = tiny_recipe(tmp_path, kind, steps=150, tokens_per_step=64, log_every=50)
    values["optim"] = {"lr": 1e-2}
    values["data"]["rows_per_batch"] = 1
    values["head"] |= BY_HEART.get(kind, {}) | {"nodes": 10}  # all candidates of a dynamic tree
    assert fit(recipe_of(values)).finished
    head = load_head(tmp_path / "run", target=target)
    for tree in (None, StaticTree.from_widths([1, 1, 1])):
        steps = list(
            Speculator(target, head, tree=tree).generate(answer.tokens[:4], max_new_tokens=60)
        )
        assert [token for step in steps for token in step.tokens] == answer.tokens[4:]
        assert [step.accepted for step in steps[1:-1]] == [3] * (len(steps) - 2)


def test_learning_rate_warms_up_and_falls():
    choices = OptimChoices(lr=1.0, warmup=0.2)
    rates = [learning_rate(choices, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.1
    constant = OptimChoices(lr=1.0, warmup=0, schedule="constant")
    assert {learning_rate(constant, step, 10) for step in range(10)} == {1.0}


def test_a_callback_sees_each_evaluation_and_may_end_the_run(made, tmp_path):
    """Without changing what is learned."""
    values = tiny_recipe(made, steps=6, save_every=2)
    seen = []
    values["run"]["output"] = str(tmp_path / "whole")
    outcome = fit(
        recipe_of(values), on_evaluation=lambda step, figures: seen.append((step, figures))
    )
    assert outcome.finished and [step for step, _ in seen] == [2, 4, 6]
    lines = [line for line in read_metrics(tmp_path / "whole") if "heldout_top1" in line]
    assert [{"step": step, **figures} for step, figures in seen] == lines
    values["run"]["output"] = str(tmp_path / "ended")
    outcome = fit(recipe_of(values), on_evaluation=lambda step, figures: step < 2)
    assert (outcome.step, outcome.stopped_by, outcome.finished) == (3, "on_evaluation", False)
    assert fit(recipe_of(values)).finished
    assert_same(weights(tmp_path / "ended", 6), weights(tmp_path / "whole", 6))


@pytest.mark.mend("fit set torch's random numbers of the program that called it")
def test_training_leaves_the_callers_random_numbers_alone(made, tmp_path):
    values = tiny_recipe(made, steps=1)
    values["run"]["output"] = str(tmp_path)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert fit(recipe_of(values)).finished
    assert torch.equal(torch.rand(3), expected)


def test_adamw_in_one_pass_is_adamw():
    """On a CPU it is torch's fused one; matrices decay, vectors do not."""
    head = make_head(MedusaHead, tiny_target(), depth=2)
    plain = copy.deepcopy(head)
    choices = OptimChoices(lr=0.01, weight_decay=0.1)
    ours = Learner(head, "fp32").optimizer(choices)
    parameters = list(plain.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    usual = torch.optim.AdamW(groups, lr=0.01, betas=choices.betas, foreach=False, fused=False)
    for _ in range(3):
        for left, right in zip(head.parameters(), parameters, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        ours.step()
        usual.step()
    for left, right in zip(head.parameters(), parameters, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


class Clones(TorchDispatchMode):
    """Counts the numbers that are copied."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.mend("a head copied before it went to the meta device")
@pytest.mark.parametrize("kind", HEADS)
def test_an_engine_copies_no_head(kind):
    """Its weights and a copy of them would be in memory at the start of each run."""
    head = make_head(HEADS[kind], tiny_target())
    accelerator = SimpleNamespace(num_processes=1)
    with Clones() as clones:
        engine = TorchEngine(Learner(head, "fp32"), OptimChoices(), accelerator, sharded=False)
    assert clones.numbers < 100
    full = engine.full_head()
    assert_same(full.state_dict(), head.state_dict())
    assert [x.requires_grad for x in full.parameters()] == [
        x.requires_grad for x in head.parameters()
    ]
