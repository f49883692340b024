"""The promise: what heads keep of their weights for drafting is never older than the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tiny_heads import DRAFTING, KINDS, drafts_of, random_head
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.base import DraftHead
from draftheads.heads.layers import Cached

NEW = 11


def replaced(parameter: torch.Tensor) -> None:
    parameter.data = torch.randn_like(parameter)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "all of it": lambda parameter: parameter.data.mul_(-1.0),
    "one number": lambda parameter: parameter.data.flatten()[:1].add_(9.0),
    "its rows in another order": lambda parameter: parameter.data.copy_(parameter.data.flip(0)),
    "other storage": replaced,
}


def drafts(head: DraftHead) -> list:
    return drafts_of(head, tiny_target(), some_prompts(19), NEW)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", KINDS)
def test_weights_written_through_data_are_drafted_with(name, write):
    head = random_head(name, tiny_target())
    before = drafts(head)
    for parameter in head.parameters():
        WRITES[write](parameter)
    fresh = random_head(name, tiny_target())
    fresh.load_state_dict(head.state_dict())
    assert drafts(head) == drafts(fresh)
    assert drafts(head) != before, "the change must matter for this to prove anything"


@pytest.mark.parametrize("name", DRAFTING)
def test_heads_made_and_used_in_inference_mode_draft_the_same(name):
    expected = drafts(random_head(name, tiny_target()))
    with torch.inference_mode():
        head = random_head(name, tiny_target())
        assert drafts(head) == expected
    assert drafts(head) == expected


def test_what_is_kept_is_made_once_until_something_changes():
    made, parameters = [], [torch.randn(4, 3), torch.randn(2)]
    cached: Cached[int] = Cached()
    get = lambda: cached.get(parameters, lambda: made.append(1) or len(made))  # noqa: E731
    assert get() == 1
    cached.refresh()
    assert get() == 1
    parameters[0].data[2, 1] += 1
    cached.refresh()
    assert get() == 2
    assert copy.deepcopy(cached).get(parameters, lambda: 2) == 2
