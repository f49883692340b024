"""The promise: names, answers and errors from servers, models and downloaded files cannot control
the terminal: no escape sequences, control characters or marks that reorder text.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from tiny_chat import llama

from draftheads.heads import terminal
from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.terminal import SafeConsole, printable
from draftheads.scripts import cli
from draftheads.scripts.benchmarks.house import modules

ROOT = Path(__file__).parents[2]
CLIPBOARD = "\x1b]52;c;cm0gLXJmIC8=\x07"
EVIL = f"{CLIPBOARD}\x1b[2J\x9b31m\x08\r\x00\u202etxt\u2066\u200f\u2028\ud800 [/b] é\u00a0漢"
HARMLESS = "]52;c;cm0gLXJmIC8=[2J31mtxt [/b] é\u00a0漢"


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, Path]:
    """Head folders whose config.json has EVIL in one place each."""
    tiny = llama()
    folders = {}
    for place in ("draftheads.target.name", "draftheads.kind", "model_type", "draftheads.tree"):
        folder = folders[place] = tmp_path_factory.mktemp("evil") / "head"
        save_head(MedusaHead.create(tiny), folder, target=tiny)
        config = json.loads((folder / "config.json").read_text())
        *outer, last = place.split(".")
        inner = config
        for key in outer:
            inner = inner[key]
        inner[last] = EVIL
        (folder / "config.json").write_text(json.dumps(config))
    return folders


def assert_harmless(text: str) -> None:
    assert printable(text) == text
    assert "\x1b" not in text


@pytest.mark.parametrize("command", ["chat --head", "publish --dry-run", "convert --to vllm"])
@pytest.mark.parametrize("place", ["draftheads.target.name", "draftheads.kind", "draftheads.tree"])
def test_a_published_head_cannot_write_to_the_terminal(
    heads, place, command, tmp_path, monkeypatch, capsys
):
    rest = {"publish": ["user/name"], "convert": [str(tmp_path / "new")]}
    words = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["draftheads", *words, str(heads[place]), *rest.get(words[0], [])]
    )
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr()
    assert shown.out or shown.err
    assert_harmless(shown.out + shown.err)


SAYING = """
import logging, sys, warnings
from draftheads.train import entry
entry.guard_terminal()
logging.getLogger("somebody").error("log %s", EVIL)
warnings.warn("warn " + EVIL)
entry.say("said " + EVIL, sys.stderr)
with entry.mistakes_in_one_line():
    raise ValueError("fault " + EVIL)
"""


@pytest.mark.slow
def test_error_lines_warnings_and_log_records_of_all_libraries_are_harmless():
    line = f"EVIL = {EVIL!r}{SAYING}"
    shown = subprocess.run([sys.executable, "-c", line], capture_output=True, timeout=120)
    assert shown.returncode == 2
    assert shown.stderr.decode().splitlines() == [
        f"log {HARMLESS}",
        f"warning: warn {HARMLESS}",
        f"said {HARMLESS}",
        f"error: fault {printable(' '.join(EVIL.split()))}",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_titles_and_rich_text_are_harmless_and_brackets_are_no_markup(terminal):
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=terminal, width=200, highlight=False)
    table = Table("name", title=EVIL)
    table.add_row(EVIL)
    console.print(table)
    console.print(EVIL, style="bold")
    console.out(EVIL)
    written = file.getvalue()
    assert written.count("[/b]") == 4
    assert_harmless(re.sub("\x1b\\[[0-9;]*m", "", written))  # rich's own colours


def test_a_locale_without_the_characters_does_not_end_a_command():
    """It was a UnicodeEncodeError at the end of a measurement."""
    line = "from draftheads.train.entry import guard_terminal, say; guard_terminal(); say('τ 1.5')"
    shown = subprocess.run(
        [sys.executable, "-c", line], env={"PYTHONIOENCODING": "latin-1"}, capture_output=True
    )
    assert shown.stdout == b"\\u03c4 1.5\n", shown.stderr


@pytest.mark.mend("escape sequences of configs")
def test_nothing_is_printed_past_the_functions_that_make_it_harmless():
    """Use `say`, `SafeConsole`, or `printable` around what is printed."""
    for name, path in modules(ROOT).items():
        if name in ("heads.terminal", "train.entry"):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            made = ast.unparse(call.func)
            shown = ast.unparse(call.args[0]) if call.args else ""
            assert made != "Console", f"{name}: {ast.unparse(call)}"
            if made in ("print", "tqdm.write", "sys.stdout.write", "sys.stderr.write"):
                assert shown.startswith("printable("), f"{name}: {ast.unparse(call)}"


@pytest.mark.mend("progress bars that filled piped logs")
def test_a_bar_in_a_log_is_a_line_now_and_then(monkeypatch, capsys):
    """Drawn over itself, a bar was 87 % of a log."""
    with terminal.progress_bar(total=500, desc="train", bar_format="{desc} {bar}") as bar:
        for _ in range(500):
            bar.update()
    log = capsys.readouterr().err
    first, last = log.splitlines()
    assert (first[:12], last[:14]) == ("train 0/500 ", "train 500/500 ")
    assert "\r" not in log

    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.progress_bar(total=2, desc="train") as bar:
        bar.update()
    assert "\r" in screen.getvalue() and "50%" in screen.getvalue()
