"""The arithmetic that a training step cannot do without, by formula.

FLOP are counted, two per multiply-add, of matrix products alone: linear layers, and attention to
the entries that are seen. Backward takes one product for the gradient of the weight and one for
that of the input, where that is wanted: not of the frozen features. Nothing is computed twice.
Legend: B batch, T tokens.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead
from draftheads.heads.eagle import Eagle3Head
from draftheads.heads.kinds import HEADS
from draftheads.heads.layers import DecoderLayer
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.engines import Learner
from draftheads.train.recipe import OptimChoices

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""The operators that linear layers end in; FlopCounterMode counts attention under other names."""


@dataclass(frozen=True)
class Part:
    """FLOP of one part of a step. is_linear: of linear layers, not of attention."""

    name: str
    forward: int
    backward: int = 0
    is_linear: bool = True


def root_masks(batch: Batch, depth: int) -> list[Tensor]:
    """`Batch.root_masks` as tensors."""
    return [torch.from_numpy(mask_BT) for mask_BT in batch.root_masks(depth)]


def frozen_parts(target: Target, batch: Batch) -> list[Part]:
    """The target's forward; its attention is causal within each document."""
    config = target.config
    seen = int((batch.positions_BT + 1).sum())
    attention = _attention(seen, config.num_attention_heads * config.head_dim) * target.layers
    return [
        Part("target: linear layers", _linear(batch.tokens_BT.numel(), target.model.get_decoder())),
        Part("target: attention", attention, is_linear=False),
    ]


def head_parts(head: DraftHead, batch: Batch, target: Target) -> list[Part]:
    """A head's forward and backward."""
    if isinstance(head, MedusaHead):
        return _medusa_parts(head, batch)
    if isinstance(head, BlockHead):
        return _block_parts(head, batch)
    assert isinstance(head, Eagle3Head), f"no formula for {head.kind}"
    return _eagle3_parts(head, batch, target)


def total(parts: Iterable[Part], *, only_linear: bool = False) -> int:
    """FLOP, forward and backward."""
    chosen = [part for part in parts if part.is_linear or not only_linear]
    return sum(part.forward + part.backward for part in chosen)


def counted(function: Callable[[], Any]) -> int:
    """FLOP that torch sees in the linear layers of a call, and of the backward pass in it."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if str(name).split(".")[-1] in PRODUCTS)


def _medusa_parts(head: MedusaHead, batch: Batch) -> list[Part]:
    blocks = first = words = 0
    for k, mask_BT in enumerate(root_masks(batch, head.depth)):
        judged = int(mask_BT.sum())
        blocks += _linear(judged, head.blocks[k])
        first += _linear(judged, head.blocks[k].get_submodule("layers.0"))
        words += _linear(judged, head.lm_heads[k])
    return [
        Part("head: blocks", blocks, 2 * blocks - first),
        Part("head: lm_heads", words, 2 * words),
    ]


def _eagle3_parts(head: Eagle3Head, batch: Batch, target: Target) -> list[Part]:
    layers = head.midlayer if head.layer_count == 1 else head.layers
    masks = root_masks(batch, head.choices.steps)
    judged = [int(mask_BT.sum()) for mask_BT in masks]
    seen = [int(batch.positions_BT.sum())]  # the first token of a document makes no pair
    for step in range(1, head.choices.steps):
        seen.append(int(batch.positions_BT[masks[step]].sum()) + step * judged[step])
    width = head.design.shape.heads * head.design.shape.head_dim
    attention = _attention(sum(seen), width) * head.layer_count
    fused = _linear(batch.tokens_BT.numel(), head.fc)
    first = _linear(batch.tokens_BT.numel(), layers)
    later = _linear(sum(judged[1:]), layers)
    words = _linear(sum(judged), head.lm_head)
    labels = _linear(judged[0], target.model.get_output_embeddings())
    return [
        Part("head: fc", fused, fused),
        Part("head: layer, step 0", first, 2 * first),
        Part("head: layer, later steps", later, 2 * later),
        Part("head: attention", attention, 2 * attention, is_linear=False),
        Part("head: lm_head", words, 2 * words),
        *([Part("target: lm_head, for labels", labels)] if head.choices.labels == "soft" else []),
    ]


def _block_parts(head: BlockHead, batch: Batch) -> list[Part]:
    """Without conditioning, on the target's lm_head; random anchors stand for the mean one."""
    tokens, size, shape = batch.tokens_BT.numel(), head.design.block_size, head.design.shape
    masks = root_masks(batch, head.depth)
    anchors = int(masks[0].sum(1).clamp(max=head.choices.anchors).sum())
    judged = anchors * int(sum(mask_BT.sum() for mask_BT in masks)) // int(masks[0].sum())
    seen = anchors * size * (int(batch.positions_BT[masks[0]].float().mean()) + size)
    attention = _attention(seen, shape.heads * shape.head_dim) * len(head.layers)
    fused, layers = _linear(tokens, head.fc), _linear(anchors * size, head.layers)
    attentions = [cast(DecoderLayer, layer).self_attn for layer in head.layers]
    entries = sum(
        _linear(tokens, each.k_proj) + _linear(tokens, each.v_proj) for each in attentions
    )
    words = 2 * judged * head.hidden_size * head.vocab_size
    return [
        Part("head: fc", fused, fused),
        Part("head: keys and values of features", entries, 2 * entries),
        Part("head: layers, over blocks", layers, 2 * layers),
        Part("head: attention", attention, 2 * attention, is_linear=False),
        Part("target: lm_head", words, words),
    ]


def _linear(rows: int, module: nn.Module) -> int:
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return 2 * rows * sum(layer.weight.numel() for layer in layers)


def _attention(seen: int, width: int) -> int:
    return 2 * 2 * seen * width  # scores, and the sum of values


# The pieces of a training step on a random target, ready to be called again and again.
#
# Legend: B batch, T tokens, D width.


@dataclass(frozen=True)
class Setup:
    """The choices of one run; the sizes are the target's, and EAGLE-3's layer has the same.

    documents: packed into each row of `length` tokens. depth: Medusa's heads. ttt: EAGLE-3's steps
    of training-time test. anchors: block heads' blocks per row. threads: 0 leaves torch's number.
    dtype: of the target and of matrix products; the heads' weights are float32, as in training.
    clock: "wall", or "cpu": time that all threads together had, which on a busy machine is fairer
    where there is one thread.
    """

    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int = 8
    heads: int = 8
    kv_heads: int = 8
    vocabulary: int = 4096
    draft_vocabulary: int = 4096
    rows: int = 8
    length: int = 512
    documents: int = 4
    depth: int = 4
    ttt: int = 7
    anchors: int = 64
    repetitions: int = 5
    threads: int = 0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    clock: str = "wall"

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        pairs = [(option(name), str(value)) for name, value in asdict(self).items()]
        return [word for pair in pairs for word in pair]


def create_target(setup: Setup) -> Target:
    """A random Llama."""
    config = LlamaConfig(
        hidden_size=setup.hidden_size,
        intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.kv_heads,
        vocab_size=setup.vocabulary,
        max_position_embeddings=max(2048, setup.length),
        tie_word_embeddings=False,
    )
    torch.manual_seed(setup.seed)
    model = LlamaForCausalLM(config).to(setup.device, getattr(torch, setup.dtype))
    return Target(model, name="random Llama")


def create_batch(setup: Setup) -> Batch:
    """Documents of random tokens, packed as in training, all learned but the first of each."""
    size, count = setup.length // setup.documents, setup.documents * setup.rows
    tokens_DT = torch.randint(setup.vocabulary, (count, size), dtype=torch.int32).tolist()
    documents = Documents.read(Answer(tokens, [(0, size)]) for tokens in tokens_DT)
    rows = Rows(documents, documents.spans, setup.length, pack=True, seed=setup.seed)
    return rows.batch(range(len(rows))).to(setup.device)


def create_head(kind: str, setup: Setup, target: Target) -> DraftHead:
    """A new head as the trainer makes it."""
    choices: dict[str, dict[str, Any]] = {
        "medusa": {"depth": setup.depth},
        "eagle3": {"steps": setup.ttt},
        "block": {"conditioning": "none", "anchors": setup.anchors},
    }
    vocabulary = range(setup.draft_vocabulary) if kind == "eagle3" else None
    head = HEADS[kind].create(target, HEADS[kind].Choices(**choices[kind]), vocabulary)
    return head.float().to(target.device)


KINDS = ("medusa", "eagle3", "block")


class Trial:
    """The pieces of a head's training step, to be called again and again."""

    def __init__(self, kind: str, setup: Setup, target: Target, batch: Batch) -> None:
        self.kind, self.target, self.batch = kind, target, batch
        self.head = create_head(kind, setup, target)
        self.optimizer = Learner(self.head, "fp32").optimizer(OptimChoices())
        self.dtype = target.dtype
        self.features_BTD: Tensor | None = None

    def frozen(self) -> None:
        """The target's forward."""
        self.features_BTD = self.target.features(self.batch, self.head.training_layers)

    def learn(self) -> None:
        """The head's forward and backward."""
        is_mixed = self.dtype != torch.float32
        with torch.autocast(self.target.device.type, self.dtype, enabled=is_mixed):
            loss = self.head(self.batch, self.features_BTD, self.target).loss
        (loss / int(self.batch.loss_mask_BT.sum())).backward()

    def update(self) -> None:
        """Clipping and AdamW."""
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pieces(self) -> dict[str, Callable[[], None]]:
        """Name in the report -> call, in the order of a step."""
        return {
            "frozen forward": self.frozen,
            "head forward + backward": self.learn,
            "optimizer": self.update,
        }

    def parts(self) -> dict[str, list[Part]]:
        """What each piece's arithmetic is."""
        frozen = frozen_parts(self.target, self.batch)
        head = head_parts(self.head, self.batch, self.target)
        return dict(zip(self.pieces(), (frozen, head, []), strict=True))


def add_options(parser: ArgumentParser) -> None:
    """One for each choice of `Setup`."""
    for field in fields(Setup):
        kind = type(field.default)
        parser.add_argument(
            option(field.name), type=kind, default=field.default, help="%(default)s"
        )


def chosen_setup(chosen: Namespace) -> Setup:
    """What the command line chose; torch has that many threads from now on."""
    setup = Setup(**{field.name: getattr(chosen, field.name) for field in fields(Setup)})
    if setup.threads:
        torch.set_num_threads(setup.threads)
    return setup


def option(name: str) -> str:
    """The command line's word for a choice of `Setup`."""
    return f"--{name.replace('_', '-')}"
