"""The promise: the analysis of a bench is the formula of speculative decoding, beside the rates
that were measured.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftheads.infer.measure import analysis
from draftheads.infer.measure.analysis import analysed, best_depth, rates, tokens


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
def test_equal_rates_give_the_formula(alpha):
    for gamma in range(6):
        formula = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert tokens([alpha] * gamma) == pytest.approx(formula)


def test_rates_are_of_the_steps_that_came_so_far():
    result = SimpleNamespace(acceptance_by_depth=[0.8, 0.4, 0.1, 0.0])
    assert rates(result) == pytest.approx([0.8, 0.5, 0.25, 0.0])
    assert tokens(rates(result)) == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert rates(SimpleNamespace(acceptance_by_depth=[0.5, 0.0, 0.0])) == [0.5, 0.0]


def test_the_best_depth_is_that_of_a_search():
    """Of the paper's table: alpha .8 and c .1 are fastest with 5 or 6 tokens."""
    assert best_depth([0.8] * 20, 0.1) in (5, 6)
    assert best_depth([0.9] * 20, 0.02) > best_depth([0.9] * 20, 0.2) > 0
    assert best_depth([0.3] * 5, 0.5) == best_depth([], 0.1) == 0
    assert best_depth([0.9, 0.9, 0.1, 0.9], 0.1) == 2, "where rates fall, the formula goes too far"


def test_a_line_for_each_head(monkeypatch):
    result = SimpleNamespace(
        name="medusa@7",
        acceptance_by_depth=[0.5, 0.2],
        tokens_per_step=1.7,
        draft_seconds=0.002,
        verify_seconds=0.012,
    )
    nothing = SimpleNamespace(name="none", acceptance_by_depth=[])
    report = SimpleNamespace(plain=SimpleNamespace(step_seconds=0.010))
    monkeypatch.setattr(analysis, "fastest", lambda report: [result, nothing])
    [line] = analysed(report)
    assert "medusa@7: alpha by depth 0.50, 0.40." in line
    assert "would write 1.75 tokens, +3% of what it does" in line
    assert "costs 0.10 plain steps" in line and line.endswith("it takes 1.20.")
