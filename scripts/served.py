"""What `bench --server` measures. It needs what distilling needs; `bench` alone does not."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from draftheads.infer.measure.bench import BenchOptions
from draftheads.infer.measure.served import ServedReport, measure
from draftheads.infer.race import fitting_prompts
from draftheads.train.data.distill import Sampling
from draftheads.train.data.server import ServedEngine, ServedTarget


def bench_served(
    model: ServedTarget, ids: Sequence[list[int]], sampling: Sampling, options: BenchOptions
) -> ServedReport:
    """Measure the first server of a target, which drafts, against the second, if there is one, on
    prompts of token ids.
    """
    if sampling.temperature:
        model.servers[0].warn_of_speculation()
    prompts = fitting_prompts(model, ids, options.max_new_tokens)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(ServedEngine(model, server, sampling)))
            for server in model.servers
        ]
        settings = {
            "target": model.name,
            "model": model.model,
            "servers": [engine.url for engine in engines],
            "prompts_skipped": len(ids) - len(prompts),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }
        plain = engines[1] if len(engines) > 1 else None
        return measure(engines[0], plain, prompts, options, settings)
