"""The pieces of a training step on a random target, ready to be called again and again.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.base import Batch, DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.target import Target
from draftheads.scripts.step_floor import Part, frozen_parts, head_parts
from draftheads.train.batches import Documents, Rows
from draftheads.train.learner import Learner
from draftheads.train.recipe import OptimChoices


@dataclass(frozen=True)
class Setup:
    """The choices of one run; the sizes are the target's, and EAGLE-3's layer has the same.

    documents: packed into each row of `length` tokens. depth: Medusa's heads. ttt: EAGLE-3's steps
    of training-time test. threads: 0 leaves torch's number. dtype: of the target and of matrix
    products; the heads' weights are float32, as in training. clock: "wall", or "cpu": time that all
    threads together had, which on a busy machine is fairer where there is one thread.
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
    tokens_N = torch.randint(setup.vocabulary, (count * size,), dtype=torch.int32)
    spans = [(at * size, (at + 1) * size) for at in range(count)]
    documents = Documents(tokens_N, torch.ones_like(tokens_N, dtype=torch.bool), spans)
    rows = Rows(documents, spans, setup.length, pack=True, seed=setup.seed)
    return rows.batch(range(len(rows))).to(setup.device)


def create_head(kind: str, setup: Setup, target: Target) -> DraftHead:
    """A new head as the trainer makes it."""
    choices: dict[str, dict[str, Any]] = {
        "medusa": {"depth": setup.depth},
        "eagle3": {"steps": setup.ttt, "vocabulary": range(setup.draft_vocabulary)},
    }
    return HEADS[kind].create(target, **choices[kind]).float().to(target.device)


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
        (loss / int(self.batch.learn_BT.sum())).backward()

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
