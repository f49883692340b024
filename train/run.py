"""A run: its parts, the steps that are left, and what follows a step: counts, an evaluation, a
checkpoint.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.train.batches import Order, share
from draftheads.train.checkpoint import Checkpoints, Content, RunState, Saved
from draftheads.train.engines import Engine
from draftheads.train.evaluate import Evaluation, Evaluator
from draftheads.train.faults import lost_processes
from draftheads.train.features.sources import FeatureSource, SharedFaults
from draftheads.train.launch import StopRequest, agreeing, main_process_log
from draftheads.train.metrics import Outcome, Progress, StepResult
from draftheads.train.origin import sizes_of
from draftheads.train.recipe import Recipe
from draftheads.train.setup import TrainingData, free_unread, training_facts

AHEAD = 2
"""Micro batches that are made ahead, at least."""
SHOWN = 8
"""Documents listed in the line about a skipped step."""

MicroBatch = tuple[int, list[int], Batch]
"""Its number in the step, its rows, and these in host memory."""
OnEvaluation = Callable[[int, dict[str, Any]], bool | None]
"""(step, figures as in metrics.jsonl) -> False to end the run."""


@dataclass
class Run:
    """One process's part of a run. Iterating gives the steps that are left.

    sources: the features of training rows and of held-out rows. state: after the last step done.
    resumed: the checkpoint that the run goes on from. on_evaluation: called by the first process;
    where it returns False, the run is saved and ends after the next step.
    """

    accelerator: Accelerator
    target: Target
    data: TrainingData
    state: RunState
    head: DraftHead
    engine: Engine
    sources: tuple[FeatureSource, FeatureSource]
    resumed: Path | None = None
    on_evaluation: OnEvaluation | None = None
    stopped_by: str = field(default="", init=False)
    """The signal, file, callback or process that ends the run early."""
    ended_by: str = field(default="", init=False)
    """What asked for that, other than a signal or a file."""
    progress: Progress = field(init=False)
    began: float = field(init=False)
    """When this process would have begun, had it done all in one launch, by time.monotonic."""

    def __post_init__(self) -> None:
        recipe, accelerator, target = self.recipe, self.accelerator, self.target
        log = main_process_log(accelerator)
        layers = len(self.head.training_layers)
        self.features, heldout = (SharedFaults(each, target, layers) for each in self.sources)
        free_unread(recipe, target, self.data, self.head, log)
        self.evaluator = Evaluator(recipe, accelerator, target, self.data, heldout)
        if recipe.run.minutes:
            reserved = self.evaluator.seconds()
            self.state = replace(self.state, reserved=reserved)
            log(f"run.minutes begins; an evaluation, of about {reserved:.0f} s, is part of it")
        self.checkpoints = Checkpoints(recipe, accelerator, self.resumed, self.engine.bytes_saved)
        self.order = Order(len(self.data.train), self.state.rows_per_step, recipe.run.seed)
        self.stop = StopRequest(recipe.run.output)
        self.batches = self.micro_batches()
        self.began = time.monotonic() - self.state.seconds

    @property
    def recipe(self) -> Recipe:
        """The recipe of this launch."""
        return self.state.recipe

    @property
    def seconds(self) -> float:
        """The seconds of this process's part of the run, over all launches."""
        return time.monotonic() - self.began

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Take requests to stop and show progress in the block, then end all that goes on beside
        the training.

        If features fail, what was learned before is saved without an evaluation, for which held-out
        ones would fail, too. A process that is gone is named before the launcher ends this one.
        """
        with closing(self), self.stop.watch():  # there is nothing to save before
            self.progress = Progress(self.accelerator, self.state)
            with closing(self.progress), lost_processes():
                try:
                    yield
                except (ValueError, OSError):
                    if self.features.is_broken or self.evaluator.features.is_broken:
                        self._save_without_evaluation()
                    raise

    def __iter__(self) -> Iterator[int]:
        if self.state.lacks_evaluation:
            self.save(self.evaluate())
        while self.state.has_steps and not self.stopped_by:
            yield self.state.step

    @property
    def must_stop(self) -> bool:
        """True if this process was asked to end the run, or knows a reason to."""
        failed = self.checkpoints.failed or self.data.verification.failed
        return self.stop.pending() or failed or bool(self.ended_by)

    @property
    def must_save(self) -> bool:
        """True if the run saves after this step."""
        return bool(self.stopped_by) or self.state.saves

    def record(self, result: StepResult) -> None:
        """Count a step. Raises ValueError after too many consecutive non-finite ones, and the error
        of a checkpoint that could not be written.
        """
        rows = self.order.step(self.state.step)
        tokens = sum(self.data.train.sizes[row] for row in rows)
        skipped = self.state.skipped + 1
        self.state = self.state.after_step(tokens, result.seconds)
        self.progress.bar.total = self.state.steps
        if math.isfinite(result.norm):
            self.state = replace(self.state, loss=result.loss, skipped=0)
            self.progress.step(self.state.step, result, tokens)
        else:
            self.state = replace(self.state, skipped=skipped)
            self._note_skipped(result, rows)
        if result.stop:
            self.stopped_by = self.stop.by or self.ended_by or "another process"
            self.checkpoints.wait()  # raises if a failed write is the reason

    def _note_skipped(self, result: StepResult, rows: Sequence[int]) -> None:
        documents = result.documents or sorted(set(self.data.train.document_numbers(rows)))
        listed = ", ".join(map(str, documents[:SHOWN]))
        if documents[SHOWN:]:
            listed += " ..."
        cause = f"loss {result.loss}, gradient norm {result.norm} in documents {listed}"
        state, recipe = self.state, self.recipe
        self.progress.skipped(state.step, cause)
        if state.skipped >= recipe.run.max_skipped:
            raise ValueError(
                f"loss or gradient was not finite in {state.skipped} steps up to {state.step}; "
                f"{cause}; lower optim.lr or check the target in dtype {recipe.target_dtype}, then "
                "run again"
            )

    def evaluate(self) -> Evaluation:
        """Evaluate the heads on held-out documents and fit their tree to the result. A run that was
        interrupted does not decode. Raises ValueError if weights are not finite.
        """
        evaluation = self.evaluator(self._finite_head(), decode=self.state.is_due)
        self.head.tree = evaluation.head.tree
        return evaluation

    def save(self, evaluation: Evaluation) -> None:
        """Log an evaluation, and begin to write a checkpoint of the head that was evaluated."""
        figures = self.progress.evaluated(self.state.step, evaluation)
        [seconds, *_] = gather_object([self.seconds])  # by the clock of the first
        self.state = self.state.evaluated(figures).at(seconds)
        results = {
            "predicted_tokens_per_step": self.state.tokens_per_step,
            "heldout_top1": figures["heldout_top1"],
        }
        if self.state.measured:
            results["decoding"] = self.state.measured
        self._write(evaluation.head, results)
        is_main = self.accelerator.is_main_process
        if self.on_evaluation and is_main and self.on_evaluation(self.state.step, figures) is False:
            self.ended_by = "on_evaluation"

    def outcome(self) -> Outcome:
        """The end of the run, once its checkpoint is on disk."""
        self.checkpoints.wait()
        state = self.state
        steps = state.steps
        if state.exhausted and state.step < steps:
            self.progress.log(state.early_end)
            steps = state.step
        folder = self.checkpoints.folder(state.step)
        return Outcome(folder, state.step, steps, trained=True, stopped_by=self.stopped_by)

    def close(self) -> None:
        """End all that goes on beside the training."""
        self.batches.close()
        self.features.close()
        self.checkpoints.close()
        del self.engine  # a DDP that outlives its process group hangs

    def micro_batches(self) -> Generator[MicroBatch]:
        """All that this process has left to read, made ahead by a thread."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        size = self.recipe.data.rows_per_batch
        pins = self.accelerator.device.type == "cuda"

        def make(number: int, rows: list[int]) -> MicroBatch:
            batch = self.data.train.batch(rows)
            if pins:
                batch = batch.pin_memory()
            return number, rows, batch

        choices = self.recipe.features
        asked = choices.in_flight * len(choices.server)  # rows, of servers
        ahead = max(AHEAD, asked // size)
        # by the clock, nobody knows which step is the last
        end = sys.maxsize if self.recipe.run.minutes else self.state.steps
        due: deque[Future[MicroBatch]] = deque()
        with ThreadPoolExecutor(1, "batches") as thread:
            for step in range(self.state.step, end):
                for number, rows in share(self.order.step(step), size, rank, world):
                    due.append(thread.submit(make, number, rows))
                    self.features.ahead(rows)
                    if len(due) > ahead:
                        yield due.popleft().result()
            for future in due:
                yield future.result()

    def _save_without_evaluation(self) -> None:
        self.checkpoints.wait()
        step = self.state.step
        with agreeing(self.accelerator) as values:
            values["saved"] = is_saved = not step or self.checkpoints.folder(step).exists()
        if not is_saved:
            self.state = replace(
                self.state,
                tokens_per_step=1.0,
                measured=None,
                drift=None,
                lacks_evaluation=self.evaluator.features.is_broken,
            )
            self._write(self._finite_head(), {})
            self.checkpoints.wait()

    def _finite_head(self) -> DraftHead:
        """The whole head; a collective. Raises ValueError if weights are not finite."""
        head = self.engine.full_head()
        if not all(weight.isfinite().all() for weight in head.state_dict().values()):
            raise ValueError(
                f"weights are not finite after step {self.state.step}, which was not saved; lower "
                "optim.lr, then run again from the last checkpoint"
            )
        return head

    def _write(self, head: DraftHead, results: dict[str, Any]) -> None:
        """Begin to write a checkpoint. results: of its evaluation."""
        facts = training_facts(self.state, results, self.data, self.accelerator)
        if self.state.origin:
            facts["continued"] = asdict(self.state.origin)
            facts["recipe"]["head"] |= sizes_of(head, self.recipe.head)
        self.checkpoints.wait()  # before the copies: only one is in memory
        self.data.verification.wait()  # nothing learned from damaged files is kept
        is_main = self.accelerator.is_main_process
        optimizer_state = self.engine.optimizer_state(keep=is_main)
        if is_main:
            target = copy.copy(self.target)
            if target.adapter:
                target.adapter = target.adapter.on_host()
            on_host = self.engine.on_host(head)
            content = Content(on_host, optimizer_state, self.state, target, facts)
            self.checkpoints.save(content)


def end_again(saved: Saved, recipe: Recipe, accelerator: Accelerator) -> Outcome:
    """The outcome of a run without a step left, after what a process that was killed behind the
    last one did not come to: `best`, removal of old checkpoints.
    """
    Checkpoints(recipe, accelerator, saved.folder, size=0).close()
    return Outcome(saved.folder, saved.state.step, saved.state.step, trained=False)
