"""The promise: heads are evaluated by what decoding with them brings, training does not notice, and
the best checkpoint and the end of a run follow from it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from launching import outputs_of_two_forks
from tiny_heads import overfitted, random_head, written_by
from tiny_training import (
    assert_same,
    conversation,
    in_step,
    recipe_of,
    run,
    tiny_recipe,
    tiny_target,
    weights,
    write_answers,
)

from draftheads.heads.formats.hub import HEADS, load_head
from draftheads.heads.target.model import Target
from draftheads.infer.rows import Step
from draftheads.train.checkpoint import read_state
from draftheads.train.data.answers import Answer
from draftheads.train.evaluate import (
    Evaluation,
    Evaluator,
    Measured,
    as_decoded,
)
from draftheads.train.features.sources import OnlineFeatures, SharedFaults
from draftheads.train.metrics import evaluation_line, read_metrics
from draftheads.train.run import Run
from draftheads.train.setup import load_data

pytestmark = pytest.mark.slow

DECODING = ["eval.every=2", "eval.prompts=3", "eval.new_tokens=12"]


@pytest.fixture(params=HEADS)
def kind(request) -> str:
    return request.param


def judged(output: Path) -> list[dict]:
    return [line for line in read_metrics(output) if "measured" in line]


def evaluator_of(folder: Path, target: Target, **choices) -> Evaluator:
    values = tiny_recipe(folder)
    values["eval"] = {"prompts": 4, "new_tokens": 24, **choices}
    recipe, accelerator = recipe_of(values), Accelerator(cpu=True)
    data = load_data(recipe, target, lambda line: None)
    features = SharedFaults(OnlineFeatures(target, (-1,)), target, 1)
    return Evaluator(recipe, accelerator, target, data, features)


def test_a_head_that_knows_the_text_brings_depth_plus_one_and_a_random_one_nearly_one(tmp_path):
    target = tiny_target()
    answers = [conversation(target, prompt, 24) for prompt in ([3, 14], [15, 9], [2, 6])]
    write_answers(tmp_path / "data", answers, target.fingerprint())
    evaluator = evaluator_of(tmp_path, target)
    assert len(evaluator.prompts) == 1
    text = written_by(target, [list(evaluator.prompts[0].prompt)], 24)
    head = overfitted("medusa", target, text, depth=3, nodes=9)
    head.eval()
    verdict = evaluator(head, decode=True)
    assert verdict.measured is not None
    # 1 token of the prefill, then 23 in steps of 4, the last one cut
    assert verdict.measured.tokens_per_step == pytest.approx(23 / 6)
    assert verdict.measured.acceptance == [1.0, 1.0, 1.0]
    line = evaluation_line(7, verdict)
    assert line.startswith("step 7: τ 3.75 simulated, 3.83 ± 0.00 decoded, top-1 ")
    untrained = evaluator(random_head("medusa", target, depth=3), decode=True).measured
    assert untrained is not None and 1 <= untrained.tokens_per_step < 1.5


def test_only_what_the_target_did_not_write_is_a_prompt(made):
    target = tiny_target()
    evaluator = evaluator_of(made, target, prompts=100, new_tokens=1000)
    documents = evaluator.share.rows.documents
    texts = [(span, tuple(documents.tokens(*span).tolist())) for span in documents.spans.tolist()]
    assert 1 < len(evaluator.prompts) == len({job.prompt for job in evaluator.prompts})
    for job in evaluator.prompts:
        start, _ = next(span for span, text in texts if text[: len(job.prompt)] == job.prompt)
        first = start + len(job.prompt)
        assert documents.mask(start, first + 1).tolist() == [False] * len(job.prompt) + [True]
        assert job.limit == target.context - len(job.prompt)


def test_prompts_that_leave_no_room_are_one_line(made, tmp_path, capsys):
    answers = [Answer([n % 97] * 200, [(150, 200)]) for n in range(6)]
    data = write_answers(tmp_path / "data", answers)
    choices = [f"data.path={data}", "data.sequence_length=128"]
    assert run(made, tmp_path / "run", *DECODING, *choices) == 2
    assert "expected held-out prompts shorter than the context (128" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=[pytest.mark.thorough] * (each in ("sequential", "eagle", "mtp")))
        for each in HEADS
    ],
)
def test_judging_does_not_change_what_is_trained(made, tmp_path, kind):
    with_, without = tmp_path / "with", tmp_path / "without"
    drawn = ["head.anchors=3"] if kind == "block" else []
    for output, choices in ((with_, DECODING), (without, ["run.save_every=2"])):
        assert run(made, output, *choices, *drawn, kind=kind) == 0
    assert [line["step"] for line in judged(with_)] == [2, 4, 6]
    assert not judged(without)
    assert_same(weights(with_, 6), weights(without, 6))
    for mine, others in zip(read_metrics(with_), read_metrics(without), strict=True):
        assert {k: v for k, v in mine.items() if k not in ("measured", "tokens_per_second")} == {
            k: v for k, v in others.items() if k != "tokens_per_second"
        }
    facts = json.loads((with_ / "step-000006" / "config.json").read_text())["draftheads"]
    assert facts["training"]["decoding"] == judged(with_)[-1]["measured"]


def test_what_is_judged_is_what_loads(made, tmp_path, kind):
    assert run(made, tmp_path / "run", "run.steps=2", *DECODING, kind=kind) == 0
    target = Target.load(made / "target")
    head = load_head(tmp_path / "run", target=target)
    copy = as_decoded(head, target)
    assert_same(head.state_dict(), copy.state_dict())
    assert copy.tree == head.tree
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    evaluator = evaluator_of(made, target, prompts=3, new_tokens=12)
    again = asdict(evaluator.decode(copy))
    saved = read_state(tmp_path / "run" / "step-000002").measured
    assert saved is not None
    assert again == saved


def test_a_target_in_bfloat16_is_decoded_with_heads_in_bfloat16(made, tmp_path):
    output = tmp_path / "run"
    assert run(made, output, *DECODING, "target_dtype=bfloat16", "run.precision=bf16") == 0
    assert len(judged(output)) == 3
    assert weights(output, 6)["lm_heads.0.weight"].dtype == torch.float32


def test_cached_features_keep_the_target_where_it_is_decoded(made, tmp_path, capsys):
    choices = ["features.mode=cached", f"features.path={tmp_path / 'features'}"]
    assert run(made, tmp_path / "run", *DECODING, *choices) == 0
    assert "freed" not in capsys.readouterr().out
    assert len(judged(tmp_path / "run")) == 3


def scripted(monkeypatch, simulated: list[float], decoded: list[float]) -> None:
    """Verdicts of the judgements to come, by step, over all launches; nothing is decoded."""
    original = Evaluator.__call__

    def verdict(self, head, *, decode):
        real = original(self, head, decode=False)
        step = runs[-1].state.step
        calibration = replace(real.calibration, tokens_per_step=simulated[step - 1])
        tau = decoded[step - 1]
        measured = Measured(1, tau, 0.0, [0.5]) if decode and self.prompts else None
        return Evaluation(head, calibration, measured, None)

    runs: list[Run] = []
    evaluate = Run.evaluate
    monkeypatch.setattr(Run, "evaluate", lambda run: runs.append(run) or evaluate(run))
    monkeypatch.setattr(Evaluator, "__call__", verdict)


@pytest.mark.parametrize(
    ("measure", "best"),
    [
        (["eval.every=1"], 3),
        (["eval.every=1", "eval.best=tokens_per_step"], 3),
        (["eval.every=1", "eval.best=simulated"], 2),
        (["eval.every=0"], 2),
    ],
    ids=str,
)
def test_best_is_what_the_measure_says(made, tmp_path, monkeypatch, measure, best):
    scripted(monkeypatch, [1.0, 3.0, 2.0, 1.5, 1.2, 1.1], [1.0, 1.5, 4.0, 3.5, 2.0, 1.0])
    output = tmp_path / "run"
    assert run(made, output, "run.save_every=1", "run.keep=1", "optim.lr=1e-2", *measure) == 0
    assert (output / "best").resolve().name == f"step-{best:06d}"
    assert {path.name for path in output.glob("step-*")} == {f"step-{best:06d}", "step-000006"}


def test_a_step_that_was_saved_and_not_judged_is_not_the_best(made, tmp_path):
    output = tmp_path / "run"
    assert run(made, output, "eval.every=4", "run.save_every=1", "run.keep=9", *DECODING[1:]) == 0
    assert [line["step"] for line in judged(output)] == [4, 6]
    assert (output / "best").resolve().name in ("step-000004", "step-000006")
    assert read_state(output / "step-000005").measured is None


PATIENT = ["run.steps=20", "eval.every=2", "eval.patience=3", "eval.prompts=1"]
TAUS = [1.0] * 3 + [2.0] + [1.5] * 16


def test_patience_ends_a_run_and_says_so(made, tmp_path, monkeypatch, capsys):
    scripted(monkeypatch, TAUS, TAUS)
    assert run(made, tmp_path / "run", *PATIENT) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"ended at step 10 of 20, after [\d,]+ tokens: 3 evaluations without better "
        "tokens_per_step; the best was at step 4",
        said,
    )
    assert f"done: 10 steps, saved in {tmp_path}/run/step-000010" in said
    assert (tmp_path / "run" / "best").resolve().name == "step-000004"
    assert run(made, tmp_path / "run", *PATIENT) == 0
    assert "raise eval.patience to resume" in capsys.readouterr().out
    assert run(made, tmp_path / "run", *PATIENT, "eval.patience=4") == 0
    said = capsys.readouterr().out
    assert re.search(r"ended at step 12 of 20, after [\d,]+ tokens: 4 evaluations", said)


def test_patience_is_counted_over_launches(made, tmp_path, monkeypatch):
    scripted(monkeypatch, TAUS, TAUS)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, parts = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert run(made, whole, *PATIENT) == 0
    with monkeypatch.context() as patch:
        for step in (4, 7):
            in_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(made, parts, *PATIENT) == 130
        assert run(made, parts, *PATIENT) == 130
    assert run(made, parts, *PATIENT) == 0
    assert_same(weights(whole, 10), weights(parts, 10))
    states = [read_state(output / "step-000010") for output in (whole, parts)]
    assert [(s.best, s.best_step, s.waited) for s in states] == [(2.0, 4, 3)] * 2
    assert judged(whole) == judged(parts)


def test_a_continued_run_goes_on_by_its_own_measure(made, tmp_path, capsys):
    assert run(made, tmp_path / "run", *DECODING) == 0
    for change in ("eval.best=simulated", "eval.every=0", "eval.new_tokens=5"):
        assert run(made, tmp_path / "run", *DECODING, "run.steps=8", change) == 2
        assert "holds a run with other choices (eval." in capsys.readouterr().err
    free = ["eval.every=4", "eval.patience=5"]
    assert run(made, tmp_path / "run", *DECODING, "run.steps=8", *free) == 0


def test_decoding_may_begin_in_a_later_launch(made, tmp_path, capsys):
    output = tmp_path / "run"
    assert run(made, output) == 0
    assert run(made, output, "run.steps=8") == 0
    assert run(made, output, "run.steps=9", *DECODING) == 2
    assert "eval.best: simulated -> tokens_per_step" in capsys.readouterr().err
    assert run(made, output, "run.steps=9", "eval.best=simulated", *DECODING) == 0
    assert len(judged(output)) == 1


def test_a_measure_that_cannot_be_had_is_one_line(made, tmp_path, capsys):
    assert run(made, tmp_path / "run", "eval.best=tokens_per_step") == 2
    message = capsys.readouterr().err
    assert "eval.best: expected simulated, got tokens_per_step" in message


def test_trackers_get_a_number_for_every_depth(made, tmp_path, monkeypatch):
    logged: dict[int, dict[str, float]] = {}
    monkeypatch.setattr(
        Accelerator, "log", lambda self, values, step: logged.setdefault(step, {}).update(values)
    )
    assert run(made, tmp_path / "run", *DECODING) == 0
    names = set(logged[6])
    assert {"top1/1", "top1/3", "heldout_top1/3", "heldout_tokens_per_step"} <= names
    assert {"measured/tokens_per_step", "measured/standard_error"} <= names
    assert all(isinstance(value, int | float) for value in logged[6].values())


def test_the_error_of_tau_is_that_of_a_ratio_of_sums():
    hit, miss = Step([1, 2], 1, None, 0.0, 0.0), Step([1], 0, None, 0.0, 0.0)
    prefill = Step([1], -1, None, 0.0, 0.0)
    measured = Measured.of([[prefill, *[hit] * n, *[miss] * (10 - n)] for n in range(5)])
    assert measured.tokens_per_step == pytest.approx(1.2)
    taus_P = torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4])  # of equally many steps: means' own error
    assert measured.standard_error == pytest.approx(float(taus_P.std() / 5**0.5))
    assert measured.acceptance == [0.2]


def test_a_sharded_target_is_judged_by_simulation(made):
    values = {**tiny_recipe(made), "target_placement": "sharded", "eval": {}}
    assert recipe_of(values).measure == "simulated"
    with pytest.raises(ValueError, match=r"eval.best: expected simulated, got tokens_per"):
        recipe_of({**values, "eval": {"best": "tokens_per_step"}})


def test_two_processes_judge_as_one(made, tmp_path):
    values = tiny_recipe(made, output=str(tmp_path / "run"), steps=2)
    values["eval"] = {"prompts": 3, "new_tokens": 12}
    values["data"]["rows_per_batch"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    outputs_of_two_forks(tmp_path, "train/medusa.py", str(tmp_path / "recipe.yaml"))
    saved = read_state(tmp_path / "run" / "step-000002").measured
    target = Target.load(made / "target")
    evaluator = evaluator_of(made, target, prompts=3, new_tokens=12)
    assert len(evaluator.prompts) == 3, "the shares must differ for this to mean anything"
    alone = asdict(evaluator.decode(load_head(tmp_path / "run", target=target)))
    assert saved is not None
    assert saved == alone
