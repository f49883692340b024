"""The promise: a draft multiplies each matrix of weights where it lies, by one product of two
matrices. A batched product with one matrix for all rows makes a CPU copy it for each of them: with
the lm_head of a large vocabulary a draft in bfloat16 took 3 s and not 0.07.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_heads import DRAFTING, OF_OTHERS, VARIANTS, random_head, written_by
from tiny_targets import VOCABULARY, random_model, some_prompts, tiny_target
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from draftheads.heads.base import DraftHead
from draftheads.heads.drafting import Committed
from draftheads.heads.layers import project
from draftheads.heads.target.model import Target

SHARED = {
    "medusa": {"lm_head": "shared"},
    "sequential": {"lm_head": "shared"},
    "sequential-hydra": {"lm_head": "shared"},
    "block": {"lm_head": "own"},
    "eagle3": {"vocabulary": range(12)},
}
"""The other source of a kind's last matrix."""
CASES = [*DRAFTING, *(pytest.param(name, id=f"{name}-other") for name in SHARED)]


class Products(TorchDispatchMode):
    """Notes batched products whose second factor is one matrix for all rows, or weights."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        super().__init__()
        parameters = [p for module in modules for p in module.parameters()]
        self.weights = {p.untyped_storage().data_ptr() for p in parameters}
        self.batched: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            factor = args[-1]
            is_one = factor.stride(0) == 0 and factor.shape[0] > 1
            if is_one or factor.untyped_storage().data_ptr() in self.weights:
                self.batched.append((name, tuple(factor.shape)))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(random_model("qwen3").to(torch.bfloat16), name="tiny-bfloat16")


def committed(head: DraftHead, target: Target, count: int, rows: int) -> Committed:
    """What a step with `count` tokens would add to each row; the features are a slice."""
    width = len(head.feature_layers) * target.hidden_size
    features_BCD = torch.randn(rows, count + 1, width, dtype=target.dtype)[:, 1:]
    tokens_BC = torch.randint(VOCABULARY, (rows, count))
    return Committed(tokens_BC, features_BCD, torch.full((rows,), count), [count] * rows)


@pytest.mark.mend("lm_head copied for each draft in bfloat16")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_draft_copies_no_matrix(request, target, name, top_k, rows):
    is_other = request.node.callspec.id.endswith("-other")
    own = SHARED[name] if is_other else {}
    head = random_head(name, target, top_k=top_k or 3, **own).to(torch.bfloat16)
    head.requires_grad_(False)  # as trained weights, F.linear would fold some of them by itself
    if top_k is None and {**VARIANTS, **OF_OTHERS}[name][0] != "medusa":
        head.tree = type(random_head("medusa", target).tree).unfitted(3)
    drafter = head.drafter(target)
    with torch.no_grad(), Products(head, target.model) as products:  # of eager tensors, as decoding
        for count in (9, 3, 1):
            drafter.propose(committed(head, target, count, rows))
    assert products.batched == []


@pytest.mark.parametrize("name", DRAFTING)
def test_an_evaluation_copies_no_matrix(target, name):
    head = random_head(name, target).to(torch.bfloat16).requires_grad_(False)
    batch = written_by(tiny_target("qwen3"), some_prompts(5, 5), 20)
    features_BTD = target.features(batch, head.training_layers)
    with torch.no_grad(), Products(head, target.model) as products:
        head.token_ranks(batch, features_BTD, target)
    assert products.batched == []


def test_a_slice_is_what_f_linear_makes_a_batched_product_of():
    """The reason for `project`; without it, the tests above would hold nothing."""
    states, weight = torch.randn(2, 5, 8)[:, 1:], torch.randn(11, 8)
    with torch.no_grad(), Products(torch.nn.ParameterList([weight])) as products:
        expected = F.linear(states, weight)
        assert products.batched
        products.batched.clear()
        torch.testing.assert_close(project(states, weight), expected)
    assert products.batched == []
