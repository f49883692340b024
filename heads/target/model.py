"""The frozen causal LM that draft heads read: prompts, token trees and training rows go in; logits,
hidden states and embeddings come out.

Legend: B batch, T tokens, N tree nodes, S cache slots, D feature width, V vocabulary, L tokens of
a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftheads.heads.batch import Batch
from draftheads.heads.cache import SlotCache
from draftheads.heads.cpu.attention import use_grouped_attention
from draftheads.heads.cpu.linear import PackedBits
from draftheads.heads.hybrid.states import Mixing, States, install
from draftheads.heads.target import onnx_decoder
from draftheads.heads.target.adapter import Adapter
from draftheads.heads.target.load import Engine, can_pack_model, load, pack_model
from draftheads.heads.target.longrope import LongRope
from draftheads.heads.target.lora import titled
from draftheads.heads.target.masks import Masks
from draftheads.heads.target.packing import Packing, packed_states
from draftheads.heads.target.placement import LoadOptions, end_ids, quantisation
from draftheads.heads.target.pretrained import (
    ModelCall,
    fingerprint,
    is_skeleton,
    logits_fault,
    plain_model,
    refuse_unsupported,
    release,
    usable_context,
)
from draftheads.heads.target.trial import Ways, working_ways
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import TokenTree

PREFILL_CHUNK = 1024
"""Prompt tokens per forward pass, which bounds the (T, S) mask of a long prompt."""


@dataclass(frozen=True)
class Decoded:
    """The result of one forward pass."""

    logits_BNV: Tensor
    features_BND: Tensor | None
    """The requested hidden states, concatenated; None if there are none."""


class Target:
    """A frozen causal LM. A plain object, not an nn.Module, so it cannot leak into the parameters
    of a head.

    lora: a LoRA that was merged into it when it was loaded, by name; no `adapter`, as it learns
    nothing here. saved_dtype: of its checkpoint, in which engines serve it; None: not loaded from
    one. ways: how its layers run over trees and packed rows.

    Raises ValueError for models that cannot follow a token tree, judging by their config and by a
    tiny decode (skipped on the meta device).
    """

    adapter: Adapter | None = None
    """Changes to its matrices, if heads were trained together with it (Medusa-2)."""
    bits: PackedBits | None = None
    """Of its weights, if `pack` quantised them."""
    template_args: dict[str, Any]
    """Variables of its chat template for all prompts, such as {"enable_thinking": False}: those
    with which the answers were made that its heads learned from.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        fingerprint: str | None = None,
        lora: str | None = None,
        saved_dtype: str | None = None,
    ) -> None:
        model = plain_model(model)
        self.is_skeleton = is_skeleton(model)
        if not self.is_skeleton:
            refuse_unsupported(model)
        # recurrent layers, which hand their states to our caches from now on
        self._mixers = [] if self.is_skeleton else install(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self.lora = lora
        self.saved_dtype = saved_dtype
        self._fingerprint = fingerprint
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.config.hidden_size
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context = usable_context(model)
        self.eos_ids = end_ids(model.generation_config.eos_token_id, self.name)
        self.template_args = {}
        self.call = ModelCall(model)
        self.masks = Masks(model)
        self.longrope = LongRope(model)
        self.ways = Ways(packing="alone" if self._mixers else "resets")
        # a few tokens are decoded: are states in a tree those of the same texts without one?
        if not (self.is_skeleton or model.get_input_embeddings().weight.is_meta):
            self.ways = working_ways(self)

    def __repr__(self) -> str:
        return (
            f"Target({self.title!r}, {self.layers} layers, hidden size {self.hidden_size}, "
            f"{self.precision}, {self.device})"
        )

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        lora: str | Path | None = None,
        **options: Unpack[LoadOptions],
    ) -> Target:
        """Load a target from a folder or from the Hub; FOLDER/NAME.gguf is a GGUF file there.

        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own on an accelerator,
        float32 on CPU. device: such as "cuda:0"; default: CUDA if available. placement: "whole", on
        that device; "split" over all GPUs of this process, or a transformers device map; "sharded":
        layers are divided over all processes, which must then call `load`, and whatever runs the
        model, equally often; "skeleton": without layers, for training from features
        that others computed. bits: quantise all but embeddings, norms and lm_head. lora: a LoRA in
        PEFT's format, to be merged into it: a folder, or user/name or user/name@revision on the
        Hub; its tokenizer, if it brings one, replaces the target's.

        Raises ValueError for a placement that is not possible on this machine, for incomplete or
        damaged weights, and for a LoRA that cannot be merged into them.
        """
        model, tokenizer, facts = load(str(name_or_path), lora, options)
        return cls(model, tokenizer, **facts)

    def new_cache(self, batch: int, capacity: int, mixing: Mixing | None = None) -> SlotCache:
        """An empty cache for `batch` rows of at most `capacity` tokens, tree included. mixing: how
        recurrent layers run; default: as a trial found.
        """
        mixing = mixing or self.ways.mixing
        states = States(batch, self._mixers, mixing) if self.is_hybrid else None
        if self.engine == "onnx":
            return SlotCache(self.layers, batch, 1, self.device, growth=onnx_decoder.GROWTH)
        return SlotCache(self.layers, batch, capacity, self.device, states)

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: SlotCache, layers: Sequence[int]
    ) -> Decoded:
        """Append prompts of any lengths to `cache`. Returns logits_B1V after the last token of each
        row and the features at all prompt positions (B, T, D); those of padding, on the right, are
        meaningless.
        """
        chunks = [out for _, out in self.prefill_chunks(prompts, cache, layers)]
        features = [out.features_BND for out in chunks if out.features_BND is not None]
        logits_B1V = chunks[-1].logits_BNV
        return Decoded(logits_B1V, torch.cat(features, dim=1) if features else None)

    def prefill_chunks(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        layers: Sequence[int],
        chunk: int | None = None,
    ) -> Iterator[tuple[int, Decoded]]:
        """`prefill` in passes over `chunk` tokens (default: PREFILL_CHUNK). Yields, after each,
        how many tokens are read, and the features of its own. The last logits are those of
        `prefill`.
        """
        chunk = chunk or (onnx_decoder.CHUNK if self.engine == "onnx" else PREFILL_CHUNK)
        lengths = [len(prompt) for prompt in prompts]
        rows = [torch.tensor(prompt) for prompt in prompts]
        tokens_BT = pad_sequence(rows, batch_first=True).to(self.device)
        lengths_B1 = torch.tensor(lengths, device=self.device)[:, None]
        logits: dict[int, Tensor] = {}  # of the rows that ended
        for start in range(0, max(lengths), chunk):
            chunk_BN = tokens_BT[:, start : start + chunk]
            width = chunk_BN.shape[1]
            # logits are computed where a row ends; nobody reads those of a chunk without an end
            ends = {row: n - 1 - start for row, n in enumerate(lengths) if 0 < n - start <= width}
            columns = sorted(set(ends.values())) or [0]
            depths_1N = torch.arange(width, device=self.device)[None]
            counts = [max(0, min(n - start, width)) for n in lengths]
            if cache.states is not None:
                cache.states.read(counts)
            with self.longrope.factors(lengths_B1):
                out = self._decode(chunk_BN, None, depths_1N, cache, layers, columns)
            cache.advance(counts)
            for row, column in ends.items():
                logits[row] = out.logits_BNV[row, columns.index(column)]
            if len(logits) == len(prompts):
                logits_BV = torch.stack([logits[row] for row in range(len(prompts))])
                out = Decoded(logits_BV[:, None], out.features_BND)
            yield start + width, out

    def verify(self, tree: TokenTree, cache: SlotCache, layers: Sequence[int]) -> Decoded:
        """One forward pass over all nodes of a tree, after the tokens that `cache` has committed.
        The caller then commits a path with `cache.keep`.
        """
        ancestors_BNN = tree.topology.ancestors_BNN if tree.tokens_BN.shape[1] > 1 else None
        if cache.states is not None:
            cache.states.branch(tree.topology)
        with self.longrope.factors(cache.table.lengths_B[:, None] + tree.topology.levels_BN):
            return self._decode(
                tree.tokens_BN, ancestors_BNN, tree.topology.depths_BN, cache, layers
            )

    def _decode(
        self,
        tokens_BN: Tensor,
        ancestors_BNN: Tensor | None,
        depths_BN: Tensor,
        cache: SlotCache,
        layers: Sequence[int],
        columns: list[int] | None = None,
    ) -> Decoded:
        """One forward pass. ancestors_BNN: None for a chain. columns: the nodes whose logits are
        returned; None: all.
        """
        self._check_layers()
        table = cache.table
        nodes = tokens_BN.shape[1]
        table.reserve(nodes)
        positions_BN = table.lengths_B[:, None] + depths_BN
        mask = None  # models add their own for a chain after equal rows, with the fastest kernels
        if ancestors_BNN is not None or not table.uniform or self.is_hybrid:
            if ancestors_BNN is None:
                ancestors_BNN = torch.ones(1, nodes, nodes, device=self.device).tril_() > 0
            visible_BNS = table.visible(ancestors_BNN)
            key_positions_BS = table.positions(depths_BN)
            mask = self.masks(visible_BNS, positions_BN, key_positions_BS)
        if table.fixed_S is not None or table.span > self.context:
            # a text ends at the context, but its last trees may reach beyond; models look positions
            # up, and nothing of these nodes is kept
            positions_BN = positions_BN.clamp(max=self.context - 1)
        return Decoded(
            *self.call(tokens_BN, mask, positions_BN, cache, layers=layers, columns=columns)
        )

    @torch.no_grad()
    def features(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """Features of packed training tokens by the alignment law, (B, T, D), without gradient.

        Most models separate documents by position resets alone. Others get a mask, and recurrent
        layers a row for each document.
        """
        return self.states(batch, layers)

    def states(self, batch: Batch, layers: Sequence[int], packing: Packing | None = None) -> Tensor:
        """`features`, with gradients for an adapter in training. packing: how documents are kept
        apart; default: as a trial found.
        """
        self._check_layers()
        return packed_states(self, batch, layers, packing or self.ways.packing)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, shape (..., hidden)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded.to(tokens.device)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of last-layer hidden states.

        Raises ValueError if lm_head(hidden) is not what the model returns because it scales or caps
        its logits.
        """
        logits: Tensor = self._checked_lm_head()(hidden)
        return logits.to(hidden.device)

    def unembed_weight(self) -> Tensor:
        """The lm_head weight (V, hidden).

        Raises ValueError where `unembed` does, and if there is a bias, which the weight leaves out.
        """
        lm_head = self._checked_lm_head()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                f"{self.name}: its lm_head has a bias, which shared heads leave out; "
                "use heads with their own lm_head and hard labels"
            )
        weight: Tensor = lm_head.weight
        return weight if weight.device == self.device else self._lm_head_copy

    def _checked_lm_head(self) -> Any:
        if self._unembed_fault:
            raise ValueError(self._unembed_fault)
        return self.model.get_output_embeddings()

    @cached_property
    def _unembed_fault(self) -> str | None:
        """Why lm_head(hidden) differs from the model's logits; None if it does not."""
        return logits_fault(self.model, self.name)

    @cached_property
    def _lm_head_copy(self) -> Tensor:
        """For an lm_head that is on another device than the features."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.to(self.device)

    @property
    def device(self) -> torch.device:
        """The device of token ids and features."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def precision(self) -> str:
        """The precision of its weights, by name: the dtype, or "int8" (see `pack`)."""
        return "int8" if self.bits else dtype_name(self.dtype)

    @property
    def quantisation(self) -> str | None:
        """Names the quantisation of its weights, past or present; None if there was none."""
        return self.precision if self.bits else quantisation(self.model.config, self.name)

    @property
    def engine(self) -> Engine:
        """The library that runs its layers."""
        return "torch" if onnx_decoder.decoder_of(self.model) is None else "onnx"

    @property
    def title(self) -> str:
        """Its name and its LoRA's, for people."""
        return titled(self.name, self.lora)

    @property
    def is_hybrid(self) -> bool:
        """True if some of its layers have recurrent states."""
        return bool(self._mixers)

    @property
    def mixes_by_level(self) -> bool:
        """True if some of these run over a tree level by level."""
        return self.ways.mixing != "tree" or not all(each.branching for each in self._mixers)

    @property
    def has_long_rope(self) -> bool:
        """True if RoPE factors depend on the length of a text (LongRoPE)."""
        return bool(self.longrope.limit)

    def adapt(self, **choices: Any) -> Adapter:
        """Add a new adapter, which changes nothing until it is trained; choices: arguments of
        `Adapter.create`.
        """
        self.adapter = Adapter.create(self.model, self.fingerprint(), **choices)
        return self.adapter

    def attach(self, folder: str | Path, *, merge: bool = True) -> Target:
        """Add the adapter of a head folder; returns the target.

        merge: add it to the matrices, which makes decoding as fast as without, but cannot be
        undone; quantised matrices are never merged. Raises ValueError for an adapter of another
        target, and for a target without layers.
        """
        self._check_layers()
        self.adapter = Adapter.load(self.model, self.fingerprint(), Path(folder))
        if merge and not getattr(self.model.config, "quantization_config", None):
            self.adapter.merge()
        return self

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the target works without its adapter."""
        return self.adapter.disabled() if self.adapter else nullcontext()

    def pack(self, bits: PackedBits | None = None, engine: Engine | None = None) -> Target:
        """Lay out its matrices as this CPU multiplies the few tokens of a step fastest, for
        decoding alone; returns the target. Does nothing where torch has no such layout.

        bits=8: quantise them to int8, lm_head included; the rest becomes float32, in which sums of
        int8 products come out. engine: what runs layers in int8; default: ONNX Runtime if
        it can. Raises ValueError for a target that is quantised
        already or has few linear layers, and on CPUs for which torch has no int8 products.
        """
        can_pack = can_pack_model(self.model, self.name, bits)
        use_grouped_attention(self.model, bits)
        if can_pack:
            self.fingerprint()
            pack_model(self.model, self.tokenizer, bits, engine)
            self.bits = bits or self.bits
            self.ways = working_ways(self)
        return self

    def settle_threads(self) -> None:
        """Keep torch's present number of CPU threads for layers in ONNX Runtime, and free the
        memory that another number would need.
        """
        if decoder := onnx_decoder.decoder_of(self.model):
            decoder.settle()

    def fingerprint(self) -> str:
        """Hex digits that identify these weights; see `pretrained.fingerprint`."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    def release(self, *, lm_head: bool = False, layers: bool = False) -> int:
        """Free weights that are no longer needed; returns the bytes freed on this process.

        lm_head: unless it is tied to the embeddings. layers: all of them. Later calls that need
        them raise RuntimeError; `embed`, sizes, tokenizer and fingerprint stay. A sharded target
        must be released by every process.
        """
        self.fingerprint()
        _ = self._unembed_fault  # computed now, while that is possible
        self.__dict__.pop("_lm_head_copy", None)
        return release(self.model, lm_head=lm_head, layers=layers)

    def _check_layers(self) -> None:
        if self.is_skeleton:
            raise ValueError(
                f"{self.name}: expected a target with its layers, got one that was loaded without, "
                "for features of a server; load it whole to decode, or ask its server"
            )
