"""The promise: coding agents, as they are, do a task with tools to its end against our server, with
drafts and without. Opt-in: `pytest -m engines`.

DRAFTHEADS_AIDER, DRAFTHEADS_CLAUDE_CODE, DRAFTHEADS_CODEX, DRAFTHEADS_OPENCODE and
DRAFTHEADS_QWEN_CODE: a program, by its name or its path; DRAFTHEADS_SMOLAGENTS: a Python that has
smolagents. Numbers are printed with -s.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from agents import AGENTS, ANSWER, PROSE, WORD
from scripted import scripted_target
from served import running
from tiny_heads import random_head

from draftheads.heads.target.model import Target
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.sources import DrafterSource, NoDraft

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]
SECONDS = 120
DRAFTS: dict[str, Callable[[Target], DrafterSource]] = {
    "plain": lambda target: NoDraft(),
    "ngram": lambda target: NGram(),
    "head": lambda target: random_head("medusa", target),
}
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "seconds")


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_its_task(name, drafts, tmp_path):
    agent = AGENTS[name]
    program = agent.place()
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    (folder / "notes.txt").write_text(f"{WORD}\n")
    target = scripted_target(agent.script(folder))
    engine = Speculator(target, DRAFTS[drafts](target))
    with running(engine) as (url, service):
        own = {key: value.format(url=url) for key, value in agent.environment.items()}
        done = subprocess.run(
            [program, *agent.command(url, home)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        value = service.metrics.registry.get_sample_value
        counts = {each: value(f"draftheads_{each}_total") or 0 for each in COUNTS}
        [requests] = service.metrics.requests.collect()
    statuses = {sample.labels["status"] for sample in requests.samples}
    print(f"\n{name}, {drafts}: {counts}")
    assert (folder / "answer.txt").read_text().strip() == ANSWER, done.stderr
    assert PROSE in done.stdout
    assert (done.returncode, statuses) == (0, {"200"})
    assert counts["cached_tokens"] > 0, "each prompt was read anew"
    if drafts == "ngram":
        assert counts["steps"] < counts["completion_tokens"]
