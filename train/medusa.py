"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]

This is the training script: `start` makes the parts of a run, `fit` takes its steps. `draftheads
train` runs `main`, too, and programs call `fit`. What is slow to import is imported in these
functions, after `main` has begun to handle signals.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from draftheads.arguments import check_path
from draftheads.train import entry

if TYPE_CHECKING:
    from accelerate import Accelerator

    from draftheads.train.checkpoint import Saved
    from draftheads.train.loop import OnEvaluation, Run
    from draftheads.train.metrics import Outcome
    from draftheads.train.recipe import Recipe


def start(
    recipe: Recipe,
    accelerator: Accelerator,
    saved: Saved | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> Run:
    """Make the parts of a run. saved: the checkpoint from which it is resumed."""
    from draftheads.heads.formats.hub import refusals
    from draftheads.train import checkpoint, engines, evaluate, launch, loop, setup
    from draftheads.train.data.answers import read_manifest
    from draftheads.train.features import sources

    log = launch.main_process_log(accelerator)
    with launch.agreeing(accelerator) as values:
        check_path(recipe.target)  # mistakes are said before the target is loaded
        read_manifest(recipe.data.path)
        target = setup.frozen_target(recipe, accelerator)
        data = setup.load_data(recipe, target, log)
        values["target"] = target.fingerprint()
        values["data"] = data.counts["digest"]
    order, state = setup.schedule(recipe, accelerator, target, data, saved)
    head = setup.create_head(recipe, target, data.documents, saved and saved.folder)
    learner = engines.make_learner(recipe, head, target)
    trained = sum(parameter.numel() for parameter in learner.trained().values())
    log(f"training {trained:,} parameters of the {head.kind} head; the target is frozen")
    if readers := refusals(head, target):
        log(f"convert will refuse this head for {readers}")
    engine = engines.make_engine(learner, recipe.optim, accelerator)
    if saved:
        engine.restore(checkpoint.load_optimizer_state(saved.folder))
    rows = data.train, data.heldout
    layers = head.training_layers
    features = sources.make_features(recipe, target, rows, layers, accelerator)
    train, heldout = (sources.SharedFaults(each, target, len(layers)) for each in features)
    setup.free_unread(recipe, target, data, head, log)
    evaluator = evaluate.Evaluator(recipe, accelerator, target, data, heldout)
    if recipe.run.minutes:
        state = replace(state, reserved=evaluator.seconds())
        log(f"run.minutes begins; an evaluation, of about {state.reserved:.0f} s, is part of it")
    size = 12 * trained  # weights and two moments, float32
    checkpoints = checkpoint.Checkpoints(recipe, accelerator, saved and saved.folder, size)
    return loop.Run(
        recipe,
        accelerator,
        target,
        data,
        order,
        head,
        engine,
        train,
        evaluator,
        checkpoints,
        state,
        on_evaluation,
    )


def fit(
    recipe: Recipe,
    accelerator: Accelerator | None = None,
    *,
    on_evaluation: OnEvaluation | None = None,
) -> Outcome:
    """Train, starting from the newest intact checkpoint in `run.output` if there is one, and save.

    accelerator: of processes that have already joined; left running. on_evaluation: called by the
    first process after each evaluation; where it returns False, the run is saved and ends after the
    next step, as if it was interrupted. Raises ValueError for a recipe, data or launch that cannot
    work, and if the loss stays non-finite; OSError if a checkpoint cannot be written.
    """
    from draftheads.train import checkpoint, launch, loop, metrics

    with launch.launched(recipe, accelerator) as accelerator:
        log = launch.main_process_log(accelerator)
        saved = checkpoint.resume_point(recipe, accelerator)
        if saved and checkpoint.is_over(saved.state, recipe, log):
            # what a process that was killed after it did not come to: `best`, removal of old ones
            checkpoint.Checkpoints(recipe, accelerator, saved.folder, size=0).close()
            return metrics.Outcome(saved.folder, saved.state.step, saved.state.step, trained=False)
        run = start(recipe, accelerator, saved, on_evaluation)
        stop = launch.StopRequest(recipe.run.output)
        with closing(run), stop.watch():  # nothing to save before
            progress = metrics.Progress(accelerator, run.state)
            with closing(progress), loop.rescued(run):
                stopped_by = ""
                if run.state.lacks_evaluation:
                    loop.save(run, progress)
                while run.state.has_steps and not stopped_by:
                    result = loop.train_step(run, stop.pending() or run.must_stop)
                    loop.record(run, result, progress)
                    if result.stop:
                        stopped_by = stop.by or run.asked or "another process"
                        run.checkpoints.wait()  # raises if a failed write is the reason
                    if stopped_by or run.state.saves:
                        loop.save(run, progress)
                run.checkpoints.wait()
                step, steps = run.state.step, run.state.steps
                if run.state.exhausted and step < steps:
                    progress.log(run.state.early_end)
                    steps = step
                folder = run.checkpoints.folder(step)
                return metrics.Outcome(folder, step, steps, trained=True, stopped_by=stopped_by)


def main(argv: Sequence[str] | None = None, *, script: str = "medusa", kind: str = "medusa") -> int:
    """Run the recipe named in `argv` (None: the arguments of the process); returns the exit code.

    kind: of the head, if the recipe has no `head.kind`.
    """
    try:
        with entry.mistakes_in_one_line():
            path, *overrides = entry.words(argv, script, kind)
            from draftheads.train.metrics import report
            from draftheads.train.recipe import load_recipe

            logging.getLogger("draftheads").disabled = not entry.is_first()
            outcome = fit(load_recipe(path, overrides, kind))
            entry.say_once(report(outcome))
            return 0 if outcome.finished else entry.INTERRUPTED
    except SystemExit as ended:
        return int(ended.code or 0)


if __name__ == "__main__":
    sys.exit(main())
