r"""Training at the shape of Qwen3-0.6B: tokens per second of each recipe's head, alone.

    cd recipes; python ../scripts/benchmarks/training_shapes.py \
        qwen3-0.6b-{medusa,sequential,eagle3}.yaml qwen3-0.6b-eagle3.yaml,head.kind=eagle \
        qwen3-0.6b-block.yaml,head.anchors=64 \
        [--old CHECKOUT] [--rounds 3] [--repetitions 3] [--profile] [--json OUT]

Weights, tokens and features are random; the features are in memory, as `data.cache_gb` and
`features.mode=cached` have them. A step is what the trainer does: the head's forward and backward
for each micro batch, then clipping and AdamW. Micro batches and updates are timed apart.
--old: another checkout, measured in turns with this one, each time in a process of its own.

Share: floating-point operations of matrix products that torch counts, over time and the rate at
which this machine multiplies 1024 x 1024 bfloat16 matrices, measured between the micro batches.
Memory: the peak of a process less what it had before the head was made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CPU = (
    "target=random",
    "data.path=none",
    "data.rows_per_batch=1",
    "data.sequence_length=512",
    "run.tokens_per_step=8192",
)
"""What the recipes advise for a CPU."""
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = 28
SQUARE = 1024
DOCUMENTS = 2
"""Of each row."""


class Step:
    """The parts of a training step of a recipe's head."""

    def __init__(self, recipe: Any) -> None:
        import torch
        from accelerate import Accelerator

        from draftheads.heads.kinds import HEADS
        from draftheads.train.engines import Learner, TorchEngine

        self.target = create_target()
        self.batch = create_batch(recipe)
        self.base = peak(forget=True)
        torch.manual_seed(0)
        words = recipe.head.draft_vocabulary
        vocabulary = None if words is None else range(words)
        head = HEADS[recipe.head.kind].create(self.target, recipe.head, vocabulary)
        learner = Learner(head.float(), recipe.run.precision)
        self.engine = TorchEngine(learner, recipe.optim, Accelerator(cpu=True), sharded=False)
        width = len(head.training_layers) * self.target.hidden_size
        shape = (*self.batch.tokens_BT.shape, width)
        self.features_BTD = torch.randn(shape).to(self.target.dtype)

    def learn(self) -> float:
        """Forward and backward of a micro batch; its loss."""
        import torch

        torch.manual_seed(1)
        out = self.engine.model(self.batch, self.features_BTD, self.target, 1.0)
        self.engine.backward(out.loss / self.batch.loss_mask_BT.sum(), last=True)
        return float(out.loss.detach())

    def update(self) -> None:
        """Clipping and AdamW."""
        self.engine.update({"heads": 1e-5})


def create_target() -> Any:
    """A random Qwen3 with one layer, which no head runs, instead of LAYERS."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from draftheads.heads.target.model import Target

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, num_hidden_layers=1, dtype=torch.bfloat16)
    target = Target(Qwen3ForCausalLM._from_config(config), name="random Qwen3", fingerprint="")
    target.layers = LAYERS
    return target


def create_batch(recipe: Any) -> Any:
    """Documents of random tokens, all learned but the first of each."""
    import torch

    from draftheads.train.batches import Documents, Rows
    from draftheads.train.data.answers import Answer

    length, rows = recipe.data.sequence_length, recipe.data.rows_per_batch
    size = length // DOCUMENTS
    tokens_DT = torch.randint(30_000, (DOCUMENTS * rows, size), dtype=torch.int32).tolist()
    documents = Documents.read(Answer(tokens, [(0, size)]) for tokens in tokens_DT)
    made = Rows(documents, documents.spans, length, pack=True, seed=0)
    return made.batch(range(len(made)))


def peak(*, forget: bool = False) -> int:
    """Most bytes of this process so far; forget: those of now, from which it counts anew."""
    import gc

    from draftheads.train.advice.plan import forget_peak, peak_memory

    if forget:
        gc.collect()
        forget_peak()
    return peak_memory()


def measure(recipe: Any, repetitions: int, *, with_profile: bool) -> dict[str, Any]:
    """Seconds of each part, FLOP of a micro batch, and bytes. The first one is not timed."""
    import torch
    from torch.profiler import profile
    from torch.utils.flop_counter import FlopCounterMode

    from draftheads.train import launch

    if hasattr(launch, "use_huge_pages"):  # not in older checkouts
        launch.use_huge_pages()
    torch.set_num_threads(1)
    step = Step(recipe)
    with FlopCounterMode(display=False) as counter:
        loss = step.learn()
    step.update()
    square = torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"square": [], "micro": [], "update": []}
    for _ in range(repetitions):
        for _ in range(2):  # a further one adds to the gradients of the first
            times["square"].append(seconds(lambda: square @ square))
            times["micro"].append(seconds(step.learn))
        times["update"].append(seconds(step.update))
    result = {
        "loss": loss,
        "flop": counter.get_total_flops(),
        "bytes": peak() - step.base,
        "tokens": int(step.batch.tokens_BT.numel()),
        **{name: statistics.median(each) for name, each in times.items()},
    }
    if with_profile:
        with profile() as profiler:
            step.learn()
            step.update()
        result["profile"] = profiler.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=44
        )
    return result


def seconds(function: Callable[[], object]) -> float:
    """Wall time."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def row(results: Sequence[dict[str, Any]], tokens_per_step: int) -> dict[str, float]:
    """The figures of one head in one checkout, medians over rounds."""
    middle = {
        key: statistics.median(each[key] for each in results)
        for key in ("square", "micro", "update", "flop", "bytes", "tokens", "loss")
    }
    count = tokens_per_step / middle["tokens"]
    step = count * middle["micro"] + middle["update"]
    rate = 2 * SQUARE**3 / middle["square"]
    return {
        "tokens/s": tokens_per_step / step,
        "micro ms": 1e3 * middle["micro"],
        "update ms": 1e3 * middle["update"],
        "share %": 100 * count * middle["flop"] / step / rate,
        "GFLOP": middle["flop"] / 1e9,
        "GFLOP/s": rate / 1e9,
        "MB": middle["bytes"] / 1e6,
        "loss": middle["loss"],
    }


def run(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """One measurement, by the code of a checkout, in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure all recipes, in turns, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="+", metavar="RECIPE[,KEY=VALUE ...]")
    parser.add_argument("--old", type=Path, metavar="CHECKOUT", help="measured in turns with this")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each; %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="of a step; %(default)s")
    parser.add_argument("--profile", action="store_true", help="operators by their own time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    options = ["--repetitions", str(chosen.repetitions)]
    if chosen.profile:
        options.insert(0, "--profile")
    from draftheads.train.recipe import load_recipe

    loaded = {}
    for name in chosen.recipes:
        path, *changes = name.split(",")
        loaded[name] = load_recipe(path, (*CPU, *changes))
    if chosen.child:
        (recipe,) = loaded.values()
        print(json.dumps(measure(recipe, chosen.repetitions, with_profile=chosen.profile)))
        return
    checkouts = {"old": chosen.old, "new": ROOT} if chosen.old else {"new": ROOT}
    report = {}
    for path, recipe in loaded.items():
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
        for _ in range(chosen.rounds):
            for name, checkout in checkouts.items():
                results[name].append(run(checkout, [path, *options]))
        for name, each in results.items():
            figures = row(each, recipe.run.tokens_per_step)
            if not report:
                print("| head |", " | ".join(figures), "|")
                print("| --- " * (1 + len(figures)) + "|")
            report[f"{Path(path).name} {name}"] = figures
            shown = (f"{value:.6g}" for value in figures.values())
            print(f"| {Path(path).name} {name} |", " | ".join(shown), "|", flush=True)
            if chosen.profile:
                print(each[-1]["profile"])
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
