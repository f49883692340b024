"""The frozen causal LM that draft heads stand on, seen through forward / embed / unembed.

Legend: B batch, T tokens, N tree nodes, S cache slots, D feature width, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from draftheads.heads.adapter import Adapter
from draftheads.heads.batch import Batch
from draftheads.heads.cache import LongRope, SlotCache, document_lengths
from draftheads.heads.placement import Bits, Placement, load_model, reading
from draftheads.heads.supported import (
    ADVICE,
    TREE_ROOM,
    describe,
    plain_model,
    refuse_by_trial,
    refuse_unsupported,
    slot_limit,
)
from draftheads.heads.tree import TokenTree
from draftheads.heads.weights import decoder, fingerprint, release_layers, release_lm_head

PREFILL_CHUNK = 1024
"""Prompt tokens per forward: bounds the (T, S) mask of a long prompt."""


@dataclass(frozen=True)
class Decoded:
    """One forward's results. logits_BNV; features_BND: the chosen hidden states, concatenated (None
    if none).
    """

    logits_BNV: Tensor
    features_BND: Tensor | None


class Target:
    """A frozen causal LM. A plain object, not an nn.Module: it cannot leak into a head's
    parameters.

    Raises ValueError for models that cannot follow a token tree (`heads.supported`): by what their
    config says, and by a tiny decode, unless the model has no numbers (meta).
    """

    adapter: Adapter | None = None
    """What changes its matrices since heads were trained together with it (Medusa-2)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        model = plain_model(model)
        refuse_unsupported(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self._fingerprint = fingerprint
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.config.hidden_size
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context: int = _context(model, self.config)
        self.eos_ids = _as_tuple(model.generation_config.eos_token_id)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = MaskBuilder(model)
        self._longrope = LongRope(model)
        self._unembedding = Unembedding(model, self.name)
        self._resets = True  # whether position resets alone keep packed documents apart
        if not model.get_input_embeddings().weight.is_meta:
            self._resets = refuse_by_trial(self)

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
        placement: Placement | dict[str, Any] = "whole",
        bits: Bits | None = None,
    ) -> Target:
        """Load a target from a folder or a Hub id.

        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own on an accelerator,
        float32 on CPU. device: e.g. "cuda:0"; default CUDA where there is one. placement: whole, on
        that device; split, over all GPUs of the one process, or as a transformers device map says;
        sharded, its layers divided over all processes, which must then call `load`, and whatever
        runs the model, equally often. bits: quantise all but embeddings, norms and lm_head.

        Raises ValueError for a placement that cannot be had here, and for weights that are
        incomplete or broken.
        """
        path = str(name_or_path)
        model, known = load_model(
            path, dtype=dtype, device=device, revision=revision, placement=placement, bits=bits
        )
        local = Path(path).expanduser()
        has_tokenizer = (
            not local.is_dir() or any(local.glob("tokenizer*")) or any(local.glob("vocab*"))
        )
        tokenizer = None
        if has_tokenizer:
            with reading(path):
                tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        commit = revision or getattr(model.config, "_commit_hash", None)
        return cls(model, tokenizer, name=path, revision=commit, fingerprint=known)

    def adapt(self, **choices: Any) -> Adapter:
        """Put a new adapter on, which changes nothing until it is trained; choices: of
        `Adapter.create`.
        """
        self.adapter = Adapter.create(self.model, self.fingerprint(), **choices)
        return self.adapter

    def attach(self, folder: str | Path, *, merge: bool = True) -> Target:
        """Put the adapter of a head folder on, and return the target. merge: into its matrices,
        which costs nothing when decoding, but cannot be undone; quantised ones are not merged.

        Raises ValueError for another target's adapter.
        """
        self.adapter = Adapter.load(self.model, self.fingerprint(), Path(folder))
        if merge and not getattr(self.model.config, "quantization_config", None):
            self.adapter.merge()
        return self

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Inside, the target is as it came, without an adapter that was put on."""
        return self.adapter.disabled() if self.adapter else nullcontext()

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache for `batch` rows of at most `capacity` tokens, tree included."""
        return SlotCache(self.layers, batch, capacity, self.device)

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: SlotCache, layers: Sequence[int]
    ) -> Decoded:
        """Append prompts (rows of any length) to `cache`. Returns logits_B1V after each row's last
        token and the features at all prompt positions (B, T, D), right-padded with whatever the
        padding computed.
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens_BT = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
        tokens_BT = tokens_BT.to(self.device)
        texts_B1 = torch.tensor(lengths, device=self.device)[:, None]
        logits: list[Tensor | None] = [None] * len(prompts)
        features: list[Tensor] = []
        for start in range(0, max(lengths), PREFILL_CHUNK):
            chunk_BN = tokens_BT[:, start : start + PREFILL_CHUNK]
            width = chunk_BN.shape[1]
            ends = {
                row: n - 1 - start for row, n in enumerate(lengths) if start < n <= start + width
            }
            keep = sorted(set(ends.values())) or [0]
            depths_1N = torch.arange(width, device=self.device)[None]
            with self._longrope.factors(texts_B1):
                out = self._decode(chunk_BN, None, depths_1N, cache, layers, keep=keep)
            for row, end in ends.items():
                logits[row] = out.logits_BNV[row, keep.index(end)]
            if out.features_BND is not None:
                features.append(out.features_BND)
            cache.table.advance([max(0, min(n - start, width)) for n in lengths])
        rows = [row for row in logits if row is not None]
        return Decoded(torch.stack(rows)[:, None], torch.cat(features, 1) if features else None)

    def verify(self, tree: TokenTree, cache: SlotCache, layers: Sequence[int]) -> Decoded:
        """One forward over all tree nodes behind what `cache` has committed; `cache.keep` must
        follow.
        """
        ancestors_BNN = tree.ancestors() if tree.tokens_BN.shape[1] > 1 else None
        with self._longrope.factors(cache.table.lengths_B[:, None], tree.depths() + 1):
            return self._decode(tree.tokens_BN, ancestors_BNN, tree.depths(), cache, layers)

    def room(self, text: int) -> int:
        """How many tokens a text of so many, the newest one included, may grow before `recompute`
        must see it.
        """
        crossing = self._longrope.crossing
        return crossing + 1 - text if crossing and text <= crossing else self.context

    def recompute(self, texts: Mapping[int, Sequence[int]], cache: SlotCache) -> None:
        """Compute rows of `cache` anew where `generate` does (LongRoPE, whose factors change with
        the length of the text). texts: of each row to look at, its newest token included.
        """
        for row, text in texts.items():
            if len(text) - 1 == self._longrope.crossing:
                alone = self.new_cache(1, len(text))
                self.prefill([text], alone, ())
                cache.copy_row(row, alone)

    @torch.no_grad()
    def features(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """Features of packed training tokens, (B, T, D), obeying the alignment law; no gradient.

        Documents are kept apart by their position resets, which most models honour without mask and
        cache, and by a mask in the others.
        """
        return self.states(batch, layers)

    def states(self, batch: Batch, layers: Sequence[int], *, resets: bool | None = None) -> Tensor:
        """As `features`, with the gradients of an adapter that learns. resets: whether position
        resets keep documents apart; default: as was found out when the target was made.
        """
        honoured = self._resets if resets is None else resets
        with self._longrope.factors(document_lengths(batch.positions_BT)):
            out = decoder(self.model)(
                batch.tokens_BT,
                attention_mask=None if honoured else self._masks.packed(batch),
                position_ids=batch.positions_BT,
                use_cache=False,
                output_hidden_states=list(layers),
            )
        states_BTD = self._concatenate(out.hidden_states, layers)
        return torch.cat([torch.zeros_like(states_BTD[:, :1]), states_BTD[:, :-1]], dim=1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, shape (..., hidden)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded.to(tokens.device)

    def unembed(self, hidden: Tensor) -> Tensor:
        """The model's own logits (..., V) of last-layer hidden states.

        Raises ValueError where lm_head(hidden) is not what the model returns (its logits are scaled
        or capped).
        """
        return self._unembedding.logits(hidden)

    def unembed_weight(self) -> Tensor:
        """The lm_head weight (V, hidden), after the same check as `unembed`.

        Raises ValueError also where there is a bias, which the weight alone would leave out.
        """
        return self._unembedding.weight()

    def fingerprint(self) -> str:
        """Hex digits that name these weights, whatever dtype, number of bits and placement they are
        loaded in (see `heads.weights.fingerprint`).
        """
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    def release(self, *, lm_head: bool = False, layers: bool = False) -> int:
        """Free weights that no later call needs; returns bytes freed on this process's devices.

        lm_head: unless it is the embeddings. layers: all of them. What would need them raises
        RuntimeError from now on; `embed`, sizes, tokenizer and fingerprint stay. A sharded target
        must be released by every process.
        """
        self.fingerprint()
        self._unembedding.prepare_release()
        freed = release_lm_head(self.model) if lm_head else 0
        return freed + (release_layers(self.model) if layers else 0)

    def _decode(
        self,
        tokens_BN: Tensor,
        ancestors_BNN: Tensor | None,
        depths_BN: Tensor,
        cache: SlotCache,
        layers: Sequence[int],
        *,
        keep: list[int] | None = None,
    ) -> Decoded:
        """ancestors_BNN: None for a chain, in which each node follows the one before."""
        table, nodes = cache.table, tokens_BN.shape[1]
        table.reserve(nodes)
        positions_BN = table.lengths_B[:, None] + depths_BN
        mask = None  # a chain after rows of one length is what models expect: the fastest kernels
        if ancestors_BNN is not None or not table.uniform:
            if ancestors_BNN is None:
                ancestors_BNN = torch.ones(1, nodes, nodes, device=self.device).tril_() > 0
            visible_BNS, key_positions_BS = table.visible(ancestors_BNN), table.positions(depths_BN)
            mask = self._masks(visible_BNS, positions_BN, key_positions_BS)
        if table.span > self.context:  # such nodes are never committed, but learned positions end
            positions_BN = positions_BN.clamp(max=self.context - 1)
        arguments: dict[str, Any] = {}
        if layers:
            arguments["output_hidden_states"] = list(layers)
        if keep is not None and self._keeps_logits:
            arguments["logits_to_keep"] = torch.tensor(keep)  # the last layer may be anywhere
        out = self.model(
            tokens_BN,
            attention_mask=mask,
            position_ids=positions_BN,
            past_key_values=cache,
            use_cache=True,
            **arguments,
        )
        logits_BNV = out.logits if keep is None or self._keeps_logits else out.logits[:, keep]
        features = self._concatenate(out.hidden_states, layers) if layers else None
        return Decoded(logits_BNV.to(self.device), features)

    def _concatenate(self, states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
        chosen = [states[layer].to(self.device) for layer in layers]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


def _context(model: PreTrainedModel, config: Any) -> int:
    """How many tokens a text may have, without what depends on the number of cache slots."""
    context: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    limit = slot_limit(config)
    if limit is None or context <= limit[0] - TREE_ROOM:
        return context
    slots, reason = limit
    if slots <= 2 * TREE_ROOM:
        raise ValueError(
            f"{describe(model)}: beyond {slots} cache slots, {reason}; expected that only beyond "
            f"{2 * TREE_ROOM}; {ADVICE}"
        )
    warnings.warn(
        f"{describe(model)}: texts are limited to {slots - TREE_ROOM} of {context} tokens, since "
        f"beyond {slots} cache slots, a tree's included, {reason}",
        stacklevel=3,
    )
    return slots - TREE_ROOM


def _as_tuple(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


# The attention masks that make a model follow a token tree, or keep packed documents apart.
#
# Legend: B batch, T tokens, N tree nodes, S cache slots.


class MaskBuilder:
    """Turns visibility into what a model's attention takes.

    Windows are cut by position, not by cache slot; hybrid models get one mask per layer type. Masks
    are additive (0, or the dtype's least number): eager attention *adds* whatever it gets, and sdpa
    would turn a bool mask into this in every layer again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        self.window: int | None = window
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        types = getattr(config, "layer_types", None) or [
            "sliding_attention" if window else "full_attention"
        ]
        self.types: tuple[str, ...] = tuple(dict.fromkeys(types))
        self.dtype = model.dtype
        self.slots = limit[0] if (limit := slot_limit(config)) else None

    def __call__(
        self, visible_BNS: Tensor, positions_BN: Tensor, key_positions_BS: Tensor
    ) -> Tensor | dict[str, Tensor]:
        if self.slots and visible_BNS.shape[2] > self.slots:
            raise ValueError(
                f"expected text and tree to take at most {self.slots} cache slots of this target, "
                f"got {visible_BNS.shape[2]}; use a smaller tree"
            )
        return self._build(visible_BNS, positions_BN, key_positions_BS)

    def packed(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """The mask of training rows: every token sees its own document up to itself."""
        documents_BT = batch.documents_BT
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return self._build(same_BTT.tril(), batch.positions_BT, batch.positions_BT)

    def _build(self, visible_BNS: Tensor, q_BN: Tensor, k_BS: Tensor) -> Tensor | dict[str, Tensor]:
        rows = len(q_BN)  # a topology that rows share is one row; some models ask for each
        masks = {
            kind: self._finish(self._limit(kind, visible_BNS, q_BN, k_BS)).expand(rows, -1, -1, -1)
            for kind in self.types
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _limit(self, kind: str, visible_BNS: Tensor, q_BN: Tensor, k_BS: Tensor) -> Tensor:
        if kind == "sliding_attention" and self.window:
            return visible_BNS & (q_BN[:, :, None] - k_BS[:, None, :] < self.window)
        if kind == "chunked_attention" and self.chunk:
            return visible_BNS & (q_BN[:, :, None] // self.chunk == k_BS[:, None, :] // self.chunk)
        return visible_BNS

    def _finish(self, visible_BNS: Tensor) -> Tensor:
        hidden_B1NS = ~visible_BNS[:, None]
        zeros = torch.zeros(hidden_B1NS.shape, dtype=self.dtype, device=hidden_B1NS.device)
        return zeros.masked_fill_(hidden_B1NS, torch.finfo(self.dtype).min)


# A target's last matrix, as heads read it that share it or learn from the target's distribution.
#
# Legend: V vocabulary.


class Unembedding:
    """Logits of hidden states. name: of the model, for messages."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits (..., V) of last-layer hidden states.

        Raises ValueError where lm_head(hidden) is not what the model returns (its logits are scaled
        or capped).
        """
        self.check()
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.to(hidden.device)

    def weight(self) -> Tensor:
        """The matrix (V, hidden) where the model takes its token ids, after the same check.

        Raises ValueError also where there is a bias, which the weight alone would leave out.
        """
        self.check()
        lm_head = self.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                f"{self.name}: its lm_head has a bias, which shared heads leave out; "
                "use heads with their own lm_head and hard labels"
            )
        weight: Tensor = lm_head.weight
        return weight if weight.device == self.model.device else self._copy

    def check(self) -> None:
        """Raise ValueError where lm_head(hidden) is not what the model returns."""
        if self._fault:
            raise ValueError(self._fault)

    def prepare_release(self) -> None:
        """Check what could not be checked later, and forget copies."""
        _ = self._fault
        self.__dict__.pop("_copy", None)

    @cached_property
    def _copy(self) -> Tensor:
        """Of a matrix that stands elsewhere than the features, made once."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.to(self.model.device)

    @cached_property
    @torch.no_grad()
    def _fault(self) -> str | None:
        config = self.model.config.get_text_config(decoder=True)
        lm_head = self.model.get_output_embeddings()
        tokens = torch.arange(min(4, lm_head.weight.shape[0]), device=self.model.device)[None]
        out = self.model(tokens, use_cache=False, output_hidden_states=[-1])
        got = lm_head(out.hidden_states[-1])
        if torch.allclose(got.float(), out.logits.float().to(got.device), rtol=1e-3, atol=1e-3):
            return None
        causes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
        found = [f"{key}={value}" for key in causes if (value := getattr(config, key, None))]
        return (
            f"{self.name}: lm_head(hidden state) is not this model's logits "
            f"({', '.join(found) or 'another layer comes between them'}); "
            "use heads with their own lm_head and hard labels"
        )
