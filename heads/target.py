"""The frozen causal LM that draft heads stand on, seen through forward / embed / unembed.

Legend: B batch, T tokens, N tree nodes, S cache slots, D feature width, V vocabulary, R texts, L
tokens of a text.
"""

from __future__ import annotations

import inspect
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
from draftheads.heads.pretrained import (
    ADVICE,
    decoder,
    describe,
    fingerprint,
    plain_model,
    refuse_unsupported,
    release,
    slot_limit,
    usable_context,
)
from draftheads.heads.tree import TokenTree, Topology

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

    Raises ValueError for models that cannot follow a token tree: by what their config says, and by
    a tiny decode, unless the model has no numbers (meta).
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
        self._slots, self.context = slot_limit(self.config), usable_context(model)
        eos = model.generation_config.eos_token_id
        eos_ids = [eos] if isinstance(eos, int) else eos or []
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = Masks(model)
        self._longrope = LongRope(model)
        self._resets = True  # whether position resets alone keep packed documents apart
        if not model.get_input_embeddings().weight.is_meta:
            _refuse_by_trial(self)

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
        local, tokenizer = Path(path).expanduser(), None
        if not local.is_dir() or any(local.glob("tokenizer*")) or any(local.glob("vocab*")):
            with reading(path):
                tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        commit = revision or getattr(model.config, "_commit_hash", None)
        return cls(model, tokenizer, name=path, revision=commit, fingerprint=known)

    def adapt(self, **choices: Any) -> Adapter:
        """Put on a new adapter, which changes nothing until it is trained; choices: of
        `Adapter.create`.
        """
        self.adapter = Adapter.create(self.model, self.fingerprint(), **choices)
        return self.adapter

    def attach(self, folder: str | Path, *, merge: bool = True) -> Target:
        """Put on the adapter of a head folder, and return the target. merge: into its matrices,
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
        logits: dict[int, Tensor] = {}
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
        logits_BV = torch.stack([logits[row] for row in range(len(prompts))])
        return Decoded(logits_BV[:, None], torch.cat(features, 1) if features else None)

    def verify(self, tree: TokenTree, cache: SlotCache, layers: Sequence[int]) -> Decoded:
        """One forward over all nodes of a tree after what `cache` has committed; `cache.keep` must
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

    def states(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """As `features`, with the gradients of an adapter that learns."""
        with self._longrope.factors(document_lengths(batch.positions_BT)):
            out = decoder(self.model)(
                batch.tokens_BT,
                attention_mask=None if self._resets else self._masks.packed(batch),
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
        self._check_unembed()
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.to(hidden.device)

    def unembed_weight(self) -> Tensor:
        """The lm_head weight (V, hidden), after the same check as `unembed`.

        Raises ValueError also where there is a bias, which the weight alone would leave out.
        """
        self._check_unembed()
        lm_head = self.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                f"{self.name}: its lm_head has a bias, which shared heads leave out; "
                "use heads with their own lm_head and hard labels"
            )
        weight: Tensor = lm_head.weight
        return weight if weight.device == self.device else self._lm_head_copy

    def fingerprint(self) -> str:
        """Hex digits that name these weights (see `heads.weights.fingerprint`)."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    def release(self, *, lm_head: bool = False, layers: bool = False) -> int:
        """Free weights that no later call needs; returns the bytes freed on this process.

        lm_head: unless it is the embeddings. layers: all of them. What would need them raises
        RuntimeError from now on; `embed`, sizes, tokenizer and fingerprint stay. A sharded target
        must be released by every process.
        """
        self.fingerprint()
        _ = self._unembed_fault  # can be found out no later
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
        """ancestors_BNN: None for a chain, in which each node follows the one before. keep: nodes
        whose logits are wanted; None: all.
        """
        table, nodes = cache.table, tokens_BN.shape[1]
        table.reserve(nodes)
        positions_BN = table.lengths_B[:, None] + depths_BN
        mask = None  # a chain after rows of one length is what models expect: the fastest kernels
        if ancestors_BNN is not None or not table.uniform:
            if ancestors_BNN is None:
                ancestors_BNN = torch.ones(1, nodes, nodes, device=self.device).tril_() > 0
            visible_BNS, key_positions_BS = table.visible(ancestors_BNN), table.positions(depths_BN)
            mask = self._masks(visible_BNS, positions_BN, key_positions_BS)
            if self._slots and visible_BNS.shape[2] > self._slots:
                raise ValueError(
                    f"expected text and tree to take at most {self._slots} cache slots of this "
                    f"target, got {visible_BNS.shape[2]}; use a smaller tree"
                )
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

    def _check_unembed(self) -> None:
        if self._unembed_fault:
            raise ValueError(self._unembed_fault)

    @cached_property
    @torch.no_grad()
    def _unembed_fault(self) -> str | None:
        """Why lm_head(hidden) is not what the model returns; None where it is."""
        lm_head = self.model.get_output_embeddings()
        tokens = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        out = self.model(tokens, use_cache=False, output_hidden_states=[-1])
        got = lm_head(out.hidden_states[-1])
        if torch.allclose(got.float(), out.logits.float().to(got.device), rtol=1e-3, atol=1e-3):
            return None
        causes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
        found = [f"{key}={value}" for key in causes if (value := getattr(self.config, key, None))]
        return (
            f"{self.name}: lm_head(hidden state) is not this model's logits "
            f"({', '.join(found) or 'another layer comes between them'}); "
            "use heads with their own lm_head and hard labels"
        )

    @cached_property
    def _lm_head_copy(self) -> Tensor:
        """Of an lm_head on another device than the features."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.to(self.device)


class Masks:
    """Turns visibility into what a model's attention takes, one mask per layer type.

    Windows are cut by position, not by cache slot. Masks are additive (0, or the dtype's least
    number): eager attention *adds* whatever it gets, and sdpa would turn a bool mask into this in
    every layer again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        windowed = getattr(config, "use_sliding_window", True)
        self.window: int | None = getattr(config, "sliding_window", None) if windowed else None
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        default = "sliding_attention" if self.window else "full_attention"
        types = getattr(config, "layer_types", None) or [default]
        self.types: tuple[str, ...] = tuple(dict.fromkeys(types))
        self.dtype = model.dtype

    def __call__(
        self, visible_BNS: Tensor, positions_BN: Tensor, key_positions_BS: Tensor
    ) -> Tensor | dict[str, Tensor]:
        q_BN1, k_B1S = positions_BN[:, :, None], key_positions_BS[:, None, :]
        masks: dict[str, Tensor] = {}
        for kind in self.types:
            seen_BNS = visible_BNS
            if kind == "sliding_attention" and self.window:
                seen_BNS = visible_BNS & (q_BN1 - k_B1S < self.window)
            elif kind == "chunked_attention" and self.chunk:
                seen_BNS = visible_BNS & (q_BN1 // self.chunk == k_B1S // self.chunk)
            hidden_B1NS = ~seen_BNS[:, None]
            zeros = torch.zeros(hidden_B1NS.shape, dtype=self.dtype, device=hidden_B1NS.device)
            mask = zeros.masked_fill_(hidden_B1NS, torch.finfo(self.dtype).min)
            masks[kind] = mask.expand(len(positions_BN), -1, -1, -1)  # some models ask for all rows
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def packed(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """The mask of training rows: every token sees its own document up to itself."""
        documents_BT = batch.documents_BT
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return self(same_BTT.tril(), batch.positions_BT, batch.positions_BT)


def _refuse_by_trial(target: Target) -> None:
    """Raise ValueError, with the reason, for a model whose states in a tiny tree are not those of
    plain forwards. Nothing in it is random.
    """
    try:
        fault = _trial(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises here, decoding would meet
        line = (str(error).strip().splitlines() or [""])[0]
        fault = f"its forward fails there with {type(error).__name__}: {line}".rstrip(": ")
    if fault:
        raise ValueError(
            f"{describe(target.model)} cannot follow a token tree, as a trial with a few tokens "
            f"shows: {fault}; {ADVICE}"
        )


@torch.no_grad()  # not inference mode: what a model remembers of it may be needed in training
def _trial(target: Target) -> str | None:
    """Decode a tree after two prompts of different lengths; the fault, if there is one. Finds out
    besides whether packed documents need a mask.
    """
    ids = torch.linspace(target.vocab_size // 4, 3 * target.vocab_size // 4, 12).long().tolist()
    prompts, drafts, paths = [ids[:4], ids[4:7]], ids[7:], ([0, 1, 3], [0, 2, 4])
    cache = target.new_cache(2, 16)
    target.prefill(prompts, cache, [-1])
    tree = TokenTree(
        torch.tensor([drafts, drafts], device=target.device),
        Topology(torch.tensor([[-1, 0, 0, 1, 2]], device=target.device)),
    )
    nodes_BND = target.verify(tree, cache, [-1]).features_BND
    assert nodes_BND is not None
    texts = [prompt + [drafts[node] for node in path] for prompt in prompts for path in paths]
    rows = torch.tensor([text + ids[: 7 - len(text)] for text in texts], device=target.device)
    out = target.model(rows, use_cache=False, output_hidden_states=[-1])
    plain_RLD: Tensor = out.hidden_states[-1].to(target.device)

    if plain_RLD.ndim != 3 or plain_RLD.shape[2] != target.hidden_size:
        shape = tuple(plain_RLD.shape)
        return f"its last states are {shape}, expected texts x tokens x {target.hidden_size}"
    if not plain_RLD.isfinite().all():
        return f"its states are not finite in {target.dtype}"
    if _apart(target, plain_RLD[1, :5], plain_RLD[0, :5]):
        return "it is not causal, as later tokens change earlier states"
    ends = [len(text) - 1 for text in texts]
    if _apart(target, nodes_BND[:, 3:].flatten(0, 1), plain_RLD[range(4), ends]):
        return "nodes do not see their own path, or not at its positions"

    # two rows of two documents each, of which the second is the same: does it see the first?
    documents_BT = torch.tensor([[0] * 7 + [1] * 6] * 2)
    tokens_BT = torch.tensor([texts[0] + texts[2], texts[1] + texts[2]])
    positions_BT = torch.tensor([[*range(7), *range(6)]] * 2)
    batch = Batch(tokens_BT, tokens_BT >= 0, positions_BT, documents_BT).to(target.device)
    for resets in (True, False):
        target._resets = resets
        first_LD, second_LD = target.states(batch, [-1])[:, 8:]
        leaks = _apart(target, first_LD, second_LD, 0.05)
        if not leaks and not _apart(target, first_LD, plain_RLD[2, :5]):
            return None
    return "packed documents see each other in training"


def _apart(target: Target, got_RD: Tensor, want_RD: Tensor, rounding: float = 0.25) -> bool:
    """Whether states differ by more than rounding does, measured by how states vary. In low
    precision, where single ones may be far off (other experts chosen), most of them must.
    """
    exact = (
        target.dtype == torch.float32
        and torch.get_float32_matmul_precision() == "highest"
        and not getattr(target.model.config, "quantization_config", None)
    )
    got_RD, want_RD = got_RD.float(), want_RD.float()
    size = want_RD.norm(dim=-1).mean()
    spread = (want_RD - want_RD.mean(0)).norm(dim=-1).mean().clamp(min=1e-3 * size)
    apart_R = (got_RD - want_RD).norm(dim=-1)
    worst = apart_R.max() if exact else apart_R.median()
    return not bool(worst <= spread * (1e-3 if exact else rounding))
