"""The decoding loop: propose, verify, accept, keep, yield.

Legend: B batch, N tree nodes, A committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from draftheads.heads.base import DraftHead
from draftheads.heads.cache import ROOM, SlotCache
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target import Decoded, Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, Greedy, commit
from draftheads.infer.compiled import Advance, FixedSteps, compiled, draft_cache, why_not
from draftheads.infer.text import StopStrings


@dataclass(frozen=True)
class Step:
    """The output of one target forward for one row."""

    tokens: list[int]  # new token ids, cut at EOS, stop string and max_new_tokens
    accepted: int  # draft tokens accepted before that cut; -1 for the prefill, which verifies none
    finish: str | None  # "eos", "stop", "length" or "failed" on the last step
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
    and may be cut back to. generations: how many have begun with it; the newest one alone may go
    on. Another engine starts anew. An interrupted generation leaves what its complete steps
    computed.
    """

    def __init__(self) -> None:
        self.reused = self.length = self.generations = 0
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
        self.generations += 1
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

    def check(self, generation: int) -> None:
        """Raise ValueError unless this generation is the newest one."""
        if generation != self.generations:
            raise ValueError(
                "expected the session of a generation for it alone, got it used by another one, "
                "which replaced its text; end a generation before the next, or give each a Session"
            )

    def note(self, length: int) -> None:
        """Both caches have the first `length` tokens of the text."""
        self.length = length


class Speculator:
    """Decodes a target with a drafter; without one, one token per forward.

    drafts: a DraftHead or another source of drafters, or a function that returns a new Drafter for
    each generation, or None. tree: overrides the source's own tree. compile: let torch compile all
    steps but the first (see `compiled`), once for each batch size and rule; where it cannot, a
    warning says why. Raises ValueError for a tree that head or target cannot take, and TypeError
    for drafts that are none.
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
        self.compile = compile and self.allowed(why_not(target, drafts))
        self._compiled: dict[tuple[int, str], Advance] = {}
        self.compile_more = True  # False: for no further batch sizes and rules
        self.profile = False  # synchronize, for exact draft_seconds and verify_seconds (slower)
        self.drops_rows = drafts is None or isinstance(drafts, DraftHead)
        if isinstance(drafts, DrafterSource):
            self.tree: Tree = tree or drafts.tree
            drafts.check_tree(self.tree)
            target.check_tree(self.tree)
            self.new_drafter: Callable[[], Drafter] = lambda: drafts.drafter(target, self.tree)
            if self.tree.nodes == 1:
                self.new_drafter = NoDraft
        elif drafts is None or callable(drafts):
            self.tree = tree or StaticTree(())
            target.check_tree(self.tree)
            self.new_drafter = drafts or NoDraft
        else:
            raise TypeError(
                f"expected draft heads, another source of drafters or None, got {drafts!r:.80}; "
                "load_head and load_pair load heads by name"
            )

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[str] = (),
        session: Session | None = None,
        chunk: int | None = None,
    ) -> Iterator[Step]:
        """Continue one prompt (token ids), one Step per forward. session: computes again only what
        differs from its text. chunk: read so many tokens of the prompt per forward, and yield a
        Step without tokens after each but the last, so that others can take turns.

        Ends after exactly `max_new_tokens` (default: the rest of the context; the cache grows with
        the text), after an EOS of the target's generation config (included in the output), or after
        the token that completes a `stop` string. Raises ValueError, before any computation, for ids
        outside the target's vocabulary and when prompt and new tokens exceed its context.
        """
        rows = [Row(self.target, prompt, max_new_tokens, stop)]
        reserved = min(max_new_tokens or ROOM, ROOM)
        batch = self._decode(rows, sampling or Greedy(), reserved, session, chunk)
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
        rows = [Row(self.target, prompt, max_new_tokens, stop) for prompt in prompts]
        return self._decode(rows, sampling or Greedy(), min(max_new_tokens or ROOM, ROOM))

    @torch.inference_mode()
    def _decode(
        self,
        rows: list[Row],
        accept: Acceptance,
        reserved: int,
        session: Session | None = None,
        chunk: int | None = None,
    ) -> Iterator[list[Step | None]]:
        decoding = Decoding(self, accept)
        if chunk is None:
            yield [*decoding.begin(rows, reserved, session)]
        else:
            for step in decoding.begin_in_turns(rows[0], chunk, reserved, session):
                yield [step]
        while not all(row.finish for row in rows):
            made = decoding.step()
            yield [made.get(row) for row in rows]
            if self.drops_rows:
                decoding.drop_finished()
            decoding.compile()

    def advance(self, batch: int, accept: Acceptance) -> Advance | None:
        key = (batch, repr(accept))
        if key not in self._compiled and self.compile_more:
            self._compiled[key] = compiled(self.target)
        return self._compiled.get(key)

    def allowed(self, fault: str | None) -> bool:
        if fault is not None:
            warnings.warn(f"decoding without compilation: {fault}", stacklevel=3)
        return fault is None

    def clock(self) -> float:
        if self.profile and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return perf_counter()


class Decoding:
    """Rows that are decoded together: their caches, and what was committed last. Rows have any
    lengths; they may join, and finished ones be dropped, between steps.
    """

    def __init__(self, engine: Speculator, accept: Acceptance) -> None:
        self.engine, self.target = engine, engine.target
        self.accept = accept.branch()  # another generation with this rule may run meanwhile
        self.rows: list[Row] = []  # those in the caches
        self.session: Session | None = None
        self._generation = 0  # its number in the session
        self._fixed: FixedSteps | None = None

    def begin(
        self, rows: Sequence[Row], reserved: int, session: Session | None = None
    ) -> list[Step]:
        """Prefill the first rows, but for what a session holds of the only one. reserved: slots for
        new tokens. Returns a Step for each row.
        """
        start = self.engine.clock()
        prompts, shared = self._open(rows, reserved, session)
        out = self.target.prefill(prompts, self.cache, self.drafter.feature_layers)
        self._prepare()
        committed = _prompt(prompts, out, self.accept.choose(out.logits_BNV[:, 0]))
        self.committed = committed.since(shared)
        return self._first((0.0, self.engine.clock() - start))

    def begin_in_turns(
        self, row: Row, chunk: int, reserved: int, session: Session | None = None
    ) -> Iterator[Step]:
        """`begin` for one row, in passes over `chunk` tokens of its prompt. Yields a Step without
        tokens after each but the last.
        """
        start, seconds = self.engine.clock(), 0.0
        [prompt], shared = self._open([row], reserved, session)
        drafts, length = draft_cache(self.drafter), len(row.text)
        pieces: list[Committed] = []
        for place in range(0, len(prompt), chunk):
            part, following = prompt[place : place + chunk], prompt[place + chunk :][:1]
            whole = self.accept.reads_prompt
            out = self.target.read(part, self.cache, self.drafter.feature_layers, length, whole)
            if whole:
                self.accept.read(out.logits_BNV[0], prompt[place + 1 :][: len(part)])
            if following:
                next_B = torch.tensor(following, device=self.target.device)
            else:
                self._prepare()
                next_B = self.accept.choose(out.logits_BNV[:, -1])
            pieces.append(_prompt([part], out, next_B).since(1 if place else shared))
            if following and drafts is not None:
                drafts.commit(pieces.pop())
            seconds += self.engine.clock() - start
            if following:
                yield Step([], -1, None, 0.0, 0.0)
            start = self.engine.clock()
        self.committed = _chain(pieces)
        yield from self._first((0.0, seconds))

    def _open(
        self, rows: Sequence[Row], reserved: int, session: Session | None
    ) -> tuple[list[list[int]], int]:
        """Make the caches, or take those of a session. Returns what is to be read of the prompts,
        and how many tokens of that the drafter has.
        """
        target, prompts = self.target, [list(row.text) for row in rows]
        self.rows, self.session = list(rows), session
        held = session.resume(self.engine, prompts[0]) if session is not None else None
        self._generation = session.generations if session is not None else 0
        if session is not None and held is not None:
            self.cache, self.drafter = held
            prompts = [prompts[0][session.reused - 1 :]]
        else:
            capacity = min(max(map(len, prompts)) + reserved, target.context)
            self.cache = target.new_cache(len(prompts), capacity + self.engine.tree.nodes)
            self.drafter = self.engine.new_drafter()
        if session is not None and not target.has_long_rope:  # whose keys may change
            session.hold(self.engine, rows[0].text, self.cache, self.drafter)
        return prompts, int(held is not None)

    def _first(self, seconds: tuple[float, float]) -> list[Step]:
        """The steps of the tokens that the prompts led to."""
        first = self.committed.last_tokens_B()[:, None].tolist()
        steps = [row.step(ids, -1, 0, seconds) for row, ids in zip(self.rows, first, strict=True)]
        self._replace_failed()
        return steps

    def join(self, other: Decoding) -> None:
        """Add the rows of another decoding, which ends: in the places of finished ones, as far as
        there are such.
        """
        free = [place for place, row in enumerate(self.rows) if row.finish]
        more = range(len(self.rows), len(self.rows) + len(other.rows))
        places = [*free, *more][: len(other.rows)]
        for each in (self, other):
            each._settle()
        self.cache.join(other.cache, places)
        drafts, new = draft_cache(self.drafter), draft_cache(other.drafter)
        if drafts is not None and new is not None:
            drafts.join(new, places)
        self.committed = self.committed.join(other.committed, places)
        self.rows += other.rows[: len(self.committed.counts) - len(self.rows)]
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row

    def step(self) -> dict[Row, Step]:
        """One forward pass of the target. Returns the steps of the rows that were running."""
        if self.session is not None:
            self.session.check(self._generation)
        start, text = self.engine.clock(), self.rows[0].text
        drafted, nodes, known = start, self.engine.tree.nodes, len(text)
        if self._fixed is not None:
            try:
                self.committed, new = self._fixed(
                    self.committed, [row.finish is None for row in self.rows]
                )
            except TorchDynamoException as error:  # at its first call, before it computes
                self.engine.compile = self.engine.allowed(str(error).strip().partition("\n")[0])
                self._end_fixed()
                return self.step()
        else:
            tree = self.drafter.propose(self.committed)
            drafted, nodes = self.engine.clock(), tree.tokens_BN.shape[1]
            new = self._verify(tree)
        if self.session is not None:
            self.session.note(known)
        seconds = drafted - start, self.engine.clock() - drafted
        made = {
            row: row.step(ids[:count], count - 1, nodes - 1, seconds)
            for row, ids, count in zip(self.rows, new, self.committed.counts, strict=True)
            if not row.finish
        }
        self._replace_failed()
        return made

    def drop_finished(self) -> None:
        """Remove finished rows from the caches, but for the last."""
        left = [place for place, row in enumerate(self.rows) if not row.finish]
        if not 0 < len(left) < len(self.rows) or self._fixed is not None:
            return
        self.committed, self.rows = self.committed.select(left), [self.rows[at] for at in left]
        self.cache.select(left)
        if (drafts := draft_cache(self.drafter)) is not None:
            drafts.select(left)

    def compile(self) -> None:
        """Compile the following steps, if the engine compiles."""
        if self._fixed is not None or not self.engine.compile:
            return
        advance = self.engine.advance(len(self.rows), self.accept)
        if advance is not None:
            self._fixed = FixedSteps(advance, self.target, self.drafter, self.engine.tree)
            self.committed = self._fixed.begin(self.cache, self.accept, self.committed)

    def _verify(self, tree: TokenTree) -> list[list[int]]:
        """Verify a tree, and keep what the rule accepts; returns the tokens of each row."""
        target, rows = self.target, self.rows
        texts = {place: row.text for place, row in enumerate(rows) if not row.finish}
        target.recompute(texts, self.cache)
        out = target.verify(tree, self.cache, self.drafter.feature_layers)
        self._prepare()
        accepted = self.accept(out.logits_BNV, tree)
        chosen, in_place = accepted.read()
        counts = [
            0 if row.finish else min(count, target.room(len(row.text)))
            for row, count in zip(rows, chosen, strict=True)
        ]
        path_BA = accepted.path_BN[:, : max(chosen)]
        self.cache.keep(path_BA, counts, in_place=in_place)
        count_B = torch.tensor(counts, device=path_BA.device)
        made = commit(tree, out, accepted, path_BA)
        self.committed = Committed(*made, count_B, counts)
        tokens: list[list[int]] = self.committed.tokens_BA.tolist()
        return tokens

    def _prepare(self) -> None:
        self.accept.prepare([(row.seed, row.made) for row in self.rows])

    def _replace_failed(self) -> None:
        """Let finished rows have a token that can be embedded."""
        if any(row.finish == "failed" for row in self.rows):
            self.committed.tokens_BA.clamp_(min=0)

    def _settle(self) -> None:
        """Let the drafter take all that was committed but the newest token of each row."""
        if self._fixed is not None:
            self._end_fixed()
        earlier, self.committed = self.committed.divide()
        drafts = draft_cache(self.drafter)
        if drafts is not None and max(earlier.counts) > 0:
            drafts.commit(earlier)

    def _end_fixed(self) -> None:
        assert self._fixed is not None
        self._fixed.end()
        self._fixed = None


class Row:
    """The text of one row, prompt included, and the reason it finished.

    limit: new tokens at most; None: the rest of the context. seed: of its own random numbers, for
    rules that have such. Raises ValueError for ids outside the vocabulary, and for texts that
    exceed the context.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        limit: int | None,
        stop: Collection[str] = (),
        seed: str = "",
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
        self.text, self.seed = list(map(int, prompt)), seed
        self.finish: str | None = None
        self.prompt, self._end = len(prompt), len(prompt) + limit
        self._eos = frozenset(target.eos_ids)
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop else None

    @property
    def made(self) -> int:
        """Number of new tokens."""
        return len(self.text) - self.prompt

    def step(
        self, tokens: list[int], accepted: int, drafted: int, seconds: tuple[float, float]
    ) -> Step:
        """Append tokens up to the end of the output. seconds: of drafting, of verifying."""
        for place, token in enumerate(tokens, start=1):
            self.text.append(token)
            if token < 0:
                self.finish = "failed"
            elif token in self._eos:
                self.finish = "eos"
            elif self._stop is not None and self._stop.completed_by(token):
                self.finish = "stop"
            elif len(self.text) == self._end:
                self.finish = "length"
            if self.finish:
                return Step(tokens[:place], accepted, self.finish, *seconds, drafted)
        return Step(tokens, accepted, None, *seconds, drafted)


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


def _chain(pieces: Sequence[Committed]) -> Committed:
    """One after the other, of the same rows, without padding."""
    tokens_BA = torch.cat([piece.tokens_BA for piece in pieces], dim=1)
    features_BAD = torch.cat([piece.features_BAD for piece in pieces], dim=1)
    counts = [sum(row) for row in zip(*(piece.counts for piece in pieces), strict=True)]
    count_B = torch.stack([piece.count_B for piece in pieces]).sum(0)
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
