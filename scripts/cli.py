"""The `draftheads` command: the table of its subcommands.

Exit codes: 0 done, 2 a mistake of the user's (one line: expected, got, next step), 130 interrupted.
DRAFTHEADS_DEBUG=1 shows the traceback of a mistake.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich import reconfigure
from rich.logging import RichHandler

from draftheads import __version__
from draftheads.arguments import VARIABLE, expected
from draftheads.scripts import data, measuring, sharing, training, using
from draftheads.scripts.doctor import doctor, report
from draftheads.scripts.options import expand_options
from draftheads.train.entry import INTERRUPTED, mistakes_in_one_line, say

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[Callable[..., None], str] = {
    using.demo: "draftheads demo",
    data.questions: "draftheads questions --target Qwen/Qwen3-0.6B --out prompts.jsonl",
    data.distill: "draftheads distill --target Qwen/Qwen3-0.6B --prompts mt-bench --out data",
    data.import_answers: "draftheads import-answers c.jsonl --target Qwen/Qwen3-0.6B --out data",
    data.data_preview: "draftheads data-preview data",
    training.init: "draftheads init --target Qwen/Qwen3-0.6B --data data --out recipe.yaml",
    training.plan: "draftheads plan recipe.yaml run.steps=1000",
    training.train: "draftheads train recipe.yaml run.steps=1000",
    data.prompts: "draftheads prompts",
    training.recipes: "draftheads recipes demo-medusa > recipe.yaml",
    training.keys: "draftheads keys run.minutes",
    measuring.bench: "draftheads bench --target me/model --head me/head --prompts mt-bench",
    measuring.tune: "draftheads tune --head out/head --prompts mt-bench",
    using.chat: "draftheads chat --head out/head --temperature 0.7",
    using.serve: "draftheads serve --head out/head --port 8000",
    using.rollback: "draftheads rollback --head out/head",
    using.forget: "draftheads forget --head out/head",
    doctor: "draftheads doctor --target Qwen/Qwen3-0.6B --head out/head",
    report: "draftheads report out/head --sample 'What is a list?'",
    sharing.merge: "draftheads merge out/head out/merged",
    sharing.convert: "draftheads convert out/head out/vllm --to vllm",
    sharing.publish: "draftheads publish out/head me/heads --license apache-2.0",
}
"""Commands in the order of --help -> an example, which stands at the end of their own."""
for command, example in COMMANDS.items():
    summary, _, _ = " ".join((command.__doc__ or "").split()).partition(". ")
    name = command.__name__.replace("_", "-")
    app.command(
        name,
        short_help=summary.rstrip("."),
        epilog=f"Example: {example}",
        context_settings={"ignore_unknown_options": name == "train"},
    )(expand_options(command))

RESUMING = (["demo"], ["distill"], ["train"])
"""Commands that continue what an interrupted one began."""
TEXTS = ("--system", "--template-args")
NO_VALUE = "write one, or leave it out (is a variable of your shell unset?)"

LEARNING = "data-preview demo distill import-answers init plan questions report train"
"""Commands that need packages of an extra, which are missed only once torch is loaded otherwise."""

UsageError: Any = typer.BadParameter.__base__
"""click's; typer may carry its own copy of click."""


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"draftheads {__version__}")
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
    log = logging.getLogger("draftheads")
    reconfigure(stderr=True)  # stdout is for results
    log.addHandler(RichHandler(show_time=False, show_path=False))
    log.propagate = False
    arguments = sys.argv[1:]
    with mistakes_in_one_line(resumes=arguments[:1] in RESUMING):
        try:
            refuse_empty(arguments)
            check_packages(arguments)
            code = app(arguments or ["--help"], prog_name="draftheads", standalone_mode=False)
        except UsageError as error:
            raise ValueError(usage_line(error)) from error
        except typer.Abort:
            code = INTERRUPTED
        if code == INTERRUPTED:  # from typer, for Ctrl-C: commands end themselves by SystemExit
            raise KeyboardInterrupt
    sys.exit(code if arguments else 2)


def check_packages(arguments: Sequence[str]) -> None:
    """Raise ImportError for a package that this command needs and the install lacks."""
    if not {*arguments[:1]} & {*LEARNING.split()} or "--help" in arguments:
        return
    for package in ("pyarrow", "ruamel.yaml"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise ValueError for an empty value, which would be read as the working directory, and for a
    variable of the shell as it stands. Only texts may have these.
    """
    for before, argument in pairwise(["", *arguments]):
        option, is_joined, value = argument.partition("=")
        if not (is_joined and option.startswith("--")):
            option = before if before.startswith("-") else "an argument"
            value = argument
        if option in TEXTS:
            continue
        if not value.strip():
            raise ValueError(f"{option}: expected a value, got an empty one; {NO_VALUE}")
        if variable := VARIABLE.search(value):
            raise ValueError(
                f"{option}: expected a value, got {variable[0]}, which your shell did not replace; "
                "use double quotes, or write its value"
            )


def usage_line(error: Any) -> str:
    """One line about a command line that click refuses."""
    from pydantic import ValidationError  # slow

    command = error.ctx.command_path if error.ctx else "draftheads"
    line = error.format_message().rstrip(".")
    cause = error.__cause__
    parameter = getattr(error, "param", None)
    if parameter and isinstance(cause, ValidationError):
        fault = cause.errors()[0]
        wanted = expected(fault["msg"])
        if choices := wanted.partition(" is not one of ")[2]:
            listed = " or ".join(choices.rstrip(".").replace("'", "").rsplit(", ", 1))
            wanted = f"expected {listed}"
        line = f"{parameter.opts[0]}: {wanted}, got {fault['input']!r}"
    return f"{line}; see `{command} --help`"


if __name__ == "__main__":
    main()
