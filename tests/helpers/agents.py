"""Coding agents: how each is pointed at our server, and the script of its task. It reads notes.txt,
writes answer.txt, runs a command, and says what that printed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted import RESULT, START, Script, call

MODEL = "tiny"
TASK = "Read notes.txt, write its word in upper case to answer.txt, run cat answer.txt, and report."
WORD, ANSWER = "heron", "HERON"
PROSE = f"The command printed {ANSWER}."
FAILED = "The command printed something else."
TITLE = "A heron"


@dataclass(frozen=True)
class Agent:
    """An agent. program: its name on PATH, unless `variable` is set to its place. command: its
    arguments, given a server's address and an empty HOME, where it may write a configuration.
    script: what the target answers it, given the folder of the task. environment: its variables,
    given the address.
    """

    program: str
    variable: str
    command: Callable[[str, Path], list[str]]
    script: Callable[[Path], Script]
    environment: Callable[[str], dict[str, str]] = lambda url: {}

    def path(self) -> str:
        """Its place; skips the test if it has none."""
        found = os.environ.get(self.variable) or shutil.which(self.program)
        if not found:
            pytest.skip(f"{self.variable} is not set, and no {self.program} is on PATH")
        return found


def one_by_one(*calls: str, result: str = RESULT) -> Script:
    """Each call after the result of the one before, with a sentence; at last, what that result
    shows. A conversation without tools is to be named. result: what begins one in a prompt.
    """

    def answer(prompt: str) -> str:
        done = prompt.count(result)
        if not prompt.startswith('{"'):
            return TITLE
        if done < len(calls):
            return f"Step {done + 1} of the task.\n{calls[done]}"
        return PROSE if ANSWER in prompt.rpartition(result)[2] else FAILED

    return answer


def written(path: Path, text: str) -> None:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# Chat completions


def qwen_command(url: str, home: Path) -> list[str]:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    written(home / ".qwen/settings.json", json.dumps(settings))
    return ["--yolo", "--auth-type", "openai", "--prompt", TASK]


def qwen_script(folder: Path) -> Script:
    return one_by_one(
        call("read_file", file_path=f"{folder}/notes.txt"),
        call("write_file", file_path=f"{folder}/answer.txt", content=ANSWER),
        call("run_shell_command", command="cat answer.txt", is_background=False),
    )


def opencode_command(url: str, home: Path) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": 60000, "output": 4000}}},
    }
    config = {
        "provider": {"draftheads": provider},
        "model": f"draftheads/{MODEL}",
        "autoupdate": False,
        "permission": "allow",
        "share": "disabled",
    }
    written(home / ".config/opencode/opencode.json", json.dumps(config))
    return ["run", TASK]


def opencode_script(folder: Path) -> Script:
    return one_by_one(
        call("read", filePath=f"{folder}/notes.txt"),
        call("write", filePath=f"{folder}/answer.txt", content=ANSWER),
        call("bash", command="cat answer.txt", description="Shows the answer"),
    )


def aider_command(url: str, home: Path) -> list[str]:
    place = f"--model openai/{MODEL} --openai-api-base {url}/v1 --openai-api-key none"
    quiet = "--yes-always --no-git --no-check-update --no-show-model-warnings --analytics-disable"
    files = "--read notes.txt --file answer.txt --auto-test"
    words = [*place.split(), *quiet.split(), *files.split()]
    return [*words, "--test-cmd", "cat answer.txt; false", "--message", TASK]


def aider_script(folder: Path) -> Script:
    """It has no tools: it reads files out of answers, and sends what a failing test prints."""

    def answer(prompt: str) -> str:
        newest = prompt.rpartition(f"{START}user\n")[2]
        edit = f"The word in upper case:\n\nanswer.txt\n```\n{ANSWER}\n```"
        return PROSE if ANSWER in newest else edit

    return answer


def smolagents_command(url: str, home: Path) -> list[str]:
    return [str(Path(__file__).with_name("smolagent.py")), f"{url}/v1", MODEL, TASK]


def smolagents_script(folder: Path) -> Script:
    """It requires a call in each answer, and shows results as the user's messages."""
    result = "user\nObservation:"
    calls = (
        call("read_file", path="notes.txt"),
        call("write_file", path="answer.txt", content=ANSWER),
        call("run", command="cat answer.txt"),
    )
    steps = one_by_one(*calls, result=result)

    def answer(prompt: str) -> str:
        done = prompt.count(result)
        return calls[done] if done < len(calls) else call("final_answer", answer=steps(prompt))

    return answer


# Responses and Messages

CODEX = """
model = "{model}"
model_provider = "draftheads"
check_for_update_on_startup = false
analytics.enabled = false
[model_providers.draftheads]
name = "draftheads"
base_url = "{url}/v1"
wire_api = "responses"
"""


def codex_command(url: str, home: Path) -> list[str]:
    written(home / ".codex/config.toml", CODEX.format(model=MODEL, url=url))
    free = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
    return ["exec", *free.split(), TASK]


def codex_script(folder: Path) -> Script:
    return one_by_one(
        call("exec_command", cmd="cat notes.txt"),
        call("exec_command", cmd=f"echo {ANSWER} > answer.txt"),
        call("exec_command", cmd="cat answer.txt"),
    )


def claude_command(url: str, home: Path) -> list[str]:
    return ["--print", TASK, "--allowedTools", "Read", "Write", "Bash"]


def claude_script(folder: Path) -> Script:
    return one_by_one(
        call("Read", file_path=f"{folder}/notes.txt"),
        call("Write", file_path=f"{folder}/answer.txt", content=ANSWER),
        call("Bash", command="cat answer.txt"),
    )


def claude_environment(url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


AGENTS = {
    "aider": Agent(
        "aider",
        "DRAFTHEADS_AIDER",
        aider_command,
        aider_script,
        lambda url: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "claude": Agent(
        "claude", "DRAFTHEADS_CLAUDE_CODE", claude_command, claude_script, claude_environment
    ),
    "codex": Agent("codex", "DRAFTHEADS_CODEX", codex_command, codex_script),
    "opencode": Agent("opencode", "DRAFTHEADS_OPENCODE", opencode_command, opencode_script),
    "qwen": Agent(
        "qwen",
        "DRAFTHEADS_QWEN_CODE",
        qwen_command,
        qwen_script,
        lambda url: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
        },
    ),
    "smolagents": Agent(
        "python-with-smolagents", "DRAFTHEADS_SMOLAGENTS", smolagents_command, smolagents_script
    ),
}
