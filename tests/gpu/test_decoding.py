"""The promise, on a GPU: what drafts write is what the target writes, also in steps that are
replays of CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hybrid_targets import FAMILIES, HYBRIDS, hybrid_model, load_mtp_target, write_mtp_target
from tiny_heads import VARIANTS, random_head
from tiny_targets import generated, random_model, some_prompts

from draftheads.heads.mtp.checkpoint import native_head
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.continuous import Request, answer_all
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.lossy import Typical
from draftheads.infer.reading import Session

NEW = 40
RAGGED = (13, 4, 8)
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
DYNAMIC = DynamicTree(9, 3, 3)
MIXERS = ("qwen3.5", "qwen3-next", "lfm2", "bamba")
"""Each kind of mixer that runs over a tree in one call."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(random_model("llama").cuda())


@pytest.fixture(scope="module", params=MIXERS)
def hybrid(request) -> Target:
    return Target(hybrid_model(request.param).cuda())


@pytest.fixture
def recordings(monkeypatch) -> list[int]:
    """How many replays each CUDA graph has had; few slots per graph, so that there are several."""
    replays: list[int] = []
    record = RECORDERS["cuda"]

    def note(step):
        replay = record(step)
        number = len(replays)
        replays.append(0)

        def counted() -> None:
            replays[number] += 1
            replay()

        return counted

    monkeypatch.setitem(RECORDERS, "cuda", note)
    monkeypatch.setattr(compiled, "BUCKET", 16)
    return replays


@pytest.fixture
def eager(monkeypatch) -> None:
    """Steps are run operator by operator."""
    monkeypatch.setenv("DRAFTHEADS_GRAPHS", "0")


def engine(kind: str, target: Target, **options) -> Speculator:
    tree = TREE if kind == "medusa" else DYNAMIC
    head = random_head(kind, target).to(target.device, target.dtype)
    return Speculator(target, head, tree=tree, **options)


def written(speculator: Speculator, prompts: list[list[int]], **options) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for steps in speculator.generate_batch(prompts, max_new_tokens=NEW, **options):
        for row, step in zip(rows, steps, strict=True):
            row += step.tokens if step else []
    return rows


def has_experts(target: Target) -> bool:
    return any(name.endswith("experts") for name, _ in target.model.named_modules())


@contextmanager
def waiting_experts(target: Target) -> Iterator[None]:
    """In float32, products of experts wait for the host, as do layers that take a tree level by
    level, which a warning says.
    """
    with warnings.catch_warnings():
        if has_experts(target) or target.mixes_by_level:
            warnings.filterwarnings("ignore", "decoding without CUDA graphs")
        yield


def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(target, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_every_head_writes_what_the_target_writes(target, eager, kind, lengths):
    prompts = some_prompts(*lengths)
    assert written(engine(kind, target), prompts) == expected(target, prompts)


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_recorded_steps_write_the_same(target, recordings, kind, lengths):
    prompts = some_prompts(*lengths)
    rows = written(engine(kind, target), prompts)
    assert rows == expected(target, prompts)
    assert len(recordings) >= 2
    assert max(recordings) >= 2


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "block", "mtp"])
def test_compiled_and_recorded_steps_write_the_same(target, recordings, kind):
    prompts = some_prompts(*RAGGED)
    rows = written(engine(kind, target, compile=True), prompts)
    assert rows == expected(target, prompts)
    assert max(recordings) >= 2


@pytest.mark.parametrize("rule", [Sampled(0.8, top_k=5), Typical()], ids=repr)
def test_recorded_steps_draw_anew(target, recordings, rule, monkeypatch):
    outputs = []
    for graphs in "01":
        monkeypatch.setenv("DRAFTHEADS_GRAPHS", graphs)
        rule.seed(5)
        speculator = engine("sequential", target)
        outputs.append(written(speculator, some_prompts(9), sampling=rule))
    assert outputs[0] == outputs[1]
    assert max(recordings) >= 2


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=["one", "ragged"])
def test_hybrid_targets_write_what_they_write_alone(hybrid, eager, lengths):
    prompts = some_prompts(*lengths)
    assert not hybrid.mixes_by_level
    for kind in ("medusa", "eagle3"):
        assert written(engine(kind, hybrid), prompts) == expected(hybrid, prompts)


def test_recorded_steps_of_hybrid_targets_write_the_same(hybrid, recordings):
    prompts = some_prompts(*RAGGED)
    with waiting_experts(hybrid):
        rows = written(engine("medusa", hybrid), prompts)
    assert rows == expected(hybrid, prompts)
    assert has_experts(hybrid) or max(recordings) >= 2


def test_compiled_steps_of_a_hybrid_target_write_the_same(recordings):
    target, prompts = Target(hybrid_model("qwen3.5").cuda()), some_prompts(9)
    assert written(engine("medusa", target, compile=True), prompts) == expected(target, prompts)
    assert max(recordings) >= 2


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_in_bfloat16_a_text_goes_to_its_end(recordings, name):
    model = random_model(name) if name == "llama" else hybrid_model(name)
    target = Target(model.to("cuda", torch.bfloat16))
    with waiting_experts(target):
        speculator = engine("medusa", target)
        assert [len(row) for row in written(speculator, some_prompts(*RAGGED))] == [NEW] * 3
    assert target.mixes_by_level or max(recordings) >= 2


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_a_session_continues_a_text(target, recordings, graphs, monkeypatch):
    monkeypatch.setenv("DRAFTHEADS_GRAPHS", graphs)
    session, text = Session(), some_prompts(9)[0]
    speculator = engine("eagle3", target)
    for more in some_prompts(3, 4, seed=2):
        steps = speculator.generate(text, max_new_tokens=20, session=session)
        answer = [token for step in steps for token in step.tokens]
        assert answer == generated(target, text, 20)
        text = text + answer + more
    assert session.reused > 20
    assert bool(recordings) == (graphs == "1")


def test_rows_join_and_leave_a_continuous_batch(target, recordings):
    prompts = some_prompts(9, 5, 12, 7)
    asked = [Request(prompt, NEW) for prompt in prompts]
    waiting, texts = iter(asked), {}
    decode = engine("sequential", target)
    for request, ids, error in answer_all(decode, Greedy(), 2, lambda: next(waiting, None)):
        assert error is None
        texts[request] = ids
    assert [texts[request] for request in asked] == expected(target, prompts)
    assert max(recordings) >= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoints_own_mtp_layer_drafts(tmp_path, recordings, name, monkeypatch):
    write_mtp_target(tmp_path, name)
    target = load_mtp_target(tmp_path)
    assert target.device.type == "cuda"
    prompts = some_prompts(*RAGGED)
    for graphs in "01":
        monkeypatch.setenv("DRAFTHEADS_GRAPHS", graphs)
        speculator = Speculator(target, native_head(target), tree=DYNAMIC)
        with waiting_experts(target):
            assert written(speculator, prompts) == expected(target, prompts)
    assert has_experts(target) or max(recordings) >= 2
