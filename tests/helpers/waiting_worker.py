"""A training run that waits in its first step for a file: MADE OUTPUT."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tiny_training import run

from draftheads.train.metrics import Progress


def main(made: Path, output: Path) -> int:
    step = Progress.step

    def wait(self, number, *rest):
        if number == 1:
            (output / "waiting").touch()
            while not (output / "go-on").exists():
                time.sleep(0.01)
        step(self, number, *rest)

    Progress.step = wait  # type: ignore[method-assign]
    return run(made, output)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
