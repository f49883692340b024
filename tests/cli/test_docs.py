"""The promise: the documents are true where a machine can tell: commands and their options exist,
recipe keys too, links lead to a file and to a heading in it, and files that are named are there.
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from draftheads.scripts.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LAB = [*(ROOT / "docs" / "lab").glob("*.md")]  # its commands are those of their day
COMMANDS = typer.main.get_group(app).commands
FOLDERS = ("heads", "infer", "train", "recipes", "scripts", "tests", "docs")


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def calls(text: str) -> list[list[str]]:
    """The words after `draftheads` of each command in shell blocks and in inline code."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(draftheads [^`]+)`", without_code(text))
    found = []
    for line in [*lines, *inline]:
        words = shlex.split(line, comments=True)
        found += [words[place + 1 :] for place, word in enumerate(words) if word == "draftheads"]
    return [words for words in found if words]


@pytest.mark.parametrize("page", named(PAGES))
def test_commands_and_options_exist(page):
    for command, *words in calls(page.read_text()):
        if command.startswith("-"):
            assert command in ("--help", "--version", "--install-completion")
            continue
        assert command in COMMANDS, f"draftheads {command}"
        options = {"--help"}
        for parameter in COMMANDS[command].params:
            options |= {*parameter.opts, *parameter.secondary_opts}
        for word in words:
            if word.startswith("[") and word.endswith("]"):
                word = word.strip("[]")
            if word.startswith("-") and len(word) > 1:
                assert word.split("=")[0] in options, f"draftheads {command} {word}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_of_the_command(command):
    program, name, *words = shlex.split(COMMANDS[command].epilog.removeprefix("Example: "))
    parameters = COMMANDS[command].params
    options = {option: each for each in parameters for option in each.opts}
    typed = [word for word in words if word.startswith("-")]
    assert (program, name) == ("draftheads", command)
    assert {*typed} <= options.keys()
    needed = [each for each in parameters if each.required and each.opts[0].startswith("-")]
    assert {each.opts[0] for each in needed} <= {*typed}


def test_commands_are_found():
    """The test above sees commands, and would see a wrong one."""
    page = (
        "```sh\ndraftheads bench --head A \\\n  --wrong 3   # --comment\n```\nor `draftheads keys`"
    )
    assert calls(page) == [["bench", "--head", "A", "--wrong", "3"], ["keys"]]
    assert len(calls((ROOT / "README.md").read_text())) > 7


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """All keys of recipes."""
    out = CliRunner().invoke(app, ["keys"]).output
    return set(re.findall(r"^([a-z_.]+) ", out, re.MULTILINE))


@pytest.mark.parametrize("page", named(PAGES))
def test_recipe_keys_exist(page, keys):
    sections = {key.split(".")[0] for key in keys if "." in key}
    pattern = rf"`((?:{'|'.join(sorted(sections))})\.[a-z_]+)\b(?![.(])"
    assert {"head", "run"} <= sections
    assert set(re.findall(pattern, page.read_text())) <= keys


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", named([*PAGES, *LAB]))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("page", named(PAGES))
def test_files_that_are_named_are_there(page):
    pattern = (
        rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|sh|yaml|jinja|txt|jsonl|md))\b"
    )
    for path in re.findall(pattern, page.read_text()):
        assert (ROOT / path).is_file(), path


@pytest.mark.mend("the first step of the first head showed no draft")
@pytest.mark.slow
def test_what_the_first_head_shows_without_training_is_mostly_drafts(run, monkeypatch):
    step = (ROOT / "docs" / "first-head.md").read_text().partition("**1.")[0]
    [command] = re.findall(r"^draftheads (chat .*)$", step, re.MULTILINE)
    [asked] = re.findall(r"^Ask .*$", step, re.MULTILINE)
    questions = re.findall(r"`([^`]+)`", asked) * (2 if "twice" in asked else 1)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))
    code, said, _ = run(*command.split(), "--threads", 1)
    assert code == 0
    assert int(re.findall(r"(\d+) % from drafts", said)[-1]) > 80
