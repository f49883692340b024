"""The promises of every head kind: each test runs for each row of `HEADS` (and for each of its
variants), with no test code of its own.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_heads import (
    BY_HEART,
    EACH,
    KINDS,
    SMALL,
    decode,
    drafts_of,
    new_head,
    overfitted,
    written_by,
)
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.losses import RANKS
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Sampled
from draftheads.infer.engine import Speculator

NEW = 24


@pytest.fixture(params=EACH)
def kind(request) -> str:
    return request.param


@pytest.fixture
def head(kind):
    torch.manual_seed(0)
    return new_head(kind, tiny_target())


@pytest.fixture(scope="module")
def batch() -> Batch:
    return written_by(tiny_target(), some_prompts(6, 6), NEW)


def test_the_loss_reaches_every_parameter_of_the_head_and_none_of_the_target(head, batch):
    target = tiny_target()
    out = head(batch, target.features(batch, head.training_layers), target)
    out.loss.backward()
    assert out.loss.isfinite() and out.loss.dim() == 0
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    depths = len(out.ranks_KR)
    assert 1 <= depths <= head.depth and out.ranks_KR.shape[1] == RANKS + 1
    # depth k is learned at every learned token but the first k of its document
    assert out.ranks_KR.sum(1).tolist() == [2 * (NEW - k) for k in range(1, depths + 1)]


def test_the_target_is_no_part_of_the_head(head):
    own = {id(parameter) for parameter in head.parameters()}
    assert not own & {id(parameter) for parameter in tiny_target().model.parameters()}
    held = sum(tensor.numel() for tensor in head.state_dict().values())
    assert held == sum(t.numel() for t in [*head.parameters(), *head.buffers()])


def test_sampling_has_the_plain_engines_first_tokens(head):
    """Same seed, same first draw: drafts must not touch what the target draws for the prompt."""
    target, (prompt,) = tiny_target(), some_prompts(9)
    first = []
    for drafts in (None, head):
        rule = Sampled(temperature=3.0)
        rule.seed(4)
        steps = Speculator(target, drafts).generate(prompt, sampling=rule, max_new_tokens=5)
        first.append(next(steps).tokens)
    assert first[0] == first[1]


@pytest.fixture(scope="module")
def learned(batch):
    """The head of a kind that knows the batch by heart."""
    return cache(lambda kind: overfitted(kind, tiny_target(), batch))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_overfitted_saved_and_loaded_every_draft_is_accepted(kind, learned, batch, tmp_path):
    head, target = learned(kind), tiny_target()
    save_head(head, tmp_path / "head", target=target)
    loaded = load_head(tmp_path / "head", target=target)
    prompt = batch.tokens_BT[0, :6].tolist()
    new = 1 + 2 * (head.tree.depth + 1)  # the prefill's token and two full steps
    written, (statistics,) = decode(target, loaded, [prompt], max_new_tokens=new)
    assert written == [batch.tokens_BT[0, 6 : 6 + new].tolist()]
    assert statistics.tokens_per_step == head.tree.depth + 1


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_right_where_training_said_so(kind):
    """A chain of best guesses is accepted as far as `token_ranks` has rank 0 at its root: both see
    the same features, tokens, positions and windows.
    """
    target, prompts, new = tiny_target(), some_prompts(6, 6, 6, 6), 60
    text = written_by(target, prompts, new)
    choices = {"steps": 2, "layers": 2, "sliding_window": 7, "norm_output": True, "fc_norm": True}
    learned = written_by(target, prompts[:2], NEW)
    head = overfitted(kind, target, learned, updates=20, **{**SMALL, **choices})
    observed_MK = head.token_ranks(text, target.features(text, head.training_layers), target)
    chains, accepted = StaticTree.from_widths([1] * head.depth), []
    for prompt, right_TK in zip(prompts, (observed_MK == 0).long().split(new), strict=True):
        root = 0
        steps = Speculator(target, head, tree=chains).generate(
            prompt, max_new_tokens=new - head.depth
        )
        for step in list(steps)[1:]:
            assert step.accepted == int(right_TK[root].cumprod(0).sum())
            accepted.append(step.accepted)
            root += step.accepted + 1
    assert {0, 1, head.depth} <= set(accepted)


def test_observed_ranks_are_those_of_the_loss(head, batch):
    target = tiny_target()
    head.eval()
    features_BTD = target.features(batch, head.training_layers)
    counts_KR = head(batch, features_BTD, target).ranks_KR
    ranks_MK = head.token_ranks(batch, features_BTD, target)
    assert ranks_MK.shape == (int(batch.loss_mask_BT.sum()), head.depth)
    for k in range(len(counts_KR)):
        kept = torch.bincount(ranks_MK[ranks_MK[:, k] >= 0, k], minlength=RANKS)
        assert kept.tolist() == counts_KR[k, :RANKS].tolist()


@pytest.mark.parametrize("choices", [{}, {"lm_head": "shared", "vocabulary": list(range(0, 60))}])
def test_a_head_that_has_drafted_learns_on_and_drafts_what_it_learned(kind, batch, choices):
    """What is kept of the weights for drafting neither stops training nor outlives it."""
    target, prompt = tiny_target(), batch.tokens_BT[0, :6].tolist()
    head = new_head(kind, target, **{**BY_HEART, **choices}).eval()
    before = drafts_of(head, target, [prompt], NEW)
    features_BTD = target.features(batch, head.training_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(5):
        head(batch, features_BTD, target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = drafts_of(head, target, [prompt], NEW)
    assert after != before
    fresh = new_head(kind, target, **{**BY_HEART, **choices}).eval()
    fresh.load_state_dict(head.state_dict())
    assert drafts_of(fresh, target, [prompt], NEW) == after
