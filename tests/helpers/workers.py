"""What the processes of a launch run: workers.py NAME ARGUMENTS."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import wait_for_everyone

from draftheads.heads.target.model import Target
from draftheads.train import loop, run
from draftheads.train.engines import Engine
from draftheads.train.launch import make_accelerator
from draftheads.train.medusa import fit, main
from draftheads.train.recipe import load_recipe

train_step = loop.train_step


def apart(path: str) -> None:
    """Train each case as this process was told to, and print what came of it, a line of JSON per
    case.
    """
    for case in json.loads(Path(path).read_text()):
        os.environ["MASTER_PORT"] = str(case["port"])
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(case["arguments"][int(os.environ["RANK"])])
        lines = [line for line in err.getvalue().splitlines() if line.startswith("error")]
        print(json.dumps([code, lines]), flush=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def restart(recipe: str) -> None:
    """Train, but in the first launch the second process is killed in step 4."""

    def step_or_die(run, *rest):
        launch, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        if (launch, rank, run.state.step) == ("0", "1", 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(run, *rest)

    loop.train_step = step_or_die
    sys.exit(main([recipe]))


def train(path: Path, output: Path, accelerator: Accelerator) -> tuple[Target, Engine, float]:
    """One run, after which the processes stay together; its target, its engine, and what it would
    draw next.
    """
    runs = []

    def noted(run, *rest, **more):
        result = train_step(run, *rest, **more)
        with torch.random.fork_rng():
            runs.append((run.target, run.engine, torch.rand(()).item()))
        return result

    loop.train_step = noted
    fit(load_recipe(path, [f"run.output={output}"]), accelerator)
    loop.train_step = train_step  # else an engine would outlive its process group
    return runs[-1]


def halve(source: Path, output: Path, *, first: bool) -> Path:
    """A copy of a run without its last checkpoint, made by the first process."""
    if first:
        shutil.copytree(source, output, symlinks=True)
        shutil.rmtree(output / "step-000006")
    wait_for_everyone()
    return output


def engines(output: str, *recipes: str) -> None:
    """Train each recipe, then again from half of what came out, then from half of what one process
    made, then by the clock; leave each process's weights, and what it would draw next.

    Beside a recipe stands `one`, a run of one process, finished.
    """
    out = Path(output)
    accelerator = make_accelerator(load_recipe(recipes[0]))
    for path in map(Path, recipes):
        folder = out / path.parent.name
        target, engine, drawn = train(path, folder / "whole", accelerator)
        rank = accelerator.process_index
        adapter = target.adapter
        learned = engine.full_head().state_dict() | (adapter.state() if adapter else {})
        left = {"head": learned, "drawn": drawn}
        torch.save(left, folder / f"rank-{rank}.pt")
        for begun, copy in ((folder / "whole", "resumed"), (path.parent / "one", "moved")):
            train(path, halve(begun, folder / copy, first=rank == 0), accelerator)
    if rank:  # the clock of the first counts
        run.time = SimpleNamespace(monotonic=float)
    fit(load_recipe(path, ["run.minutes=0.01", f"run.output={folder / 'minutes'}"]), accelerator)
    del engine
    gc.collect()
    wait_for_everyone()
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps groups of its own, whose threads may abort the interpreter's end


if __name__ == "__main__":
    {"apart": apart, "restart": restart, "engines": engines}[sys.argv[1]](*sys.argv[2:])
