"""Losses restated, and the comparison of a head's loss, ranks and gradients with a restatement."""

from __future__ import annotations

import torch


def plain_row_loss(log_q_v, teacher_V, vocabulary: list[int], objective: str):
    """One row, as the formulas stand in the papers, left to autograd."""
    if int(teacher_V.argmax()) not in vocabulary:
        return log_q_v.sum() * 0.0
    p_v = teacher_V[vocabulary].exp() / teacher_V[vocabulary].exp().sum()
    ce = -sum(p * log_q for p, log_q in zip(p_v, log_q_v, strict=True))
    return ce if objective == "ce" else ce + sum(p * torch.log(p) for p in p_v)


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip


def assert_equal(head, got, loss, ranks_KR, weights):
    torch.testing.assert_close(got.loss.double(), loss, rtol=1e-5, atol=1e-5)
    assert got.ranks_KR.tolist() == ranks_KR.tolist()
    names = [name for name, _ in head.named_parameters()]
    expected = torch.autograd.grad(loss, [weights[name] for name in names])
    actual = torch.autograd.grad(got.loss, list(head.parameters()))
    for name, left, right in zip(names, actual, expected, strict=True):
        rounding = 1e-5 * max(float(right.abs().max()), 0.1)
        torch.testing.assert_close(
            left.double(), right, rtol=1e-4, atol=rounding, msg=lambda m, name=name: f"{name}: {m}"
        )
