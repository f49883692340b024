"""Whether the steps of an engine are compiled or recorded, and what happens where they are not."""

from __future__ import annotations

import warnings
from typing import Any

from torch._dynamo.exc import TorchDynamoException

from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree
from draftheads.infer.accept import Acceptance
from draftheads.infer.fixed.recorded import CannotRecord, recorder
from draftheads.infer.fixed.steps import Advance, FixedSteps, advance, compiled, why_not
from draftheads.infer.rows import Decoding


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

    def fix(self, decoding: Decoding) -> None:
        """Compile or record the following steps; not the first of a text, which reads the prompt,
        and of a drafter, which tells what it caches.
        """
        if not (self.compiles or self.recorder) or decoding.fixed is not None:
            return
        if decoding.is_constrained:  # by the host, at every node
            return
        drafter = decoding.drafter
        known = decoding.caches.pending.get(id(drafter))
        width = decoding.committed.tokens_BC.shape[1]
        if known is None or width > decoding.tree.depth + 1:
            return
        # each tree would be compiled
        compiles = self.compiles and drafter is decoding.caches.drafter
        function = self.function(len(decoding.rows), decoding.accept, compiles)
        if function is not None:
            decoding.fixed = FixedSteps(
                function,
                self.target,
                drafter,
                decoding.tree,
                decoding.cache,
                decoding.accept,
                pending=known[1],
                on_host=self.on_host,
                recordings=decoding.caches.recordings if self.recorder else None,
            )

    def step(self, decoding: Decoding, tree: TokenTree | None) -> list[list[int]] | None:
        """The tokens of a fixed step; None if there is none. tree: what was drafted before it."""
        if decoding.fixed is None:
            return None
        decoding.prepare()
        try:
            decoding.committed, tokens = decoding.fixed(
                decoding.committed, tree, decoding.running()
            )
        except (TorchDynamoException, CannotRecord) as error:  # before anything is computed
            self._give_up(decoding, error)
            return None
        return tokens

    def launch_ahead(self, decoding: Decoding) -> None:
        """Let a GPU work while the host tells the tokens of this step."""
        running = decoding.running()
        if decoding.fixed is None or not any(running):
            return
        decoding.prepare()
        try:
            decoding.fixed.launch_ahead(decoding.committed, running)
        except CannotRecord as error:
            self._give_up(decoding, error)

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

    def _give_up(self, decoding: Decoding, error: Exception) -> None:
        fault = str(error).strip().partition("\n")[0]
        if isinstance(error, CannotRecord):
            self.stop_recording(fault)
        else:
            self.stop_compiling(fault)
        decoding.end_fixed()
