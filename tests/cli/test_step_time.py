"""The promise: the floor of a training step counts what torch counts, and a report comes out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from draftheads.scripts.benchmarks.step_time import (
    KINDS,
    Setup,
    Trial,
    counted,
    create_batch,
    create_target,
    frozen_parts,
    head_parts,
    main,
    total,
)

TINY = Setup(
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    vocabulary=64,
    draft_vocabulary=48,
    rows=2,
    length=32,
    documents=2,
    depth=2,
    ttt=2,
    repetitions=1,
)


@pytest.fixture(scope="module")
def trials() -> dict[str, Trial]:
    target, batch = create_target(TINY), create_batch(TINY)
    made = {kind: Trial(kind, TINY, target, batch) for kind in KINDS}
    for trial in made.values():
        trial.frozen()
    return made


def test_frozen_linear_layers_cost_what_torch_counts(trials):
    trial = trials["medusa"]
    parts = frozen_parts(trial.target, trial.batch)
    # older transformers multiply matrices for rotary embeddings, which are not counted
    linear = total(parts, only_linear=True)
    assert linear == pytest.approx(counted(trial.frozen), rel=1e-4)


def test_medusa_linear_layers_cost_what_torch_counts(trials):
    trial = trials["medusa"]
    parts = head_parts(trial.head, trial.batch, trial.target)
    assert total(parts, only_linear=True) == counted(trial.learn)


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_little_is_computed_that_the_floor_does_not_ask_for(trials, kind):
    """EAGLE-3's steps run over all roots, though those near a document's end have nothing left to
    say, and a state at the edge of two chunks is unembedded twice. A block attends to itself, and
    all of its slots are unembedded.
    """
    trial = trials[kind]
    floor = total(head_parts(trial.head, trial.batch, trial.target), only_linear=True)
    assert floor <= counted(trial.learn) < 1.1 * floor


def test_attention_is_counted_within_documents():
    """Two documents of three tokens: 1 + 2 + 3 entries each; four products of width 32 a layer."""
    setup = replace(TINY, layers=2, rows=1, length=6)
    target, batch = create_target(setup), create_batch(setup)
    attention = frozen_parts(target, batch)[1]
    assert attention.forward == 2 * (6 + 6) * 4 * 32


def test_a_report_comes_out(tmp_path, capsys):
    out = tmp_path / "step.json"
    main([*TINY.arguments(), "--profile", "--json", str(out)])
    printed = capsys.readouterr().out
    assert all(f"{kind}: whole step" in printed for kind in KINDS)
    report = json.loads(out.read_text())
    assert report["setup"]["hidden_size"] == 32
    assert set(report["heads"]["eagle3"]["reached"]) == set(report["heads"]["medusa"]["reached"])
