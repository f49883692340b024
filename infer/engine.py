"""The decoding loop: propose, verify, accept, keep, yield.

Legend: B batch, N tree nodes, C committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from draftheads.heads.base import DraftHead, TreeDrafter
from draftheads.heads.cache import ROOM, SlotCache
from draftheads.heads.drafting import Committed, DraftCache, Drafter, Observer
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, Greedy, commit, most_probable
from draftheads.infer.constraint import Constraint
from draftheads.infer.fixed.maker import StepMaker
from draftheads.infer.fixed.recorded import Recordings
from draftheads.infer.rows import (
    CacheKey,
    Caches,
    Decoding,
    Row,
    Session,
    Step,
    Unread,
    apply_constraints,
)
from draftheads.infer.threads import fair_clock


@runtime_checkable
class DrafterSource(Protocol):
    """What makes a drafter for each generation: a DraftHead, or one of `infer.drafters`."""

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """The default tree of `drafter`."""

    @property
    def rows_may_leave(self) -> bool:
        """Whether rows of a batch may leave and others take their places, between steps."""
        return False

    @abstractmethod
    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that its drafters cannot fill."""

    @abstractmethod
    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation."""


def is_source(drafts: Any) -> TypeGuard[DrafterSource]:
    """Whether these are a source of drafters, and not its class."""
    return isinstance(drafts, DrafterSource) and not isinstance(drafts, type)


def check_is_target(target: Any) -> None:
    """Raise TypeError for a model, a name or anything else."""
    if not isinstance(target, Target):
        raise TypeError(
            f"expected a Target, got {type(target).__name__}; use Target(model, tokenizer) or "
            "Target.load(name)"
        )


class NoDraft:
    """Drafts nothing, so that the engine decodes one token per forward like the plain model.

    idle: a drafter whose cache takes what is committed meanwhile.
    """

    feature_layers: tuple[int, ...] = ()
    cache: DraftCache | None = None
    tree = StaticTree(())
    rows_may_leave = True

    def __init__(self, idle: Drafter | None = None) -> None:
        self._root: Topology | None = None
        if idle is not None:
            self.feature_layers = idle.feature_layers
            self.cache = idle.cache

    def check_tree(self, tree: Tree) -> None:
        """Any tree stays empty."""

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """This one, which remembers nothing."""
        return self

    def propose(self, committed: Committed) -> TokenTree:
        """A tree that holds only the newest token."""
        if self.cache is not None:
            self.cache.commit(committed)
        tokens_B = committed.last_tokens_B()
        if self._root is None or self._root.parents_BN.device != tokens_B.device:
            self._root = self.tree.topology(tokens_B.device)
        return TokenTree(tokens_B[:, None], self._root)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""


class Speculator:
    """Decodes a target with a drafter; without one, one token per forward.

    drafts: a DraftHead or another source of drafters, or None. tree: overrides the source's own
    tree. compile: let torch compile all steps but the first (see `compiled`), once for each batch
    size and rule; where it cannot, a warning says why. On CUDA, steps are recorded (see
    `recorded`). profile: synchronize, for exact
    draft_seconds and verify_seconds (slower). Raises ValueError for a tree that head or target
    cannot take, and TypeError for drafts that are none.
    """

    def __init__(
        self,
        target: Target,
        drafts: DrafterSource | None = None,
        *,
        tree: Tree | None = None,
        compile: bool = False,
        profile: bool = False,
    ) -> None:
        self.target = target
        self.drafts = drafts
        self.profile = profile
        source = NoDraft() if drafts is None else drafts
        check_is_target(target)
        if not isinstance(tree, Tree | None):
            raise TypeError(f"tree: expected one of parse_tree or none, got {tree!r:.80}")
        if not is_source(source):
            raise TypeError(
                f"expected draft heads, another source of drafters or None, got {drafts!r:.80}; "
                "load_head and load_pair load heads by name"
            )
        self.tree = tree or source.tree
        self._source = source
        self._has_own_tree = self.tree == source.tree
        source.check_tree(self.tree)
        self.rows_may_leave = source.rows_may_leave
        self._ended: list[Session] = []  # of the newest generation, if it was recorded
        self.maker = StepMaker(
            target, compiles=compile, on_host=not isinstance(source, DraftHead | NoDraft)
        )

    def __repr__(self) -> str:
        return f"Speculator({self.target!r}, {self.drafts!r}, tree={self.tree!r})"

    @property
    def compile(self) -> bool:
        """Whether steps are compiled, as far as is known."""
        return self.maker.compiles

    def with_drafts(self, drafts: DrafterSource) -> Speculator:
        """An engine like this one with other drafts, in their own tree if this one has that of its
        own drafts. Raises as the constructor.
        """
        tree = None if self._has_own_tree else self.tree
        return Speculator(
            self.target, drafts, tree=tree, compile=self.compile, profile=self.profile
        )

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[str] = (),
        session: Session | None = None,
        constraint: Constraint | None = None,
    ) -> Generator[Step]:
        """Continue one prompt (token ids), one Step per forward. session: computes again only what
        differs from its text. constraint: of the answer.

        Ends after exactly `max_new_tokens` (default: the rest of the context; the cache grows with
        the text), after an EOS of the target's generation config (included in the output), or after
        the token that completes a `stop` string. Raises ValueError, before any computation, for ids
        outside the target's vocabulary and when prompt and new tokens exceed its context; and
        ConstraintError where a constraint fails.
        """
        rows = [Row(self.target, prompt, max_new_tokens, stop)]
        batch = self._decode(rows, rule_of(sampling), session, constraint)
        return (step for [step] in batch if step is not None)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        stop: Collection[str] = (),
        seeds: Sequence[str] = (),
        constraint: Constraint | None = None,
    ) -> Iterator[list[Step | None]]:
        """Continue prompts of any lengths as a batch; yields one Step per row, None for a finished
        row. max_new_tokens: of all rows, or of each. seeds: of each row's own random numbers;
        default: those of the rule. constraint: of each answer. Raises ValueError as `generate`, and
        without prompts.
        """
        prompts = list(prompts)
        if not prompts:
            raise ValueError("prompts: expected at least one, got none")
        limits: Sequence[int | None] = (
            max_new_tokens
            if isinstance(max_new_tokens, Sequence)
            else [max_new_tokens] * len(prompts)
        )
        seeds = seeds or [""] * len(prompts)
        rows = [
            Row(self.target, prompt, limit, stop, seed)
            for prompt, limit, seed in zip(prompts, limits, seeds, strict=True)
        ]
        return self._decode(rows, rule_of(sampling), None, constraint)

    def _decode(self, rows: list[Row], *arguments: Any) -> Generator[list[Step | None]]:
        """The steps of `_steps`, until a row has a fault, which is raised. Inference mode ends
        before each is yielded: the caller has its own, and a program may end, and torch with it,
        while a generation waits here.
        """
        steps = self._steps(rows, *arguments)
        while True:
            with torch.inference_mode():
                step = next(steps, None)
            if step is None:
                return
            for row in rows:
                if row.fault is not None:
                    raise row.fault
            yield step

    def _steps(
        self,
        rows: list[Row],
        accept: Acceptance,
        session: Session | None,
        constraint: Constraint | None,
    ) -> Iterator[list[Step | None]]:
        for number, row in enumerate(rows):
            row.constraint = constraint and constraint.row(number, row.text)
        reserved = min(ROOM, max(row.end - row.prompt for row in rows))
        kept = session or (self._ended.pop() if self._ended else Session())
        *_, decoding = self.prefill(rows, accept, reserved, kept)
        assert decoding is not None  # the last one
        try:
            yield [*decoding.first]
            while not all(row.finish for row in rows):
                self.maker.fix(decoding)
                steps = self.step(decoding)
                yield [steps.get(row) for row in rows]
                if self.rows_may_leave:
                    decoding.drop_finished()
        finally:
            if session is None and decoding.caches.recordings.made:
                kept.length = 0  # the next generation takes the memory, and computes its own text
                self._ended = [kept]

    def prefill(
        self,
        rows: Sequence[Row],
        accept: Acceptance,
        reserved: int,
        session: Session | None = None,
        chunk: int | None = None,
    ) -> Iterator[Decoding | None]:
        """Read the prompts of the first rows, but for what a session holds of the only one, in
        passes over `chunk` tokens. reserved: slots for new tokens. Yields None after each pass but
        the last, then the decoding.
        """
        start = self.clock()
        seconds = 0.0
        accept = accept.branch()  # another generation with this rule may run meanwhile
        session = session or Session()
        caches = session.begin(self.cache_key, rows[0].text)
        if caches is None:
            caches = self._new_caches(rows, reserved, session)
        # LongRoPE changes the keys of a text that grows
        session.caches = None if self.target.has_long_rope else caches
        # the last token that the session has is read again: its state predicts the next one
        prompts = [row.text[max(session.reused - 1, 0) :] for row in rows]
        longest = max(map(len, prompts))
        layers = caches.drafter.feature_layers
        drafts = caches.drafter.cache
        has_begun = session.reused or (drafts is not None and drafts.memories)
        unread = Unread(prompts, known=int(bool(has_begun)))
        for end, out in self.target.prefill_chunks(prompts, caches.cache, layers, chunk):
            if out.features_BND is not None:
                unread.features.append(out.features_BND)
            if end == longest:
                break
            # the drafter reads along; of several rows, some may have ended in an earlier pass
            if drafts is not None and len(rows) == 1:
                next_B = torch.tensor([prompts[0][end]], device=self.target.device)
                drafts.commit(unread.take(end, next_B))
            seconds += self.clock() - start
            yield None
            start = self.clock()
        accept.prepare(rows)
        logits_BNV = apply_constraints(rows, out.logits_BNV[:, -1:], [[()]] * len(rows))
        committed = unread.take(end, accept.choose(logits_BNV[:, 0]))
        seconds += self.clock() - start
        decoding = Decoding(rows, accept, session, caches, committed, self.tree)
        tokens = committed.last_tokens_B()[:, None].tolist()
        decoding.first = [
            row.step(ids, -1, 0, (0.0, seconds)) for row, ids in zip(rows, tokens, strict=True)
        ]
        decoding.replace_failed()
        yield decoding

    def step(self, decoding: Decoding) -> dict[Row, Step]:
        """One forward pass of the target. Returns the steps of the rows that were running."""
        if decoding.caches.generation != decoding.session.generations:
            raise ValueError(
                "expected the session of a generation for it alone, got it used by another one, "
                "which replaced its text; end a generation before the next, or give each a Session"
            )
        length = len(decoding.rows[0].text)  # of the only row, if the session is for others
        start = self.clock()
        drafted = start
        tree = None
        if decoding.fixed is None or decoding.fixed.on_host:
            tree = decoding.propose()
            drafted = self.clock()
        tokens = self.maker.step(decoding, tree)
        if tokens is None:
            tree = tree or decoding.propose()
            decoding.note_pending()
            tokens = self._verify(decoding, tree)
        decoding.session.length = length  # both caches have so many tokens
        seconds = drafted - start, self.clock() - drafted
        counts = decoding.committed.counts
        nodes = tree.drafted() if tree else [decoding.tree.nodes - 1] * len(counts)
        steps = {
            row: row.step(ids[:count], count - 1, drafts, seconds)
            for row, ids, count, drafts in zip(decoding.rows, tokens, counts, nodes, strict=True)
            if not row.finish
        }
        decoding.replace_failed()
        self.maker.launch_ahead(decoding)
        return steps

    def _verify(self, decoding: Decoding, tree: TokenTree) -> list[list[int]]:
        """Verify a tree, and keep what the rule accepts; returns the tokens of each row."""
        target = self.target
        rows = decoding.rows
        cache = decoding.cache
        texts = {place: row.text for place, row in enumerate(rows) if not row.finish}
        target.longrope.recompute(target, texts, cache)
        out = target.verify(tree, cache, decoding.drafter.feature_layers)
        accepted = decoding.choose(out.logits_BNV, tree)
        chosen, in_place = accepted.read()
        # a constraint changes the tree, of which the drafter then knows no node
        if isinstance(decoding.drafter, Observer) and not decoding.is_constrained:
            decoding.drafter.observe(most_probable(out.logits_BNV).tolist())
        # finished rows may stay in the caches, and add nothing; a text ends its step where LongRoPE
        # computes it again
        counts = [
            0 if row.finish else target.longrope.step_end(len(row.text), count)
            for row, count in zip(rows, chosen, strict=True)
        ]
        path_BC = accepted.path_BN[:, : max(chosen)]
        cache.keep(path_BC, counts, in_place=in_place)
        count_B = torch.tensor(counts, device=path_BC.device)
        tokens_BC, features_BCD = commit(tree, out, accepted, path_BC)
        decoding.committed = Committed(tokens_BC, features_BCD, count_B, counts)
        tokens: list[list[int]] = tokens_BC.tolist()
        return tokens

    def open(self, decoding: Decoding) -> Decoding:
        """A decoding of the same rows, in caches of its own: any row may leave, and the given one
        take it back.
        """
        caches = self._caches(0, [], self.target.new_cache(0, 0))
        nothing = decoding.committed.select([])
        opened = Decoding((), decoding.accept, Session(), caches, nothing, self.tree)
        opened.join(decoding)
        return opened

    def use(self, decoding: Decoding, tree: Tree) -> None:
        """Draft this tree from now on: that of the engine, or a smaller one. For heads alone."""
        # one drafter for each tree, and one for none; all write to the caches of the first, so that
        # any may follow any other
        first = decoding.caches.drafter
        drafter = first if tree == self.tree else decoding.drafters.get(tree)
        if drafter is None and tree.nodes == 1:
            drafter = NoDraft(first)
        elif drafter is None:
            drafter = self._source.drafter(self.target, tree)
            if isinstance(drafter, TreeDrafter):
                drafter.cache = first.cache
        if drafter is not decoding.drafter:
            decoding.end_fixed()
        decoding.tree = tree
        decoding.drafter = decoding.drafters[tree] = drafter

    def _new_caches(self, rows: Sequence[Row], reserved: int, session: Session) -> Caches:
        old = session.caches
        if old is not None and old.is_free(self.cache_key, len(rows)):  # in the same recordings
            if self.maker.on_host:
                old = replace(old, drafter=self._drafter(), pending={})
            old.clear()
            return replace(old, generation=session.generations, text=rows[0].text)
        longest = max(len(row.text) for row in rows)
        capacity = min(longest + reserved, self.target.context) + self.tree.nodes
        cache = self.target.new_cache(len(rows), capacity)
        return self._caches(session.generations, rows[0].text, cache)

    def _caches(self, generation: int, text: list[int], cache: SlotCache) -> Caches:
        recordings = Recordings(self.maker.recorder)
        return Caches(self.cache_key, generation, text, cache, self._drafter(), recordings)

    def _drafter(self) -> Drafter:
        if self.tree.nodes == 1:
            return NoDraft()
        return self._source.drafter(self.target, self.tree)

    @property
    def cache_key(self) -> CacheKey:
        """It may change: a target can be moved."""
        return self, self.target.device, self.target.dtype

    def clock(self) -> float:
        # a recorded step ends when the host has read its tokens, and the next one runs by then
        is_whole = self.maker.recorder and not self.maker.on_host
        if self.profile and self.target.device.type == "cuda" and not is_whole:
            torch.cuda.synchronize(self.target.device)
        return fair_clock(self.target.device)()


def rule_of(sampling: Acceptance | None) -> Acceptance:
    """The rule; by default, greedy. Raises TypeError for what is none."""
    rule = Greedy() if sampling is None else sampling
    if not isinstance(rule, Acceptance):
        raise TypeError(f"sampling: expected a rule, such as Greedy(), got {rule!r:.80}")
    return rule
