"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]

This is the training script: `start` makes the parts of a run, `fit` takes its steps. `draftheads
train` runs `main`, too, and programs call `fit`. What is slow to import is imported in these
functions, after `main` has begun to handle signals.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftheads.recipes import check_paths
from draftheads.train import entry

if TYPE_CHECKING:
    from accelerate import Accelerator

    from draftheads.train.checkpoint import Saved
    from draftheads.train.metrics import Outcome
    from draftheads.train.recipe import Recipe
    from draftheads.train.run import OnEvaluation, Run


def start(
    recipe: Recipe,
    accelerator: Accelerator,
    saved: Saved | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> Run:
    """Make the parts of a run. saved: the checkpoint from which it is resumed."""
    from draftheads.train import launch, setup
    from draftheads.train.features import sources
    from draftheads.train.run import Run

    log = launch.main_process_log(accelerator)
    folder = saved and saved.folder
    with launch.agreeing(accelerator) as values:
        setup.check_inputs(recipe)
        target = setup.frozen_target(recipe, accelerator)
        answers = setup.load_data(recipe, target, log)
        values.update(target=target.fingerprint(), data=answers.counts["digest"])
    state = setup.first_state(recipe, accelerator, target, answers, saved)
    head = setup.create_head(recipe, target, answers.documents, folder)
    engine = setup.create_engine(recipe, head, target, accelerator, folder)
    layers, rows = head.training_layers, (answers.train, answers.heldout)
    features = sources.make_features(recipe, target, rows, layers, accelerator)
    return Run(
        accelerator,
        target,
        answers,
        state,
        head,
        engine,
        features,
        resumed=folder,
        on_evaluation=on_evaluation,
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
    from draftheads.train import checkpoint, launch, loop
    from draftheads.train.run import end_again

    with launch.launched(recipe, accelerator) as accelerator:
        log = launch.main_process_log(accelerator)
        saved = checkpoint.resume_point(recipe, accelerator)
        if saved and checkpoint.is_over(saved.state, recipe, log):
            return end_again(saved, recipe, accelerator)
        run = start(recipe, accelerator, saved, on_evaluation)
        with run.guarded():
            for step in run:
                run.record(loop.train_step(run, step))
                if run.must_save:
                    run.save(run.evaluate())
            return run.outcome()


def main(argv: Sequence[str] | None = None, *, script: str = "medusa", kind: str = "medusa") -> int:
    """Run the recipe named in `argv` (None: the arguments of the process); returns the exit code.

    kind: of the head, if the recipe has no `head.kind`.
    """
    try:
        with entry.mistakes_in_one_line():
            path, *overrides = entry.words(argv, script, kind)
            check_paths(path, overrides)
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
