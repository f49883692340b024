"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]

Several processes: `accelerate launch --multi_gpu --num_processes N ...` on GPUs,
`ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ...` on CPU. A recipe without `head.kind` is
for medusa heads. Exit codes: 0 done, 2 a mistake in recipe, data or launch, 130 interrupted and
saved. DRAFTHEADS_DEBUG=1 shows tracebacks.

usage: train/medusa.py RECIPE.yaml [key.path=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftheads.train import entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code."""
    return entry.main(argv, "medusa", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
