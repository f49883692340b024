"""Draft heads, their trees and files, and the frozen target that they read.

from draftheads.heads import load_pair, parse_tree

target, head = load_pair("out/qwen")  # a head folder, a run, a Hub id
head.tree = parse_tree("4,2,1")
"""

from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead
from draftheads.heads.choices import HeadChoices
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.eagle import Eagle3Head, EagleHead
from draftheads.heads.formats.hub import load_head, load_pair, save_head
from draftheads.heads.kinds import HEADS, register
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.sequential import SequentialHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree, parse_tree

__all__ = [
    "HEADS",
    "Batch",
    "BlockHead",
    "Committed",
    "DraftHead",
    "Drafter",
    "DynamicTree",
    "Eagle3Head",
    "EagleHead",
    "HeadChoices",
    "HeadLoss",
    "MedusaHead",
    "SequentialHead",
    "StaticTree",
    "Target",
    "TokenTree",
    "Tree",
    "load_head",
    "load_pair",
    "parse_tree",
    "register",
    "save_head",
]


def __dir__() -> list[str]:
    return sorted(__all__)
