"""The promise: every combination is trained once and measured as a bench would; an interrupted
ablation is resumed.
"""

from __future__ import annotations

import importlib.util
import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from tiny_training import random_answers, tiny_recipe, write_answers, write_target

from draftheads.heads.formats.hub import load_head
from draftheads.heads.target import Target
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.bench import bench
from draftheads.infer.race import BenchOptions
from draftheads.scripts.benchmarks import ablation
from draftheads.scripts.benchmarks.ablation import combinations, main, plan
from draftheads.train.recipe import load_recipe

pytestmark = pytest.mark.slow

PROMPTS = ([5, 17, 33, 8], [90, 2, 41], [60, 61, 7, 7, 3])
SHARED = ["--vary", "head.conditioning=markov,hydra", "--vary", "head.rank=null,4"]
MEDUSA = ["--case", "head.kind=medusa head.depth=2"]
NAMES = [
    "conditioning=markov,rank=null",
    "conditioning=markov,rank=4",
    "conditioning=hydra,rank=null",
    "kind=medusa,depth=2",
]
REFUSED = "conditioning=hydra,rank=4"


@pytest.fixture(autouse=True)
def token_ids(monkeypatch):
    """The tiny target has no tokenizer: its prompts are token ids."""
    monkeypatch.setattr(ablation, "opening_ids", lambda *_: [list(prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(60))
    values = tiny_recipe(folder)
    values["head"] = {"kind": "sequential", "conditioning": "recurrent", "depth": 3, "nodes": 7}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def arguments(recipe: Path, folder: Path, *more: str) -> list[str]:
    measure = ["--prompts", "ids", "--max-new-tokens", "12", "--nodes", "2", "5", "99"]
    places = [f"run.output={folder / 'runs'}", "run.steps=4"]
    return [str(recipe), *places, *more, *measure, "--json", str(folder / "out.json")]


def report_of(folder: Path) -> dict:
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "opening_ids", lambda *_: [list(prompt) for prompt in PROMPTS])
        main(arguments(recipe, folder, *SHARED, *MEDUSA))
    return folder


def test_axes_multiply_and_lists_stay_whole():
    assert combinations(["a=1,2", "b=x,null"]) == [
        ("a=1", "b=x"),
        ("a=1", "b=null"),
        ("a=2", "b=x"),
        ("a=2", "b=null"),
    ]
    assert combinations(["a=[1,2],[3]"]) == [("a=[1,2]",), ("a=[3]",)]
    with pytest.raises(ValueError, match="expected key=value"):
        combinations(["a"])


def test_every_combination_is_trained_in_its_own_folder(finished):
    report = report_of(finished)
    assert [run["name"] for run in report["runs"]] == NAMES
    assert sorted(folder.name for folder in (finished / "runs").iterdir()) == sorted(NAMES)
    for run in report["runs"]:
        assert Path(run["checkpoint"]) == finished / "runs" / run["name"] / "step-000004"
        assert run["trained"]["steps"] == 4
        assert len(run["trained"]["heldout_top1"]) == run["recipe"]["head"]["depth"]
    heads = [run["recipe"]["head"] for run in report["runs"]]
    assert [head.get("rank") for head in heads] == [None, 4, None, None]
    assert [(head["kind"], head["depth"], head["nodes"]) for head in heads[2:]] == [
        ("sequential", 3, 7),
        ("medusa", 2, 7),  # what the recipe says of its own kind and Medusa's knows is kept
    ]


def test_block_heads_are_varied_in_shape_and_loss(recipe, tmp_path):
    kind = "head.kind=block head.layers=1"
    shapes = f"{kind} head.conditioning=none,rnn head.block_size=3,5"
    losses = f"{kind} head.conditioning=markov head.feature_layers=[1],[0,2] head.labels=soft"
    losses += " head.loss=ce,dspark"
    main(arguments(recipe, tmp_path, "--case", shapes, "--case", losses))
    report = report_of(tmp_path)
    assert report["skipped"] == {}
    lines = [line for line in lines_of(ablation.table(report)) if "kind=block" in line]
    assert len(report["runs"]) == len(lines) == 8
    for run in report["runs"]:
        head, asked = load_head(run["checkpoint"]), run["recipe"]["head"]
        assert head.depth == asked["block_size"] == len(run["trained"]["heldout_top1"])
        assert head.design.conditioning == {"none": None}.get(*[asked["conditioning"]] * 2)
        assert list(head.feature_layers) == (asked["feature_layers"] or [1])
        assert run["lossless"] is True


def test_what_the_recipe_refuses_is_skipped_with_its_reason(finished):
    assert list(report_of(finished)["skipped"]) == [REFUSED]
    assert "rank should be null with conditioning: hydra" in report_of(finished)["skipped"][REFUSED]


def test_figures_are_those_of_a_bench(recipe, finished):
    target = Target.load(load_recipe(recipe).target)
    for run in report_of(finished)["runs"]:
        head = load_head(run["checkpoint"], target=target)
        options = BenchOptions(12, nodes=(2, 5, 99), resamples=2)
        results = bench(target, {"head": head}, PROMPTS, options).heads
        keys = ("nodes", "tokens_per_step", "acceptance_by_depth", "steps", "tokens", "lossless")
        measured = [tuple(row[key] for key in keys) for row in run["measured"]]
        assert measured == [tuple(getattr(row, key) for key in keys) for row in results]
        assert run["lossless"] is True
        assert run["parameters"] == sum(p.numel() for p in head.parameters())


def test_sampling_is_measured_beside_greedy_decoding(recipe, tmp_path):
    """Both are what a bench finds; only greedy output is compared with the plain engine's."""
    depth = ["--vary", "head.depth=3", "--temperature", "0.7", "0", "0.7"]
    main(arguments(recipe, tmp_path, *depth))
    [run] = report_of(tmp_path)["runs"]
    target = Target.load(load_recipe(recipe).target)
    head = load_head(run["checkpoint"], target=target)
    rows = {(row["temperature"], row["nodes"]): row for row in run["measured"]}
    sizes = len(rows) // 2
    assert [temperature for temperature, _ in rows] == [0.7] * sizes + [0.0] * sizes
    for temperature, rule in [(0.7, Sampled(0.7)), (0.0, Greedy())]:
        options = BenchOptions(12, rule, nodes=(2, 5), resamples=2)
        for result in bench(target, {"head": head}, PROMPTS, options).heads:
            row = rows[temperature, result.nodes]
            assert row["tokens_per_step"] == result.tokens_per_step
            assert row["lossless"] is (None if temperature else True)
    assert run["lossless"] is True
    [first, second] = lines_of(ablation.table(report_of(tmp_path)))
    assert first.split()[-1] == "yes"
    assert (first.count("±"), second.count("±"), second.split()[0]) == (sizes, sizes, "0")


def lines_of(table: Table) -> list[str]:
    """The rows of a table, without its titles."""
    console = Console(width=200, file=StringIO())
    with console.capture() as captured:
        console.print(table)
    return [line for line in captured.get().splitlines() if line.strip()][2:]


def test_the_standard_error_is_that_of_a_ratio_over_prompts(recipe, finished):
    target = Target.load(load_recipe(recipe).target)
    run = report_of(finished)["runs"][0]
    head = load_head(run["checkpoint"], target=target)
    row = run["measured"][1]
    engine = Speculator(target, head, tree=head.tree.head(row["nodes"]))
    counts = []
    for prompt in PROMPTS:
        steps = [s for s in engine.generate(prompt, max_new_tokens=12) if s.accepted >= 0]
        counts.append((len(steps), sum(len(step.tokens) for step in steps)))
    tau = sum(tokens for _, tokens in counts) / sum(steps for steps, _ in counts)
    # the linearised ratio: variance of (tokens - tau x steps) over prompts, per step
    variance = sum((tokens - tau * steps) ** 2 for steps, tokens in counts) / (len(counts) - 1)
    expected = (len(counts) * variance) ** 0.5 / sum(steps for steps, _ in counts)
    assert row["standard_error"] == pytest.approx(expected)
    assert expected > 0


def test_a_wrong_output_is_called_so(recipe, tmp_path, monkeypatch):
    """The plain engine's output is made to end with another token."""
    kept = ablation.race

    def lying(contestants, *others):
        results = kept(contestants, *others)
        for run in results.get(ablation.PLAIN, [[]])[0]:
            run.steps[-1].tokens[-1] += 1
        return results

    monkeypatch.setattr(ablation, "race", lying)
    main(arguments(recipe, tmp_path, "--case", "head.depth=1"))
    assert [run["lossless"] for run in report_of(tmp_path)["runs"]] == [False]


def test_an_interrupted_ablation_goes_on(recipe, tmp_path, monkeypatch):
    """The first run is kept, the second was trained but not measured, the rest is new."""
    asked, trained, measured = arguments(recipe, tmp_path, *SHARED, *MEDUSA), [], []
    kept = ablation.Meter.measure

    def stopping(meter, head):
        if measured:
            raise KeyboardInterrupt
        measured.append(head)
        return kept(meter, head)

    monkeypatch.setattr(ablation.Meter, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        main(asked)
    [first] = report_of(tmp_path)["runs"]
    assert first["name"] == NAMES[0]
    assert not list(tmp_path.glob(".*.part"))

    def counting(recipe):
        outcome = fit(recipe)
        trained.append(outcome.trained)
        return outcome

    fit = ablation.fit
    monkeypatch.setattr(ablation, "fit", counting)
    monkeypatch.setattr(
        ablation.Meter, "measure", lambda meter, head: measured.append(head) or kept(meter, head)
    )
    main(asked)
    assert trained == [False, False, True, True]
    assert len(measured) == 1 + 3
    assert [run["name"] for run in report_of(tmp_path)["runs"]] == NAMES
    assert report_of(tmp_path)["runs"][0] == first


def test_a_run_that_fails_does_not_stop_the_others(recipe, tmp_path):
    grid = ["--vary", "optim.lr=1e12,1e-3", "--vary", "head.depth=1"]
    main(arguments(recipe, tmp_path, *grid))
    report = report_of(tmp_path)
    assert [run["name"] for run in report["runs"]] == ["optim.lr=1e-3,depth=1"]
    assert "not finite" in report["skipped"]["optim.lr=1e12,depth=1"]


def test_mistakes_are_explained(recipe, finished, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'head.depth'"):
        plan(recipe, [], [["head.dept=1,2"]])
    with pytest.raises(ValueError, match="one target"):
        plan(recipe, [], [["target=a,b"]])
    with pytest.raises(ValueError, match="other settings|give another --json"):
        main([*arguments(recipe, finished, *MEDUSA), "--limit", "3"])
    with pytest.raises(ValueError, match="temperature -1.0: expected above 0"):
        main([*arguments(recipe, tmp_path, *MEDUSA), "--temperature", "-1"])
    with pytest.raises(SystemExit):
        main(arguments(recipe, finished))


@pytest.mark.parametrize(
    "name", ["ablation", "draft_time", "kill_test", "plan_check", "step_memory", "step_time"]
)
def test_benchmarks_run_under_their_earlier_names(name):
    found = importlib.util.find_spec(f"draftheads.scripts.{name}")
    assert found and Path(str(found.origin)).parent.name == "benchmarks"
