"""Log-probabilities of tokens, which are recorded while decoding and returned in OpenAI's two
forms.

They are the target's own, before temperature, top-k and top-p, also for drafted tokens, because
they come from the logits of the verified nodes. For an answer with a grammar, they are among the
tokens that it allows.

Legend: B batch, N tree nodes or tokens, V vocabulary, C committed tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Topology
from draftheads.infer.accept import Acceptance, Accepted
from draftheads.infer.draws import SeededRow
from draftheads.infer.serve.protocol import Json
from draftheads.infer.text import REPLACEMENT, Marks, TextStream

LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""
CHUNK = 256
"""Number of tokens of a prompt whose logits are computed at a time."""


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token, and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float | None  # of the first token of a prompt, which nothing predicts
    top: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class ScoredRule(Acceptance):
    """A rule for one row that records the scores of its choices. top: number of likeliest tokens to
    record. before: computes the scores of the tokens before the first choice, at that choice.
    """

    rule: Acceptance
    top: int
    before: Iterator[TokenScore] = iter(())
    newest: list[TokenScore] = field(default_factory=list, init=False, repr=False)
    """Scores of the newest step, before it is cut at the end of the answer."""

    def __eq__(self, other: object) -> bool:
        """Never equal to another one, because two rows cannot share it."""
        return self is other

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Follow the rule."""
        accepted = self.rule(logits_BNV, tree)
        path_C = accepted.path_BN[0, : int(accepted.count_B[0])]
        tokens_C = torch.cat([tree.tokens_BN[0, path_C[1:]], accepted.bonus_B[:1]])
        self.newest[:] = scores(logits_BNV[0, path_C], tokens_C, self.top)
        return accepted

    def choose(self, logits: Tensor) -> Tensor:
        """The rule's choice for logits (1, V)."""
        chosen = self.rule.choose(logits)
        self.newest[:] = [*self.before, *scores(logits, chosen, self.top)]
        return chosen

    @property
    def sees_drafts(self) -> bool:
        """True if drafts change the output of the rule."""
        return self.rule.sees_drafts

    def prepare(self, rows: Sequence[SeededRow]) -> None:
        """Prepare the rule."""
        self.rule.prepare(rows)


def scores(logits_NV: Tensor, tokens_N: Tensor, top: int) -> list[TokenScore]:
    """The scores of tokens, each computed from the logits of its own place."""
    logp_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    logp_NV = logp_NV.nan_to_num(nan=LEAST).clamp(min=LEAST)
    own_N1 = logp_NV.gather(1, tokens_N.clamp(min=0)[:, None])
    best = logp_NV.topk(min(top, logp_NV.shape[1]), dim=1)
    columns = (tokens_N, own_N1[:, 0], best.indices, best.values)
    return [
        TokenScore(token, logprob, list(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(*map(Tensor.tolist, columns), strict=True)
    ]


def prompt_scores(target: Target, prompt: Sequence[int], top: int) -> Iterator[TokenScore]:
    """Yields the scores of the tokens of a prompt, in a forward pass only for them."""
    yield from [TokenScore(token, None, []) for token in prompt[:1]]
    cache = target.new_cache(1, len(prompt))
    for start in range(0, len(prompt) - 1, CHUNK):
        stop = min(start + CHUNK, len(prompt) - 1)
        tokens_N = torch.tensor(prompt[start:stop], device=target.device)
        next_N = torch.tensor(prompt[start + 1 : stop + 1], device=target.device)
        nodes_1N = torch.arange(stop - start, device=target.device)[None]
        chain = TokenTree(tokens_N[None], Topology(nodes_1N - 1, stop - start - 1))
        out = target.verify(chain, cache, ())
        cache.keep(nodes_1N, [stop - start], in_place=True)
        yield from scores(out.logits_BNV[0], next_N, top)


@dataclass
class TokenTexts:
    """The texts of single tokens, with their spaces. A token that is a part of a character gets the
    tokenizer's own name for it. marks: as in `TextStream`, for chats.
    """

    tokenizer: Any
    marks: Marks | None

    def __post_init__(self) -> None:
        self._before = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.read = cache(self._read)

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        """The text of a token id, and its bytes; None for bytes that the tokenizer's name for it
        does not show.
        """
        # after another token, as the first one of a text may lose its space
        stream = TextStream(self.tokenizer, after=self._before, skip_special_tokens=False)
        text = stream.feed([token]) + stream.flush()
        if REPLACEMENT not in text:
            return text, list(text.encode())
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        return name, _bytes(name)


def _bytes(name: str) -> list[int] | None:
    """The bytes of a token with a name of byte-level BPE, or SentencePiece's name for a byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return [int(name[3:5], 16)]
    values = {char: byte for byte, char in bytes_to_unicode().items()}
    if not values.keys() >= set(name):
        return None
    return [values[char] for char in name]


def chat_logprobs(scored: Sequence[TokenScore], texts: TokenTexts) -> Json:
    """The log-probabilities in the form of chats."""

    def entry(token: int, logprob: float | None) -> Json:
        text, own_bytes = texts.read(token)
        return {"token": text, "logprob": logprob, "bytes": own_bytes}

    content = []
    for score in scored:
        top = [entry(token, logprob) for token, logprob in score.top]
        content.append({**entry(score.token, score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(scored: Sequence[TokenScore], texts: TokenTexts, offset: int) -> Json:
    """The log-probabilities in the form of completions. offset: characters of the choice before
    these tokens.
    """
    tokens = [texts.read(score.token)[0] for score in scored]
    top: list[dict[str, float] | None] = []
    for score in scored:
        if score.logprob is None:
            top.append(None)
            continue
        named: dict[str, float] = {}
        for token, logprob in [*score.top, (score.token, score.logprob)]:
            text, _ = texts.read(token)
            named.setdefault(text, logprob)  # several tokens may have the same text
        top.append(named)
    ends = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scored],
        "top_logprobs": top,
        "text_offset": list(ends)[:-1],
    }
