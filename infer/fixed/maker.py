"""Decides if an engine's steps are compiled or recorded, and what happens where they are not."""

from __future__ import annotations

import warnings
from typing import Any

from torch._dynamo.exc import TorchDynamoException

from draftheads.heads.drafting import Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree
from draftheads.infer.accept import Acceptance
from draftheads.infer.fixed.recorded import CannotRecord, Recordings, recorder
from draftheads.infer.fixed.steps import Advance, FixedSteps, advance, compiled, why_not
from draftheads.infer.slots import Runner, Slots

RECORDED = 8
"""So many finished rows stay in steps that are recorded."""


class StepMaker:
    """Makes fixed steps of a target's decodings, if it compiles or records. on_host: whether its
    drafters work outside of these.
    """

    def __init__(self, target: Target, *, compiles: bool, on_host: bool) -> None:
        self.target = target
        self.compiles = compiles
        self.on_host = on_host
        self.recorder = recorder(target.device)
        self._compiled: dict[tuple[Any, ...], Advance] = {}
        self._compiles_more = True
        fault = why_not(target)
        if fault and compiles:
            self.stop_compiling(fault)
        if fault and self.recorder:
            self.stop_recording(fault)

    def runner(self) -> Runner:
        """How steps of new caches are taken."""
        return Fixed(self) if self.compiles or self.recorder else Runner()

    def function(self, batch: int, accept: Acceptance, compiles: bool = True) -> Advance | None:
        """The step of this batch size and rule; None if it can be neither compiled nor recorded."""
        try:
            key = (batch, self.target.device, self.target.dtype, *accept.constants())
            known = self._compiled.get(key)
        except TypeError as fault:  # also for fields that may change, which have no hash
            if self._compiles_more:
                without = "compilation" if self.compiles else "CUDA graphs"
                name = type(accept).__name__
                warnings.warn(f"decoding {name} without {without}: {fault}", stacklevel=3)
            return None
        if known is None and compiles and self._compiles_more:
            known = self._compiled[key] = compiled()
        return known if compiles and known else advance if self.recorder else None

    def compile_no_more(self) -> None:
        """Decode further batch sizes and rules without compilation, which takes a minute."""
        self._compiles_more = False

    def stop_compiling(self, fault: str) -> None:
        """Decode without compilation from now on, and say why."""
        warnings.warn(f"decoding without compilation: {fault}", stacklevel=3)
        self.compiles = False

    def stop_recording(self, fault: str) -> None:
        """Decode without CUDA graphs from now on, and say why."""
        warnings.warn(f"decoding without CUDA graphs: {fault}", stacklevel=3)
        self.recorder = None

    def give_up(self, error: Exception) -> None:
        """Do not try again what has failed so."""
        fault = str(error).strip().partition("\n")[0]
        if isinstance(error, CannotRecord):
            self.stop_recording(fault)
        else:
            self.stop_compiling(fault)


class Fixed(Runner):
    """Compiles or records the steps of some slots, where that is possible: not the first of a text,
    which reads the prompt, and of a drafter, which tells what it caches.
    """

    def __init__(self, maker: StepMaker) -> None:
        self.maker = maker
        self.steps: FixedSteps | None = None  # None: they are taken as they are
        self._recordings = Recordings(maker.recorder)
        # drafters by their id, which is theirs as long as they are here, and the nodes in their
        # cache after a tree
        self._pending: dict[int, tuple[Drafter, int]] = {}

    @property
    def was_recorded(self) -> bool:
        """True if there are recordings."""
        return bool(self._recordings.made)

    def propose(self, slots: Slots) -> TokenTree | None:
        """The tree of a drafter that works on the host, or drafts here for the first time. None if
        the step drafts itself.
        """
        if self.steps is None:
            self.steps = self._fixed(slots)
        if self.steps is None or self.steps.on_host:
            return slots.propose()
        return None

    def advance(self, slots: Slots, tree: TokenTree | None) -> list[list[int]]:
        """Take a compiled step or a replay; where there is none, run the step as it is."""
        if self.steps is not None:
            slots.rule.prepare(slots.rows)
            try:
                slots.committed, tokens = self.steps(slots.committed, tree, slots.running())
                return tokens
            except (TorchDynamoException, CannotRecord) as error:  # before anything is computed
                self.maker.give_up(error)
                self.end(slots)
        tree = tree or slots.propose()
        drafts = slots.drafter.cache
        pending = 0 if drafts is None else drafts.cache.table.pending
        self._pending[id(slots.drafter)] = slots.drafter, pending
        return slots.verify(tree)

    def start_next(self, slots: Slots) -> None:
        """Let a GPU work while the host tells the tokens of this step."""
        running = slots.running()
        if self.steps is None or not any(running):
            return
        slots.rule.prepare(slots.rows)
        try:
            self.steps.launch_ahead(slots.committed, running)
        except CannotRecord as error:
            self.maker.give_up(error)
            self.end(slots)

    def end(self, slots: Slots) -> None:
        """Take the next steps with any shapes."""
        if self.steps is not None:
            slots.committed = self.steps.end(slots.committed)
            self.steps = None

    def may_shrink(self, running: int, finished: int) -> bool:
        """Fewer rows are recorded anew, and a GPU computes hardly longer for a few more. What is
        compiled has its number of rows.
        """
        if self.steps is not None and self.steps.is_compiled:
            return False
        if self.maker.recorder is None:
            return super().may_shrink(running, finished)
        return finished > max(RECORDED, running)

    def is_timed(self) -> bool:
        """False for the first steps of a kind, which are run as they are or recorded."""
        return self.maker.recorder is None or self.steps is not None and not self.steps.is_new

    def _fixed(self, slots: Slots) -> FixedSteps | None:
        maker = self.maker
        known = self._pending.get(id(slots.drafter))
        width = slots.committed.tokens_BC.shape[1]
        if known is None or width > slots.tree.depth + 1 or slots.is_constrained:
            return None
        # each tree and each number of rows would be compiled
        compiles = maker.compiles and slots.is_settled
        function = maker.function(len(slots.rows), slots.rule, compiles)
        if function is None:
            return None
        return FixedSteps(
            function,
            slots.target,
            slots.drafter,
            slots.tree,
            slots.cache,
            slots.rule,
            pending=known[1],
            on_host=maker.on_host,
            recordings=self._recordings if maker.recorder else None,
        )
