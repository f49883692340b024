"""The promise: the floor of a training step counts what torch counts, and a report comes out."""

from __future__ import annotations

import json

from draftheads.scripts.benchmarks.step_time import (
    KINDS,
    Setup,
    Trial,
    counted,
    create_batch,
    create_target,
    main,
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


def test_what_medusa_computes_is_counted():
    """Of each head a block and an lm_head, over its roots: forward, and twice that backward, but
    for the first layer, whose input is frozen.
    """
    trial = Trial("medusa", TINY, create_target(TINY), create_batch(TINY))
    trial.frozen()
    floor = 0
    for k, mask_BT in enumerate(trial.batch.root_masks(TINY.depth)):
        block, words = trial.head.blocks[k], trial.head.lm_heads[k]
        matrices = [each.weight.numel() for each in block.modules() if hasattr(each, "weight")]
        floor += 2 * int(mask_BT.sum()) * (3 * sum(matrices) + 3 * words.weight.numel())
        floor -= 2 * int(mask_BT.sum()) * matrices[0]
    assert counted(trial.learn) == floor


def test_a_report_comes_out(tmp_path, capsys):
    out = tmp_path / "step.json"
    main([*TINY.arguments(), "--profile", "--json", str(out)])
    printed = capsys.readouterr().out
    assert all(f"{kind}: whole step" in printed for kind in KINDS)
    report = json.loads(out.read_text())
    assert report["setup"]["hidden_size"] == 32
    assert set(report["heads"]["eagle3"]["reached"]) == set(report["heads"]["medusa"]["reached"])
