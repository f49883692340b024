"""The promise: a target and its heads learn together (Medusa-2) as the formulas say, heads alone
first; what it does to the target is measured; adapter and heads load together, merged or not.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from placement_worker import random_batch
from safetensors.torch import load_file, save_file
from tiny_heads import make_head
from tiny_targets import random_model
from tiny_training import VOCABULARY, assert_same, recipe_of, run, tiny_recipe, weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import HEADS, load_head, load_pair, open_head, shared_adapter
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.infer.engine import Speculator
from draftheads.scripts.cli import app
from draftheads.train import engines
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import read_answers
from draftheads.train.engines import JointLearner, Learner
from draftheads.train.evaluate import Share, measure_drift
from draftheads.train.metrics import read_metrics
from draftheads.train.recipe import AdapterChoices

JOINT = ["adapter.rank=4", "adapter.lr=0.02", "run.save_every=3"]


def changed(target: Target, size: float = 0.1) -> Target:
    """With an adapter that does something."""
    torch.manual_seed(1)
    adapter = target.adapt(rank=4, alpha=8.0)
    for parameter in adapter.parameters.values():
        parameter.data.normal_(std=size)
    return target


def texts() -> Batch:
    return random_batch(VOCABULARY)


@pytest.fixture(scope="module")
def joint(made, tmp_path_factory) -> Path:
    """A finished Medusa-2 run."""
    output = tmp_path_factory.mktemp("joint") / "run"
    assert run(made, output, *JOINT) == 0
    return output


def fresh(made: Path) -> Target:
    return Target.load(made / "target")


def test_a_new_adapter_changes_nothing(made):
    target, batch = fresh(made), texts()
    before = target.features(batch, [-1])
    adapter = target.adapt(rank=4, alpha=8.0)
    assert torch.equal(target.features(batch, [-1]), before)
    assert target.fingerprint() == fresh(made).fingerprint()
    assert all(p.dtype == torch.float32 for p in adapter.parameters.values())
    matrices = [p for name, p in target.model.named_parameters() if "base_layer" in name]
    assert sum(p.numel() for p in adapter.parameters.values()) == sum(
        4 * (p.shape[0] + p.shape[1]) for p in matrices
    )
    assert len(matrices) == 2 * 7 and "lm_head" not in "".join(adapter.parameters)


def test_layers_and_modules_are_chosen(made):
    adapter = fresh(made).adapt(rank=2, alpha=8.0, layers=1, modules=["q_proj", "up_proj"])
    assert len(adapter.parameters) == 4
    assert all(".layers.1." in name for name in adapter.parameters)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"layers": 3}, "adapter.layers: expected 2 or fewer, got 3"),
        (
            {"modules": ["q_proj", "kproj"]},
            "adapter.modules: expected some of .*k_proj.* got kproj",
        ),
    ],
)
def test_what_there_is_not_cannot_be_changed(made, choices, message):
    with pytest.raises(ValueError, match=message):
        fresh(made).adapt(rank=2, alpha=8.0, **choices)


def test_untouched_is_the_target_as_it_came(made):
    target, batch = changed(fresh(made)), texts()
    before = fresh(made).features(batch, [-1])
    assert not torch.allclose(target.features(batch, [-1]), before)
    with target.disable_adapter():
        assert torch.equal(target.features(batch, [-1]), before)
    assert not torch.allclose(target.features(batch, [-1]), before)
    assert all(p.requires_grad for p in target.adapter.parameters.values())


def test_merged_and_unmerged_write_the_same(made, tmp_path):
    target, batch = changed(fresh(made)), texts()
    target.adapter.save(tmp_path / "adapter", "tiny")
    apart = fresh(made).attach(tmp_path / "adapter", merge=False)
    one = fresh(made).attach(tmp_path / "adapter")
    expected = target.features(batch, [-1])
    assert torch.equal(apart.features(batch, [-1]), expected)
    assert torch.allclose(one.features(batch, [-1]), expected, atol=1e-5)
    assert not [name for name, _ in one.model.named_parameters() if "lora" in name]
    ids = torch.tensor([[5, 6, 7]])
    written = [
        each.model.generate(ids, max_new_tokens=40, do_sample=False, attention_mask=ids > 0)
        for each in (apart, one)
    ]
    assert torch.equal(*written)
    names = {each.adapter.fingerprint() for each in (target, apart, one)}
    assert len(names) == 1
    assert not same_weights(Target(one.model).fingerprint(), one.fingerprint())


def test_peft_itself_loads_the_folder(made, tmp_path):
    from peft import PeftModel

    target, batch = changed(fresh(made)), texts()
    target.adapter.save(tmp_path / "adapter", "tiny")
    model = AutoModelForCausalLM.from_pretrained(made / "target")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of transformers' names
        wrapped = PeftModel.from_pretrained(model, tmp_path / "adapter")
    here = Target(wrapped.get_base_model()).features(batch, [-1])
    assert torch.equal(here, target.features(batch, [-1]))


def test_an_adapter_belongs_to_its_target(made, tmp_path):
    changed(fresh(made)).adapter.save(tmp_path / "adapter", "tiny")
    one = fresh(made).attach(tmp_path / "adapter")
    one.model.save_pretrained(tmp_path / "merged")
    for other in (Target(random_model("llama")), Target.load(tmp_path / "merged")):
        with pytest.raises(ValueError, match="expected a target with fingerprint .*, got "):
            other.attach(tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        fresh(made).attach(made / "data")


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 1_000_000}, r"expected matrices of rank 1000000, .* of shape \[4, "),  # it took 4.7 GB
    *(
        (settings, f"expected a plain LoRA adapter, got {next(iter(settings))}")
        for settings in (
            {"layer_replication": [[0, 2], [0, 2]]},
            {"modules_to_save": ["lm_head"]},
            {"rank_pattern": {"q_proj": 900_000}},
            {"megatron_config": {"a": 1}, "megatron_core": "os"},
            {"init_lora_weights": "pissa"},
            {"use_dora": True},
        )
    ),
]


@pytest.mark.mend("an adapter that says another rank than it has")
@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_settings_that_we_never_write_are_refused_before_anything_is_built(
    made, tmp_path, monkeypatch, settings, said
):
    changed(fresh(made)).adapter.save(tmp_path / "adapter", "tiny")
    monkeypatch.setattr("peft.PeftModel.from_pretrained", lambda *_, **__: pytest.fail("built"))
    place = tmp_path / "adapter" / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | settings))
    with pytest.raises(ValueError, match=said):
        fresh(made).attach(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("factor", "said"), [(None, "expected matrices, got none"), (torch.nan, "expected finite num")]
)
def test_matrices_that_are_none_are_refused(made, tmp_path, factor, said):
    changed(fresh(made)).adapter.save(tmp_path / "adapter", "tiny")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {name: factor * each for name, each in load_file(file).items() if factor}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=said):
        fresh(made).attach(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["medusa", "sequential"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_is_that_of_the_heads_and_the_divergence(made, kind, recompute):
    target, batch = changed(fresh(made), 0.03), texts()
    torch.manual_seed(2)
    head = make_head(HEADS[kind], target, depth=2).float()
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    weight = 0.3
    choices = AdapterChoices(start=0, heads_weight=weight)
    learner = JointLearner(head, "fp32", target.adapter, choices)
    head.recompute = recompute
    with target.disable_adapter():
        before_BTD = target.features(batch, [-1])
    out = learner(batch, before_BTD, target, 0.0)
    out.loss.backward()
    got = {name: p.grad.clone() for name, p in learner.trained().items()}
    learner.zero_grad()

    states_BTD = target.states(batch, [-1])
    heads = head(batch, states_BTD, target).loss
    learned = batch.loss_mask_BT
    after, before = (target.unembed(x[learned]) for x in (states_BTD, before_BTD))
    moved = F.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert torch.allclose(out.loss, heads + moved, rtol=1e-5)
    own = dict(head.named_parameters())
    of_heads = torch.autograd.grad(heads, list(own.values()), retain_graph=True)
    changes = list(target.adapter.parameters.values())
    of_both = torch.autograd.grad(weight * heads + moved, changes)
    for name, expected in zip(own, of_heads, strict=True):
        assert torch.allclose(got[name], expected, rtol=1e-4, atol=1e-5), name
    for name, expected in zip(target.adapter.parameters, of_both, strict=True):
        assert torch.allclose(got[f"adapter.{name}"], expected, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("learned", [False, True])
def test_heads_read_the_target_as_it_is_when_a_longer_run_begins_again(made, learned):
    target, batch = fresh(made), texts()
    adapter = changed(target).adapter if learned else target.adapt(rank=4, alpha=8.0)
    head = make_head(HEADS["medusa"], target, depth=2).float()
    learner = JointLearner(head, "fp32", adapter, AdapterChoices(start=0.5))
    with target.disable_adapter():
        before_BTD = target.features(batch, [-1])
    loss = learner(batch, before_BTD, target, 0.0).loss
    seen_BTD = target.features(batch, [-1])
    expected = head(batch, seen_BTD, target).loss
    assert torch.equal(seen_BTD, before_BTD) != learned
    assert torch.allclose(loss, expected, rtol=1e-5) != learned  # the divergence is added
    assert not learned or loss > expected


@pytest.mark.slow
def test_heads_learn_alone_at_first(made, joint, tmp_path):
    assert run(made, tmp_path / "joint", *JOINT, "adapter.start=0.5") == 0
    assert run(made, tmp_path / "alone", "run.save_every=3") == 0
    assert_same(weights(tmp_path / "joint", 3), weights(tmp_path / "alone", 3))
    begun, ended = (
        load_file(tmp_path / f"joint/step-{step:06d}/adapter/adapter_model.safetensors")
        for step in (3, 6)
    )
    assert all(not tensor.any() for name, tensor in begun.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in ended.items() if "lora_B" in name)
    first, last = [x["drift"] for x in read_metrics(tmp_path / "joint") if "drift" in x]
    assert first["agreement"] == 1 and first["kl"] == 0
    assert last["kl"] > 0


def test_rates_follow_the_recipe(made):
    target = fresh(made)
    choices = AdapterChoices(start=0.2, lr=1e-2)
    learner = JointLearner(
        make_head(HEADS["medusa"], target, depth=2),
        "fp32",
        target.adapt(rank=2, alpha=1.0),
        choices,
    )
    optim = recipe_of(tiny_recipe(made)).optim.model_copy(update={"warmup": 0.25, "lr": 1.0})
    rates = [learner.rates(optim, step, 10) for step in range(10)]
    assert [rate["adapter"] for rate in rates[:4]] == [0, 0, 0.005, 0.01]
    assert rates[9]["adapter"] < rates[5]["adapter"] < 0.01
    plain = [Learner.rates(learner, optim, step, 10)["heads"] for step in range(10)]
    assert [rate["heads"] for rate in rates] == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["run.gradient_checkpointing=true", "features.mode=cached", "data.cache_gb=1"]
)
def test_memory_is_saved_without_changing_a_bit(made, joint, tmp_path, choice):
    more = [
        f"features.path={tmp_path / 'features'}",
        "data.rows_per_batch=1",
    ]
    assert run(made, tmp_path / "plain", *JOINT, "data.rows_per_batch=1") == 0
    assert run(made, tmp_path / "run", *JOINT, *more, choice) == 0
    assert_same(weights(tmp_path / "run", 6), weights(tmp_path / "plain", 6))
    left, right = (
        load_file(tmp_path / f"{name}/step-000006/adapter/adapter_model.safetensors")
        for name in ("run", "plain")
    )
    assert_same(left, right)


def test_drift_is_what_both_targets_say(made):
    target = changed(fresh(made))
    documents = Documents.read(read_answers(made / "data"))
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    share = Share(rows, 4, SimpleNamespace(process_index=0, num_processes=1, device="cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftheads.train.evaluate.gather_object", lambda parts: parts)
        drift = measure_drift(target, share, [-1])
    same, divergence, count = 0, 0.0, 0
    for number in range(len(rows)):
        batch = rows.batch([number])
        logits = [
            each.unembed(each.features(batch, [-1])[batch.loss_mask_BT]).double()
            for each in (fresh(made), target)
        ]
        before, after = (each.log_softmax(-1) for each in logits)
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
        divergence += float((before.exp() * (before - after)).sum())
        count += len(before)
    assert 0 < same < count == drift.tokens
    assert drift.agreement == same / count
    assert drift.kl == pytest.approx(divergence / count, rel=1e-4)


def test_what_drifted_too_far_is_never_the_best(made, tmp_path):
    choices = ["adapter.lr=0.3", "adapter.start=0.4", "run.save_every=2", "optim.schedule=constant"]
    assert run(made, tmp_path / "run", "adapter.rank=4", *choices) == 0
    drifts = [x["drift"]["agreement"] for x in read_metrics(tmp_path / "run") if "drift" in x]
    assert drifts[0] == 1 > 0.98 > max(drifts[1:])
    assert open_head(tmp_path / "run").path.name == "best"
    assert (tmp_path / "run" / "best").resolve().name == "step-000002"


def test_heads_and_adapter_load_together(joint, made):
    facts = open_head(joint).facts.adapter
    assert (facts["rank"], facts["alpha"], facts["layers"]) == (4, 16.0, 2)
    assert facts["drift"]["tokens"] > 0 and 0 <= facts["drift"]["agreement"] <= 1
    target, head = load_pair(joint)
    assert target.adapter.fingerprint() == facts["fingerprint"]
    apart = fresh(made).attach(open_head(joint).adapter, merge=False)
    other = load_head(joint, target=apart)
    lines = [
        [
            token
            for step in Speculator(*pair).generate([5, 6, 7], max_new_tokens=40)
            for token in step.tokens
        ]
        for pair in ((target, head), (apart, other), (target, None), (apart, None))
    ]
    assert lines.count(lines[0]) == 4
    with pytest.warns(UserWarning, match=r"trained with adapter .*tiny|target has none"):
        load_head(joint, target=fresh(made))


def test_heads_of_a_target_that_stayed_want_no_adapter(joint, made, tmp_path):
    assert run(made, tmp_path / "plain") == 0
    assert open_head(tmp_path / "plain").adapter is None
    with pytest.warns(UserWarning, match="trained with no adapter"):
        load_head(tmp_path / "plain", target=fresh(made).attach(open_head(joint).adapter))
    alike = [open_head(joint), open_head(joint / "step-000006")]
    assert shared_adapter(alike) is not None
    with pytest.raises(ValueError, match="same adapter of the target, got .*none"):
        shared_adapter([open_head(joint), open_head(tmp_path / "plain")])


@pytest.mark.mend("merge imported DeepSpeed, which printed to standard output")
def test_merge_writes_a_model_of_its_own(joint, tmp_path, monkeypatch):
    out = tmp_path / "merged"
    asked = Mock(return_value=False)
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", asked)
    result = CliRunner().invoke(app, ["merge", str(joint), str(out)])
    asked.assert_not_called()  # DeepSpeed would be imported, and print
    assert result.exit_code == 0, result.output
    assert result.output.strip().endswith(str(out / "heads"))
    merged, adapted = AutoModelForCausalLM.from_pretrained(out), load_pair(joint)[0]
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(merged(ids).logits, adapted.model(ids).logits, atol=1e-5)
    target, head = load_pair(out / "heads")
    assert target.adapter is None and target.name == str(out)
    assert_same(head.state_dict(), load_head(joint).state_dict())
    facts = json.loads((out / "heads" / "config.json").read_text())["draftheads"]
    assert facts["adapter"] is None and facts["training"]["merged_adapter"]["rank"] == 4
    again = CliRunner().invoke(app, ["merge", str(joint), str(out)])
    assert isinstance(again.exception, FileExistsError) and "already exists" in str(again.exception)
    misspelt = ["merge", str(joint), str(tmp_path / "twice"), "--dtype", "flaot32"]
    assert CliRunner().invoke(app, misspelt).exit_code == 2
    plain = CliRunner().invoke(app, ["merge", str(out / "heads"), str(tmp_path / "twice")])
    assert "nothing to merge" in str(plain.exception)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head={kind: eagle3}"], "head.kind medusa or sequential, got eagle3"),
        (["target_bits=4"], "target_bits null"),
        (["target_placement=sharded"], "whole or split"),
        (["adapter.rnk=4"], "did you mean 'adapter.rank'"),
        (["adapter.heads_weight=0"], "greater than 0"),
        (["adapter.modules=[nope]"], "adapter.modules: expected some of"),
    ],
)
def test_mistakes_are_one_line(made, tmp_path, capsys, overrides, message):
    assert run(made, tmp_path / "run", "adapter.rank=4", *overrides) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error:") and message in error
    assert not (tmp_path / "run").exists()


def test_engines_that_would_divide_the_adapter_are_refused(made, monkeypatch):
    target = fresh(made)
    head = make_head(HEADS["medusa"], target, depth=2)
    learner = JointLearner(head, "fp32", target.adapt(rank=2, alpha=1.0), AdapterChoices())
    optim = recipe_of(tiny_recipe(made)).optim
    monkeypatch.setattr(engines, "asked_for_fsdp", lambda environment: True)
    none = SimpleNamespace(deepspeed_plugin=None)
    two = SimpleNamespace(num_processes=2, distributed_type=DistributedType.FSDP, state=none)
    with pytest.raises(ValueError, match="expected DDP, ZeRO-1 or ZeRO-2, got FSDP or ZeRO-3"):
        engines.make_engine(learner, optim, two)
    monkeypatch.setattr(engines, "asked_for_fsdp", lambda environment: False)
    two.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    with pytest.raises(ValueError, match="got FSDP or ZeRO-3"):
        engines.make_engine(learner, optim, two)


def test_logits_that_are_more_than_a_product_cannot_be_kept(tmp_path, made, capsys):
    model = random_model("gemma2-window")
    model.save_pretrained(tmp_path / "target")
    assert run(made, tmp_path / "run", "adapter.rank=4", f"target={tmp_path / 'target'}") == 2
    assert "adapter: its divergence cannot be measured" in capsys.readouterr().err
