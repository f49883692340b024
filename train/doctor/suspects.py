"""Experiments: would the head be right more often if it were fed or read otherwise? What helps
clearly is what is wrong.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from draftheads.heads.autoregressive import AutoregressiveHead
from draftheads.heads.base import DraftHead
from draftheads.heads.decoder import Rope, default_rope
from draftheads.heads.eagle3 import Eagle3Head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.prefix import PrefixLayer
from draftheads.heads.sequential import SequentialHead
from draftheads.train.doctor.evidence import Evidence, Variant, is_above, observe, runs
from draftheads.train.doctor.finding import WORTH, Finding
from draftheads.train.heldout import calibrate

ROPE_BASES = (10000.0, 500000.0, 1000000.0)
MANY_STATES = 4
"""From so many feature layers on, only reversal is tried, not every order."""


def experiments(evidence: Evidence) -> Iterator[Finding]:
    """A finding for each kind of variant of which the best one is clearly better."""
    kinds = {
        "features": list(other_layers(evidence)),
        "alignment": list(other_places(evidence)),
        "rope": list(other_bases(evidence)),
        "draft vocabulary": list(other_ids(evidence)),
    }
    variants = [variant for kind in kinds.values() for variant in kind]
    observed = dict(zip(variants, observe(evidence.case, evidence.rows, variants), strict=True))
    for check, kind in kinds.items():
        if kind:
            best = max(kind, key=lambda variant: float(runs(observed[variant]).mean()))
            yield from _compared(evidence, check, best, observed[best])


def other_layers(evidence: Evidence) -> Iterator[Variant]:
    """Each feature one layer lower or higher, all of them, and every other order."""
    plain, last = evidence.plain, evidence.target.layers
    layers = plain.layers
    moved = [
        tuple(layer + step * (place in (here, None)) for place, layer in enumerate(layers))
        for step in (-1, 1)
        for here in range(len(layers))
    ]
    moved += [tuple(layer + step for layer in layers) for step in (-1, 1)]
    orders = permutations(layers) if len(layers) < MANY_STATES else [layers[::-1]]
    for changed in dict.fromkeys([*moved, *orders]):
        if changed != layers and all(0 <= layer <= last for layer in changed):
            name = f"states of layers {list(changed)} instead of {list(layers)}"
            yield replace(plain, name=name, layers=changed)


def other_places(evidence: Evidence) -> Iterator[Variant]:
    """Features one token late or early."""
    for shift, words in ((1, "before"), (-1, "behind")):
        name = f"for each token the feature of the token {words} it"
        yield replace(evidence.plain, name=name, shift=shift)


def other_bases(evidence: Evidence) -> Iterator[Variant]:
    """Other RoPE bases, and no scaling, for heads whose layers have positions."""
    reader = _reader(evidence.head)
    if reader is None:
        return
    own, width = reader.rope, _head_dim(evidence.head)
    bases = dict.fromkeys([own.theta, *ROPE_BASES, default_rope(evidence.target, {})[0]])
    for theta in bases:
        for scaling in [own.scaling] if own.scaling is None else [own.scaling, None]:
            if (theta, scaling) != (own.theta, own.scaling):
                rope = Rope(width, theta, scaling)
                name = f"RoPE base {theta:g}" + (" unscaled" if own.scaling and not scaling else "")
                planted = partial(_planted_rope, reader, rope)
                instead = f" instead of {own.theta:g}" if theta != own.theta else ""
                yield replace(evidence.plain, name=name + instead, planted=planted)


def other_ids(evidence: Evidence) -> Iterator[Variant]:
    """The draft vocabulary's ids taken for offsets, for absolute ids, and off by one."""
    ids_v = known_ids(evidence.head)
    if ids_v is None:
        return
    places_v = torch.arange(len(ids_v), device=ids_v.device)
    readings: dict[str, Tensor] = {
        "d2t read as absolute ids instead of offsets": ids_v - places_v,
        "d2t read as offsets instead of absolute ids": ids_v + places_v,
        "draft ids one lower": ids_v - 1,
        "draft ids one higher": ids_v + 1,
        "draft ids one place further on": ids_v.roll(1),
        "draft ids one place back": ids_v.roll(-1),
    }
    for name, read_v in readings.items():
        rising = bool((read_v.diff() > 0).all())
        if rising and int(read_v[0]) >= 0 and int(read_v[-1]) < evidence.target.vocab_size:
            yield replace(evidence.plain, name=name, planted=_with_ids(evidence.head, read_v))


def known_ids(head: DraftHead) -> Tensor | None:
    """int64 (v,): the target ids that the head can guess; None: all."""
    return head.token_map if isinstance(head, MedusaHead | AutoregressiveHead) else None


def _compared(
    evidence: Evidence, check: str, variant: Variant, ranks_MK: Tensor
) -> Iterator[Finding]:
    case, plain_MK = evidence.case, evidence.ranks_MK
    if not is_above(runs(ranks_MK) - runs(plain_MK), WORTH):
        return
    better, worse = (
        calibrate(ranks, case.nodes, case.head.tree).tokens_per_step
        for ranks in (ranks_MK, plain_MK)
    )
    right, now = (float((ranks[:, 0] == 0).float().mean()) for ranks in (ranks_MK, plain_MK))
    yield Finding(
        check,
        better - worse,
        f"with {variant.name}, the head's first guess is right {right:.1%} of the time, as it is "
        f"{now:.1%} (the same {len(ranks_MK)} positions; {better:.2f} tokens per step instead of "
        f"{worse:.2f})",
        "nothing else is better than what the head's config says",
        ADVICE[check],
    )


ADVICE = {
    "features": "set draftheads.feature_layers in the head's config.json to these layers (0 = "
    "embeddings; SGLang's numbers are one lower), or train again with the layers it has now",
    "alignment": "the head was trained on pairs shifted by one; features[i] is the state from "
    "which tokens[i] was predicted: export or train it again so",
    "rope": "set rope_theta and rope_scaling in the head's config.json to what it was trained with "
    "(loaders assume 10000 where it is missing)",
    "draft vocabulary": "write d2t as target id minus draft index, in the order of the head's "
    "lm_head, and t2d to match",
}
"""What to do about what an experiment has shown."""


def _reader(head: DraftHead) -> AutoregressiveHead | PrefixLayer | None:
    """The part of a head that has positions."""
    if isinstance(head, AutoregressiveHead):
        return head
    return head.prefix if isinstance(head, SequentialHead) else None


def _head_dim(head: DraftHead) -> int:
    reader = _reader(head)
    assert reader is not None
    return len(reader.rope.frequencies)


@contextmanager
def _planted_rope(reader: AutoregressiveHead | PrefixLayer, rope: Rope) -> Iterator[None]:
    own, reader.rope = reader.rope, rope
    try:
        yield
    finally:
        reader.rope = own


def _with_ids(head: DraftHead, ids_v: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the head guesses these ids."""

    @contextmanager
    def planted() -> Iterator[None]:
        name = "d2t" if isinstance(head, Eagle3Head) else "token_map"
        own_v = getattr(head, name)
        places_v = torch.arange(len(ids_v), device=ids_v.device)
        setattr(head, name, ids_v - places_v if name == "d2t" else ids_v)
        try:
            yield
        finally:
            setattr(head, name, own_v)

    return planted
