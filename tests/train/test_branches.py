"""The promise: documents that begin alike, of a conversation or of several with the same system
prompt, are read once where they do, and all that is computed and learned is what it would be with
each document in a row of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hybrid_targets import HYBRIDS, hybrid_model
from tiny_heads import VARIANTS, random_head
from tiny_targets import CONFIGS, MASKLESS, UNEVEN, random_model, tiny_target
from tiny_training import run, write_target
from turns import conversation, rows_of
from waits import Operators

from draftheads.heads import training_time_test
from draftheads.heads.batch import Batch
from draftheads.heads.target import packing
from draftheads.heads.target.model import Target
from draftheads.heads.target.packing import shares_prefixes
from draftheads.train import batches
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer, new_manifest, store_batch
from draftheads.train.data.shards import rows_of as rows_of_line
from draftheads.train.data.shards import to_batch
from draftheads.train.features.states import StateFeatures, StateLayout

NAMES = sorted({**CONFIGS, **UNEVEN, **MASKLESS, **HYBRIDS})


SYSTEM = [*range(4, 16), *range(3, 15)]
"""A system prompt, longer than SHARED is here."""


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(batches, "SHARED", 20)


@cache
def documents() -> Documents:
    alone = [Answer(list(range(3, 3 + size)), [(1, size)]) for size in (9, 14)]
    agents = [conversation(turns, seed, 3, 2, SYSTEM) for turns, seed in ((2, 4), (1, 5))]
    talks = [conversation(5, 1), agents[0], alone[:1], conversation(2, 2)]
    talks += [conversation(4, 3, 1), agents[1], alone[1:]]
    return Documents.read([answer for talk in talks for answer in talk])


def paths(rows: Rows, batch: Batch) -> list[tuple[list[int], list[int]]]:
    """What the last token of each document sees, (row, places) in the order of the batch."""
    found = []
    for line in range(len(rows)):
        ends = [
            place
            for place, (here, after) in enumerate(
                zip(*[[*batch.documents_BT[line].tolist(), -1][at:] for at in (0, 1)], strict=False)
            )
            if here != after
        ]
        for end in ends[: len(rows.pieces(line))]:
            places = torch.full((len(rows), 1), end)
            [seen] = batch.visible(places)[line].nonzero(as_tuple=True)[1:]
            found.append((line, seen.tolist()))
    return found


@pytest.mark.parametrize("length", [50, 64, 200])
def test_each_document_is_whole_in_what_its_last_token_sees(length):
    rows = rows_of(documents(), length)
    batch = rows.batch(range(len(rows)))
    texts = Counter()
    for row, seen in paths(rows, batch):
        texts[tuple(batch.tokens_BT[row, seen].tolist())] += 1
        assert batch.positions_BT[row, seen].tolist() == list(range(len(seen)))
    spans = documents().spans.tolist()
    assert texts == Counter(tuple(documents().tokens(*span).tolist()) for span in spans)
    apart = rows_of(documents(), length, branches=False)
    assert sum(rows.learned) == sum(apart.learned) == int(batch.loss_mask_BT.sum())
    assert sum(rows.sizes) == sum(apart.sizes) - rows.prefix_tokens
    assert max(rows.sizes) <= length
    assert rows.prefix_tokens > 0


@pytest.mark.mend("turns of a chat were read quadratically under templates that rewrite history")
def test_a_hundred_turns_are_read_once():
    """Not quadratically: each adds its question, its answer as written, and as shown later."""
    talk = conversation(100, 0)
    size = 4 + 7 + 99 * (5 + 4 + 7)  # question, answer; the answer as it is shown, and so on
    rows = rows_of(Documents.read(talk), 4096)
    assert size - 99 < rows.sizes[0] <= size and len(rows) == 1  # some thoughts begin like texts
    assert sum(len(answer.tokens) for answer in talk) > 25 * rows.sizes[0]


def test_a_row_takes_as_many_documents_as_fit():
    talk = conversation(16, 5)
    documents = Documents.read(talk)
    rows = rows_of(documents, 150)
    begun = {
        span: shared
        for row in range(len(rows))
        for span, shared in zip(rows.pieces(row), rows.prefixes_of(row), strict=True)
    }
    assert list(begun.values()).count(0) > 2, "one row is too small for this talk"
    size = 0
    for answer, span in zip(talk, map(tuple, documents.spans.tolist()), strict=True):
        more = 4 + 5 + 7  # the last answer as it is shown, a question, and its answer
        assert begun[span] or size == 0 or size + more > 150
        size = size + len(answer.tokens) - begun[span] if begun[span] else len(answer.tokens)


def test_conversations_with_the_same_tools_stand_in_one_row():
    """Wherever they are in the data; not those that share less, or have no room there."""
    first, second = (conversation(2, seed, opening=SYSTEM) for seed in (0, 1))
    between = conversation(2, 2, opening=SYSTEM[:19])
    documents = Documents.read([*first, *between, *second])
    rows = rows_of(documents, 100)
    held = [rows.document_numbers([row]) for row in range(len(rows))]
    row = held.index([0, 1, 4, 5])
    assert rows.prefixes_of(row)[2] == len(SYSTEM)
    tight = rows_of(documents, rows.sizes[row] - 1)
    assert [0, 1, 4, 5] not in [tight.document_numbers([row]) for row in range(len(tight))]


def test_what_no_branch_can_be_made_of_stays_as_it_was():
    """Conversations that begin alike in a few tokens; documents that do not begin alike; a row that
    would be too long. Without branches, rows are those that they have always been.
    """
    same = Answer(list(range(3, 12)), [(5, 9)])
    other = Answer([90, *range(4, 12)], [(5, 9)], follows=True)
    for answers in ([same, same], [same, other]):
        assert rows_of(Documents.read(answers), 64).prefix_tokens == 0
    talk = conversation(2, 0)
    size = rows_of(Documents.read(talk), 64).sizes[0]
    assert rows_of(Documents.read(talk), size - 1).prefix_tokens == 0
    assert rows_of(Documents.read(talk), size).prefix_tokens > 0
    alone = Documents.read([same, *[Answer(list(range(n, n + 9)), [(1, 9)]) for n in range(20)]])
    ways = [rows_of(alone, 40, branches) for branches in (True, False)]
    assert [list(map(rows.pieces, range(len(rows)))) for rows in ways[:1]] == [
        list(map(rows.pieces, range(len(rows)))) for rows in ways[1:]
    ]
    assert ways[0].batch([0]).reach_BT is None


def test_a_branch_begins_before_what_it_learns():
    """Also where two documents differ only behind it: its first learned token needs a state."""
    first = Answer(list(range(3, 13)), [(6, 10)])
    again = Answer([*range(3, 11), 20, 21], [(5, 10)], follows=True)
    rows = rows_of(Documents.read([first, again]), 64)
    assert rows.prefixes_of(0) == [0, 4]
    assert sum(rows.learned) == 9 == int(rows.batch([0]).loss_mask_BT.sum())


def compared(target: Target, features_of: Any, rows: Rows, layers: list[int]) -> None:
    """Features in rows with branches are those of each document alone."""
    batch = rows.batch(range(len(rows))).to(target.device)
    together_BTD = features_of(list(range(len(rows))), batch)
    assert rows.prefix_tokens
    for row, seen in paths(rows, batch):
        tokens_1T = batch.tokens_BT[row, seen][None]
        places_1T = torch.arange(len(seen))[None]
        one = Batch(tokens_1T, tokens_1T > 0, places_1T, torch.zeros_like(tokens_1T))
        alone_TD = target.features(one, layers)[0, 1:]
        torch.testing.assert_close(
            together_BTD[row, seen][1:],
            alone_TD,
            rtol=1e-3,
            atol=1e-3 * float(alone_TD.abs().max()),
        )


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_each_document_alone(name):
    """On a device that reads rows whole, and on one that reads documents apart."""
    target = Target(hybrid_model(name)) if name in HYBRIDS else tiny_target(name)
    assert shares_prefixes(target) == (target.ways.mixing != "tokens")
    layers = [0, 1, target.layers]
    ways = ["alone"] if target.is_hybrid else ["alone", "mask" if name in MASKLESS else "resets"]
    for way in ways:
        compared(
            target,
            lambda _, batch, way=way: target.states(batch, layers, way).detach(),
            rows_of(documents(), 200),
            layers,
        )


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "lfm2"])
def test_beginnings_are_read_once(name, monkeypatch):
    """Also where a row has many turns, and recurrent layers remember few of their states."""
    target = Target(hybrid_model(name)) if name in HYBRIDS else tiny_target(name)
    read, prefill = [], target.prefill

    def counted(prompts: Any, *arguments: Any) -> Any:
        read.append(sum(map(len, prompts)))
        return prefill(prompts, *arguments)

    monkeypatch.setattr(target, "prefill", counted)
    rows = rows_of(Documents.read(conversation(9, 1)), 200)
    target.states(rows.batch([0]), [-1], "alone")
    assert len(rows) == 1 and sum(read) == rows.sizes[0]


def test_long_rows_are_read_in_pieces_of_whole_documents_with_their_branches(monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 30)
    target = tiny_target()
    for way in ("alone", "resets"):
        compared(
            target,
            lambda _, batch, way=way: target.states(batch, [-1], way).detach(),
            rows_of(documents(), 200),
            [-1],
        )


def test_rows_are_masked_one_by_one(monkeypatch):
    """Masks of all rows of a batch would be large."""
    target = tiny_target()
    shapes, make = [], target.masks.packed

    def packed(batch: Batch) -> Any:
        shapes.append(tuple(batch.tokens_BT.shape))
        return make(batch)

    monkeypatch.setattr(target.masks, "packed", packed)
    rows = rows_of(documents(), 64)
    target.states(rows.batch(range(len(rows))), [-1], "resets")
    assert shapes == [(1, size) for size in rows.sizes]


def test_an_adapter_learns_the_same_through_a_mask():
    pytest.importorskip("peft")
    target = Target(random_model("llama").double(), name="double")
    adapter = target.adapt(rank=2, alpha=4.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert not shares_prefixes(target), "on this device documents would be read from a cache"
    target.ways = replace(target.ways, packing="resets")
    assert shares_prefixes(target)
    gradients = []
    for branches in (True, False):
        rows = rows_of(documents(), 200, branches)
        batch = rows.batch(range(len(rows)))
        states_MD = target.states(batch, [-1])[batch.loss_mask_BT]
        states_MD.square().sum().backward()
        gradients.append([parameter.grad for parameter in adapter.parameters.values()])
        for parameter in adapter.parameters.values():
            parameter.grad = None
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_states_of_others_are_those_of_each_document_alone():
    """Servers give the states of whole documents; rows take what they have of them."""
    target, layers = tiny_target(), [0, 1]
    rows = rows_of(documents(), 200)

    def ask(number: int) -> list[Future[torch.Tensor]]:
        futures = []
        for span in rows.pieces(number):
            tokens_1T = torch.tensor(documents().tokens(*span).tolist())[None]
            out = target.model.model(tokens_1T, output_hidden_states=True, use_cache=False)
            futures.append(Future())
            futures[-1].set_result(torch.stack(out.hidden_states[:2], dim=2)[0].detach())
        return futures

    layout = StateLayout(target, layers, layers)
    compared(target, StateFeatures(layout, rows, ask, lambda: None), rows, layers)


def check_learning(name: str, **choices: Any) -> None:
    """Loss, gradients and ranks of a head, in float64."""
    target = Target(random_model("llama").double(), name="double")
    head = random_head(name, target, anchors=1000, **choices).double()
    sums, ranks = [], []
    for branches in (True, False):
        rows = rows_of(documents(), 200, branches)
        batch = rows.batch(range(len(rows)))
        assert (batch.reach_BT is not None) == branches
        head.zero_grad()
        with Operators() as operators:
            features_BTD = target.states(batch, head.training_layers, "resets").detach()
            loss = head(batch, features_BTD, target).loss
            loss.backward()
        assert operators.waits == []
        grads = [each.grad for each in head.parameters() if each.grad is not None]
        sums.append(torch.cat([loss.detach()[None], *[grad.flatten() for grad in grads]]))
        with torch.no_grad():
            ranks_MK = head.token_ranks(batch, features_BTD, target)
        ranks.append(Counter(map(tuple, ranks_MK.tolist())))
    size = float(sums[0].abs().max())  # sums are in float32
    torch.testing.assert_close(*sums, rtol=0.0, atol=1e-6 * size)
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_heads_learn_the_same(name):
    check_learning(name)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "sequential-prefix", "block"])
def test_windows_count_the_positions_of_a_document(name, monkeypatch):
    """Not the tokens of other documents between; in rows that are read in chunks, too."""
    monkeypatch.setattr(training_time_test, "CHUNK", 16)
    check_learning(name, sliding_window=8)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "medusa"), ("llama", "eagle3"), ("qwen3.5", "medusa")]
)
def test_runs_read_branches(tmp_path, name, kind, capsys):
    """Features are computed at each step, kept in memory, or read from files: the same loss,
    that of documents in rows of their own.
    """
    if name in HYBRIDS:
        hybrid_model(name).save_pretrained(tmp_path / "target")
    else:
        write_target(tmp_path / "target")
    talks = [conversation(3, seed) for seed in range(8)]
    lines = []
    for number, talk in enumerate(talks):
        parts = [
            {"tokens": answer.tokens, "learn": answer.learn, "turns": 1, "finish": "eos"}
            for answer in talk
        ]
        lines.append({"id": f"{number}", "documents": parts})
    (tmp_path / "data").mkdir()
    prompts = {"source": "", "count": len(talks), "sha256": "0" * 12}
    manifest = new_manifest({"name": "tiny", "fingerprint": None}, {}, prompts)
    rows = [row for line in lines for row in rows_of_line(line)]
    store_batch(tmp_path / "data", manifest, to_batch(rows))
    ways = {
        "online": [],
        "memory": ["data.cache_gb=1"],
        "files": ["features.mode=cached"],
        "apart": ["data.pack=false"],
    }
    whole = ["run.steps=1", "run.tokens_per_step=1000000", "data.rows_per_batch=1"]
    if kind == "medusa":  # which learns through the target's states, not from a cache
        ways["adapter"] = ["adapter.rank=2"]
    losses = {}
    for way, overrides in ways.items():
        assert run(tmp_path, tmp_path / way, *whole, *overrides, kind=kind) == 0
        assert ("read once" in capsys.readouterr().out) == (way not in ("apart", "adapter"))
        lines = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        [losses[way]] = [loss for line in lines if (loss := json.loads(line).get("loss"))]
    assert losses == pytest.approx(dict.fromkeys(ways, losses["online"]), rel=1e-5)
