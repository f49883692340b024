"""The `draftheads` command: the table of its subcommands.

A mistake of the user's ends with one line (expected, got, next step) and exit code 2; Ctrl-C and
SIGTERM with 130. Set DRAFTHEADS_DEBUG=1 to see the traceback of the former.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import warnings
from typing import Annotated

import typer
from rich.logging import RichHandler

from draftheads.scripts.commands import (
    bench,
    chat,
    data_preview,
    demo,
    distill,
    import_answers,
    keys,
    mistakes_in_one_line,
    plan,
    publish,
    report,
    spread,
    train,
)
from draftheads.scripts.convert import convert
from draftheads.scripts.doctor import doctor
from draftheads.scripts.merge import merge
from draftheads.train.entry import ended_by_sigterm, spin_briefly

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# modules that define commands import what they need when they run, so that --help is instant
app.command("demo")(demo)
app.command("distill")(distill)
app.command("import-answers")(import_answers)
app.command("data-preview")(data_preview)
app.command("plan")(plan)
app.command("train", context_settings={"ignore_unknown_options": True})(train)
app.command("keys")(keys)
app.command("report")(report)
app.command("bench")(bench)
app.command("chat")(chat)
app.command("doctor")(doctor)
app.command("merge")(merge)
app.command("convert")(convert)
app.command("publish")(publish)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"draftheads {importlib.metadata.version('draftheads')}")
        raise typer.Exit


@app.callback()
def draftheads(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    """Train small draft heads on a frozen causal LM, and generate faster with them."""


def main() -> None:
    """The console script."""
    spin_briefly()
    log = logging.getLogger("draftheads")
    log.addHandler(RichHandler(show_time=False, show_path=False))
    log.propagate = False
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    with ended_by_sigterm(), mistakes_in_one_line():
        app(spread(sys.argv[1:]))


if __name__ == "__main__":
    main()
