"""The promise: a head that keeps less, or that has no use for the target's last
matrix learns exactly the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_heads import KINDS, new_head, written_by
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target

NEW = 24
LABELS = ["hard", "soft"]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "soft labels": {"labels": "soft"},
    "two layers, a window and norms": {
        "layers": 2, "sliding_window": 7, "fc_norm": True, "norm_output": True,
    },
    "shared lm_head": {"lm_head": "shared", "vocabulary": list(range(12))},
}  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> Batch:
    return written_by(tiny_target(), some_prompts(6, 6, 6), NEW)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def drawn_head(kind: str, **choices: Any) -> DraftHead:
    """In training, and nowhere zero: gradients of all parts are wanted."""
    torch.manual_seed(0)
    head = new_head(kind, tiny_target(), **{"steps": 4, **choices})
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return head.train()


def learned(head: DraftHead, batch: Batch, target: Target) -> tuple[HeadLoss, list[torch.Tensor]]:
    """Loss, ranks and all gradients of one step."""
    head.zero_grad()
    torch.manual_seed(3)  # of the anchors
    out = head(batch, target.features(batch, head.training_layers), target)
    (out.loss / 7).backward()
    return out, [parameter.grad for parameter in head.parameters()]


def kept_bytes(head: DraftHead, batch: Batch, target: Target) -> int:
    """What the graph of a forward pass holds on to, each storage once, weights not counted."""
    weights = {
        p.untyped_storage().data_ptr() for p in [*head.parameters(), *target.model.parameters()]
    }
    sizes: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    features_BTD = target.features(batch, head.training_layers)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head(batch, features_BTD, target)
    return sum(sizes.values())


@pytest.mark.parametrize("way", WAYS)
def test_what_is_computed_again_is_the_same_to_the_last_bit(kind, batch, way):
    target, head = tiny_target(), drawn_head(kind, **WAYS[way])
    kept, kept_gradients = learned(head, batch, target)
    head.recompute = True
    checkpointed, lean_gradients = learned(head, batch, target)
    assert torch.equal(kept.loss, checkpointed.loss)
    assert torch.equal(kept.ranks_KR, checkpointed.ranks_KR)
    for left, right in zip(kept_gradients, lean_gradients, strict=True):
        assert torch.equal(left, right)


def test_less_is_kept(kind, batch):
    target, head = tiny_target(), drawn_head(kind)
    before = kept_bytes(head, batch, target)
    head.recompute = True
    assert kept_bytes(head, batch, target) < 0.7 * before


def test_an_unrolled_layer_keeps_little_for_each_further_step(batch):
    """Of a step: hidden state, key and value, and what the loss looks at."""
    target, sizes = tiny_target(), []
    for steps in (4, 5):
        head = drawn_head("eagle3", steps=steps)
        head.recompute = True
        sizes.append(kept_bytes(head, batch, target))
    positions = 3 * NEW
    assert sizes[1] - sizes[0] <= 8 * 4 * target.hidden_size * positions


def test_what_is_computed_again_is_the_same_under_autocast(kind, batch):
    target, head = tiny_target(), drawn_head(kind)
    results = []
    for head.recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(learned(head, batch, target))
    (kept, kept_gradients), (checkpointed, lean_gradients) = results
    assert torch.equal(kept.loss, checkpointed.loss)
    for left, right in zip(kept_gradients, lean_gradients, strict=True):
        assert torch.equal(left, right)


def test_nothing_of_it_is_saved(kind):
    head = drawn_head(kind)
    config, names = head.config(), list(head.state_dict())
    head.recompute = True
    assert head.config() == config and list(head.state_dict()) == names


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("labels", LABELS)
def test_training_asks_for_the_last_matrix_where_it_says_so(
    kind, labels, lm_head, batch, monkeypatch
):
    target = Target(tiny_target().model)  # not the one that other tests share
    head = drawn_head(kind, labels=labels, lm_head=lm_head)
    asked = []

    def note(name: str) -> Any:
        answer = getattr(target, name)
        return lambda *arguments: (asked.append(name), answer(*arguments))[1]

    for name in ("unembed", "unembed_weight"):
        monkeypatch.setattr(target, name, note(name))
    learned(head, batch, target)
    trained = len(asked)
    head.eval().token_ranks(batch, target.features(batch, head.training_layers), target)
    assert bool(asked) == head.needs_unembed, (trained, asked)
