"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftheads.train import entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code."""
    return entry.main(argv, "medusa", "medusa")


if __name__ == "__main__":
    sys.exit(main())
