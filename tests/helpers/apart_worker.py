"""Started twice, as processes of one launch: trains each case as this process was told to, and
prints what came of it, a line of JSON per case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from draftheads.train.medusa import main

if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(case["port"])
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(case["arguments"][int(os.environ["RANK"])])
        lines = [line for line in err.getvalue().splitlines() if line.startswith("error")]
        print(json.dumps([code, lines]), flush=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
