"""The engine: a target with a drafter, which continues prompts.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence

import torch

from draftheads.heads.base import DraftHead
from draftheads.heads.cache import ROOM
from draftheads.heads.drafting import Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.constraint import Constraint
from draftheads.infer.fixed.maker import StepMaker
from draftheads.infer.reading import Reading, Session
from draftheads.infer.rows import Row, Step
from draftheads.infer.slots import Slots
from draftheads.infer.sources import DrafterSource, NoDraft, check_is_target, is_source
from draftheads.infer.threads import fair_clock


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
        self._last_slots: Slots | None = None  # of the newest generation, if it was recorded
        self.maker = StepMaker(
            target, compiles=compile, on_host=not isinstance(source, DraftHead | NoDraft)
        )

    def __repr__(self) -> str:
        return f"Speculator({self.target!r}, {self.drafts!r}, tree={self.tree!r})"

    @property
    def compile(self) -> bool:
        """True if steps are compiled, as far as is known."""
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

    def _decode(
        self,
        rows: list[Row],
        rule: Acceptance,
        session: Session | None,
        constraint: Constraint | None,
    ) -> Generator[list[Step | None]]:
        """The steps of `_steps`, until a row has a fault, which is raised. Inference mode ends
        before each is yielded: the caller has its own, and a program may end, and torch with it,
        while a generation waits here.
        """
        for number, row in enumerate(rows):
            row.constraint = constraint and constraint.row(number, row.text)
        steps = self._steps(rows, rule, session)
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
        self, rows: list[Row], rule: Acceptance, session: Session | None
    ) -> Iterator[list[Step | None]]:
        reserved = min(ROOM, max(row.end - row.prompt for row in rows))
        own = session or Session()
        if session is None:  # no other generation takes them meanwhile
            own.slots = self._last_slots
            self._last_slots = None
        reading = self.read(rows, rule, own, reserved)
        slots = reading.slots
        try:
            yield [*reading.finish()]
            while not all(row.finish for row in rows):
                if own.slots is not slots or slots.rows[0] not in rows:
                    raise ValueError(
                        "expected the session of a generation for it alone, got it used by another "
                        "one, which replaced its text; end a generation before the next, or give "
                        "each a Session"
                    )
                steps = slots.step()
                yield [steps.get(row) for row in rows]
                if self.rows_may_leave:
                    slots.drop_finished()
        finally:
            if session is None and slots.runner.was_recorded:
                slots.length = 0  # the next generation takes the memory, and computes its own text
                self._last_slots = slots

    def read(
        self,
        rows: Sequence[Row],
        rule: Acceptance,
        session: Session | None = None,
        reserved: int = ROOM,
        chunk: int | None = None,
    ) -> Reading:
        """Begin to read the prompts of rows, but for what a session has of the only one, in parts
        of `chunk` tokens. reserved: slots for new tokens.
        """
        session = session or Session()
        slots = session.slots
        prefix = 0
        if slots is not None and slots.key == self.cache_key:
            prefix = session.shared(rows[0].text)
        if slots is not None and prefix:
            prefix = slots.rewind(prefix)
        elif slots is not None and self._can_restart(slots, len(rows)):
            slots.clear(drafter=self.maker.on_host)
        else:
            longest = max(len(row.text) for row in rows)
            capacity = min(longest + reserved, self.target.context) + self.tree.nodes
            slots = self.new_slots(len(rows), capacity)
        session.slots = slots
        session.asked = len(rows[0].text)
        session.reused = prefix
        # another generation with this rule may run meanwhile
        return Reading(slots, rows, rule.branch(), prefix, chunk)

    def new_slots(self, rows: int = 0, capacity: int = 0) -> Slots:
        """Caches for so many rows of so many tokens, tree included; both grow."""
        cache = self.target.new_cache(rows, capacity)
        slots = Slots(self.target, cache, self.tree, self._drafter, self.maker.runner(), self.clock)
        slots.key = self.cache_key
        return slots

    def _can_restart(self, slots: Slots, rows: int) -> bool:
        """True if other texts of so many rows can be decoded by what was recorded there."""
        is_same = slots.key == self.cache_key and len(slots.cache.table.lengths) == rows
        return is_same and slots.runner.was_recorded and slots.cache.states is None

    def _drafter(self, tree: Tree) -> Drafter:
        source = NoDraft() if tree.nodes == 1 else self._source
        return source.drafter(self.target, tree)

    @property
    def cache_key(self) -> tuple[object, torch.device, torch.dtype]:
        """Identifies what caches are for. It may change: a target can be moved."""
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
