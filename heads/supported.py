"""Which models can be targets: refusals by what a config says, and by one tiny decode.

Legend: R texts, L tokens, N tree nodes, D feature width.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftheads.heads.batch import Batch
from draftheads.heads.tree import TokenTree, Topology

if TYPE_CHECKING:
    from draftheads.heads.target import Target

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types that keep keys and values, and nothing else."""
MASKED = ("eager", "sdpa")
"""Implementations of attention that take a mask per query and key."""
TREE_ROOM = 64
"""Slots left for a tree where a model counts cache slots and its context is limited for it."""
ADVICE = "use a causal LM with attention layers alone and rotary or learned positions"


def plain_model(model: Any) -> PreTrainedModel:
    """The model itself, out of torch.compile's wrapper. Raises ValueError for other wrappers."""
    plain = getattr(model, "_orig_mod", model)
    if not isinstance(plain, PreTrainedModel):
        raise ValueError(
            f"expected a causal LM of transformers, got {type(plain).__name__}; of a PeftModel, "
            "pass what its merge_and_unload() returns, and an adapter that heads were trained with "
            "by Target.attach(folder)"
        )
    return plain


def describe(model: PreTrainedModel) -> str:
    """Class and name, for messages."""
    return f"{type(model).__name__} ({model.config.name_or_path or model.config.model_type})"


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that says itself that it cannot follow a
    tree.
    """
    config, text = model.config, model.config.get_text_config(decoder=True)
    types = [*dict.fromkeys(getattr(text, "layer_types", None) or [])]
    foreign = ", ".join(each for each in types if each not in ATTENTION_LAYERS)
    alibi = getattr(text, "alibi", False) or config.model_type in ("bloom", "mpt")
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    attention = next((x for c in (config, text) if (x := c._attn_implementation) not in MASKED), "")
    switch = "sdpa" if model._supports_sdpa else "eager"
    faults: list[tuple[Any, str]] = [
        (config.is_encoder_decoder, f"is an encoder-decoder; {ADVICE}"),
        (
            getattr(model, "_is_stateful", False),
            "keeps a recurrent state, which cannot be rolled back to the accepted tokens; "
            f"{ADVICE}",
        ),
        (
            foreign,
            f"has layers of type {foreign}, which remember more than keys and values, so they "
            f"cannot be rolled back to the accepted tokens; {ADVICE}",
        ),
        (
            getattr(text, "altup_num_inputs", None),
            "keeps several hidden states per token (AltUp), of which no head can read one; "
            f"{ADVICE}",
        ),
        (
            alibi,
            f"derives positions from the attention mask (ALiBi), where a tree has none; {ADVICE}",
        ),
        (not takes_positions, f"takes no position_ids, which a tree's nodes need; {ADVICE}"),
        (
            model.get_output_embeddings() is None or not hasattr(text, "hidden_size"),
            "has no lm_head over hidden states of one width; load a causal LM with "
            "AutoModelForCausalLM",
        ),
        (
            attention,
            f"runs {attention}, which takes no mask of a tree; call "
            f'model.set_attn_implementation("{switch}") first',
        ),
    ]
    reason = next((reason for fault, reason in faults if fault), None)
    if reason:
        raise ValueError(f"{describe(model)} {reason}")


def slot_limit(config: Any) -> tuple[int, str] | None:
    """From how many cache slots on a model's attention depends on their number, which in a tree or
    in a batch is not that of the text's tokens; and what does that. None: never.
    """
    if config.model_type == "gpt_neo":
        local = "local" in config.attention_layers
        ends = config.max_position_embeddings
        return min(ends, config.window_size) if local else ends, "its mask is cut by slot"
    if config.model_type == "doge":
        return config.keep_window_size, "its dynamic mask chooses among slots"
    if config.model_type == "moshi":
        return config.sliding_window, "its window is cut by slot"
    if config.model_type == "llama4_text" and config.attn_temperature_tuning:
        return config.floor_scale - 1, "its attention temperature counts slots"
    return None


@torch.no_grad()  # not inference mode: what a model remembers of it may be needed in training
def refuse_by_trial(target: Target) -> bool:
    """Decode two prompts with two small trees, and compare the states with those of plain forwards:
    five forwards of at most 80 tokens, nothing random. Returns whether position resets alone keep
    packed documents apart in training.

    Raises ValueError, with the reason, for a model that does not see what it should.
    """
    try:
        trial = _Trial(target)
        fault = trial.fault()
        if not fault:
            return trial.resets_are_enough()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises here, decoding would meet
        line = (str(error).strip().splitlines() or [""])[0]
        fault = f"its forward fails there with {type(error).__name__}: {line}".rstrip(": ")
    raise ValueError(
        f"{describe(target.model)} cannot follow a token tree, as a trial with a few tokens shows: "
        f"{fault}; {ADVICE}"
    )


class _Trial:
    """What a target made of a few texts, in trees and plainly.

    texts: prompt, committed tokens and the path to a leaf. decoded_RD: the states of these leaves.
    plain_RLD: the states of all texts' tokens, in one forward without a cache.
    """

    PROMPT = 4
    TREES = ([-1, 0, 0, 1, 2], [-1, 0, 0, 2])
    LEAVES = ((3, 4), (1, 3))
    KEPT = ([0, 1, 3], [0, 2])  # of the first tree, in each row

    def __init__(self, target: Target) -> None:
        self.target = target
        self.exact = (
            target.dtype == torch.float32
            and torch.get_float32_matmul_precision() == "highest"
            and not getattr(target.model.config, "quantization_config", None)
        )
        self.ids = torch.linspace(target.vocab_size // 4, 3 * target.vocab_size // 4, 12).tolist()
        self.texts, self.decoded_RD = self._decode()
        length = max(map(len, self.texts))
        rows = [[*text, *text[:1] * (length - len(text))] for text in self.texts]
        out = target.model(
            torch.tensor(rows, device=target.device), use_cache=False, output_hidden_states=[-1]
        )
        self.plain_RLD: Tensor = out.hidden_states[-1].to(target.device)

    def fault(self) -> str | None:
        """What is wrong with the decoded or the plain states."""
        shape, wide = tuple(self.plain_RLD.shape), self.target.hidden_size
        if len(shape) != 3 or shape[2] != wide:
            return f"its last states are {shape}, expected texts x tokens x {wide}"
        if not self.plain_RLD.isfinite().all():
            return f"its states are not finite in {self.target.dtype}"
        common = self.PROMPT + 1
        if self._apart(self.plain_RLD[1, :common], self.plain_RLD[0, :common]):
            return "it is not causal, as later tokens change earlier states"
        ends = [len(text) - 1 for text in self.texts]
        if self._apart(self.decoded_RD, self.plain_RLD[range(len(ends)), ends]):
            return "nodes do not see their own path, or not at its positions"
        return None

    def resets_are_enough(self) -> bool:
        """Whether a packed document does not see the one before it. Raises where no mask helps."""
        length, last = len(self.texts[0]), self.texts[2]
        tokens_BT = torch.tensor([self.texts[0] + last, self.texts[1] + last])
        documents_BT = torch.tensor([0] * length + [1] * length).expand(2, -1)
        positions_BT = torch.arange(length).repeat(2).expand(2, -1)
        batch = Batch(tokens_BT, tokens_BT >= 0, positions_BT, documents_BT)
        batch = batch.to(self.target.device)
        for resets in (True, False):
            states_BLD = self.target.states(batch, [-1], resets=resets)[:, length + 1 :]
            leaks = self._apart(states_BLD[0], states_BLD[1], 0.05)
            if not leaks and not self._apart(states_BLD[0], self.plain_RLD[2, : length - 1]):
                return resets
        raise RuntimeError("packed documents see each other in training")

    def _decode(self) -> tuple[list[list[int]], Tensor]:
        target, ids = self.target, [int(token) for token in self.ids]
        rows = [ids[: self.PROMPT], ids[self.PROMPT : 2 * self.PROMPT]]
        cache = target.new_cache(len(rows), 16)
        target.prefill(rows, cache, [-1])
        texts, states = [], []
        for number, parents in enumerate(self.TREES):
            tokens = ids[-1 - number :: -2][: len(parents)]
            topology = Topology(torch.tensor([parents], device=target.device))
            tokens_BN = torch.tensor([tokens] * len(rows), device=target.device)
            out = target.verify(TokenTree(tokens_BN, topology), cache, [-1])
            assert out.features_BND is not None
            for row, text in enumerate(rows):
                for leaf in self.LEAVES[number]:
                    path = topology.ancestors_BNN[0, leaf].nonzero()[:, 0].tolist()
                    texts.append(text + [tokens[node] for node in path])
                    states.append(out.features_BND[row, leaf])
            if number == 0:
                path_BA = torch.tensor([self.KEPT[0], [*self.KEPT[1], 0]], device=target.device)
                cache.keep(path_BA, [len(path) for path in self.KEPT])
                kept = zip(rows, self.KEPT, strict=True)
                rows = [text + [tokens[n] for n in path] for text, path in kept]
        return texts, torch.stack(states)

    def _apart(self, got_RD: Tensor, want_RD: Tensor, rounding: float = 0.25) -> bool:
        """Whether states differ by more than rounding does, measured by how states vary. In low
        precision, where single ones may be far off (other experts chosen), most of them must.
        """
        got_RD, want_RD = got_RD.float(), want_RD.float()
        size = want_RD.norm(dim=-1).mean()
        spread = (want_RD - want_RD.mean(0)).norm(dim=-1).mean().clamp(min=1e-3 * size)
        apart_R = (got_RD - want_RD).norm(dim=-1)
        worst = apart_R.max() if self.exact else apart_R.median()
        return not bool(worst <= spread * (1e-3 if self.exact else rounding))
