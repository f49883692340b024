"""Drafters of any kind at a given shape, with random weights on a stand-in target, ready to draft
again and again.

Legend: B batch, A newly committed tokens, D feature width, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from draftheads.heads.base import Committed, DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.sequential import CONDITIONINGS
from draftheads.heads.shape import DynamicTree, Tree, TreeShape
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa-shared": ("medusa", {"lm_head": "shared"}),
    **{name: ("sequential", {"conditioning": name}) for name in CONDITIONINGS},
    **{
        f"{name}-shared": ("sequential", {"conditioning": name, "lm_head": "shared"})
        for name in CONDITIONINGS
    },
    **{
        f"{name}+prefix": ("sequential", {"conditioning": name, "prefix": True})
        for name in CONDITIONINGS
    },
    "recurrent-shared+prefix": (
        "sequential",
        {"conditioning": "recurrent", "lm_head": "shared", "prefix": True},
    ),
    "eagle3": ("eagle3", {}),
    "eagle": ("eagle", {}),
}
"""Name -> (kind, choices). shared: the target's lm_head; others have one for each depth (eagle3:
one). prefix: a decoder layer in front.
"""
DEFAULT_KINDS = ("medusa", "medusa-shared", *CONDITIONINGS, "state+prefix", "eagle3")
GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read as much of their first tensor as they return."""


@dataclass(frozen=True)
class Setup:
    """The choices of one run. hidden, vocab, layers: the target's; attention heads and the MLP are
    in Llama 3's proportions. nodes, depth: of all trees. top_k: of the dynamic ones. draft_vocab:
    tokens that the heads can guess, 0: all. rank: of the sequential heads, 0: their default.
    context: committed tokens before the first tree; accepted: before each further one. clock: as in
    `step_trial`. together_gb: heads that take no more are timed in turns.
    """

    hidden: int = 512
    vocab: int = 8192
    layers: int = 16
    nodes: int = 60
    depth: int = 4
    top_k: int = 10
    draft_vocab: int = 0
    rank: int = 0
    context: int = 256
    accepted: int = 3
    repetitions: int = 30
    warmup: int = 5
    threads: int = 0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    clock: str = "wall"
    together_gb: float = 4.0

    def __post_init__(self) -> None:
        if self.repetitions < 2:  # quartiles of one draft there are none
            raise ValueError(f"repetitions: expected 2 or more, got {self.repetitions}")
        for name in ("hidden", "vocab", "layers", "nodes", "depth", "top_k", "accepted"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")


def create_target(setup: Setup) -> Target:
    """What drafters need of a target: its embeddings and lm_head, and the sizes of its layers. It
    has one layer and says that it has `setup.layers`, so it cannot verify.
    """
    head_dim = 128 if setup.hidden >= 1024 else 64
    heads = max(1, setup.hidden // head_dim)
    config = LlamaConfig(
        hidden_size=setup.hidden,
        intermediate_size=setup.hidden * 7 // 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=setup.vocab,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
    )
    torch.manual_seed(setup.seed)
    with torch.device(setup.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype))
    model.generation_config = GenerationConfig()
    target = Target(model.to(setup.device), name="random Llama")
    target.unembed_weight()  # its check runs the model: before it says that it is deeper
    target.layers = setup.layers
    return target


def create_head(name: str, setup: Setup, target: Target) -> DraftHead:
    """A head of one of the `KINDS`; all of its weights are drawn."""
    kind, choices = KINDS[name]
    choices = {**choices, "depth": setup.depth, "labels": "hard"}
    if kind.startswith("eagle"):
        choices |= {"nodes": setup.nodes, "top_k": setup.top_k}
    if kind == "sequential" and setup.rank and choices["conditioning"] != "hydra":
        choices["rank"] = setup.rank
    if setup.draft_vocab:
        spread = torch.linspace(0, setup.vocab - 1, setup.draft_vocab, dtype=torch.float64)
        choices["vocabulary"] = spread.long().tolist()
    with _default_dtype(target.dtype):  # float32 first would take twice the memory
        head = HEADS[kind].create(target, **choices).to(target.device, target.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.02)
    return head.eval()


def trees(name: str, setup: Setup) -> dict[str, Tree]:
    """Those that a kind fills: a fixed one as calibration makes them, where a first guess is right
    in 70 % at depth 1 and a tenth less often at each further one; and a dynamic one.
    """
    accuracies_KR = [[0.7 * 0.9**k * 0.3**r for r in range(10)] for k in range(setup.depth)]
    fixed = TreeShape.best_first(accuracies_KR, setup.nodes)
    if KINDS[name][0] == "medusa":
        return {"fixed": fixed}
    return {"fixed": fixed, "dynamic": DynamicTree(setup.nodes, setup.depth, setup.top_k)}


class Trial:
    """One drafter that drafts a tree after each commit of random tokens and features."""

    def __init__(self, head: DraftHead, target: Target, tree: Tree, setup: Setup) -> None:
        self.target, self.setup = target, setup
        self.drafter = head.drafter(target, tree)
        self.width = len(head.feature_layers) * target.hidden_size
        self.bytes_read = 0
        self.draft(self.commit(setup.context + 1))  # the text; its first token makes no pair
        with Reads() as reads:
            self.draft(self.commit(setup.accepted))
        self.bytes_read = reads.bytes

    def commit(self, count: int) -> Committed:
        """What a step of decoding would bring."""
        device, dtype = self.target.device, self.target.dtype
        return Committed(
            torch.randint(self.setup.vocab, (1, count), device=device),
            torch.randn(1, count, self.width, device=device, dtype=dtype),
            torch.tensor([count], device=device),
            [count],
        )

    @torch.inference_mode()
    def draft(self, committed: Committed) -> TokenTree:
        """The tree on the newest committed token."""
        return self.drafter.propose(committed)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read of tensors that stood in memory before: weights, what is kept of
    their products, the text's keys and values. A matrix that is read twice counts twice; what was
    made on the way, such as logits, counts not at all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._made: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if {_place(tensor) for tensor in before} & {_place(tensor) for tensor in after}:
            return out  # a view, or written in place
        if func.overloadpacket.__name__ in GATHERS:
            read = sum(map(_bytes, after)) if self._stood(before[0]) else 0
        else:
            read = sum(_bytes(tensor) for tensor in before if self._stood(tensor))
        self.bytes += read
        self._made += after
        return out

    def _stood(self, tensor: Tensor) -> bool:
        """Indices and masks are not worth counting."""
        return tensor.is_floating_point() and _place(tensor) not in map(_place, self._made)


def head_bytes(head: DraftHead) -> int:
    """Of its own weights; the target's, which it may share, are not among them."""
    return sum(map(_bytes, head.parameters()))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:  # others in this process rely on float32
        yield
    finally:
        torch.set_default_dtype(before)
