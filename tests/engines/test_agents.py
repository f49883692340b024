"""The promise: coding agents, as they are, do a task with tools to its end against our server, with
drafts, and read its prompt only once. Opt-in: `pytest -m engines`.

Agents are searched for on PATH, or where their variables say (`agents.AGENTS`).
"""

from __future__ import annotations

import os
import subprocess

import pytest
from agents import AGENTS, ANSWER, PROSE, WORD
from scripted import scripted_target
from served import running

from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]
SECONDS = 120


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_its_task(name, tmp_path):
    agent = AGENTS[name]
    program = agent.path()
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    (folder / "notes.txt").write_text(f"{WORD}\n")
    engine = Speculator(scripted_target(agent.script(folder)), NGram())
    with running(engine) as (url, service):
        done = subprocess.run(
            [program, *agent.command(url, home)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **agent.environment(url)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert (folder / "answer.txt").read_text().strip() == ANSWER, done.stderr
    assert PROSE in done.stdout
    assert done.returncode == 0
