"""Train an EAGLE head: accelerate launch train/eagle.py RECIPE.yaml [key.path=value ...]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftheads.train import entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code."""
    return entry.main(argv, "eagle", "eagle3")


if __name__ == "__main__":
    sys.exit(main())
