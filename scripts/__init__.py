"""The command line. In a clone, `python -m draftheads.scripts.NAME` also runs benchmarks/NAME.py."""

from pathlib import Path

__path__ += [str(Path(__file__).parent / "benchmarks")]
