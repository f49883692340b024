"""Memory that comes and goes in a training step, from shapes alone: an upper bound of it.

Legend: D width, I inner width of an MLP, L blocks of a head, r rank.
"""

from __future__ import annotations

from typing import Any

import torch

from draftheads.heads.losses import CHUNK_LOGITS, CHUNK_ROWS
from draftheads.train.choices import MedusaChoices, SequentialChoices
from draftheads.train.plan.parts import FLOAT, AdapterSizes, Sizes, TargetSizes
from draftheads.train.recipe import Recipe


def activation_bytes(recipe: Recipe, sizes: Sizes, length: int) -> int:
    """An upper bound of what a micro batch of rows of `length` tokens holds besides weights,
    gradients and moments, all of its tokens learned.

    Everything in 4 bytes. The target's forward: 10 D + 3 I per token, what it passes on 3 D per
    state, masks 9 per pair of tokens. The head: see `_kept`, and as much again of its largest
    piece for the backward pass. The layers of the target that an adapter changes: see `_adapted`.
    Logits: four copies of a chunk. Gradients that the loss makes in its forward pass: the head's
    weights once more; what AdamW holds meanwhile: its largest parameter twice on a CPU, all on a
    GPU.
    """
    target, head, adapter = sizes.target, sizes.head, sizes.adapter
    tokens = recipe.data.rows_per_batch * length
    width, pairs = target.width, tokens * length
    forward = tokens * (10 * width + 3 * target.inner + 3 * width * head.features) + 9 * pairs // 4
    vocabulary = _size(recipe.head, "vocabulary", target.vocabulary)
    whole = recipe.head.labels == "soft" or adapter.layers  # soft labels, or the divergence
    widest = target.vocabulary if whole else vocabulary
    on_gpu = torch.cuda.is_available()
    chunk = max(CHUNK_ROWS * widest, CHUNK_LOGITS["cuda" if on_gpu else "cpu"])
    kept = _kept(recipe, target, tokens, pairs)
    kept += _adapted(recipe, target, adapter, tokens, pairs)
    largest = max(head.largest, adapter.largest)
    update = sizes.trained // FLOAT if on_gpu else 2 * largest
    return FLOAT * (forward + kept + 4 * chunk + head.parameters + update)


def _kept(recipe: Recipe, target: TargetSizes, tokens: int, pairs: int) -> int:
    """Numbers that the head keeps for its backward pass.

    A Medusa head of L blocks: (3 L + 4) D per token; one that knows the token before: 4 D + 3 r
    more, of hydra its whole input. A decoder layer: 16 D + 5 I + 6 of attention per token and
    pass, and two masks. With gradient checkpointing a decoder layer keeps 2 D, and one pass is
    made again.
    """
    choices, width = recipe.head, target.width
    attention = max(width, _size(choices, "heads", 0) * _size(choices, "head_dim", 0))
    layer = _layer(width, _size(choices, "intermediate_size", target.inner), attention)
    if isinstance(choices, MedusaChoices):
        each = (3 * choices.layers + 4) * width
        if isinstance(choices, SequentialChoices):
            each += 4 * width + 3 * (choices.rank or width)
            each += (choices.depth + 1) * width if choices.conditioning == "hydra" else 0
        prefix = layer * tokens + 2 * pairs if getattr(choices, "prefix", False) else 0
        return tokens * each * choices.depth + prefix
    passes = choices.steps * choices.layers
    if recipe.run.gradient_checkpointing:
        return tokens * (2 * width * passes + layer) + 2 * pairs
    return tokens * (layer * passes + 3 * width * choices.steps) + 2 * pairs


def _adapted(
    recipe: Recipe, target: TargetSizes, adapter: AdapterSizes, tokens: int, pairs: int
) -> int:
    """Numbers that the target keeps for the backward pass through the layers that an adapter
    changes: those of a decoder layer, and what the adapter's matrices read once more, in their own
    dtype. With gradient checkpointing a layer keeps 2 D, and one is made again.
    """
    if not adapter.layers:
        return 0
    layer = _layer(target.width, target.inner, target.width) + adapter.reads
    if recipe.run.gradient_checkpointing:
        return tokens * (2 * target.width * adapter.layers + layer) + 2 * pairs
    return tokens * layer * adapter.layers + 2 * pairs


def _layer(width: int, inner: int, attention: int) -> int:
    """Numbers per token that a decoder layer keeps."""
    return 16 * width + 5 * inner + 6 * attention


def _size(choices: Any, name: str, default: int) -> int:
    return int(getattr(choices, name, None) or default)
