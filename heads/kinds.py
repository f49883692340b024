"""The kinds of draft heads: the one list of them."""

from __future__ import annotations

from draftheads.heads.base import DraftHead
from draftheads.heads.block import BlockHead
from draftheads.heads.eagle import Eagle3Head, EagleHead
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.sequential import SequentialHead

HEADS: dict[str, type[DraftHead]] = {
    kind.kind: kind
    for kind in (MedusaHead, SequentialHead, Eagle3Head, EagleHead, BlockHead, MtpHead)
}
"""All kinds, by the name in `head.kind` and config.json. Recipes, errors, cards and help texts
follow from it.
"""


def register(kind: type[DraftHead]) -> type[DraftHead]:
    """Add a kind from outside this package, before its recipes and folders are read; may decorate
    its class.

    Raises ValueError for a name that another class has, and for choices of another kind.
    """
    other = HEADS.setdefault(kind.kind, kind)
    if other is not kind:
        raise ValueError(
            f"head kind {kind.kind!r}: expected a new name, got that of {other.__name__}; choose "
            "another `kind`"
        )
    if (named := kind.Choices().kind) != kind.kind:
        del HEADS[kind.kind]
        raise ValueError(
            f"head kind {kind.kind!r}: expected {kind.Choices.__name__} with this kind, got "
            f"{named!r}; correct the field `kind`"
        )
    return kind
