"""The promise: a measurement that is stopped shows and keeps what has ended, and goes on from
there; and one that has little time measures all rows on the same prompts.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tiny_chat import llama, saved
from tiny_heads import make_head
from tiny_targets import some_prompts, tiny_target
from typed_commands import questions

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.infer import race
from draftheads.infer.measure.bench import BenchOptions, BenchReport, bench
from draftheads.infer.measure.report import cautions
from draftheads.infer.turns import Turns

FACTS = {"prompts": "a", "machine": "b"}


@pytest.fixture
def stop(monkeypatch) -> Callable[[int, int], list[int]]:
    """Send this process a signal in the N-th run from now on; gives a list of all runs."""
    real = race.timed

    def sent(number: int, place: int) -> list[int]:
        runs = list[int]()

        def timed(*words):
            runs.append(len(runs))
            if len(runs) == place:
                os.kill(os.getpid(), number)
            return real(*words)

        monkeypatch.setattr(race, "timed", timed)
        return runs

    return sent


def measured(turns: Turns | None = None, **options) -> BenchReport:
    target = tiny_target()
    heads = {"medusa": MedusaHead.create(target)}
    chosen = BenchOptions(**{"max_new_tokens": 9, **options})
    return bench(target, heads, some_prompts(7, 12, 5, 9), chosen, turns=turns)


def taus(report: BenchReport) -> list[tuple[float, int]]:
    return [(each.tokens_per_step, each.tokens) for each in (report.plain, *report.heads)]


def stopped(path: Path, stop: Callable[[int, int], list[int]]) -> BenchReport:
    """By Ctrl-C in the third of four turns, after a run of each row to warm up."""
    stop(signal.SIGINT, 3 + 3 + 3 + 2)
    reports = []
    with pytest.raises(KeyboardInterrupt), Turns(path, FACTS) as turns:
        reports.append(measured(turns))
    return reports[0]


def test_what_has_ended_is_reported_kept_and_not_measured_again(tmp_path, stop, monkeypatch):
    path = tmp_path / "new" / "bench.json.turns"
    report = stopped(path, stop)
    assert report.settings["prompts"] == report.settings["turns_left_out"] == 2
    assert any("PARTIAL: 2 more" in line for line in cautions(report))
    monkeypatch.undo()
    runs = stop(signal.SIGINT, 0)
    with Turns(path, FACTS) as turns:
        whole = measured(turns)
    assert len(runs) == 3 + 2 * 3
    assert taus(whole) == taus(measured())
    assert whole.settings["turns_left_out"] == 0 and not path.exists()


def test_other_facts_begin_anew_and_a_line_that_was_not_written_whole_is_left_out(
    tmp_path, stop, caplog
):
    path = tmp_path / "turns"
    stopped(path, stop)
    path.write_text(path.read_text()[:-9])
    assert len(Turns(path, FACTS).ended) == 1
    caplog.clear()
    assert not Turns(path, FACTS | {"prompts": "c"}).ended
    assert "other prompts before; starting anew" in caplog.text
    assert not Turns(path, FACTS).ended


def test_a_bound_leaves_out_the_same_prompts_of_every_row(tmp_path, monkeypatch):
    """Every look at the clock takes ten seconds."""
    path = tmp_path / "turns"
    wall = count(0, 10)
    monkeypatch.setattr("draftheads.infer.turns.time.monotonic", lambda: next(wall))
    with Turns(path, FACTS) as turns:
        report = measured(turns, minutes=0.6)
    left_out = report.settings["turns_left_out"]
    reached = 4 - left_out
    assert 1 <= report.settings["prompts"] == reached < 4
    assert all(tokens == 9 * reached for _, tokens in taus(report))
    assert len(Turns(path, FACTS).ended) == reached, "more minutes go on"


@pytest.fixture
def typed(run, tmp_path):
    """`bench` or `tune` of a tiny head, with its figures."""
    tiny = llama()
    target, head = tmp_path / "target", tmp_path / "head"
    saved(tiny, target)
    save_head(make_head(MedusaHead, tiny, depth=2, nodes=6), head, target=tiny)
    figures = tmp_path / "figures.json"
    words = ["--target", target, "--head", head, "--prompts", questions(tmp_path, 6)]
    words += ["--limit", 4, "--max-new-tokens", 8, "--threads", 1, "--json", figures]

    def answer(command, *more):
        code, out, _ = run(command, *words, *more)
        return code, out, json.loads(figures.read_text()) if figures.exists() else None

    return answer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_shows_the_table_and_the_same_command_goes_on(typed, stop, tmp_path, number):
    stop(number, 3 + 3 + 1)
    code, out, figures = typed("bench")
    assert code == 130 and "PARTIAL: 3 more" in " ".join(out.split())
    assert figures["settings"]["prompts"] == 1
    code, out, figures = typed("bench")
    assert code == 0 and "PARTIAL" not in out and figures["settings"]["prompts"] == 4
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".turns"]


def test_a_stopped_search_writes_no_tree_and_goes_on(typed, stop, tmp_path):
    """In the race: what it has shown; before: nothing but what was timed."""
    runs = stop(signal.SIGINT, 0)
    config = tmp_path / "head" / "config.json"
    before = config.read_text()
    assert typed("tune", "--nodes", 4, "--dry-run")[0] == 0
    whole = len(runs)
    stop(signal.SIGINT, 5)
    assert typed("tune", "--nodes", 4)[0] == 130
    last = stop(signal.SIGINT, whole - 2)
    code, out, figures = typed("tune", "--nodes", 4)
    assert code == 130 and "PARTIAL: 1 more" in out and config.read_text() == before
    assert figures["settings"]["turns_left_out"] == 1
    rest = stop(signal.SIGINT, 0)
    code, out, _ = typed("tune", "--nodes", 4)
    assert code == 0 and "written to" in out and config.read_text() != before
    assert len(rest) < len(last) < whole


@pytest.mark.parametrize("text", ["notes\n", "{}\n", '{"target": "x"}\nnothing\n', "[1]\n"])
def test_another_file_of_this_name_is_kept(text, tmp_path):
    path = tmp_path / "bench.json.turns"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bench\.json\.turns: expected turns .* remove it"):
        Turns(path, {"target": "x"})
    assert path.read_text() == text
