"""The frozen causal LM that draft heads read: prompts, token trees and training rows go in; logits,
hidden states and embeddings come out.

Legend: B batch, T tokens, N tree nodes, S cache slots, D feature width, V vocabulary, L tokens of
a text.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import output_capturing

from draftheads.heads.batch import Batch
from draftheads.heads.cache import SlotCache
from draftheads.heads.cpu.attention import use_grouped_attention
from draftheads.heads.cpu.linear import PackedBits, PackedLinear, can_pack, pack_layers
from draftheads.heads.hybrid.states import States, cache_argument, install
from draftheads.heads.target.adapter import Adapter
from draftheads.heads.target.longrope import LongRope, document_lengths
from draftheads.heads.target.lora import Lora, titled
from draftheads.heads.target.masks import Masks, known_packing
from draftheads.heads.target.packing import document_ends, groups, rows_of
from draftheads.heads.target.placement import (
    Loading,
    LoadOptions,
    end_ids,
    load_model,
    location,
    quantised_by,
    read_config,
    reading,
)
from draftheads.heads.target.pretrained import (
    ADVICE,
    TREE_ROOM,
    decoder,
    decoder_layers,
    describe,
    final_norm,
    fingerprint,
    is_skeleton,
    plain_model,
    refuse_unsupported,
    release,
    slot_limit,
    usable_context,
)
from draftheads.heads.target.skeleton import load_skeleton
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import TokenTree, Topology, Tree

PIECE = 8192
"""Training tokens per forward pass of a row, unless a document is longer."""
TEMPLATE_OPTIONS = {"tools", "documents", "chat_template"}
"""Parameters of `apply_chat_template` that may be given as variables of the template."""
KEEPS_SOME = hasattr(output_capturing, "resolve_hidden_states_indices")
"""Whether transformers can return some hidden states alone, by their places among all."""
PREFILL_CHUNK = 1024
"""Prompt tokens per forward pass, which bounds the (T, S) mask of a long prompt."""
TRIAL_DEPTH = 32
"""Of a trial's deepest tree: twice that of n-grams."""


Packing = Literal["resets", "mask", "ends", "alone"]
"""What keeps packed documents apart in training: position resets, a mask, the documents' ends which
kernels of recurrent layers obey, or a row for each document.
"""


@dataclass(frozen=True)
class Decoded:
    """The result of one forward pass."""

    logits_BNV: Tensor
    features_BND: Tensor | None
    """The requested hidden states, concatenated; None if there are none."""


class Target:
    """A frozen causal LM. A plain object, not an nn.Module, so it cannot leak into the parameters
    of a head.

    Raises ValueError for models that cannot follow a token tree, judging by their config and by a
    tiny decode (skipped on the meta device).
    """

    adapter: Adapter | None = None
    """Changes to its matrices, if heads were trained together with it (Medusa-2)."""
    bits: PackedBits | None = None
    """Of its weights, if `pack` quantised them."""
    lora: str | None = None
    """A LoRA that was merged into it when it was loaded, by name. No `adapter`: it learns nothing
    here.
    """
    saved_dtype: str | None = None
    """The dtype of its checkpoint, in which engines serve it; None: not loaded from one."""
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
    ) -> None:
        model = plain_model(model)
        self.is_skeleton = is_skeleton(model)
        if not self.is_skeleton:
            refuse_unsupported(model)
        self._mixers = [] if self.is_skeleton else install(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self._fingerprint = fingerprint
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.config.hidden_size
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._slots, self.context = slot_limit(self.config), usable_context(model)
        self.eos_ids = end_ids(model.generation_config.eos_token_id, self.name)
        self.template_args = {}
        self._cache_name = cache_argument(type(model))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = Masks(model)
        self._longrope = LongRope(model)
        if self.is_hybrid and self.has_long_rope:
            raise ValueError(
                f"{describe(model)} has recurrent layers and RoPE that depends on the length of a "
                f"text, so that their states would be computed again; {ADVICE}"
            )
        self._mixing: dict[str, bool] = {}  # how its mixers run, by a trial
        self._packing: Packing = "alone" if self._mixers else "resets"
        self._isolated_tokens = self._isolated_slots = 0  # documents' and their rows', so far
        if not (self.is_skeleton or model.get_input_embeddings().weight.is_meta):
            _refuse_by_trial(self)

    def __repr__(self) -> str:
        size = f"{self.layers} layers, hidden size {self.hidden_size}"
        return f"Target({self.title!r}, {size}, {self.precision}, {self.device})"

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
        path = str(name_or_path)
        options["dtype"] = dtype_name(options.get("dtype") or "auto")
        how = Loading(**options, lora=Lora.open(lora) if lora else None)
        if how.placement == "skeleton" and how.lora is None:
            model = load_skeleton(path, how)
            fingerprint = None
        else:
            model, fingerprint = load_model(path, how)
        commit = how.revision or getattr(model.config, "_commit_hash", None)
        tokenizer = _tokenizer(path, how)
        target = cls(model, tokenizer, name=path, revision=commit, fingerprint=fingerprint)
        target.lora = how.lora.name if how.lora else None
        saved = read_config(path, how.revision).get_text_config(decoder=True).dtype
        target.saved_dtype = dtype_name(saved or torch.float32)
        return target

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

    def pack(self, bits: PackedBits | None = None) -> Target:
        """Lay out its matrices as this CPU multiplies the few tokens of a step fastest, for
        decoding alone; returns the target. Does nothing where torch has no such layout.

        bits=8: quantise them to int8, lm_head included; the rest becomes float32, in which sums of
        int8 products come out. Raises ValueError for a target that is quantised already or has few
        linear layers, and on CPUs for which torch has no int8 products.
        """
        is_quantised = quantised_by(self.model.config) is not None
        if bits and is_quantised:
            raise ValueError(
                f"{self.name}: bits=8: expected weights as they were trained, got "
                f"{self.quantisation}; leave bits out"
            )
        if bits and 2 * self._linear_share < 1:
            raise ValueError(
                f"{describe(self.model)}: bits=8: expected linear layers, got others (such as "
                "experts) for most weights; leave bits out"
            )
        use_grouped_attention(self.model)
        if is_quantised or not (bits or can_pack(self.device, self.dtype)):
            return self
        self.fingerprint()
        lm_head = self.model.get_output_embeddings()
        pack_layers(self.model, bits, small=bits is not None, keep={lm_head})
        for parameter in self.model.parameters():  # views of a file would keep all of it in memory
            parameter.data = parameter.data.clone()
        if bits:
            self.bits = bits
            self.model.float()
        if self.is_packed:
            _refuse_by_trial(self)
        return self

    @property
    def is_packed(self) -> bool:
        """Whether some of its matrices are laid out for this CPU."""
        return any(isinstance(module, PackedLinear) for module in self.model.modules())

    @property
    def _linear_share(self) -> float:
        """Of the weights of its layers, those of linear ones."""
        layers = decoder_layers(self.model)
        linear = [each.weight.numel() for each in layers.modules() if type(each) is nn.Linear]
        return sum(linear) / sum(parameter.numel() for parameter in layers.parameters())

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the target works without its adapter."""
        return self.adapter.disabled() if self.adapter else nullcontext()

    @property
    def title(self) -> str:
        """Its name and its LoRA's, for people."""
        return titled(self.name, self.lora)

    @property
    def quantisation(self) -> str | None:
        """How the weights are, or were, quantised; None if they are as they were trained."""
        if self.bits:
            return self.precision
        if str(self.name).endswith(".gguf"):
            return "GGUF, dequantised"
        method = quantised_by(self.model.config)
        if method is None:
            return None
        config = self.model.config.quantization_config
        values = config if isinstance(config, dict) else config.to_dict()
        bits = 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None
        bits = bits or values.get("bits")
        return f"{method}, {bits} bits" if bits else method

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
        """That of its weights, by name: the dtype, or "int8" (see `pack`)."""
        return "int8" if self.bits else dtype_name(self.dtype)

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache for `batch` rows of at most `capacity` tokens, tree included."""
        states = States(batch, self._mixers, **self._mixing) if self.is_hybrid else None
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
        chunk = chunk or PREFILL_CHUNK
        lengths = [len(prompt) for prompt in prompts]
        rows = [torch.tensor(prompt) for prompt in prompts]
        tokens_BT = pad_sequence(rows, batch_first=True).to(self.device)
        lengths_B1 = torch.tensor(lengths, device=self.device)[:, None]
        logits: dict[int, Tensor] = {}  # of the rows that ended
        for start in range(0, max(lengths), chunk):
            chunk_BN = tokens_BT[:, start : start + chunk]
            width = chunk_BN.shape[1]
            ends = {
                row: n - 1 - start for row, n in enumerate(lengths) if start < n <= start + width
            }
            keep = sorted(set(ends.values())) or [0]
            depths_1N = torch.arange(width, device=self.device)[None]
            counts = [max(0, min(n - start, width)) for n in lengths]
            if cache.states is not None:
                cache.states.read(counts)
            with self._longrope.factors(lengths_B1):
                out = self._decode(chunk_BN, None, depths_1N, cache, layers, keep=keep)
            cache.advance(counts)
            for row, end in ends.items():
                logits[row] = out.logits_BNV[row, keep.index(end)]
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
        with self._longrope.factors(cache.table.lengths_B[:, None] + tree.topology.levels_BN):
            return self._decode(
                tree.tokens_BN, ancestors_BNN, tree.topology.depths_BN, cache, layers
            )

    @property
    def is_hybrid(self) -> bool:
        """Whether some of its layers have recurrent states."""
        return bool(self._mixers)

    @property
    def mixes_by_level(self) -> bool:
        """Whether some of these run over a tree level by level."""
        return "by_level" in self._mixing or not all(each.branching for each in self._mixers)

    @property
    def has_long_rope(self) -> bool:
        """Whether RoPE factors depend on the length of a text (LongRoPE)."""
        return bool(self._longrope.limit)

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree with which a text of `context` tokens would exceed the cache
        slots of a target that attends by slot.
        """
        if self._slots is not None and tree.draft_nodes > TREE_ROOM:
            raise ValueError(
                f"expected a tree of at most {TREE_ROOM} draft nodes for {self.name}, which "
                f"attends by cache slot, got {tree.draft_nodes}; use a smaller tree"
            )

    def room(self, length: int) -> int:
        """The number of tokens that a text of `length` tokens may grow by before `recompute`."""
        crossing = self._longrope.crossing
        return crossing + 1 - length if crossing and length <= crossing else self.context

    def recompute(self, texts: Mapping[int, Sequence[int]], cache: SlotCache) -> None:
        """Compute rows of `cache` again where `generate` does: with LongRoPE, when a text has just
        crossed the limit. texts: row -> its tokens, the newest (not yet in `cache`) included.
        """
        for row, text in texts.items():
            if len(text) - 1 == self._longrope.crossing:
                alone = self.new_cache(1, len(text))
                self.prefill([text], alone, ())
                alone.rewind(len(text) - 1)
                cache.join(alone, [row])

    @torch.no_grad()
    def features(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """Features of packed training tokens by the alignment law, (B, T, D), without gradient.

        Most models separate documents by position resets alone. Others get a mask, and recurrent
        layers a row for each document or its end, as their kernels need.
        """
        return self.states(batch, layers)

    def states(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """`features`, with gradients for an adapter in training.

        Long rows are computed in pieces of whole documents, as a mask of all their tokens would be
        large; those of a sharded target are not, because all processes must run as many forwards.
        """
        self._check_layers()
        is_sharded, length = self._is_sharded, batch.tokens_BT.shape[1]
        if self._packing == "alone" or (self._packing == "ends" and is_sharded):
            return self._isolated(batch, layers)
        is_long = self._packing == "resets" and length > PIECE and not is_sharded
        if not is_long and self._packing != "ends":
            return self._states(batch, layers)
        rows = []
        for row, starts in enumerate(batch.pieces(PIECE if is_long else length)):
            pieces = [batch.part(row, start, stop) for start, stop in pairwise(starts)]
            rows.append(torch.cat([self._states(piece, layers)[0] for piece in pieces]))
        return pad_sequence(rows, batch_first=True)

    def _isolated(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """`states` of documents that run as rows of their own."""
        width = len(layers) * self.hidden_size
        states_BTD = torch.zeros(
            *batch.tokens_BT.shape, width, dtype=self.dtype, device=self.device
        )
        passes = groups(batch, PIECE)
        if self._is_sharded:  # all processes must run as many
            most = torch.tensor(len(passes), device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            passes += passes[-1:] * (int(most) - len(passes))
        for spans in passes:
            rows = rows_of(batch, spans)
            for states_TD, (row, start, stop) in zip(
                self._states(rows, layers), spans, strict=True
            ):
                states_BTD[row, start:stop] = states_TD[: stop - start]
                self._isolated_tokens += stop - start
            self._isolated_slots += rows.tokens_BT.numel()
        return states_BTD

    def _check_layers(self) -> None:
        if self.is_skeleton:
            raise ValueError(
                f"{self.name}: expected a target with its layers, got one that was loaded without, "
                "for features of a server; load it whole to decode, or ask its server"
            )

    @property
    def _is_sharded(self) -> bool:
        return isinstance(decoder(self.model), FSDPModule)

    @property
    def padding(self) -> float | None:
        """The share of padding in all `states` so far, if each document has a row of its own."""
        return 1 - self._isolated_tokens / self._isolated_slots if self._isolated_slots else None

    def _states(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        lengths_BT = document_lengths(batch.positions_BT)
        with self._longrope.factors(lengths_BT), known_packing(batch):
            out = decoder(self.model)(
                batch.tokens_BT,
                attention_mask=self._masks.packed(batch) if self._packing == "mask" else None,
                position_ids=batch.positions_BT,
                use_cache=False,
                output_hidden_states=hidden_states_argument(layers),
                **(document_ends(batch) if self._packing == "ends" else {}),
            )
        states_BTD = self._concatenate(out.hidden_states, layers)
        return torch.cat([torch.zeros_like(states_BTD[:, :1]), states_BTD[:, :-1]], dim=1)

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
        return self.lm_head_weight()

    def lm_head_weight(self) -> Tensor:
        """The same (V, hidden), unchecked, for heads that cap the logits by themselves."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight if weight.device == self.device else self._lm_head_copy

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Last-layer hidden states (..., hidden) from what leaves the last layer."""
        normed: Tensor = final_norm(self.model)(hidden)
        return normed.to(hidden.device)

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
        """One forward pass. ancestors_BNN: None for a chain. keep: nodes to return logits for;
        None: all.
        """
        self._check_layers()
        table, nodes = cache.table, tokens_BN.shape[1]
        table.reserve(nodes)
        positions_BN = table.lengths_B[:, None] + depths_BN
        mask = None  # models add their own for a chain after equal rows, with the fastest kernels
        if ancestors_BNN is not None or not table.uniform or self.is_hybrid:
            if ancestors_BNN is None:
                ancestors_BNN = torch.ones(1, nodes, nodes, device=self.device).tril_() > 0
            visible_BNS, key_positions_BS = table.visible(ancestors_BNN), table.positions(depths_BN)
            mask = self._masks(visible_BNS, positions_BN, key_positions_BS)
            if self._slots and visible_BNS.shape[2] > self._slots:
                raise ValueError(
                    f"expected text and tree to fit into {self._slots} cache slots of this target, "
                    f"got {visible_BNS.shape[2]}; use a smaller tree"
                )
        if table.fixed_S is not None or table.span > self.context:  # by nodes that are not kept
            positions_BN = positions_BN.clamp(max=self.context - 1)
        arguments: dict[str, Any] = {}
        if layers:
            arguments["output_hidden_states"] = hidden_states_argument(layers)
        if keep is not None and self._keeps_logits:
            arguments["logits_to_keep"] = torch.tensor(keep)  # the last layer may be anywhere
        out = self.forward(tokens_BN, mask, positions_BN, cache, **arguments)
        logits_BNV = out.logits if keep is None or self._keeps_logits else out.logits[:, keep]
        features = self._concatenate(out.hidden_states, layers) if layers else None
        return Decoded(logits_BNV.to(self.device), features)

    def forward(
        self, tokens_BN: Tensor, mask: Any, positions_BN: Tensor, cache: SlotCache, **options: Any
    ) -> Any:
        """The model's own output for tokens whose keys and values go into `cache`."""
        return self.model(
            tokens_BN,
            attention_mask=mask,
            position_ids=positions_BN,
            use_cache=True,
            **{self._cache_name: cache},
            **options,
        )

    def _concatenate(self, states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
        chosen = [states[layer].to(self.device) for layer in layers]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)

    def _checked_lm_head(self) -> Any:
        if self._unembed_fault:
            raise ValueError(self._unembed_fault)
        return self.model.get_output_embeddings()

    @cached_property
    @torch.no_grad()
    def _unembed_fault(self) -> str | None:
        """Why lm_head(hidden) differs from the model's logits; None if it does not, or if a config
        says nothing of the kind about a model without layers.
        """
        keys = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
        causes = [f"{key}={value}" for key in keys if (value := getattr(self.config, key, None))]
        if self.is_skeleton and all(each.endswith(("=1", "=1.0")) for each in causes):
            return None
        if not self.is_skeleton and self._lm_head_gives_logits():
            return None
        return (
            f"{self.name}: lm_head(hidden state) is not this model's logits "
            f"({', '.join(causes) or 'another layer comes between them'}); "
            "use heads with their own lm_head and hard labels"
        )

    def _lm_head_gives_logits(self) -> bool:
        tokens = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        out = self.model(tokens, use_cache=False, output_hidden_states=hidden_states_argument([-1]))
        got = self.model.get_output_embeddings()(out.hidden_states[-1])
        return torch.allclose(got.float(), out.logits.float().to(got.device), rtol=1e-3, atol=1e-3)

    @cached_property
    def _lm_head_copy(self) -> Tensor:
        """For an lm_head that is on another device than the features."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.to(self.device)


def hidden_states_argument(layers: Sequence[int]) -> list[int] | bool:
    """What transformers takes as `output_hidden_states`, to return at least these."""
    return list(layers) if KEEPS_SOME else True


def _tokenizer(path: str, how: Loading) -> Any:
    """The tokenizer of a target, or of its LoRA if that brings one; None without any."""
    revision = how.revision
    if how.lora and any(how.lora.folder.glob("tokenizer*")):
        path, revision = str(how.lora.folder), None
    local = Path(os.path.expanduser(path))
    if local.is_dir() and not any(local.glob("tokenizer*")) and not any(local.glob("vocab*")):
        return None
    with reading(path, revision):
        place, file = location(path)
        return AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=False, **file
        )


def template_variables(given: Any) -> dict[str, Any]:
    """The same, as `Target.template_args`. Raises ValueError unless these are variables of a chat
    template, by name, without those that rendering sets itself.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"expected a JSON object, got {given!r:.80}; write it as in "
            '{"enable_thinking": false}'
        )
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    taken = sorted(given.keys() & {"messages", *own} - TEMPLATE_OPTIONS)
    if taken:
        raise ValueError(
            f"expected variables of the chat template, got {', '.join(taken)}, which is always "
            "set; leave it out"
        )
    return {**given}


def _refuse_by_trial(target: Target) -> None:
    """Raise ValueError if the model's states in a tiny tree are not those of plain text."""
    ways: list[dict[str, bool]] = [{}]
    if target.is_hybrid:
        ways += [{"by_level": True}, {"by_level": True, "forgets": True}]
    fault: str | None = None
    for target._mixing in ways:
        try:
            fault = _trial(target)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own code may raise anything; decoding would meet it
            fault = f"its forward fails with {error!r:.200}"
        if fault is None:
            return
    raise ValueError(
        f"{describe(target.model)} cannot follow a token tree, as a trial with a few tokens "
        f"shows: {fault}; {ADVICE}"
    )


@torch.no_grad()  # not inference mode: buffers that a model creates here may be used in training
def _trial(target: Target) -> str | None:
    """Decode a tree after two prompts of different lengths. Returns the fault, if any. Also finds
    out what packed documents need. Nothing is random.
    """
    ids = torch.linspace(target.vocab_size // 4, 3 * target.vocab_size // 4, 12).long().tolist()
    prompts, drafts, paths = [ids[:4], ids[4:7]], ids[7:], ([0, 1, 3], [0, 2, 4])
    cache = target.new_cache(2, 16)
    for _ in target.prefill_chunks(prompts, cache, [-1], chunk=2 if target.is_hybrid else None):
        pass
    topology = Topology(torch.tensor([[-1, 0, 0, 1, 2]], device=target.device))
    tree = TokenTree(torch.tensor([drafts, drafts], device=target.device), topology)
    nodes_BND = target.verify(tree, cache, [-1]).features_BND
    assert nodes_BND is not None
    # the same four paths as rows of plain text, padded to 7 tokens
    texts = [prompt + [drafts[node] for node in path] for prompt in prompts for path in paths]
    rows_BT = torch.tensor([text + ids[: 7 - len(text)] for text in texts], device=target.device)
    plain_BTD = _plain_states(target, rows_BT)
    if plain_BTD.ndim != 3 or plain_BTD.shape[2] != target.hidden_size:
        shape = tuple(plain_BTD.shape)
        return f"its last states are {shape}, expected texts x tokens x {target.hidden_size}"
    if not plain_BTD.isfinite().all():
        return f"its states are not finite in {target.dtype}"
    if _differ(target, plain_BTD[1, :5], plain_BTD[0, :5]):
        return "it is not causal: later tokens change earlier states"
    ends = [len(text) - 1 for text in texts]
    if _differ(target, nodes_BND[:, 3:].flatten(0, 1), plain_BTD[range(4), ends]):
        return "nodes do not see their own path, or not at its positions"

    # of the first path, what is kept: the state after it is that of its text, too
    cache.keep(torch.tensor([[0, 1]] * 2, device=target.device), [2, 2])
    leaf = TokenTree(tree.tokens_BN[:, 3:4], Topology(torch.tensor([[-1]], device=target.device)))
    leaf_BND = target.verify(leaf, cache, [-1]).features_BND
    assert leaf_BND is not None
    if _differ(target, leaf_BND[:, 0], plain_BTD[[0, 2], [ends[0], ends[2]]]):
        return "kept nodes do not continue their own path"
    if target.is_hybrid and not target.mixes_by_level and _differ(target, *_deep(target, ids)):
        return "deep nodes do not see their own path"
    return _leaking(target, texts, plain_BTD[2, :5])


def _plain_states(target: Target, tokens_BT: Tensor) -> Tensor:
    """Last states (B, T, D) of texts without trees."""
    layers = hidden_states_argument([-1])
    out = target.model(tokens_BT, use_cache=False, output_hidden_states=layers)
    states_BTD: Tensor = out.hidden_states[-1]
    return states_BTD.to(target.device)


def _deep(target: Target, ids: list[int]) -> tuple[Tensor, Tensor]:
    """States (L, D) of deep chains, as trees and as plain text. Each repeats one token, by which
    errors in a recurrence over all nodes grow most.
    """
    length = min(1 + TRIAL_DEPTH, target.context)
    tokens_BT = torch.tensor([ids[:1] * length, ids[-1:] * length], device=target.device)
    cache = target.new_cache(2, length)
    target.prefill(tokens_BT[:, :1].tolist(), cache, ())
    chain = Topology(torch.arange(-1, length - 2, device=target.device)[None])
    nodes_BND = target.verify(TokenTree(tokens_BT[:, 1:], chain), cache, [-1]).features_BND
    assert nodes_BND is not None
    plain_BND = _plain_states(target, tokens_BT)[:, 1:]
    return nodes_BND.flatten(0, 1), plain_BND.flatten(0, 1)


def _leaking(target: Target, texts: list[list[int]], expected_LD: Tensor) -> str | None:
    """Find out what keeps packed documents apart. Returns the fault, if nothing does. texts: two of
    seven tokens, one of six. expected_LD: states of the last one but for its last token.
    """
    # two rows of two documents each, the second one the same: does it see the first?
    documents_BT = torch.tensor([[0] * 7 + [1] * 6] * 2)
    tokens_BT = torch.tensor([texts[0] + texts[2], texts[1] + texts[2]])
    positions_BT = torch.tensor([[*range(7), *range(6)]] * 2)
    batch = Batch(tokens_BT, tokens_BT >= 0, positions_BT, documents_BT).to(target.device)
    ways: tuple[Packing, ...] = ("ends", "alone") if target.is_hybrid else ("resets", "mask")
    for target._packing in ways:
        # models do not take the ends of documents, or say which kernels they need for them
        refusals = (TypeError, ValueError) if target._packing == "ends" else ()
        with suppress(*refusals):
            one_LD, other_LD = target.states(batch, [-1])[:, 8:]
            leaks = _differ(target, one_LD, other_LD, 0.05)
            if not leaks and not _differ(target, one_LD, expected_LD):
                return None
    return "packed documents see each other in training"


def _differ(target: Target, got_LD: Tensor, expected_LD: Tensor, rounding: float = 0.25) -> bool:
    """Whether states differ by more than rounding, relative to how much states vary.

    In low precision most of them must differ, because a few may be far off (by another choice of
    experts).
    """
    exact = (
        target.dtype == torch.float32
        and torch.get_float32_matmul_precision() == "highest"
        and not target.quantisation
    )
    got_LD, expected_LD = got_LD.float(), expected_LD.float()
    size = expected_LD.norm(dim=-1).mean()
    spread = (expected_LD - expected_LD.mean(0)).norm(dim=-1).mean().clamp(min=1e-3 * size)
    error_L = (got_LD - expected_LD).norm(dim=-1)
    worst = error_L.max() if exact else error_L.median()
    return not bool(worst <= spread * (1e-3 if exact else rounding))
