"""The promise: what is asked and answered makes the head better, never worse, and never lost; it is
kept where nobody else reads it, within its limits, and can be deleted and taken back.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import fork
from tiny_training import (
    conversation,
    random_answers,
    run,
    tiny_model,
    tiny_target,
    write_answers,
    write_target,
)

from draftheads.heads.formats.hub import open_head
from draftheads.heads.target.model import Target
from draftheads.infer.background import Point
from draftheads.infer.engine import Speculator
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.learn import learner as learning
from draftheads.train.learn.learner import (
    PASSES,
    Source,
    UseLearner,
    answer_of,
    is_apart,
    learned_tokens,
)
from draftheads.train.learn.place import HeadStore, delete, place_of, rollback
from draftheads.train.learn.texts import Texts
from draftheads.train.learn.versions import STATE, Versions


def texts_in(folder: Path, **limits: Any) -> Texts:
    return Texts(folder, **{"vocabulary": 256, "most_bytes": 1 << 20, "keep_days": 30, **limits})


def test_what_was_said_is_there_again_after_a_start(tmp_path):
    texts = texts_in(tmp_path / "texts")
    texts.add([1, 2], [3, 4])
    texts.add([5], [6])
    grown = texts.add([1, 2, 3, 4, 9], [7])  # continues the first
    assert [list(talk.tokens) for talk in texts.conversations] == [[5, 6], [1, 2, 3, 4, 9, 7]]
    assert grown.answers == [(2, 4), (5, 6)]
    again = texts_in(tmp_path / "texts")
    for one, other in zip(texts.conversations, again.conversations, strict=True):
        assert (one.tokens, one.answers, one.key) == (other.tokens, other.answers, other.key)


def test_a_conversation_stays_on_its_side_of_the_hold_out(tmp_path):
    texts = texts_in(tmp_path)
    first = texts.add([1], [2])
    assert is_apart(texts.add([1, 2, 3], [4])) == is_apart(first)
    sides = [is_apart(texts.add([number, 50], [number])) for number in range(60)]
    assert 4 <= sum(sides) <= 24


def test_only_the_owner_reads_the_texts(tmp_path):
    texts = texts_in(tmp_path / "texts")
    texts.add([1], [2])
    assert stat.S_IMODE((tmp_path / "texts").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in texts.files] == [0o600]


@pytest.mark.mend("100,000 brackets in a text that was kept")
@pytest.mark.mend(
    "token ids outside the vocabulary in a damaged line ended learning, and were drafted"
)
def test_a_line_that_was_cut_costs_no_other(tmp_path):
    texts = texts_in(tmp_path)
    texts.add([1], [2])
    [path] = texts.files
    with path.open("a") as file:
        file.write('{"time":1,"start":1,"tok')
    texts_in(tmp_path).add([3], [4])
    with path.open("a") as file:
        file.write('{"time":1,"start":1,"tokens":[1e99]}\n[]\n' + "[" * 100_000 + "\n")
        file.write('{"time":1,"start":1,"tokens":[1,256]}\n{"time":1,"start":1,"tokens":[1,-1]}\n')
    assert [list(talk.tokens) for talk in texts_in(tmp_path).conversations] == [[1, 2], [3, 4]]


@pytest.mark.mend("texts stayed longer than --learn-keep says")
def test_texts_are_deleted_in_time_and_within_their_room(tmp_path, monkeypatch):
    limits = {"most_bytes": 3 << 20}
    texts = texts_in(tmp_path, **limits)
    for number in range(70):
        texts.add([number], [7] * 50_000)
        assert sum(path.stat().st_size for path in texts.files) <= 3 << 20
    kept = [talk.tokens[0] for talk in texts_in(tmp_path, **limits).conversations]
    assert [talk.tokens[0] for talk in texts.conversations] == kept and kept[-1] == 69
    now = time.time()
    for day in range(1, 70, 4):
        monkeypatch.setattr(time, "time", lambda day=day: now + day * 86400)
        texts.add([1], [2])
        for each in (texts, texts_in(tmp_path, **limits)):
            ages = [(time.time() - talk.time) / 86400 for talk in each.conversations]
            assert max(ages) <= 30 and len(ages) >= min(day // 4, 6)


@pytest.mark.mend("texts of a clock that was ahead outlived their days")
def test_texts_of_a_clock_that_was_ahead_are_deleted_in_time(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 365 * 86400)
    texts_in(tmp_path).add([1], [2])
    monkeypatch.setattr(time, "time", lambda: now)
    texts = texts_in(tmp_path)
    texts.add([3], [4])
    assert [talk.tokens[0] for talk in texts_in(tmp_path).conversations] == [1, 3]
    monkeypatch.setattr(time, "time", lambda: now + 31 * 86400)
    assert not texts_in(tmp_path).conversations and not list(tmp_path.iterdir())


def point(version: int) -> Point:
    return Point(time.time(), version, 2.0, 100, adopted=True)


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.mark.mend("a version number of 10^23 that rollback counted up to")
def test_versions_are_kept_and_taken_back(tmp_path, monkeypatch):
    versions = Versions(tmp_path)
    assert versions.served is None
    for number in range(1, 6):
        assert versions.adopt(write, point(number)).name == f"v{number:06d}"
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v000003", "v000004", "v000005"]
    assert versions.rollback() == 4
    again = Versions(tmp_path)
    assert again.served == tmp_path / "v000004"
    again.adopt(write, point(6))  # what was taken back is not served again
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v000003", "v000004", "v000006"]
    assert [again.rollback(), again.rollback(), again.rollback()] == [4, 3, 0]
    with pytest.raises(ValueError, match="nothing to go back to"):
        again.rollback()
    state = (tmp_path / STATE).read_text()
    (tmp_path / "v7-mine").mkdir()
    high = 10**23  # of a damaged file: no time goes by for what was never there
    (tmp_path / STATE).write_text(f'{{"served": {high}, "newest": {high}}}')
    assert Versions(tmp_path).rollback() == 6
    monkeypatch.setattr("draftheads.train.learn.versions.POINTS", 4)
    (tmp_path / STATE).write_text(state)
    again.note(point(7))
    assert [each.version for each in Versions(tmp_path).state.points] == [4, 5, 6, 7]
    (tmp_path / STATE).write_text("{")
    with pytest.raises(ValueError, match=r"state\.json: expected the state of learning"):
        Versions(tmp_path)


def learn_until_killed(folder: Path, told: int, calls: int) -> None:
    """Make versions and keep answers, and say so; die before one of the calls that change files."""
    done = itertools.count()

    def or_die(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*words: Any, **options: Any) -> Any:
            if next(done) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*words, **options)

        return called

    for place, name in ((os, "fsync"), (os, "replace"), (Path, "rename"), (shutil, "rmtree")):
        setattr(place, name, or_die(getattr(place, name)))
    texts, versions = texts_in(folder / "texts"), Versions(folder / "heads")
    for number in itertools.count():
        versions.adopt(write, point(number))
        texts.add([number % 256], [7] * 20)
        os.write(told, b".")


def test_a_process_that_is_killed_loses_no_answer_and_no_version(tmp_path):
    kept = 0
    for calls in range(20):
        reader, writer = os.pipe()
        process = fork(learn_until_killed, tmp_path, writer, calls)
        os.close(writer)
        with open(reader, "rb") as told:
            kept += len(told.read())
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert kept <= len(texts_in(tmp_path / "texts").conversations) <= kept + calls + 1
        served = Versions(tmp_path / "heads").served
        assert served is None or (served / "config.json").is_file()
        assert not list((tmp_path / "heads").glob(".v*"))
    assert kept and served


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(40))
    for kind in ("medusa", "eagle3", "block"):
        assert run(folder, folder / kind, kind=kind) == 0
    return folder


def learner_in(made: Path, kind: str, path: Path, bits: Any = None) -> tuple[UseLearner, HeadStore]:
    target = Target(tiny_model(), name="tiny").pack(bits)
    place = HeadStore(path, target, most_mb=2, keep_days=1)
    source = Source(open_head(made / kind))
    return UseLearner(target, source, place.texts, place.versions), place


def use(learner: UseLearner, count: int) -> None:
    """Ask and answer, as an engine reports it."""
    for seed in range(count):
        prompt = [seed % 97, (7 * seed) % 97, 3]
        whole = conversation(learner.target, prompt, 40).tokens
        learner.answered(prompt, whole[3:])


def rounds(learner: UseLearner, engine: Speculator) -> Speculator:
    """Work until there is nothing to do."""
    for _ in range(2000):
        engine, seconds = learner.work(engine)
        if seconds:
            return engine
    raise AssertionError("it does not end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits"), [("medusa", None), ("eagle3", None), ("block", None), ("eagle3", 8)]
)
def test_a_head_becomes_better_by_use(made, tmp_path, kind, bits, monkeypatch):
    monkeypatch.setattr(learning, "RATE", 3.0)  # the tiny heads have hardly been trained
    learner, place = learner_in(made, kind, tmp_path / "place", bits)
    engine = Speculator(learner.target, open_head(made / kind).load(learner.target))
    use(learner, 24)
    better = rounds(learner, engine)
    [first] = learner.points()
    assert first.adopted and first.version == 1
    assert better is not engine
    prompt = [5, 35, 3]
    expected = conversation(learner.target, prompt, 30).tokens
    steps = list(better.generate(prompt, max_new_tokens=30))
    assert [*prompt, *(token for step in steps for token in step.tokens)] == expected
    assert rounds(learner, better) is better, "nothing new was asked"
    place.close()
    again, place = learner_in(made, kind, tmp_path / "place", bits)
    assert again.tokens == learner.tokens
    assert rounds(again, better) is better, "what was learned is not new again"
    place.close()


def test_a_head_that_is_worse_is_not_served(made, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "RATE", 1e4)
    monkeypatch.setattr(learning, "PATIENCE", 1)
    learner, place = learner_in(made, "medusa", tmp_path / "place")
    engine = Speculator(learner.target, open_head(made / "medusa").load(learner.target))
    use(learner, 40)
    assert rounds(learner, engine) is engine
    assert [point.adopted for point in learner.points()] == [False]
    assert place.versions.served is None
    assert learner._rate == 1e4 * learning.SLOWER, "training starts again, slower"
    for name, weight in learner.served.state_dict().items():
        assert torch.equal(learner.head.state_dict()[name], weight)
    place.close()


@pytest.mark.mend("learning from use cut texts before the target read them")
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_parts_are_read_in_the_context_of_their_text(made, tmp_path, kind):
    learner, place = learner_in(made, kind, tmp_path / "place")
    use(learner, 1)
    [talk] = place.texts.conversations
    rows = Rows(
        documents := Documents.read([answer_of(talk)]), documents.spans, 99, pack=False, seed=0
    )
    expected_1TD = learner.target.features(rows.batch([0]), learner.head.training_layers)
    parts = [each for each in learner._parts([answer_of(talk)], learner._training) if each]
    assert len(parts) > 1
    at = len(talk.tokens)
    for batch, features_1TD in reversed(parts):
        first = at - features_1TD.shape[1]
        assert batch.tokens_BT[0].tolist() == talk.tokens[first:at].tolist()
        assert torch.allclose(features_1TD, expected_1TD[:, first:at], atol=1e-5)
        at = first + 1
    assert sum(len(batch.learned()) for batch, _ in parts) == talk.answered
    place.close()


@pytest.mark.mend("an agent's turns were each read from their system prompt on")
@pytest.mark.parametrize("bits", [None, 8])
def test_what_two_texts_begin_with_is_read_once(made, tmp_path, bits, monkeypatch):
    monkeypatch.setattr(learning, "BEFORE", 4)
    learner, place = learner_in(made, "eagle3", tmp_path / "place", bits)
    system = [token % 89 for token in range(60)]
    first, second = (Answer([*system, *range(n, n + 20)], [(64, 80)]) for n in (3, 30))
    read, chunks = [], learner.target.prefill_chunks

    def counting(prompts, *arguments):
        read.append(len(prompts[0]))
        return chunks(prompts, *arguments)

    monkeypatch.setattr(learner.target, "prefill_chunks", counting)

    def features(*answers: Answer) -> torch.Tensor:
        learner._text, learner._cache = [], None
        parts = filter(None, learner._parts(answers, learner._training))
        return torch.cat([part[0, batch.loss_mask_BT[0]] for batch, part in parts])

    alone_MD = features(second)
    together_MD = features(first, second, second)
    assert read == [80, 80, 20, 20]
    assert len(alone_MD) == 16
    assert torch.allclose(together_MD[16:], alone_MD.repeat(2, 1), atol=1e-5)
    place.close()


@pytest.mark.mend("a round replayed a hundred times as much as an agent had answered")
def test_what_is_replayed_is_counted_by_its_answers(made, tmp_path):
    learner, place = learner_in(made, "medusa", tmp_path / "place")
    learner.source = replace(learner.source, replay=Documents.open(made / "data", 97, "tiny"))
    for seed in range(6):
        learner.answered([seed, *[5] * 400], [seed] * 8)
    lesson = learner._lesson()
    new = [answer for answer in lesson if len(answer.tokens) == 409]
    fresh = sum(map(learned_tokens, new))
    replayed = sum(map(learned_tokens, lesson)) - fresh
    assert fresh <= replayed < fresh + max(map(learned_tokens, lesson))
    place.close()


@pytest.mark.mend("rounds of learning grew with each kill and never ended")
def test_rounds_get_done_however_much_is_new(made, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "NEWS", (64, 200))
    learner, place = learner_in(made, "medusa", tmp_path / "place")
    use(learner, 24)
    texts = {tuple(talk.tokens) for talk in place.texts.conversations if not is_apart(talk)}
    sizes, seen = [], set()
    while lesson := learner._lesson():
        sizes.append(sum(map(learned_tokens, lesson)))
        seen |= {tuple(answer.tokens) for answer in lesson}
    assert len(sizes) > 2 and max(sizes) <= 2 * PASSES * 240
    assert seen == texts, "a later round takes what was too much for the first"
    place.close()
    learner, place = learner_in(made, "medusa", tmp_path / "place")
    assert learner._is_due(), "a process that was killed in its first round takes it again"
    place.close()


@pytest.mark.mend("after a clock that was ahead nothing was learned from use")
def test_a_clock_that_was_wrong_does_not_end_learning(made, tmp_path, monkeypatch):
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 9 * 86400)
        learner, place = learner_in(made, "medusa", tmp_path / "place")
        use(learner, 24)
        learner._lesson()
        place.versions.note(learner._point(1.0, adopted=False))
        place.close()
    learner, place = learner_in(made, "medusa", tmp_path / "place")
    assert not learner._is_due(), "what was learned is not new again"
    learner.answered([1, 2], [3] * 700)
    assert learner._is_due()
    assert any(answer.tokens[:3] == [1, 2, 3] for answer in learner._lesson())
    place.close()


def test_a_place_is_open_once_and_for_one_target(made, tmp_path):
    path = place_of(open_head(made / "medusa"), tmp_path)
    assert path.parent == tmp_path and path.name.startswith("medusa-")
    assert path.name != place_of(open_head(made / "eagle3"), tmp_path).name
    target = tiny_target()
    place = HeadStore(path, target, most_mb=2, keep_days=1)
    for action in (lambda: HeadStore(path, target, most_mb=2, keep_days=1), lambda: delete(path)):
        with pytest.raises(ValueError, match="another process learns there"):
            action()
    place.close()
    other = tiny_model()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with pytest.raises(ValueError, match="tiny with other weights"):
        HeadStore(path, Target(other, name="tiny"), most_mb=2, keep_days=1)
    packed = tiny_target().pack(8)
    with pytest.raises(ValueError, match=r"\(quantisation: none\)"):
        HeadStore(path, packed, most_mb=2, keep_days=1)
    delete(path)
    assert not path.exists()
    with pytest.raises(ValueError, match="found none there"):
        rollback(path)
