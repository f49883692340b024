"""The decoding loop: propose, verify, accept, keep, yield.

Legend: B batch, N tree nodes, C committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from draftheads.heads.cache import ROOM, SlotCache
from draftheads.heads.drafting import Committed, DraftCache, Drafter, TreeDrafter
from draftheads.heads.target.model import Decoded, Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, Greedy, RowRules, commit
from draftheads.infer.compiled import Advance, FixedSteps, compiled, why_not
from draftheads.infer.text import StopStrings
from draftheads.infer.threads import fair_clock


@dataclass(frozen=True)
class Step:
    """The output of one target forward for one row."""

    tokens: list[int]  # new token ids, cut at EOS, stop string and max_new_tokens
    accepted: int  # draft tokens accepted before that cut; -1 for the prefill, which verifies none
    finish: str | None  # "eos", "stop", "length" or "failed" on the last step
    draft_seconds: float  # by `fair_clock`, shared by all rows of a batch
    verify_seconds: float
    drafted: int = 0  # draft tokens that were verified

    @property
    def from_drafts(self) -> int:
        """Draft tokens among its tokens."""
        return max(min(self.accepted, len(self.tokens)), 0)


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


PAUSE = Step([], -1, None, 0.0, 0.0)
"""Stands between two parts of a prompt, so that others can take turns."""
ONLY_HEADS = "only draft heads can be compiled, not other drafters"


@runtime_checkable
class DrafterSource(Protocol):
    """What makes a drafter for each generation: a DraftHead, or one of `infer.drafters`."""

    @property
    def tree(self) -> Tree:
        """The default tree of `drafter`."""
        ...

    @property
    def rows_may_leave(self) -> bool:
        """Whether rows of a batch may leave and others take their places, between steps."""
        return False

    @property
    def why_not_compiled(self) -> str | None:
        """Why steps with its drafters cannot be compiled; None if they can."""
        return ONLY_HEADS

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that its drafters cannot fill."""
        ...

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation."""
        ...


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
    why_not_compiled = None

    def __init__(self, idle: Drafter | None = None) -> None:
        self._root: Topology | None = None
        if idle is not None:
            self.feature_layers, self.cache = idle.feature_layers, idle.cache

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
            self._root = Topology(torch.full((1, 1), -1, device=tokens_B.device))
        return TokenTree(tokens_B[:, None], self._root)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""


CacheKey = tuple["Speculator", torch.device, torch.dtype]
"""What caches and compiled steps are for: an engine, and the device and dtype of its target."""


@dataclass(frozen=True)
class Caches:
    """The caches of one generation. text: the growing list of its only row's tokens."""

    key: CacheKey
    generation: int  # its number in the session
    text: list[int]
    cache: SlotCache
    drafter: Drafter


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
        self._caches: Caches | None = None

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be computed again. One is left to be computed."""
        text = self._caches.text[: self.length] if self._caches is not None else []
        count = 0
        for old, new in zip(text, prompt[:-1], strict=False):
            if old != new:
                break
            count += 1
        return count

    def begin(self, owner: Speculator, rows: Sequence[Row], reserved: int) -> Caches:
        """The caches of a new generation: those of the text, cut back to what it shares with the
        prompt of the only row, or new ones with `reserved` slots for new tokens.
        """
        caches, text = self._caches, rows[0].text
        self.generations += 1
        self.reused = (
            self.shared(text) if caches is not None and caches.key == owner.cache_key else 0
        )
        self.length = self.reused
        if caches is not None and self.reused:
            # one less: the state at the last shared token predicts the first new one
            self.reused = self.length = caches.cache.rewind(self.reused - 1) + 1
            caches.drafter.rewind(self.reused)
            caches = replace(caches, generation=self.generations, text=text)
        else:
            target = owner.target
            longest = max(len(row.text) for row in rows)
            capacity = min(longest + reserved, target.context) + owner.tree.nodes
            cache, drafter = target.new_cache(len(rows), capacity), owner.new_drafter()
            caches = Caches(owner.cache_key, self.generations, text, cache, drafter)
        # LongRoPE changes the keys of a text that grows
        self._caches = None if owner.target.has_long_rope else caches
        return caches


class Speculator:
    """Decodes a target with a drafter; without one, one token per forward.

    drafts: a DraftHead or another source of drafters, or a function that returns a new Drafter for
    each generation, or None. tree: overrides the source's own tree. compile: let torch compile all
    steps but the first (see `compiled`), once for each batch size and rule; where it cannot, a
    warning says why. profile: synchronize, for exact draft_seconds and verify_seconds (slower).
    Raises ValueError for a tree that head or target cannot take, and TypeError for drafts that are
    none.
    """

    def __init__(
        self,
        target: Target,
        drafts: DrafterSource | Callable[[], Drafter] | None = None,
        *,
        tree: Tree | None = None,
        compile: bool = False,
        profile: bool = False,
    ) -> None:
        self.target, self.drafts, self.profile = target, drafts, profile
        source = NoDraft() if drafts is None else drafts
        check_is_target(target)
        if not isinstance(tree, Tree | None):
            raise TypeError(f"tree: expected one of parse_tree or none, got {tree!r:.80}")
        if is_source(source):
            self.tree: Tree = tree or source.tree
            self._has_own_tree = self.tree == source.tree
            source.check_tree(self.tree)
            self.new_drafter: Callable[[], Drafter] = lambda: source.drafter(target, self.tree)
            if self.tree.nodes == 1:
                self.new_drafter = NoDraft
            self.rows_may_leave, fault = source.rows_may_leave, source.why_not_compiled
        elif callable(source) and not hasattr(source, "drafter"):  # no class of a source, either
            self.tree, self.new_drafter = tree or StaticTree(()), source
            self._has_own_tree = tree is None
            self.rows_may_leave, fault = False, ONLY_HEADS
        else:
            raise TypeError(
                f"expected draft heads, another source of drafters or None, got {drafts!r:.80}; "
                "load_head and load_pair load heads by name"
            )
        target.check_tree(self.tree)
        self.compile = compile
        self._compiled: dict[tuple[Any, ...], Advance] = {}
        self._compiles_more = True
        if compile and (fault := fault or why_not(target)):
            self.stop_compiling(fault)

    def __repr__(self) -> str:
        return f"Speculator({self.target!r}, {self.drafts!r}, tree={self.tree!r})"

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
        prefill_chunk: int | None = None,
    ) -> Generator[Step]:
        """Continue one prompt (token ids), one Step per forward. session: computes again only what
        differs from its text. prefill_chunk: read so many tokens of the prompt per forward, and
        yield a Step without tokens after each but the last, so that others can take turns.

        Ends after exactly `max_new_tokens` (default: the rest of the context; the cache grows with
        the text), after an EOS of the target's generation config (included in the output), or after
        the token that completes a `stop` string. Raises ValueError, before any computation, for ids
        outside the target's vocabulary and when prompt and new tokens exceed its context.
        """
        if prefill_chunk is not None and not (is_whole(prefill_chunk) and prefill_chunk > 0):
            raise ValueError(f"prefill_chunk: expected 1 token or more, got {prefill_chunk!r}")
        rows = [Row(self.target, prompt, max_new_tokens, stop)]
        batch = self._decode(rows, rule_of(sampling), session, prefill_chunk)
        return (step for [step] in batch if step is not None)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Acceptance | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        stop: Collection[str] = (),
        seeds: Sequence[str] = (),
    ) -> Iterator[list[Step | None]]:
        """Continue prompts of any lengths as a batch; yields one Step per row, None for a finished
        row. max_new_tokens: of all rows, or of each. seeds: of each row's own random numbers, for
        rules that have such. Raises ValueError as `generate`, and without prompts.
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
        return self._decode(rows, rule_of(sampling))

    def _decode(self, *arguments: Any) -> Generator[list[Step | None]]:
        """The steps of `_steps`. Inference mode ends before each is yielded: the caller has its
        own, and a program may end, and torch with it, while a generation waits here.
        """
        steps = self._steps(*arguments)
        while True:
            with torch.inference_mode():
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _steps(
        self,
        rows: list[Row],
        accept: Acceptance,
        session: Session | None = None,
        prefill_chunk: int | None = None,
    ) -> Iterator[list[Step | None]]:
        reserved = min(ROOM, max(row.end - row.prompt for row in rows))
        passes = Decoding.prefill(self, accept, rows, reserved, session, prefill_chunk)
        for decoding in passes:
            if decoding is None and prefill_chunk:
                yield [PAUSE]
        assert decoding is not None  # the last one
        yield [*decoding.first]
        while not all(row.finish for row in rows):
            steps = decoding.step()
            yield [steps.get(row) for row in rows]
            if self.rows_may_leave:
                decoding.drop_finished()
            decoding.compile()

    @property
    def cache_key(self) -> CacheKey:
        """It may change: a target can be moved."""
        return self, self.target.device, self.target.dtype

    def advance(self, batch: int, accept: Acceptance) -> Advance | None:
        """The compiled step of this batch size and rule; None if there is none."""
        if not self.compile:
            return None
        try:
            key = (batch, self.cache_key, *accept.constants())
            known = self._compiled.get(key)
        except TypeError as fault:  # also for fields that may change, which have no hash
            if self._compiles_more:
                warnings.warn(f"decoding {accept} without compilation: {fault}", stacklevel=3)
            return None
        if known is None and self._compiles_more:
            known = self._compiled[key] = compiled(self.target)
        return known

    def compile_no_more(self) -> None:
        """Decode further batch sizes and rules without compilation, which takes a minute."""
        self._compiles_more = False

    def stop_compiling(self, fault: str) -> None:
        """Decode without compilation from now on, and say why."""
        warnings.warn(f"decoding without compilation: {fault}", stacklevel=3)
        self.compile = False

    def clock(self) -> float:
        if self.profile and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return fair_clock(self.target.device)()


class Decoding:
    """Rows that are decoded together: their caches, and what was committed last. Rows have any
    lengths; they may join, and finished ones be dropped, between steps.
    """

    def __init__(
        self,
        engine: Speculator,
        accept: Acceptance,
        rows: Sequence[Row],
        session: Session,
        caches: Caches,
        committed: Committed,
        seconds: float,
    ) -> None:
        self.engine, self.target, self.accept = engine, engine.target, accept
        self.rows = list(rows)  # those in the caches
        self._rules = dict.fromkeys(rows, accept)
        self.session, self.caches = session, caches
        self.cache, self.drafter = caches.cache, caches.drafter
        self._drafters: dict[Tree, Drafter] = {engine.tree: caches.drafter}
        self.committed = committed
        self._fixed: FixedSteps | None = None
        tokens = committed.last_tokens_B()[:, None].tolist()
        self.first = [
            row.step(ids, -1, 0, (0.0, seconds)) for row, ids in zip(rows, tokens, strict=True)
        ]
        self._replace_failed()

    @classmethod
    def prefill(
        cls,
        engine: Speculator,
        accept: Acceptance,
        rows: Sequence[Row],
        reserved: int,
        session: Session | None = None,
        chunk: int | None = None,
    ) -> Iterator[Decoding | None]:
        """Read the prompts of the first rows, but for what a session holds of the only one, in
        passes over `chunk` tokens. reserved: slots for new tokens. Yields None after each pass but
        the last, then the decoding.
        """
        start, seconds = engine.clock(), 0.0
        accept = accept.branch()  # another generation with this rule may run meanwhile
        session = session or Session()
        caches = session.begin(engine, rows, reserved)
        prompts = [row.text[max(session.reused - 1, 0) :] for row in rows]
        end, longest = 0, max(map(len, prompts))
        unread = Unread(prompts, known=min(session.reused, 1))
        layers, drafts = caches.drafter.feature_layers, caches.drafter.cache
        for end, out in engine.target.prefill_chunks(prompts, caches.cache, layers, chunk):
            unread.add(out)
            if end == longest:
                break
            if drafts is not None and len(rows) == 1:
                next_B = torch.tensor([prompts[0][end]], device=engine.target.device)
                drafts.commit(unread.take(end, next_B))
            seconds += engine.clock() - start
            yield None
            start = engine.clock()
        accept.prepare([(row.seed, row.new_tokens) for row in rows])
        committed = unread.take(end, accept.choose(out.logits_BNV[:, -1]))
        seconds += engine.clock() - start
        yield cls(engine, accept, rows, session, caches, committed, seconds)

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
        drafts, new = self.drafter.cache, other.drafter.cache
        if drafts is not None and new is not None:
            drafts.join(new, places)
        self.committed = self.committed.join(other.committed, places)
        self.rows += other.rows[: len(self.committed.counts) - len(self.rows)]
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row
        self._set_rules({**self._rules, **other._rules})

    def open(self) -> Decoding:
        """A decoding of the rows of this one, in caches of its own: any row may leave, and this
        one take it back.
        """
        caches = Caches(
            self.engine.cache_key, 0, [], self.target.new_cache(0, 0), self.engine.new_drafter()
        )
        nothing = self.committed.select([])
        decoding = Decoding(self.engine, self.accept, (), Session(), caches, nothing, 0.0)
        decoding.join(self)
        return decoding

    def leave(self, row: Row, other: Decoding | None) -> None:
        """End a row. other: the decoding that it came with takes it, for its session."""
        place = self.rows.index(row)
        row.finish = row.finish or "left"
        self._end_fixed()
        self._set_rules({**self._rules, row: Greedy()})
        length, drafts = self.cache.table.lengths[place], self.drafter.cache
        if drafts is not None:
            length = min(length, drafts.table.lengths[place] + 1)
        if other is not None:
            other.cache.take(self.cache, place)
            if drafts is not None and other.drafter.cache is not None:
                other.drafter.cache.cache.take(drafts.cache, place)
            other.session.length = min(length, len(row.text))
        self.cache.table.empty(place)
        if drafts is not None:
            drafts.table.empty(place)

    def use(self, tree: Tree) -> None:
        """Draft this tree from now on: the engine's, or a smaller one. For heads alone."""
        drafter = self._drafters.get(tree)
        if drafter is None and tree.nodes == 1:
            drafter = NoDraft(self.caches.drafter)
        elif drafter is None:
            assert isinstance(self.engine.drafts, DrafterSource)
            drafter = self.engine.drafts.drafter(self.target, tree)
            if isinstance(drafter, TreeDrafter):
                drafter.cache = self.caches.drafter.cache
        if self.drafter is not drafter:
            self._end_fixed()
        self.drafter = self._drafters[tree] = drafter

    def step(self) -> dict[Row, Step]:
        """One forward pass of the target. Returns the steps of the rows that were running."""
        if self.caches.generation != self.session.generations:
            raise ValueError(
                "expected the session of a generation for it alone, got it used by another one, "
                "which replaced its text; end a generation before the next, or give each a Session"
            )
        length = len(self.rows[0].text)
        start = self.engine.clock()
        drafted, nodes = start, self.engine.tree.nodes
        tokens = self._fixed_step()
        if tokens is None:
            tree = self.drafter.propose(self.committed)
            drafted, nodes = self.engine.clock(), tree.tokens_BN.shape[1]
            tokens = self._verify(tree)
        self.session.length = length  # both caches have so many tokens
        seconds = drafted - start, self.engine.clock() - drafted
        steps = {
            row: row.step(ids[:count], count - 1, nodes - 1, seconds)
            for row, ids, count in zip(self.rows, tokens, self.committed.counts, strict=True)
            if not row.finish
        }
        self._replace_failed()
        return steps

    def drop_finished(self) -> None:
        """Remove finished rows from the caches, but for the last."""
        left = [place for place, row in enumerate(self.rows) if not row.finish]
        if not 0 < len(left) < len(self.rows) or self._fixed is not None:
            return
        self.committed = self.committed.select(left)
        self.rows = [self.rows[place] for place in left]
        self._set_rules(self._rules)
        self.cache.select(left)
        if self.drafter.cache is not None:
            self.drafter.cache.select(left)

    def compile(self) -> None:
        """Compile the following steps, if the engine compiles."""
        if self._fixed is not None or self.drafter is not self.caches.drafter:
            return
        advance = self.engine.advance(len(self.rows), self.accept)
        if advance is not None:
            self._fixed = FixedSteps(
                advance, self.target, self.drafter, self.engine.tree, self.cache, self.accept
            )

    def _fixed_step(self) -> list[list[int]] | None:
        """The tokens of a compiled step; None if steps are not compiled, or cannot be."""
        if self._fixed is None:
            return None
        running = [row.finish is None for row in self.rows]
        try:
            self.committed, tokens = self._fixed(self.committed, running)
        except TorchDynamoException as error:  # at its first call, before it computes
            self.engine.stop_compiling(str(error).strip().partition("\n")[0])
            self._end_fixed()
            return None
        return tokens

    def _verify(self, tree: TokenTree) -> list[list[int]]:
        """Verify a tree, and keep what the rule accepts; returns the tokens of each row."""
        target, rows = self.target, self.rows
        texts = {place: row.text for place, row in enumerate(rows) if not row.finish}
        target.recompute(texts, self.cache)
        out = target.verify(tree, self.cache, self.drafter.feature_layers)
        self.accept.prepare([(row.seed, row.new_tokens) for row in rows])
        accepted = self.accept(out.logits_BNV, tree)
        chosen, in_place = accepted.read()
        counts = [
            0 if row.finish else min(count, target.room(len(row.text)))
            for row, count in zip(rows, chosen, strict=True)
        ]
        path_BC = accepted.path_BN[:, : max(chosen)]
        self.cache.keep(path_BC, counts, in_place=in_place)
        count_B = torch.tensor(counts, device=path_BC.device)
        tokens_BC, features_BCD = commit(tree, out, accepted, path_BC)
        self.committed = Committed(tokens_BC, features_BCD, count_B, counts)
        tokens: list[list[int]] = tokens_BC.tolist()
        return tokens

    def _set_rules(self, rules: Mapping[Row, Acceptance]) -> None:
        self._rules = {row: rules[row] for row in self.rows}
        first, *others = self._rules.values()
        is_one = all(rule.joins(first) for rule in others)
        self.accept = first if is_one else RowRules((first, *others))

    def _replace_failed(self) -> None:
        """Let finished rows have a token that can be embedded."""
        if any(row.finish == "failed" for row in self.rows):
            self.committed.tokens_BC.clamp_(min=0)

    def _settle(self) -> None:
        """Let the drafter take all that was committed but the newest token of each row."""
        self._end_fixed()
        earlier, self.committed = self.committed.divide()
        if self.drafter.cache is not None and any(earlier.counts):
            self.drafter.cache.commit(earlier)

    def _end_fixed(self) -> None:
        if self._fixed is not None:
            self._fixed.end()
            self._fixed = None


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any kind, which a truth value is not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def rule_of(sampling: Acceptance | None) -> Acceptance:
    """The rule; by default, greedy. Raises TypeError for what is none."""
    rule = Greedy() if sampling is None else sampling
    if not isinstance(rule, Acceptance):
        raise TypeError(f"sampling: expected a rule, such as Greedy(), got {rule!r:.80}")
    return rule


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
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy's, torch's
        invalid: list[Any] = [prompt]
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
            invalid = [t for t in prompt if not is_whole(t) or not 0 <= t < known]
        if invalid:
            raise ValueError(
                f"prompt: expected token ids from 0 to {known - 1}, got {invalid[0]!r:.80}; use a "
                "list of those of the target's own tokenizer"
            )
        context, room = target.context, target.context - len(prompt)
        if not 0 < room < context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, expected 1 to {context - 1} (context of "
                f"{target.name}: {context}, answer included); pass a prompt that fits"
            )
        limit = room if limit is None else limit
        if not is_whole(limit) or not 1 <= limit <= room:
            raise ValueError(
                f"max_new_tokens: expected 1 to {room}, got {limit!r}; prompt and new tokens must "
                f"not exceed the context of {target.name} ({context})"
            )
        self.text, self.seed = list(map(int, prompt)), seed
        self.finish: str | None = None
        self.prompt, self.end = len(prompt), len(prompt) + limit
        self._eos = frozenset(target.eos_ids)
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop else None

    @property
    def new_tokens(self) -> int:
        """How many."""
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
            elif len(self.text) == self.end:
                self.finish = "length"
            if self.finish:
                return Step(tokens[:place], accepted, self.finish, *seconds, drafted)
        return Step(tokens, accepted, None, *seconds, drafted)


class Unread:
    """The part of the prompts that the drafter has not read. known: tokens at its beginning that
    the drafter has all the same, because they come before the first new pair.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], known: int) -> None:
        self.prompts, self.known = prompts, known
        self.start = 0
        self.features: list[Tensor] = []

    def add(self, out: Decoded) -> None:
        """Add the features of a pass."""
        if out.features_BND is not None:
            self.features.append(out.features_BND)

    def take(self, end: int, next_B: Tensor) -> Committed:
        """The tokens up to `end` and the next ones. Features are shifted by one, so that each token
        has the state that predicted it.
        """
        parts = [prompt[self.start : end] for prompt in self.prompts]
        counts = [len(part) + 1 for part in parts]
        tokens_BC = next_B.new_zeros(len(parts), max(counts))
        for row, part in enumerate(parts):
            tokens_BC[row, : len(part)] = torch.tensor(part)
        count_B = torch.tensor(counts, device=next_B.device)
        tokens_BC.scatter_(1, count_B[:, None] - 1, next_B[:, None])
        features_BCD = next_B.new_zeros(*tokens_BC.shape, 0, dtype=torch.float)
        if self.features:
            first = torch.zeros_like(self.features[0][:, :1])
            features_BCD = torch.cat([first, *self.features], dim=1)
        committed = Committed(tokens_BC, features_BCD, count_B, counts).since(self.known)
        self.start, self.known, self.features = end, 1, []
        return committed
