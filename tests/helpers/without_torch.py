"""Types commands, or runs training scripts, in a process that cannot load torch. Reads a list of
command lines in JSON from standard input, and prints for each one its exit code and error lines, or
`null` where torch was needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "transformers", "pyarrow", "datasets")


class NeededError(BaseException):
    """A slow library is imported: nothing catches this."""


class Refusing(MetaPathFinder, Loader):
    """Finds the slow libraries, and does not load them."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in SLOW else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise NeededError(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Never: importlib asks for both."""


def typed(words: Sequence[str]) -> tuple[int, list[str]] | None:
    from draftheads.scripts import cli

    main: Callable[[], object] = cli.main
    if words[0].endswith(".py"):
        main = partial(runpy.run_path, str(ROOT / words[0]), run_name="__main__")
        sys.argv = list(words)
    else:
        sys.argv = ["draftheads", *words]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except NeededError:
            return None
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, errors.getvalue().splitlines()


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing())
    print(json.dumps([typed(words) for words in json.load(sys.stdin)]))
