"""The decoding loop: propose, verify, accept, keep, yield.

Legend: B batch, N tree nodes, A committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from draftheads.heads.base import Committed, Drafter, DraftHead
from draftheads.heads.cache import ROOM
from draftheads.heads.target import Decoded, Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, Accepted, Greedy, Sampled, Typical
from draftheads.infer.text import StopStrings


@dataclass(frozen=True)
class Step:
    """What one forward of the target brought to one row.

    tokens: new token ids, cut at EOS, stop string and max_new_tokens. accepted: draft tokens
    accepted, before that cut; -1 for the prefill, which verifies no draft. finish: "eos", "stop" or
    "length" on the last step. draft_seconds, verify_seconds: wall time of the step's two halves,
    shared by all rows of a batch.
    """

    tokens: list[int]
    accepted: int
    finish: str | None
    draft_seconds: float
    verify_seconds: float


@dataclass
class Statistics:
    """Sums over steps; the prefill and its token do not count."""

    steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Statistics:
        """The sums over these steps."""
        total = cls()
        for step in steps:
            total.add(step)
        return total

    def add(self, step: Step) -> None:
        """Count one step of one row."""
        if step.accepted < 0:
            return
        self.steps += 1
        self.tokens += len(step.tokens)
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.accepted += [0] * (step.accepted - len(self.accepted))
        for depth in range(step.accepted):
            self.accepted[depth] += 1

    @property
    def tokens_per_step(self) -> float:
        """The acceptance length tau, the target's bonus token included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
        return [count / self.steps for count in self.accepted]


class Speculator:
    """Decodes a target with a drafter; with none, one token per forward.

    drafts: a DraftHead, or a function that makes a fresh Drafter for each generation, or None.
    tree: overrides the head's own tree. profile: wait for the device around each half of a step, so
    that draft_seconds and verify_seconds are true on an accelerator (slower).
    """

    def __init__(
        self,
        target: Target,
        drafts: DraftHead | Callable[[], Drafter] | None = None,
        *,
        tree: Tree | None = None,
        profile: bool = False,
    ) -> None:
        self.target, self.profile = target, profile
        if isinstance(drafts, DraftHead):
            self.tree: Tree = tree or drafts.tree
            drafts.check_tree(self.tree)
            self._new_drafter: Callable[[], Drafter] = lambda: drafts.drafter(target, self.tree)
            if self.tree.nodes == 1:
                self._new_drafter = NoDraft
        else:
            self.tree = tree or StaticTree(())
            self._new_drafter = drafts or NoDraft

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[str] = (),
    ) -> Iterator[Step]:
        """Continue one prompt (token ids), one Step per forward.

        Ends after exactly `max_new_tokens` (default: the rest of the context; then the cache grows
        with the text), after an EOS of the target's generation config, which is the last token
        yielded, or after the token that completes a `stop` string. Raises ValueError, before
        anything is computed, for ids that the target does not know, and when prompt and new tokens
        exceed its context.
        """
        batch = self.generate_batch(
            [prompt], sampling=sampling, max_new_tokens=max_new_tokens, stop=stop
        )
        return filter(None, chain.from_iterable(batch))

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[str] = (),
    ) -> Iterator[list[Step | None]]:
        """Continue several prompts of any lengths together; each item holds one Step per row, None
        once it is done.
        """
        if not len(prompts):
            raise ValueError("no prompts: expected one or more")
        rows = [_Row(self.target, prompt, max_new_tokens, stop) for prompt in prompts]
        reserved = ROOM if max_new_tokens is None else max_new_tokens
        return self._decode(rows, sampling or Greedy(), reserved)

    @torch.inference_mode()
    def _decode(
        self, rows: list[_Row], accept: Acceptance, reserved: int
    ) -> Iterator[list[Step | None]]:
        target, drafter = self.target, self._new_drafter()
        prompts = [list(row.text) for row in rows]
        capacity = min(max(map(len, prompts)) + reserved, target.context)
        cache = target.new_cache(len(prompts), capacity + self.tree.nodes)
        start = self._clock()
        prefilled = target.prefill(prompts, cache, drafter.feature_layers)
        first_B = accept.choose(prefilled.logits_BNV[:, 0])
        committed = _prompt(prompts, prefilled, first_B)
        new = [[token] for token in first_B.tolist()]
        seconds = self._clock() - start
        yield [row.step(new[b], -1, 0.0, seconds) for b, row in enumerate(rows)]
        while not all(row.finish for row in rows):
            start = self._clock()
            tree = drafter.propose(committed)
            drafted = self._clock()
            target.recompute({b: r.text for b, r in enumerate(rows) if not r.finish}, cache)
            out = target.verify(tree, cache, drafter.feature_layers)
            accepted = accept(out.logits_BNV, tree)
            counts = [
                0 if row.finish else min(count, target.room(len(row.text)))
                for row, count in zip(rows, accepted.counts, strict=True)
            ]
            cache.keep(accepted.path_BA, counts, in_place=accepted.in_place)
            committed = _commit(tree, out, accepted, counts)
            new = [ids[:n] for ids, n in zip(committed.tokens_BA.tolist(), counts, strict=True)]
            halves = drafted - start, self._clock() - drafted
            yield [
                None if row.finish else row.step(new[b], counts[b] - 1, *halves)
                for b, row in enumerate(rows)
            ]

    def _clock(self) -> float:
        if self.profile and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return perf_counter()


class _Row:
    """One row's text so far, prompt included: where its output is cut, and why it ended."""

    def __init__(
        self, target: Target, prompt: Sequence[int], limit: int | None, stop: Collection[str]
    ) -> None:
        known = target.model.get_input_embeddings().weight.shape[0]
        strange = [t for t in prompt if not _is_whole(t) or not 0 <= t < known]
        if strange:
            raise ValueError(
                f"prompt: expected token ids, whole numbers from 0 to {known - 1}, got "
                f"{strange[0]!r}; encode it with the target's own tokenizer"
            )
        length, context = len(prompt), target.context
        if not 0 < length < context:
            raise ValueError(
                f"the prompt has {length} tokens, expected 1 to {context - 1}: the context of "
                f"{target.name} holds {context}, the answer included; pass a prompt that fits"
            )
        if limit is not None and (not _is_whole(limit) or limit < 1):
            raise ValueError(f"max_new_tokens: expected 1 or more, a whole number, got {limit!r}")
        if limit is not None and length + limit > context:
            raise ValueError(
                f"prompt ({length} tokens) and max_new_tokens ({limit}) exceed the context of "
                f"{target.name} ({context}); lower max_new_tokens to {context - length} "
                "or shorten the prompt"
            )
        self.text = list(map(int, prompt))
        self.finish: str | None = None
        self._end = length + limit if limit is not None else context
        self._eos = frozenset(target.eos_ids)
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop or stop == "" else None

    def step(self, tokens: list[int], accepted: int, draft: float, verify: float) -> Step:
        """Take the tokens that still belong to the output."""
        for place, token in enumerate(tokens, start=1):
            self.text.append(token)
            if token in self._eos:
                self.finish = "eos"
            elif self._stop is not None and self._stop.completed_by(token):
                self.finish = "stop"
            elif len(self.text) == self._end:
                self.finish = "length"
            if self.finish:
                return Step(tokens[:place], accepted, self.finish, draft, verify)
        return Step(tokens, accepted, None, draft, verify)


def _is_whole(number: object) -> bool:
    """True for integers, numpy's and torch's among them, and not for bools."""
    return hasattr(number, "__index__") and not isinstance(number, bool)


def _prompt(prompts: Sequence[Sequence[int]], prefilled: Decoded, first_B: Tensor) -> Committed:
    """The first commit: the prompt and the token that the prefill chose, with features shifted by
    the law.
    """
    counts = [len(prompt) + 1 for prompt in prompts]
    tokens_BA = first_B.new_zeros(len(prompts), max(counts))
    for row, prompt in enumerate(prompts):
        tokens_BA[row, : len(prompt)] = torch.tensor(prompt)
    count_B = torch.tensor(counts, device=first_B.device)
    tokens_BA.scatter_(1, count_B[:, None] - 1, first_B[:, None])
    if prefilled.features_BND is None:
        features_BAD = first_B.new_zeros(*tokens_BA.shape, 0, dtype=torch.float)
    else:
        first = torch.zeros_like(prefilled.features_BND[:, :1])
        features_BAD = torch.cat([first, prefilled.features_BND], dim=1)
    return Committed(tokens_BA, features_BAD, count_B, counts)


def _commit(tree: TokenTree, out: Decoded, accepted: Accepted, counts: list[int]) -> Committed:
    """The accepted children and the bonus token, each with the state of the node that predicted
    it.
    """
    path_BA, count_B = accepted.path_BA, torch.tensor(counts, device=accepted.path_BA.device)
    if tree.tokens_BN.shape[1] == 1:
        tokens_BA = accepted.bonus_B[:, None]
    else:
        tokens_BA = tree.tokens_BN.gather(1, path_BA).roll(-1, dims=1)
        last_B1 = torch.tensor(accepted.counts, device=path_BA.device)[:, None] - 1
        tokens_BA.scatter_(1, last_B1, accepted.bonus_B[:, None])
    if out.features_BND is None:
        features_BAD = path_BA.new_zeros(*path_BA.shape, 0, dtype=torch.float)
    else:
        index_BAD = path_BA[:, :, None].expand(-1, -1, out.features_BND.shape[-1])
        features_BAD = out.features_BND.gather(1, index_BAD)
    return Committed(tokens_BA, features_BAD, count_B, counts)


class NoDraft:
    """Proposes nothing: the engine then decodes one token per forward, as the plain model does."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._root: Topology | None = None

    def propose(self, committed: Committed) -> TokenTree:
        """The newest token alone."""
        tokens_B = committed.last_tokens_B()
        if self._root is None:
            self._root = Topology(torch.full((1, 1), -1, device=tokens_B.device))
        return TokenTree(tokens_B[:, None], self._root)


class Oracle:
    """Knows each row's continuation: the upper bound of every head that fills this tree.

    continuations: per row, the tokens that follow the prompt. noise: the chance that a node is
    wrong, seed: of those. The nodes of rank 0 carry the truth, the others carry wrong tokens.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        shape: StaticTree,
        continuations: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.shape, self.continuations = shape, continuations
        self.vocab_size, self.noise = vocab_size, noise
        self.written = [0] * len(continuations)
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, committed: Committed) -> TokenTree:
        """The known continuation on the path of rank 0."""
        started = any(self.written)  # the first call brings the prompt and one token
        roots = committed.last_tokens_B().tolist()
        rows = []
        for row, count in enumerate(committed.counts):
            self.written[row] += count if started else 1
            rows.append([roots[row], *self._drafts(self.continuations[row][self.written[row] :])])
        device = committed.tokens_BA.device
        return TokenTree(torch.tensor(rows, device=device), self.shape.topology(device))

    def _drafts(self, ahead: Sequence[int]) -> Iterator[int]:
        for path in self.shape.paths:
            truth = ahead[len(path) - 1] if len(path) <= len(ahead) else 0
            is_wrong = torch.rand((), generator=self._generator).item() < self.noise
            offset = path[-1] + self.shape.width if is_wrong else path[-1]
            yield (truth + offset) % self.vocab_size


class Baseline:
    """transformers' own `generate` with its default cache, sampling as `rule` does: the baseline of
    every speedup and the judge of losslessness.

    Raises ValueError for a rule that `generate` has no equivalent of. `Typical` is compared with
    plain sampling at its temperature.
    """

    def __init__(self, target: Target, rule: Acceptance, limits: Collection[int]) -> None:
        self.target = target
        sampling: dict[str, Any] = {"do_sample": False}
        if isinstance(rule, Sampled | Typical):
            sampling = {"do_sample": True, "temperature": float(rule.temperature)}
            # not told, generate takes a top_k of 50
            sampling |= {"top_p": 1.0, "top_k": 0}
        if isinstance(rule, Sampled):
            sampling |= {"top_p": float(rule.top_p), "top_k": rule.top_k}
        if not isinstance(rule, Greedy | Sampled | Typical):
            raise ValueError(
                f"expected Greedy, Sampled or Typical, got {type(rule).__name__}: `generate` has "
                "no equivalent to compare it with"
            )
        eos = list(target.eos_ids)
        ends = {"eos_token_id": eos or None, "pad_token_id": eos[0] if eos else 0}
        # made here, so that no timer sees them made
        self._configs = {n: GenerationConfig(max_new_tokens=n, **ends, **sampling) for n in limits}

    def __call__(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The new tokens, the EOS included; limit: max_new_tokens, one of `limits`."""
        tokens_1T = torch.tensor([prompt], device=self.target.device)
        out_1T = self.target.model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            generation_config=self._configs[limit],
        )
        new: list[int] = out_1T[0, len(prompt) :].tolist()
        return new


@contextmanager
def without_defaults(target: Target) -> Iterator[None]:
    """Hide the model's generation_config, which `generate` merges into any config it is given.

    A repetition penalty or suppressed tokens from there would make `generate` write something else
    than the target's plain distribution, which is what draft heads reproduce.
    """
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:  # the target is the caller's: give it back as it was, also after Ctrl-C
        yield
    finally:
        target.model.generation_config = own
