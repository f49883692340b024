"""The command line; in a clone, `python -m draftheads.scripts.NAME` also runs benchmarks/NAME."""

from pathlib import Path

__path__ += [str(Path(__file__).parent / "benchmarks")]
