"""The frozen causal LM that draft heads stand on, seen through forward / embed / unembed.

Legend: B batch, T tokens, N tree nodes, S cache slots, D feature width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftheads.heads.base import Batch
from draftheads.heads.cache import SlotCache
from draftheads.heads.masks import MaskBuilder, refuse_unsupported
from draftheads.heads.tree import TokenTree

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

    Raises ValueError for models whose state cannot be rolled back or whose positions cannot be
    given: recurrent and linear-attention models, ALiBi models, encoder-decoders.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        refuse_unsupported(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.config.hidden_size
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_ids = _as_tuple(model.generation_config.eos_token_id)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = MaskBuilder(model)

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "auto",
        device: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        revision: str | None = None,
    ) -> Target:
        """Load a target from a folder or a Hub id.

        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own on an accelerator,
        float32 on CPU. device: e.g. "cuda:0"; default CUDA where there is one. device_map: as in
        transformers, instead of device.
        """
        path = str(name_or_path)
        local = Path(path).expanduser()
        is_path = local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
        if (is_path or local.exists()) and not (local / "config.json").is_file():
            raise FileNotFoundError(
                f"target {path}: expected a folder with config.json, found none; "
                "pass a model folder or a Hub id"
            )
        local_gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one GPU per launched process
        device = device or (local_gpu if torch.cuda.is_available() else "cpu")
        if dtype == "auto" and device == "cpu" and device_map is None:
            dtype = "float32"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, revision=revision, device_map=device_map
            )
        except OSError as error:  # transformers does not always say which model it speaks of
            reason = str(error).strip().splitlines()[0]
            raise OSError(f"target {path}: {reason}; pass a model folder or a Hub id") from error
        if device_map is None:
            model.to(device)
        has_tokenizer = (
            not local.is_dir() or any(local.glob("tokenizer*")) or any(local.glob("vocab*"))
        )
        tokenizer = (
            AutoTokenizer.from_pretrained(path, revision=revision) if has_tokenizer else None
        )
        commit = revision or getattr(model.config, "_commit_hash", None)
        return cls(model, tokenizer, name=path, revision=commit)

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
        logits: list[Tensor | None] = [None] * len(prompts)
        features: list[Tensor] = []
        for start in range(0, max(lengths), PREFILL_CHUNK):
            chunk_BN = tokens_BT[:, start : start + PREFILL_CHUNK]
            width = chunk_BN.shape[1]
            ends = {
                row: n - 1 - start for row, n in enumerate(lengths) if start < n <= start + width
            }
            keep = sorted(set(ends.values())) or [0]
            chain = torch.ones(1, width, width, dtype=torch.bool, device=self.device).tril_()
            depths_1N = torch.arange(width, device=self.device)[None]
            out = self._decode(chunk_BN, chain, depths_1N, cache, layers, keep=keep)
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
        return self._decode(tree.tokens_BN, tree.ancestors(), tree.depths(), cache, layers)

    def features(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """Features of packed training tokens, (B, T, D), obeying the alignment law; no gradient.

        Documents are kept apart by their position resets, which transformers honours without mask
        and cache.
        """
        with torch.no_grad():
            out = self.model.get_decoder()(
                batch.tokens_BT,
                position_ids=batch.positions_BT,
                use_cache=False,
                output_hidden_states=list(layers),
            )
        states_BTD = self._concatenate(out.hidden_states, layers)
        return torch.cat([torch.zeros_like(states_BTD[:, :1]), states_BTD[:, :-1]], dim=1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, shape (..., hidden)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def unembed(self, hidden: Tensor) -> Tensor:
        """The model's own logits (..., V) of last-layer hidden states.

        Raises ValueError where lm_head(hidden) is not what the model returns (its logits are scaled
        or capped).
        """
        if self._unembed_fault:
            raise ValueError(self._unembed_fault)
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def unembed_weight(self) -> Tensor:
        """The lm_head weight (V, hidden), after the same check as `unembed`.

        Raises ValueError also where there is a bias, which the weight alone would leave out.
        """
        if self._unembed_fault:
            raise ValueError(self._unembed_fault)
        lm_head = self.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                f"{self.name}: its lm_head has a bias, which shared heads leave out; "
                "use heads with their own lm_head and hard labels"
            )
        weight: Tensor = lm_head.weight
        return weight

    def fingerprint(self) -> str:
        """16 hex digits that name these weights, the same for every dtype and device they are
        loaded in.

        A hash of parameter names and of the one-dimensional parameters and 64 embedding rows in
        bfloat16: those stay unquantised, differ after any fine-tuning, and are read in
        milliseconds.
        """
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters(), key=lambda item: item[0]):
            digest.update(name.encode())
            if parameter.ndim == 1:
                _update(digest, parameter)
        embeddings = self.model.get_input_embeddings().weight
        _update(digest, embeddings[:: max(1, len(embeddings) // 64)])
        return digest.hexdigest()[:16]

    @cached_property
    def _unembed_fault(self) -> str | None:
        tokens = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with torch.no_grad():
            out = self.model(tokens, use_cache=False, output_hidden_states=[self.layers])
            got = self.model.get_output_embeddings()(out.hidden_states[self.layers])
        if torch.allclose(got.float(), out.logits.float().to(got.device), rtol=1e-3, atol=1e-3):
            return None
        causes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
        found = [f"{key}={value}" for key in causes if (value := getattr(self.config, key, None))]
        return (
            f"{self.name}: lm_head(hidden state) is not this model's logits "
            f"({', '.join(found) or 'cause unknown'}); "
            "use heads with their own lm_head and hard labels"
        )

    def _decode(
        self,
        tokens_BN: Tensor,
        ancestors_BNN: Tensor,
        depths_BN: Tensor,
        cache: SlotCache,
        layers: Sequence[int],
        *,
        keep: list[int] | None = None,
    ) -> Decoded:
        table = cache.table
        table.reserve(tokens_BN.shape[1])
        visible_BNS, key_positions_BS = table.visible(ancestors_BNN), table.positions(depths_BN)
        positions_BN = table.lengths_B[:, None] + depths_BN
        arguments: dict[str, Any] = {}
        if layers:
            arguments["output_hidden_states"] = list(layers)
        if keep is not None and self._keeps_logits:
            arguments["logits_to_keep"] = torch.tensor(keep, device=self.device)
        out = self.model(
            tokens_BN,
            attention_mask=self._masks(visible_BNS, positions_BN, key_positions_BS),
            # nodes beyond the context are never committed, but learned positions end there
            position_ids=positions_BN.clamp(max=self.context - 1),
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


def _as_tuple(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _update(digest: Any, tensor: Tensor) -> None:
    digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())
