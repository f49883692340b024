"""The promise: the benchmark's numbers mean what they say, and a wrong output is called wrong."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_heads import Made, Oracle
from tiny_targets import CONTEXT, VOCABULARY, greedy, random_model, some_prompts, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.hybrid.states import cache_argument
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer import accept
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.generate import Processed
from draftheads.infer.lossy import Lenient, Typical
from draftheads.infer.measure.baseline import Baseline, without_defaults
from draftheads.infer.measure.bench import (
    BenchOptions,
    bench,
    by_category,
    int8_cost,
    text_quality,
    top2_margin,
)
from draftheads.infer.measure.report import (
    best,
    cautions,
    print_report,
    verdict,
)
from draftheads.infer.race import (
    BenchPrompt,
    speedup_interval,
)
from draftheads.infer.rows import Step
from draftheads.infer.turns import TimedRun
from draftheads.scripts.options import write_figures

NEW = 21  # one token from the prefill and four steps of an oracle of depth 4
CHAIN = StaticTree.from_widths((1, 1, 1, 1))
HEAD_FIELDS = {
    "name": str,
    "nodes": int,
    "lossless": bool,
    "tokens_per_step": float,
    "acceptance_by_depth": list,
    "tokens_per_second": float,
    "baseline_tokens_per_second": float,
    "plain_tokens_per_second": float,
    "speedup": float,
    "speedup_ci95": list,
    "speedup_over_best": float,
    "speedup_over_best_ci95": list,
    "draft_seconds": float,
    "verify_seconds": float,
    "steps": int,
    "tokens": int,
}


class Recall:
    """An oracle that finds the prompt it was given among those it knows."""

    feature_layers = ()
    cache = None

    def __init__(self, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.truth, self.oracle = truth, None

    def propose(self, committed):
        if self.oracle is None:
            prompt = tuple(committed.tokens_BC[0, :-1].tolist())
            self.oracle = Oracle(CHAIN, [self.truth[prompt]], vocab_size=VOCABULARY)
        return self.oracle.propose(committed)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return some_prompts(7, 12, 5)


@pytest.fixture(scope="module")
def oracle(target, prompts):
    truth = {tuple(prompt): greedy(target, prompt, NEW) for prompt in prompts}
    return Made(lambda: Recall(truth)), CHAIN


@pytest.fixture(scope="module")
def report(target, prompts, oracle):
    heads = {"medusa": MedusaHead.create(target), "oracle": oracle}
    options = BenchOptions(max_new_tokens=NEW, nodes=(2, 8, 99))
    return bench(target, heads, prompts, options)


def quick(target, prompts, heads=None, **choices):
    choices = {"max_new_tokens": 9, **choices}
    return bench(target, heads or {}, prompts, BenchOptions(**choices))


def test_categories_divide_the_results(target, prompts, oracle):
    options = BenchOptions(max_new_tokens=NEW, categories=["code", "prose", "code"])
    report = bench(target, {"oracle": oracle}, prompts, options)
    [whole] = report.heads
    parts = {name: results[-1] for name, results in report.categories.items()}
    assert list(parts) == ["code", "prose"] and {each.name for each in parts.values()} == {"oracle"}
    assert sum(each.tokens for each in parts.values()) == whole.tokens
    assert sum(each.steps for each in parts.values()) == whole.steps
    printed = StringIO()
    print_report(report, Console(file=printed, width=120))
    assert all(f"\n{name}" in printed.getvalue() for name in ("oracle by category", *parts))
    turns = [BenchPrompt(number, [number], 1) for number in (0, 2, 3)]
    runs = {"plain": [TimedRun([], seconds) for seconds in (1.0, 2.0, 3.0)]}
    found = by_category(turns, runs, ["code", "", "prose", "code"])
    assert found["code"] == ([turns[0], turns[2]], {"plain": [runs["plain"][0], runs["plain"][2]]})
    one = bench(target, {"oracle": oracle}, prompts, replace(options, categories=["code"] * 3))
    assert one.categories == {}


def test_json_has_every_field_with_its_type(report, tmp_path):
    path = tmp_path / "new" / "bench.json"
    write_figures(path, asdict(report))
    written = json.loads(path.read_text())
    assert written["heads"][3]["tokens_per_step"] == report.result("oracle").tokens_per_step
    assert [path.name] == [file.name for file in path.parent.iterdir()], "no partial file is left"
    for row in written["heads"]:
        assert {key: type(row[key]) for key in HEAD_FIELDS} == HEAD_FIELDS
        assert row["lossless_reason"] is None
        low, high = row["speedup_ci95"]
        assert 0 < low <= high
    assert set(written["machine"]) == {
        *("cpu", "cores", "torch_threads", "gpu", "dtype", "engine", "date"),
        *("python", "torch", "transformers", "draftheads"),
    }
    assert written["machine"]["gpu"] is None
    settings = written["settings"]
    assert (settings["prompts"], settings["seed"]) == (3, 0)
    assert settings["command"].endswith(shlex.join(sys.argv[1:]))


def test_tree_sizes_are_cut_from_the_heads_own_tree(report):
    """Its default is 8, and 99 are more than the 64 that it knows; a drafter from a function keeps
    its own tree.
    """
    sizes = [(row.name, row.nodes) for row in report.heads]
    assert sizes == [("medusa@2", 2), ("medusa@8", 8), ("medusa@64", 64), ("oracle", 4)]


def test_tokens_and_steps_are_counted(report, prompts):
    oracle = report.result("oracle")
    assert oracle.tokens_per_step == 5.0
    assert oracle.acceptance_by_depth == [1.0] * 4
    runs = len(prompts)
    assert (oracle.steps, oracle.tokens) == (runs * 4, runs * NEW)
    assert (report.plain.tokens_per_step, report.plain.steps) == (1.0, runs * (NEW - 1))


def test_speedup_is_the_ratio_of_speeds(report):
    for row in (report.plain, *report.heads):
        assert row.speedup == pytest.approx(row.tokens_per_second / row.baseline_tokens_per_second)
        assert row.plain_tokens_per_second == report.plain.tokens_per_second
        best = max(row.baseline_tokens_per_second, row.plain_tokens_per_second)
        assert row.speedup_over_best == pytest.approx(row.tokens_per_second / best)
        assert row.speedup_over_best <= row.speedup


def test_right_outputs_are_called_lossless(report):
    assert [row.lossless for row in (report.plain, *report.heads)] == [True] * 5
    assert all(row.first_divergence is None for row in report.heads)


@pytest.fixture
def liar(prompts, monkeypatch):
    """A drafter of wrong tokens, and acceptance that takes every draft for right."""
    wrong = {tuple(prompt): [0] * 4 + [1] * 20 for prompt in prompts}

    def gullible(tree, chosen_BN):
        rows, nodes = tree.tokens_BN.shape
        return accept.take(tree, torch.full((rows,), nodes - 1), chosen_BN[:, -1])

    monkeypatch.setattr(accept, "follow", gullible)
    return Made(lambda: Recall(wrong)), CHAIN


def test_a_wrong_output_is_called_so(target, prompts, liar):
    prompt = prompts[0]
    expected = greedy(target, prompt, 9)
    report = quick(target, [prompt], {"liar": liar})
    liar = report.result("liar")
    assert liar.lossless is False
    found = liar.first_divergence
    assert (found.prompts, found.prompt) == (1, 0)
    assert found.expected == expected[found.token] != found.got
    assert found.top2_margin == top2_margin(target, [*prompt, *expected[: found.token]])
    assert report.plain.lossless is True
    lines = cautions(report)
    assert any("liar: differs from generate in 1 prompt" in note for note in lines)


def test_the_margin_is_that_of_the_targets_two_best_logits(target, prompts):
    logits = target.model(torch.tensor([prompts[1]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert top2_margin(target, prompts[1]) == pytest.approx(best - second, abs=1e-4)


@pytest.mark.parametrize("rule", [Sampled(0.8, 0.9, 5), Typical()], ids=["sampled", "typical"])
def test_random_outputs_are_not_compared(target, prompts, rule):
    report = quick(target, prompts, {"medusa": MedusaHead.create(target)}, sampling=rule)
    [row] = report.heads
    assert (row.lossless, row.first_divergence) == (None, None)
    assert ("lossy" in row.lossless_reason) is isinstance(rule, Typical)
    assert type(rule).__name__ in report.settings["sampling"]


def test_the_quality_of_a_lossy_rules_text_is_told(target, prompts, capsys):
    """Plain decoding, which keeps no drafts, is the target's own: all of it is the likeliest."""
    head = MedusaHead.create(target)
    report = quick(target, prompts, {"medusa": head}, sampling=Lenient(top=target.vocab_size))
    assert report.plain.quality["likeliest"] == 1.0
    [row] = report.heads
    assert row.quality["likeliest"] < 1.0 and row.tokens_per_step > 2
    tokens = greedy(target, prompts[0], 4)
    own = TimedRun([Step(tokens, 0, "length", 0.0, 0.0)], 1.0)
    logits = target.model(torch.tensor([[*prompts[0], *tokens]])).logits[0].log_softmax(-1)
    expected = [logits[len(prompts[0]) - 1 + n, token].item() for n, token in enumerate(tokens)]
    measured = text_quality(target, [BenchPrompt(0, prompts[0], 4)], [own])
    assert measured["log_probability"] == pytest.approx(sum(expected) / 4, abs=1e-4)
    print_report(report)
    assert "of its tokens are the likeliest after what it wrote" in capsys.readouterr().out
    exact = quick(target, prompts, {"medusa": head})
    assert [each.quality for each in (exact.plain, *exact.heads)] == [None, None]


def test_in_bfloat16_a_difference_is_reported_and_not_judged(prompts, liar):
    target = Target(random_model("llama").to(torch.bfloat16), name="tiny-bf16")
    report = quick(target, prompts, {"liar": liar})
    [row] = report.heads
    assert row.lossless is None
    assert (row.first_divergence.prompts, row.first_divergence.prompt) == (3, 0)
    assert "bfloat16" in row.lossless_reason
    assert report.machine["dtype"] == "bfloat16"
    [note] = [note for note in cautions(report) if note.startswith("liar: differs")]
    assert f"logits are {row.first_divergence.top2_margin:.2g} apart" in note
    assert row.lossless_reason in cautions(report)


@pytest.mark.mend("no page and no bench said what int8 costs, and its texts were not judged")
@pytest.mark.skipif(not has_int8(), reason="torch has no int8 products for this CPU")
def test_in_int8_texts_are_judged_and_its_cost_is_told(prompts, liar):
    whole, target = (Target(random_model("llama"), name="tiny-int8") for _ in range(2))
    report = quick(target.pack(8), prompts, {"liar": liar})
    assert report.plain.lossless and report.plain.lossless_reason is None
    assert report.heads[0].lossless is False
    nothing = int8_cost(whole, whole, prompts)
    assert nothing == {"agreement": 1.0, "kl": pytest.approx(0.0), "tokens": 24}
    cost = int8_cost(target, whole, prompts, tokens=20)
    assert cost["kl"] > 0 and 0.3 < cost["agreement"] <= 1 and cost["tokens"] == 20
    [note] = [note for note in cautions(replace(report, int8=cost)) if note.startswith("int8: ")]
    assert f"{cost['agreement']:.1%} of 20 tokens" in note


def test_generate_ignores_the_models_own_generation_config(prompts):
    """A repetition penalty there would make `generate` write what no head can reproduce."""
    target = Target(random_model("llama"), name="tiny-penalised")
    plain = greedy(target, prompts[0], 9)
    own = GenerationConfig(repetition_penalty=5.0, temperature=0.5, do_sample=True, pad_token_id=0)
    target.model.generation_config = own
    assert quick(target, prompts).plain.lossless is True
    with without_defaults(target):
        [step] = Baseline(target).generate(prompts[0], sampling=Greedy(), max_new_tokens=9)
    assert step.tokens == plain
    assert target.model.generation_config is own


def test_generate_ends_at_the_targets_eos(prompts):
    target = Target(random_model("llama"), name="tiny-eos")
    target.eos_ids = (greedy(target, prompts[0], 4)[3], VOCABULARY - 1)
    report = quick(target, prompts)
    assert report.plain.lossless is True
    assert report.plain.tokens < 9 * len(prompts)


def test_random_streams_are_repeatable_and_the_callers_is_untouched(target, prompts):
    heads = {"medusa": MedusaHead.create(target)}
    before = torch.get_rng_state()
    steps = [
        quick(target, prompts, heads, sampling=Sampled(), seed=seed).heads[0].acceptance_by_depth
        for seed in (1, 1, 2)
    ]
    assert steps[0] == steps[1] != steps[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_prompts_get_the_room_that_the_context_leaves(target):
    lengths = (5, CONTEXT - 3, CONTEXT, CONTEXT + 7)
    report = quick(target, some_prompts(*lengths))
    settings = report.settings
    assert [settings[f"prompts{key}"] for key in ("", "_shortened", "_skipped")] == [2, 1, 2]
    assert report.plain.tokens == 9 + 3
    assert any("2 prompts fill the context" in note for note in cautions(report))


def test_the_interval_holds_the_estimate_and_repeats():
    torch.manual_seed(3)
    tokens_P = torch.full((40,), 100.0, dtype=torch.float64)
    slow_P = 2.0 + torch.rand(40, dtype=torch.float64)
    fast_P = slow_P / (2.0 + 0.4 * torch.rand(40, dtype=torch.float64))
    ours, baseline = torch.stack([tokens_P, fast_P], 1), torch.stack([tokens_P, slow_P], 1)
    low, high = speedup_interval(ours, baseline)
    assert low < float(slow_P.sum() / fast_P.sum()) < high
    assert high - low < 0.15, "prompts differ in length; pairing keeps that out of the interval"
    assert [low, high] == speedup_interval(ours, baseline)


def test_an_equal_contestant_has_an_interval_of_one_point():
    sums = torch.tensor([[10.0, 1.0], [20.0, 3.0], [5.0, 2.0]], dtype=torch.float64)
    assert speedup_interval(sums, sums) == [1.0, 1.0]


def ended(report, **changes):
    """The report with one result with drafts, changed."""
    figures = {
        "speedup": 2.2,
        "speedup_ci95": [1.8, 2.6],
        "speedup_over_best": 2.0,
        "speedup_over_best_ci95": [1.7, 2.3],
        "lossless": True,
    }
    result = replace(report.result("medusa@8"), name="heads@8", **{**figures, **changes})
    return replace(report, heads=[result])


NONE_FASTER = "No drafts are faster here than the best decoding without: the fastest, heads@8, has "


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "heads@8 is 2.2 times (1.8 to 2.6) as fast as generate here, 2.0 times (1.7 to 2.3) "
            "the best without drafts; its text is the same, token for token.",
        ),
        (
            {"speedup_over_best": 1.04, "speedup_over_best_ci95": [0.91, 1.2]},
            "heads@8 may be no faster here than the best decoding without drafts: it has 1.04 "
            "times (0.91 to 1.20) its speed, and 2.2 times (1.8 to 2.6) that of generate; its text "
            "is the same, token for token.",
        ),
        ({"lossless": False}, "; ITS TEXT DIFFERS."),
        ({"lossless": None}, "; its text is not judged."),
        (
            {"speedup_over_best": 0.97, "speedup_over_best_ci95": [0.9, 1.02]},
            f"{NONE_FASTER}0.97 times (0.90 to 1.02) its speed.",
        ),
        (
            {"speedup_over_best": 0.6, "speedup_over_best_ci95": [0.5, 0.7]},
            f"{NONE_FASTER}0.6 times (0.5 to 0.7) its speed.",
        ),
    ],
)
def test_a_sentence_says_what_was_found(report, changes, sentence):
    changed = ended(report, **changes)
    assert verdict(changed).endswith(sentence)
    assert verdict(changed) in printed(changed, 4000)


def test_a_wrong_text_does_not_win(report):
    """A faster one that is right does, and a slower one."""
    [right] = ended(report).heads
    wrong = replace(right, name="wrong", lossless=False, speedup=9.0)
    assert best(replace(report, heads=[wrong, right])) is right
    assert best(replace(report, heads=[wrong])) is wrong
    assert verdict(replace(report, heads=[])) == "Nothing with drafts was measured."


def printed(report, width, **terminal) -> str:
    out = StringIO()
    print_report(report, Console(file=out, width=width, **terminal))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 60, 50])
def test_cells_of_narrow_terminals_are_folded_and_nothing_is_cut(report, width):
    text = printed(ended(report), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    if width == 80:
        headings = ["candidate", "τ", "tok/s", "speedup", "95 %", "draft", "verify", "loss-"]
        headings += ["generate", "heads@8", "τ: tokens per step"]
        for heading in (
            "candidate",
            "τ: tokens per step",
            "generate",
            "heads@8",
            "tok/s",
            "speedup",
            "95 %",
            "draft",
            "verify",
            "loss-",
        ):
            assert heading in text
        marked = [line for line in text.splitlines() if "* " in f"{line} "]
        assert marked and all("heads@8*" in line for line in marked)


def test_the_winner_is_marked_in_green_and_nothing_else(report):
    text = printed(ended(report), 80, force_terminal=True, color_system="standard")
    marked = [line for line in text.splitlines() if "\x1b[1;32m" in line]
    assert marked and all("heads@8*" in line for line in marked)
    slow = ended(report, speedup_over_best=0.9)
    assert "heads@8*" not in printed(slow, 80)


@pytest.mark.mend("break-even in bench")
def test_a_head_whose_steps_cost_more_than_they_bring_is_named(report):
    """By its fastest tree, with the next step; one that pays is not."""
    plain = replace(report.plain, draft_seconds=0.0, verify_seconds=0.01, tokens_per_second=100.0)
    oracle = replace(report.result("oracle"), tokens_per_second=300.0)
    sizes = [
        replace(
            report.result(f"medusa@{nodes}"),
            tokens_per_step=2.0,
            draft_seconds=0.01,
            verify_seconds=0.01 * nodes,
            tokens_per_second=100 / nodes,
            speedup=1 / nodes,
        )
        for nodes in (2, 8)
    ]
    slow = replace(report, plain=plain, heads=[*sizes, oracle])
    line = (
        "medusa@2: slower than without drafts: a step costs 3.00 plain ones (break-even τ) and "
        "brings τ 2.00; try fewer --nodes, --dtype bfloat16, or draftheads tune"
    )
    [note] = cautions(slow)
    assert note.startswith(line)
    assert printed(slow, 400).count(line) == 1
    halved = replace(slow, machine={**slow.machine, "dtype": "bfloat16"})
    assert "--dtype" not in cautions(halved)[0]
    faster = replace(sizes[0], tokens_per_second=120.0, tokens_per_step=3.6)
    assert cautions(replace(slow, heads=[faster, oracle])) == []


def test_progress_is_quiet_without_a_terminal(target, prompts, capsys):
    quick(target, prompts[:1])
    assert capsys.readouterr() == ("", "")


class Operators(TorchDispatchMode):
    """Counts what reaches torch's kernels."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_plain_decoding_adds_few_operators_to_the_shortest_loop(target):
    """The rival of every head is the best plain decoding, not a slow one of our own."""
    prompt, steps = some_prompts(9)[0], 20
    name = cache_argument(type(target.model))

    def loop(new: int) -> None:
        cache, ids = DynamicCache(), torch.tensor([prompt])
        for _ in range(new):
            logits = target.model(ids, **{name: cache}, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            ids.tolist()

    def per_step(decode) -> float:
        counts = []
        for new in (2, 2 + steps):
            with torch.inference_mode(), Operators() as operators:
                decode(new)
            counts.append(operators.count)
        return (counts[1] - counts[0]) / steps

    ours = per_step(lambda new: list(Speculator(target).generate(prompt, max_new_tokens=new)))
    assert ours <= per_step(loop) + 30  # 22 when this was written, 73 with a mask of our own


@dataclass(frozen=True)
class Without(Acceptance):
    """A rule that a user wrote: the most probable token but one."""

    banned: int = 0

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        banned_1 = torch.tensor([self.banned], device=logits.device)
        return logits.index_fill(-1, banned_1, -torch.inf).argmax(-1)


class Suppressed(Without):
    def as_generate(self) -> dict[str, Any]:
        return {"do_sample": False, "suppress_tokens": [self.banned]}


def test_a_rule_that_a_user_wrote_is_compared_by_what_it_says_of_generate(target, prompts):
    usual = greedy(target, prompts[0], 9)
    report = quick(target, prompts, sampling=Suppressed(banned=usual[0]))
    assert report.plain.lossless is True
    assert "Suppressed(banned=" in report.settings["sampling"]
    with pytest.raises(ValueError, match="Without.*give it the method as_generate"):
        quick(target, prompts, sampling=Without(banned=usual[0]))
    with pytest.raises(ValueError, match="give it the method as_generate"):
        quick(target, prompts, sampling=Processed(LogitsProcessorList(), sample=False))
