"""Started by torchrun: trains, but in the first launch the second process is killed in step 4."""

from __future__ import annotations

import os
import signal
import sys

from draftheads.train import loop
from draftheads.train.medusa import main

if __name__ == "__main__":
    original = loop.train_step

    def step_or_die(run, *rest):
        launch, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        if (launch, rank, run.state.step) == ("0", "1", 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(run, *rest)

    loop.train_step = step_or_die
    sys.exit(main(sys.argv[1:]))
