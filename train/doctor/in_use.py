"""What decoding says of a head: whether its guesses arrive, in which tree, how warm, how precise.

Legend: M learned positions, K draft depth, T tokens, V vocabulary.

Each check takes the evidence and how many tokens per step are still unexplained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from draftheads.heads.shape import TreeShape
from draftheads.train.doctor.evidence import Evidence, Written, is_above, replayed, write
from draftheads.train.doctor.finding import WORTH, Finding

MANY_TIES = 0.02
"""Share of the target's choices that rounding may decide."""


def drafting(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Decoding accepts less than the guesses along the same text would earn."""
    written, tree = evidence.written, evidence.head.tree
    promised = replayed(tree, evidence.written_rows, evidence.written_ranks_MK)
    gap = promised - written.tokens_per_step
    if len(written.accepted) and gap > 0.07 * promised:
        yield Finding(
            "drafting",
            gap,
            f"decoding brings {written.tokens_per_step:.2f} tokens per step "
            f"({len(written.accepted)} steps); along the same text, the head's guesses are worth "
            f"{promised:.2f} or more",
            "equal for a fixed tree, no less for a dynamic one",
            "the head is drafted with in another way than it is trained: features or tokens reach "
            "its drafter late, or memory is not kept; please report it with this output",
        )


def wrong_tree(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Another tree of the same size would catch more."""
    head, ranks_MK = evidence.head, evidence.ranks_MK
    if isinstance(head.tree, TreeShape) and head.tree.paths:
        half = len(ranks_MK) // 2
        halves, best_M = (ranks_MK[:half], ranks_MK[half:]), []
        for known_MK, judged_MK in (halves[::-1], halves):
            best = head.tree.fitted(known_MK, head.tree.draft_nodes)
            best_M.append(_caught(best, judged_MK) - _caught(head.tree, judged_MK))
        gain_M = torch.cat([best_M[0], best_M[1]])
        if is_above(gain_M, WORTH):
            fitted = head.tree.fitted(ranks_MK, head.tree.draft_nodes)
            gain, paths = float(gain_M.mean()), json.dumps(fitted.to_json(), separators=(",", ":"))
            yield Finding(
                "tree",
                gain,
                f"its {head.tree.draft_nodes} nodes, {head.tree.depth} deep, catch {gain:.2f} "
                f"tokens per step less than the best {fitted.draft_nodes}, {fitted.depth} deep, "
                f"would ({len(ranks_MK)} positions)",
                "the best tree of its size",
                f"use the tree {paths} (chat --tree, or draftheads.tree in config.json)",
            )
    deepest = int(evidence.written.accepted.max()) if len(evidence.written.accepted) else 0
    if deepest < head.tree.depth - 1:
        yield Finding(
            "tree",
            0.0,
            f"the tree is {head.tree.depth} deep, no step of {len(evidence.written.accepted)} "
            f"accepted more than {deepest} drafts",
            "the deepest level is reached now and then",
            f"a tree of depth {deepest + 1} drafts faster; compare with draftheads bench --tree",
        )


def warm(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Acceptance at the temperature that was asked for."""
    case = evidence.case
    if case.sampling is None:
        return
    drawn = write(case, case.openings, case.head, case.sampling)
    if not accepts_less(drawn, evidence.written):
        return
    cold, warm = evidence.written.tokens_per_step, drawn.tokens_per_step
    data = case.manifest.get("sampling", {}).get("temperature")
    yield Finding(
        "temperature",
        cold - warm,
        f"{warm:.2f} tokens per step with {case.sampling} ({len(drawn.accepted)} steps), "
        f"{cold:.2f} greedy ({len(evidence.written.accepted)})"
        + (f"; the data was drawn at temperature {data}" if data is not None else ""),
        "a little less than greedy",
        "distill at this temperature and train with head.labels=soft, or decode colder",
    )


def near_ties(evidence: Evidence, left: float) -> Iterator[Finding]:
    """In low precision, one token at a time and many at a time do not always agree."""
    case, target = evidence.case, evidence.target
    if target.dtype == torch.float32:
        return
    differ = total = 0
    for answer in write(case, case.openings, None).answers:
        [(start, end)] = answer.learn
        tokens_1T = torch.tensor([answer.tokens], device=target.device)
        with torch.inference_mode():
            logits_TV = target.model(tokens_1T, use_cache=False).logits[0, start - 1 : end - 1]
        differ += int((logits_TV.argmax(-1) != tokens_1T[0, start:end]).sum())
        total += end - start
    share = differ / max(1, total)
    yield Finding(
        "precision",
        share * evidence.written.tokens_per_step if share > MANY_TIES else 0.0,
        f"in {target.dtype}, the target's choice after one token at a time differs from that after "
        f"all at once at {differ} of {total} places ({share:.1%})",
        f"below {MANY_TIES:.0%}: ties that rounding decides, output is lossless up to them",
        "use --dtype float32 where output must be equal token for token",
    )


def accepts_less(less: Written, more: Written) -> bool:
    """Whether the steps of one accept fewer drafts than those of another, beyond chance."""
    return is_above(more.accepted.float(), less.accepted.float())


def _caught(tree: TreeShape, ranks_MK: Tensor) -> Tensor:
    """float (M,): how many nodes of the tree lie on each observed path."""
    known = set(tree.paths)
    paths = [tuple(path) for path in ranks_MK.tolist()]
    caught = [sum(path[:d] in known for d in range(1, len(path) + 1)) for path in paths]
    return torch.tensor(caught, dtype=torch.float32)
