"""The promise of a GPU, kept where there is none: steps that are replayed write what the others
write, alone and in batches that rows join and leave; the host does next to nothing for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import decoding_modes
import pytest
import torch
from asked import Asked
from recorder import recorded
from tiny_heads import VARIANTS, random_head
from tiny_targets import greedy, some_prompts, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import recorded as recording
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.reading import Session
from draftheads.infer.rules import RowRules
from draftheads.infer.tree_sizes import TreeSizes

NEW = 24
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
DYNAMIC = DynamicTree(9, 3, 3)
written = partial(decoding_modes.written, max_new_tokens=NEW)


@pytest.fixture
def recordings(monkeypatch) -> list[int]:
    """Lets steps be recorded and replayed as on CUDA; how many replays each recording has had."""
    replays: list[int] = []

    def note(step):
        replay = recorded(step)
        number = len(replays)
        replays.append(0)

        def counted() -> None:
            replays[number] += 1
            with _disable_current_modes():
                replay()

        return counted

    monkeypatch.setitem(RECORDERS, "cpu", note)
    monkeypatch.setattr(compiled, "BUCKET", 8)
    return replays


@pytest.mark.parametrize("compile", [False, True])
def test_what_cannot_be_recorded_decodes_all_the_same(recordings, compile, monkeypatch):
    monkeypatch.setattr("draftheads.infer.fixed.maker.compiled", lambda: compiled.advance)

    def broken(step):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setitem(RECORDERS, "cpu", broken)
    target, prompts = tiny_target(), some_prompts(9)
    speculator = Speculator(target, random_head("sequential", target), compile=compile)
    with pytest.warns(
        UserWarning, match="^decoding without CUDA graphs: [^\n]* capturing$"
    ) as said:
        for _ in range(2):
            assert written(speculator, prompts) == [greedy(target, prompts[0], NEW)]
    assert len(said) == 1


class HostWork(TorchDispatchMode):
    """Operators that the host starts one by one. Those that return a part of what is there do not
    reach a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.started.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Numbers of elements that were read to the host, each of which would wait for a device."""
    sizes: list[int] = []
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    return sizes


@pytest.mark.parametrize("rule", [Greedy(), Sampled(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [*VARIANTS, None])
def test_the_host_starts_a_replay_and_reads_the_new_tokens(recordings, reads, kind, rule):
    """And copies the numbers of its rows, if it draws: no other operator, no other wait."""
    target, (prompt,) = tiny_target(), some_prompts(9)
    tree = TREE if kind == "medusa" else DYNAMIC
    engine = Speculator(target, kind and random_head(kind, target), tree=tree if kind else None)
    steps = engine.generate(prompt, sampling=rule, max_new_tokens=110)
    seen: list[tuple[list[str], int, int]] = []
    for _ in range(20):
        with HostWork() as host:
            before = sum(recordings), len(recordings), len(reads)
            next(steps)
        if len(recordings) == before[1]:  # no step of new shapes
            replays = sum(recordings) - before[0]
            seen.append((host.started, replays, len(reads) - before[2]))
    numbers = ["aten.cat.default", "aten.stack.default", "aten.copy_.default"]
    draws = [] if isinstance(rule, Greedy) else numbers
    assert (draws, 1, 1) in seen[5:]
    alone = [each for each in seen if each[1] == 1]
    assert sum(each == (draws, 1, 1) for each in alone) > len(alone) / 2


def test_a_step_is_launched_before_the_tokens_of_the_last_are_told(recordings):
    target, (prompt,) = tiny_target(), some_prompts(9)
    engine = Speculator(target, random_head("sequential", target))
    steps = engine.generate(prompt, max_new_tokens=NEW)
    told, launched = [], []
    for step in steps:
        told.append(len(step.tokens))
        launched.append(sum(recordings))
    assert launched[-1] == launched[-2], "no step after the last"
    ahead = [now - before for before, now in zip(launched, launched[1:], strict=False)]
    assert max(ahead) == 2, "that of the first replay, and the next"
    assert sum(told) == NEW


def turns(target: Any, engine: Speculator, session: Session) -> Iterator[list[int]]:
    [text] = some_prompts(9)
    for more in some_prompts(3, 4, 2, seed=2):
        steps = engine.generate(text, max_new_tokens=20, session=session)
        answer = [token for step in steps for token in step.tokens]
        assert answer == greedy(target, text, 20)
        yield answer
        text = text + answer + more


def test_what_was_recorded_serves_the_next_turns_of_a_session(recordings, monkeypatch):
    monkeypatch.setattr(compiled, "BUCKET", 128)
    target, session = tiny_target(), Session()
    engine = Speculator(target, random_head("eagle3", target), tree=DYNAMIC)
    made = [len(recordings) for _ in turns(target, engine, session)]
    assert made == [1, 1, 1]


def test_a_given_up_answer_leaves_a_session_its_text(recordings):
    """A step that was launched ahead had written to its caches."""
    target, session, (prompt,) = tiny_target(), Session(), some_prompts(9)
    engine = Speculator(target, random_head("eagle3", target), tree=DYNAMIC)
    for stop in (5, 7, 9):
        steps = engine.generate(prompt, max_new_tokens=60, session=session)
        text = prompt + [token for _ in range(stop) for token in next(steps).tokens]
        del steps
        prompt = [*text, 3]
        answer = engine.generate(prompt, max_new_tokens=NEW, session=session)
        assert [t for step in answer for t in step.tokens] == greedy(target, prompt, NEW)
        assert session.reused >= len(text) - 8
    assert max(recordings) >= 2


@pytest.mark.parametrize("kind", ["medusa", "eagle3", None])
@pytest.mark.parametrize("rule", [Greedy(), checked(0.9, 1.0, 0)], ids=["greedy", "seeded"])
def test_rows_that_join_and_leave_go_on_in_the_same_recordings(recordings, kind, rule, monkeypatch):
    monkeypatch.setattr(compiled, "BUCKET", 128)
    monkeypatch.setattr("draftheads.infer.continuous.RESERVED", 128)
    target, prompts = tiny_target(), some_prompts(9, 5, 12, 7, 11, 6, 3, 8)
    head = kind and random_head(kind, target)
    texts: dict[str, list[list[int]]] = {}
    for graphs in "01":
        monkeypatch.setenv("DRAFTHEADS_GRAPHS", graphs)
        asked = [Request(each, NEW - place, str(place)) for place, each in enumerate(prompts)]
        waiting = iter(asked)
        engine = Speculator(target, head)
        answers = {}
        for request, ids, error in answer_all(engine, rule, 3, lambda w=waiting: next(w, None)):
            assert error is None
            answers[request] = ids
        texts[graphs] = [answers[each] for each in asked]
    assert texts["0"] == texts["1"]
    assert sum(recordings) > 20
    assert len(recordings) <= 4, "for three rows, and for the last ones"


def test_few_recordings_are_kept(recordings, monkeypatch):
    """One for every few slots, of a long text: the others go, and come again."""
    monkeypatch.setattr(recording, "MOST", 3)
    target, session, (prompt,) = tiny_target(), Session(), some_prompts(9)
    engine = Speculator(target, random_head("sequential", target))
    for _ in range(2):
        steps = engine.generate(prompt, max_new_tokens=100, session=session)
        assert [t for step in steps for t in step.tokens] == greedy(target, prompt, 100)
        kept = session.slots.runner._recordings
        assert 0 < len(kept.made) <= 3
    assert len(recordings) > 6


def test_slots_in_sight_grow_by_half_at_most():
    """So that a long text has few recordings."""
    table = tiny_target().new_cache(1, 10**6).table
    spans = []
    for length in range(1, 40_000, 7):
        table.longest = length
        table.fix(9, 256)
        assert length + 9 <= table.span <= max(256 + length + 9, 1.5 * (length + 9))
        spans.append(table.span)
    assert len(set(spans)) < 22


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "block", "ngram", None])
@pytest.mark.parametrize("lengths", [(9,), (13, 4)], ids=["one", "two"])
def test_the_next_generation_is_recorded_already(recordings, kind, lengths, monkeypatch):
    """It takes the memory of the last one, and nothing of its text."""
    monkeypatch.setattr(compiled, "BUCKET", 128)
    target = tiny_target()
    drafts = NGram(shortest=1) if kind == "ngram" else kind and random_head(kind, target)
    engine = Speculator(target, drafts)
    for seed in range(3):
        prompts = some_prompts(*(length + seed for length in lengths), seed=seed)
        assert written(engine, prompts) == [greedy(target, each, NEW) for each in prompts]
        assert len(recordings) == 1
        assert written(engine, prompts) == [greedy(target, each, NEW) for each in prompts]
        assert engine._last_slots.length == 0, "a bench reads each prompt"
    first, second = (engine.generate(some_prompts(9)[0], max_new_tokens=NEW) for _ in range(2))
    both = [[token for step in steps for token in step.tokens] for steps in (first, second)]
    assert both[0] == both[1] == greedy(target, some_prompts(9)[0], NEW)
    one, two = (engine.generate(each, max_new_tokens=NEW) for each in some_prompts(9, 6))
    texts = [[], []]
    for pair in zip(one, two, strict=False):  # at the same time: each has memory of its own
        for text, step in zip(texts, pair, strict=True):
            text += step.tokens
    for text, prompt in zip(texts, some_prompts(9, 6), strict=True):
        assert text == greedy(target, prompt, NEW)[: len(text)]


def test_each_rule_has_recordings_of_its_own(recordings):
    """In the same memory: one must not be decoded by those of another."""
    target, (prompt,) = tiny_target(), some_prompts(9)
    engine = Speculator(target, random_head("medusa", target), tree=TREE)
    hot, hotter = checked(0.3, 1.0, 0), checked(3.0, 1.0, 0)
    rules = {"greedy": Greedy(), "hot": hot, "hotter": hotter}
    texts: dict[str, list[list[int]]] = {name: [] for name in rules}
    for name in ("greedy", "hot", "hotter", "hot", "greedy", "hotter"):
        texts[name] += written(
            engine, [prompt], max_new_tokens=NEW, sampling=rules[name], seeds=["a"]
        )
    assert texts["greedy"] == [greedy(target, prompt, NEW)] * 2
    for name, (first, second) in texts.items():
        alone = Speculator(target, random_head("medusa", target), tree=TREE)
        [expected] = written(alone, [prompt], sampling=rules[name], seeds=["a"])
        assert first == second == expected
    assert texts["hot"] != texts["hotter"]


def test_rules_of_rows_are_the_same_for_the_same_rows_alone():
    rules = [Greedy(), Sampled(0.5), Greedy(), Sampled(0.7)]

    def constants(*numbers: int) -> Any:
        return RowRules(tuple(rules[n] for n in numbers), torch.device("cpu")).constants()

    assert constants(0, 1, 2) == constants(2, 1, 0)
    assert len({constants(*each) for each in permutations((0, 1, 2))}) == 3
    assert constants(0, 1) != constants(0, 3)


def test_a_server_records_once_for_rows_that_come_again(recordings, schedulers, monkeypatch):
    monkeypatch.setattr(compiled, "BUCKET", 128)
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("eagle3", target)), slots=3)
    made = []
    for seed in range(3):
        asked = [Asked(ids, new=20) for ids in some_prompts(4, 9, 6, seed=seed)]
        scheduler.submit(*(each.job for each in asked))
        for each in asked:
            assert each.answer() == greedy(target, each.job.prompt, 20)
        made.append(len(recordings))
    assert made[0] == made[2], made


def test_what_recording_takes_does_not_count_against_a_tree(recordings, schedulers, monkeypatch):
    """In a server's trials of other trees: a step that is recorded takes as long as many."""
    learned: list[float] = []
    monkeypatch.setattr(TreeSizes, "learn", lambda sizes, rows, *more: learned.append(rows))
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("medusa", target)), slots=2)
    asked = [Asked(ids, new=40) for ids in some_prompts(4, 9)]
    scheduler.submit(*(each.job for each in asked))
    for each in asked:
        assert each.answer() == greedy(target, each.job.prompt, 40)
    assert 0 < len(learned) <= sum(recordings)
