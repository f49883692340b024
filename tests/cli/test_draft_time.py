"""The promise: every kind drafts at any shape, and what a draft reads is counted."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace

import pytest
import torch

from draftheads.scripts.benchmarks import draft_time
from draftheads.scripts.benchmarks.draft_time import (
    KINDS,
    Reads,
    Setup,
    Trial,
    create_head,
    create_target,
    head_bytes,
    main,
    measure,
    trees,
)

TINY = Setup(
    hidden=64, vocab=97, nodes=12, depth=3, top_k=4, context=9, repetitions=2, warmup=1, threads=1
)
LM_HEAD = TINY.hidden * TINY.vocab * 4
CHOICES = ["--hidden", "64", "--vocab", "97", "--nodes", "12", "--depth", "3", "--top-k", "4"]
QUICK = ["--repetitions", "3", "--warmup", "0", "--context", "9", "--threads", "1"]


@pytest.fixture(scope="module")
def target():
    return create_target(TINY)


def trial(kind: str, target, setup: Setup = TINY, tree: str = "fixed") -> Trial:
    return Trial(create_head(kind, setup, target), target, trees(kind, setup)[tree], setup)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_the_trees_that_it_fills(target, kind):
    assert list(trees(kind, TINY)) == ["fixed", "dynamic"][: 1 if kind.startswith("medusa") else 2]
    for name in trees(kind, TINY):
        made = trial(kind, target, tree=name)
        committed = made.commit(2)
        drafted = made.draft(committed)
        assert drafted.tokens_BN.shape == (1, 1 + TINY.nodes)
        assert drafted.tokens_BN[0, 0] == committed.tokens_BC[0, -1]
        depth = int(drafted.topology.depths_BN.max())  # a dynamic tree need not go down to the end
        assert depth == TINY.depth if name == "fixed" else 1 <= depth <= TINY.depth


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_steps_are_timed_beside_plain_ones(tmp_path, capsys, dtype):
    """Each tree is verified by all layers of the target; c is its step over a plain one."""
    out = tmp_path / "steps.json"
    shape = ["--layers", "3", "--intermediate", "96", "--heads", "2", "--kv-heads", "1"]
    kinds = ["--kinds", "medusa", "block-rnn-2", "eagle3", "--dtype", dtype]
    main([*CHOICES, *QUICK, *shape, *kinds, "--verify", "--clock", "cpu", "--json", str(out)])
    rows = json.loads(out.read_text())["drafts"]
    assert [row["kind"] for row in rows] == ["medusa", *["block-rnn-2"] * 2, *["eagle3"] * 2]
    for row in rows:
        step = row["seconds"] + row["verify_seconds"]
        assert row["cost"] == pytest.approx(step / row["plain_seconds"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "verify ms" in printed and "tokens per step at which drafts begin to pay" in printed


def test_all_weights_are_drawn_and_a_draft_vocabulary_is_kept(target):
    setup = replace(TINY, draft_vocab=13, rank=5)
    for kind in KINDS:
        head = create_head(kind, setup, target)
        assert all(0 < p.detach().std() < 0.1 for p in head.parameters() if p.numel() > 9)
        if kind == "eagle":  # guesses with the target's own matrix
            continue
        ids = set(head.token_map.tolist())
        assert len(ids) == 13
        made = trial(kind, target, setup)
        assert set(made.draft(made.commit(2)).tokens_BN[0, 1:].tolist()) <= ids
    assert len(create_head("recurrent", setup, target).down[0].weight) == 5


def test_a_head_stands_on_as_many_layers_as_were_asked_for():
    deep = create_target(replace(TINY, layers=32))
    assert create_head("eagle3", TINY, deep).feature_layers == (2, 16, 29)
    assert len(deep.model.get_decoder().layers) == 1


def test_reads_counts_what_stood_before():
    weight_VD, rows = torch.randn(10, 6), torch.tensor([[1, 2]])
    matrix, row = 10 * 6 * 4, 6 * 4
    with Reads() as reads:
        embedded = torch.nn.functional.embedding(rows, weight_VD)
        assert reads.bytes == 2 * row
        made = embedded @ weight_VD.T
        assert reads.bytes == 2 * row + matrix
        made.softmax(-1)
        assert reads.bytes == 2 * row + matrix, "what was made counts not at all"
        embedded @ weight_VD[:5].T
    assert reads.bytes == 2 * row + matrix + matrix // 2


def test_own_lm_heads_are_read_once_and_a_shared_one_where_it_is_used(target):
    own, shared = (create_head(kind, TINY, target) for kind in ("medusa", "medusa-shared"))
    assert trial("medusa", target).bytes_read == head_bytes(own)
    assert trial("medusa-shared", target).bytes_read == head_bytes(shared) + LM_HEAD
    bias = 4 * TINY.vocab * TINY.depth
    hydra = [trial(kind, target).bytes_read for kind in ("hydra", "hydra-shared")]
    assert hydra[0] - hydra[1] == bias, "a level reads a matrix, whosever it is"


def test_eagle_reads_its_layer_and_its_matrix_for_every_level(target):
    head = create_head("eagle3", TINY, target)
    fc = head.fc.weight.numel() * 4
    per_level = head_bytes(head) - fc
    read = trial("eagle3", target).bytes_read
    assert 0 < read - (fc + TINY.depth * per_level) < 0.5 * per_level, "the rest is the text's"


@pytest.mark.parametrize("conditioning", ["none", "markov", "rnn"])
def test_a_block_is_read_once_and_its_conditioning_for_every_level(target, conditioning):
    head = create_head(f"block-{conditioning}-2", TINY, target)
    again = sum(  # for the block, and for the new tokens' features
        head_bytes(part)
        for layer in head.layers
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    once, per_level = head_bytes(head) + again + LM_HEAD, 0
    if head.markov_head is not None:
        parts = dict(head.markov_head.named_children())
        once -= head_bytes(parts.pop("markov_w1")) + head_bytes(parts.pop("markov_w2"))
        per_level = head_bytes(head.markov_head.markov_w2)
        for joint in parts.values():  # of the state, read once, and of what was drafted
            per_level += 4 * joint.weight[:, TINY.hidden :].numel()
            once -= 4 * joint.weight[:, TINY.hidden :].numel()
    if conditioning == "rnn":  # nothing was carried to the first level
        once -= 4 * 3 * head.design.rank**2
    read = trial(f"block-{conditioning}-2", target).bytes_read
    assert 0 < read - (once + TINY.depth * per_level) < 0.05 * once, "the rest is the text's"


def test_a_head_is_freed_before_the_next_is_made(monkeypatch):
    kinds = ["eagle3", "recurrent+prefix", "recurrent-shared", "medusa"]
    alive, kept = [], draft_time.create_head

    def watching(*arguments):
        assert [head for head in alive if head() is not None] == []
        head = kept(*arguments)
        alive.append(weakref.ref(head))
        return head

    monkeypatch.setattr(draft_time, "create_head", watching)
    report = measure(replace(TINY, together_gb=0.0), kinds)
    assert len(alive) == len(kinds) == len(report["weight_bytes"])


def test_a_report_comes_out(tmp_path, capsys):
    out = tmp_path / "draft.json"
    kinds = ["medusa", "recurrent", "eagle3"]
    main([*CHOICES, *QUICK, "--dtype", "bfloat16", "--kinds", *kinds, "--json", str(out)])
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in kinds)
    report = json.loads(out.read_text())
    rows = [(row["kind"], row["tree"]) for row in report["drafts"]]
    assert rows == [("medusa", "fixed"), *((k, t) for k in kinds[1:] for t in ("fixed", "dynamic"))]
    assert report["setup"]["dtype"] == report["machine"]["dtype"] == "bfloat16"
    for row in report["drafts"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["repetitions"] == 3
    medusa = report["weight_bytes"]["medusa"]
    assert medusa == 2 * 3 * (64 * 64 + 64 + 64 * 97), "three heads in bfloat16"
    assert torch.get_default_dtype() == torch.float32


def test_one_repetition_has_no_quartiles():
    with pytest.raises(ValueError, match="2 or more"):
        replace(TINY, repetitions=1)
