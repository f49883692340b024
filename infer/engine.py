"""The decoding loop: propose, verify, accept, keep, yield.

Legend: B batch, N tree nodes, A committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import CompileConfig, GenerationConfig

from draftheads.heads.base import Committed, Drafter, DraftHead
from draftheads.heads.cache import ROOM, SlotCache
from draftheads.heads.target import Decoded, Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, Greedy, Sampled, Typical, commit
from draftheads.infer.compiled import Advance, FixedSteps, compiled, draft_cache, why_not
from draftheads.infer.text import StopStrings


@dataclass(frozen=True)
class Step:
    """The output of one target forward for one row."""

    tokens: list[int]  # new token ids, cut at EOS, stop string and max_new_tokens
    accepted: int  # draft tokens accepted before that cut; -1 for the prefill, which verifies none
    finish: str | None  # "eos", "stop" or "length" on the last step
    draft_seconds: float  # wall time, shared by all rows of a batch
    verify_seconds: float
    drafted: int = 0  # draft tokens that were verified


@dataclass
class Statistics:
    """Sums over steps, excluding the prefill and its token."""

    steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # [d]: steps with more than d drafts accepted

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Statistics:
        """Sum these steps."""
        total = cls()
        for step in steps:
            total.add(step)
        return total

    def add(self, step: Step) -> None:
        """Add one step of one row."""
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
        """Acceptance length tau, including the target's bonus token."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
        return [count / self.steps for count in self.accepted]


@runtime_checkable
class DrafterSource(Protocol):
    """What makes a drafter for each generation: a DraftHead, or one of `infer.drafters` and
    `infer.draft_model`.
    """

    @property
    def tree(self) -> Tree:
        """The default tree of `drafter`."""
        ...

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that its drafters cannot fill."""
        ...

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation."""
        ...


class Session:
    """Keys and values of a text, the target's and the drafter's, which outlive a generation: the
    next one computes only what differs from it.

    reused: tokens of the newest prompt that were not computed again. length: tokens that both have,
    and may be cut back to. Another engine starts anew. An interrupted generation leaves what its
    complete steps computed.
    """

    def __init__(self) -> None:
        self.reused = self.length = 0
        self._owner: Speculator | None = None
        self._text: list[int] = []

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be computed again. One is left to be computed."""
        count = 0
        for held, new in zip(self._text[: self.length], prompt[:-1], strict=False):
            if held != new:
                break
            count += 1
        return count

    def resume(self, owner: Speculator, prompt: Sequence[int]) -> tuple[SlotCache, Drafter] | None:
        """The caches, cut back to what they share with a prompt; None if that is nothing."""
        self.reused = self.shared(prompt) if owner is self._owner else 0
        self.length = self.reused
        if not self.reused:
            return None
        self._drafter.rewind(self.reused)
        # one less: the state at the last shared token predicts the first new one
        self._cache.table.free([self.reused - 1])
        return self._cache, self._drafter

    def hold(self, owner: Speculator, text: list[int], cache: SlotCache, drafter: Drafter) -> None:
        """Use these from now on. text: the growing list of their tokens."""
        self._owner, self._text = owner, text
        self._cache, self._drafter = cache, drafter

    def note(self, length: int) -> None:
        """Both caches have the first `length` tokens of the text."""
        self.length = length


class Speculator:
    """Decodes a target with a drafter; without one, one token per forward.

    drafts: a DraftHead or another source of drafters, or a function that returns a new Drafter for
    each generation, or None. tree: overrides the source's own tree. compile: let torch compile all
    steps but the first (see `compiled`), once for each batch size and rule; where it cannot, a
    warning says why.
    """

    def __init__(
        self,
        target: Target,
        drafts: DrafterSource | Callable[[], Drafter] | None = None,
        *,
        tree: Tree | None = None,
        compile: bool = False,
    ) -> None:
        self.target = target
        self.compile = compile and self._allowed(why_not(target, drafts))
        self._compiled: dict[tuple[int, str], Advance] = {}
        self.compile_more = True  # False: for no further batch sizes and rules
        self.profile = False  # synchronize, for exact draft_seconds and verify_seconds (slower)
        self._drops_rows = drafts is None or isinstance(drafts, DraftHead)
        if isinstance(drafts, DrafterSource):
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
        session: Session | None = None,
    ) -> Iterator[Step]:
        """Continue one prompt (token ids), one Step per forward. session: computes again only what
        differs from its text.

        Ends after exactly `max_new_tokens` (default: the rest of the context, with a cache that
        grows with the text), after an EOS of the target's generation config (included in the
        output), or after the token that completes a `stop` string. Raises ValueError, before any
        computation, for ids outside the target's vocabulary and when prompt and new tokens exceed
        its context.
        """
        rows = [_Row(self.target, prompt, max_new_tokens, stop)]
        batch = self._decode(rows, sampling or Greedy(), max_new_tokens or ROOM, session)
        return filter(None, chain.from_iterable(batch))

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[str] = (),
    ) -> Iterator[list[Step | None]]:
        """Continue prompts of any lengths as a batch; yields one Step per row, None for a finished
        row.
        """
        rows = [_Row(self.target, prompt, max_new_tokens, stop) for prompt in prompts]
        return self._decode(rows, sampling or Greedy(), max_new_tokens or ROOM)

    @torch.inference_mode()
    def _decode(
        self,
        rows: list[_Row],
        accept: Acceptance,
        reserved: int,
        session: Session | None = None,
    ) -> Iterator[list[Step | None]]:
        start = self._clock()
        cache, drafter, committed = self._read(rows, accept, reserved, session)
        new = committed.last_tokens_B()[:, None].tolist()
        halves = 0.0, self._clock() - start
        yield [row.step(ids, -1, 0, halves) for row, ids in zip(rows, new, strict=True)]
        fixed: FixedSteps | None = None
        batch = rows  # those that are in the caches
        while not all(row.finish for row in rows):
            start, known = self._clock(), len(rows[0].text)
            drafted, nodes = start, self.tree.nodes
            if fixed is not None:
                try:
                    committed, new = fixed(committed, [row.finish is None for row in batch])
                except TorchDynamoException as error:  # at its first call, before it computes
                    self.compile = self._allowed(str(error).strip().partition("\n")[0])
                    fixed.end()
                    fixed = None
                    continue
            else:
                tree = drafter.propose(committed)
                drafted, nodes = self._clock(), tree.tokens_BN.shape[1]
                committed = self._verify(tree, batch, cache, drafter.feature_layers, accept)
                new = committed.tokens_BA.tolist()
            if session is not None:
                session.note(known)
            halves = drafted - start, self._clock() - drafted
            made = {
                row: row.step(ids[:count], count - 1, nodes - 1, halves)
                for row, ids, count in zip(batch, new, committed.counts, strict=True)
                if not row.finish
            }
            yield [made.get(row) for row in rows]
            left = [place for place, row in enumerate(batch) if not row.finish]
            if 0 < len(left) < len(batch) and self._drops_rows and fixed is None:
                committed, batch = committed.select(left), [batch[place] for place in left]
                cache.select(left)
                if (drafts := draft_cache(drafter)) is not None:
                    drafts.select(left)
            advance = self._advance(len(batch), accept) if self.compile and fixed is None else None
            if advance is not None:
                fixed = FixedSteps(advance, self.target, drafter, self.tree)
                committed = fixed.begin(cache, accept, committed)

    def _read(
        self, rows: Sequence[_Row], accept: Acceptance, reserved: int, session: Session | None
    ) -> tuple[SlotCache, Drafter, Committed]:
        """Prefill, but for what a session holds. Returns caches, and what the drafter has not seen:
        the rest of the prompts, and the token after each.
        """
        target, prompts = self.target, [list(row.text) for row in rows]
        held = session.resume(self, prompts[0]) if session is not None else None
        if session is not None and held is not None:
            cache, drafter = held
            prompts = [prompts[0][session.reused - 1 :]]
        else:
            capacity = min(max(map(len, prompts)) + reserved, target.context)
            cache = target.new_cache(len(prompts), capacity + self.tree.nodes)
            drafter = self._new_drafter()
        if session is not None and not target.has_long_rope:  # whose keys may change
            session.hold(self, rows[0].text, cache, drafter)
        out = target.prefill(prompts, cache, drafter.feature_layers)
        committed = _prompt(prompts, out, accept.choose(out.logits_BNV[:, 0]))
        return cache, drafter, committed if held is None else committed.since(1)

    def _verify(
        self,
        tree: TokenTree,
        batch: Sequence[_Row],
        cache: SlotCache,
        layers: Sequence[int],
        accept: Acceptance,
    ) -> Committed:
        """Verify a tree, and keep what the rule accepts."""
        target = self.target
        target.recompute({b: r.text for b, r in enumerate(batch) if not r.finish}, cache)
        out = target.verify(tree, cache, layers)
        accepted = accept(out.logits_BNV, tree)
        chosen, in_place = accepted.read()
        counts = [
            0 if row.finish else min(count, target.room(len(row.text)))
            for row, count in zip(batch, chosen, strict=True)
        ]
        path_BA = accepted.path_BN[:, : max(chosen)]
        cache.keep(path_BA, counts, in_place=in_place)
        count_B = torch.tensor(counts, device=path_BA.device)
        return Committed(*commit(tree, out, accepted, path_BA), count_B, counts)

    def _advance(self, batch: int, accept: Acceptance) -> Advance | None:
        key = (batch, repr(accept))
        if key not in self._compiled and self.compile_more:
            self._compiled[key] = compiled(self.target)
        return self._compiled.get(key)

    def _allowed(self, fault: str | None) -> bool:
        if fault is not None:
            warnings.warn(f"decoding without compilation: {fault}", stacklevel=3)
        return fault is None

    def _clock(self) -> float:
        if self.profile and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return perf_counter()


class _Row:
    """The text of one row, prompt included, and the reason it finished."""

    def __init__(
        self, target: Target, prompt: Sequence[int], limit: int | None, stop: Collection[str]
    ) -> None:
        known = target.model.get_input_embeddings().weight.shape[0]
        invalid = [t for t in prompt if not hasattr(t, "__index__") or not 0 <= t < known]
        if invalid:
            raise ValueError(
                f"prompt: expected token ids from 0 to {known - 1}, got {invalid[0]!r}; use the "
                "target's own tokenizer"
            )
        context, room = target.context, target.context - len(prompt)
        if not 0 < room < context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, expected 1 to {context - 1} (context of "
                f"{target.name}: {context}, answer included); pass a prompt that fits"
            )
        limit = room if limit is None else limit
        if not hasattr(limit, "__index__") or not 1 <= limit <= room:
            raise ValueError(
                f"max_new_tokens: expected 1 to {room}, got {limit!r}; prompt and new tokens must "
                f"not exceed the context of {target.name} ({context})"
            )
        self.text = list(map(int, prompt))
        self.finish: str | None = None
        self._end = len(prompt) + limit
        self._eos = frozenset(target.eos_ids)
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop else None

    def step(
        self, tokens: list[int], accepted: int, drafted: int, halves: tuple[float, float]
    ) -> Step:
        """Append tokens up to the end of the output. halves: seconds of drafting, verifying."""
        for place, token in enumerate(tokens, start=1):
            self.text.append(token)
            if token in self._eos:
                self.finish = "eos"
            elif self._stop is not None and self._stop.completed_by(token):
                self.finish = "stop"
            elif len(self.text) == self._end:
                self.finish = "length"
            if self.finish:
                return Step(tokens[:place], accepted, self.finish, *halves, drafted)
        return Step(tokens, accepted, None, *halves, drafted)


def _prompt(prompts: Sequence[Sequence[int]], prefilled: Decoded, first_B: Tensor) -> Committed:
    """Commit the prompt and the token chosen by the prefill; features are shifted by one, so that
    each token has the state that predicted it.
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


class NoDraft:
    """Drafts nothing, so that the engine decodes one token per forward like the plain model."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._root: Topology | None = None

    def propose(self, committed: Committed) -> TokenTree:
        """A tree that holds only the newest token."""
        tokens_B = committed.last_tokens_B()
        if self._root is None:
            self._root = Topology(torch.full((1, 1), -1, device=tokens_B.device))
        return TokenTree(tokens_B[:, None], self._root)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""


class Baseline:
    """transformers' own `generate`: with its default cache the baseline of every speedup, and the
    reference output. compile: with its static cache, and compiled. options: further arguments of
    `generate`.
    """

    def __init__(self, target: Target, *, compile: bool = False, **options: Any) -> None:
        self.target, self.compile, self.options = target, compile, options

    def generate(
        self, prompt: Sequence[int], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[Step]:
        """Continue one prompt like `Speculator.generate`, all in one Step."""
        batch = self.generate_batch([prompt], sampling=sampling, max_new_tokens=max_new_tokens)
        return filter(None, chain.from_iterable(batch))

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[list[Step | None]]:
        """Continue prompts of any lengths, padded on the left, all in one Step per row.

        `Typical` becomes plain sampling at its temperature. Raises ValueError for a rule that
        `generate` has no equivalent of.
        """
        if isinstance(sampling, Typical):
            sampling = Sampled(sampling.temperature)
        if not isinstance(sampling, Greedy | Sampled):
            raise ValueError(
                f"expected Greedy, Sampled or Typical, got {type(sampling).__name__}; `generate` "
                "has no equivalent of it to compare with"
            )
        eos = list(self.target.eos_ids)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )
        if isinstance(sampling, Sampled):
            config.do_sample = True
            config.temperature = float(sampling.temperature)
            config.top_p = float(sampling.top_p)
            config.top_k = sampling.top_k  # generate's default is 50
        if self.compile:
            config.cache_implementation = "static"
            config.compile_config = CompileConfig(mode=None, fullgraph=False)
            config.compile_config._compile_all_devices = True  # the CPU, too
        width, pad = max(map(len, prompts)), config.pad_token_id
        padding = [width - len(prompt) for prompt in prompts]
        tokens = [[pad] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in padding]
        out_BT = self.target.model.generate(
            torch.tensor(tokens, device=self.target.device),
            attention_mask=torch.tensor(mask, device=self.target.device),
            generation_config=config,
            **self.options,
        )
        rows = out_BT[:, width:].tolist()
        ends = [next((i for i, t in enumerate(row, 1) if t in eos), len(row)) for row in rows]
        yield [Step(row[:end], -1, None, 0.0, 0.0) for row, end in zip(rows, ends, strict=True)]


@contextmanager
def without_defaults(target: Target) -> Iterator[None]:
    """Hide the model's generation_config, which `generate` merges into any config it is given.

    With a repetition penalty or suppressed tokens from there, `generate` would not follow the
    target's plain distribution, which draft heads reproduce.
    """
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:  # the caller's target is restored even after Ctrl-C
        yield
    finally:
        target.model.generation_config = own
