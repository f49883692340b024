"""Coding agents: how each is pointed at our server, and the script of its task. It reads notes.txt,
writes answer.txt, runs a command, and says what that printed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scripted import RESULT, START, Script, call

MODEL = "tiny"
TASK = "Read notes.txt, write its word in upper case to answer.txt, run cat answer.txt, and report."
WORD, ANSWER = "heron", "HERON"
PROSE = f"The command printed {ANSWER}."
FAILED = "The command printed something else."


class Agent:
    """An agent. variable: that says where it is. environment: variables that it reads, where {url}
    is the server's address. result: what begins the result of a call in a prompt.
    """

    variable: str
    environment: ClassVar[dict[str, str]] = {}
    result = RESULT

    def place(self) -> str:
        """The path of its program; skips the test if the variable names none."""
        found = shutil.which(os.environ.get(self.variable, ""))
        if found is None:
            pytest.skip(f"{self.variable} names no program")
        return found

    def command(self, url: str, home: Path) -> list[str]:
        """Its arguments. home: an empty folder, where it may write a configuration."""
        raise NotImplementedError

    def calls(self, folder: Path) -> Sequence[str]:
        """The calls of its own tools that do the task in a folder."""
        raise NotImplementedError

    def script(self, folder: Path) -> Script:
        """Each call after the result of the one before, and at last what that result shows. What is
        asked without tools is a name for the conversation.
        """
        calls = self.calls(folder)

        def answer(prompt: str) -> str:
            done = prompt.count(self.result)
            if not prompt.startswith('{"'):
                return "A heron"
            if done < len(calls):
                return f"Step {done + 1} of the task.\n{calls[done]}"
            return PROSE if ANSWER in prompt.rpartition(self.result)[2] else FAILED

        return answer


def write(path: Path, text: str) -> None:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Aider(Agent):
    """It has no tools: it reads files out of answers, and sends what a failing test prints."""

    variable = "DRAFTHEADS_AIDER"
    environment: ClassVar = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def command(self, url: str, home: Path) -> list[str]:
        place = f"--model openai/{MODEL} --openai-api-base {url}/v1 --openai-api-key none"
        quiet = "--yes-always --no-git --no-check-update --no-show-model-warnings"
        files = "--analytics-disable --read notes.txt --file answer.txt --auto-test"
        words = [*place.split(), *quiet.split(), *files.split()]
        return [*words, "--test-cmd", "cat answer.txt; false", "--message", TASK]

    def script(self, folder: Path) -> Script:
        edit = f"The word in upper case:\n\nanswer.txt\n```\n{ANSWER}\n```"
        return lambda prompt: PROSE if ANSWER in prompt.rpartition(f"{START}user")[2] else edit


class Claude(Agent):
    variable = "DRAFTHEADS_CLAUDE_CODE"
    environment: ClassVar = {
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    def command(self, url: str, home: Path) -> list[str]:
        return ["--print", TASK, "--allowedTools", "Read", "Write", "Bash"]

    def calls(self, folder: Path) -> Sequence[str]:
        return (
            call("Read", file_path=f"{folder}/notes.txt"),
            call("Write", file_path=f"{folder}/answer.txt", content=ANSWER),
            call("Bash", command="cat answer.txt"),
        )


class Codex(Agent):
    variable = "DRAFTHEADS_CODEX"

    def command(self, url: str, home: Path) -> list[str]:
        provider = f'{{name = "draftheads", base_url = "{url}/v1", wire_api = "responses"}}'
        config = (
            f'model = "{MODEL}"\nmodel_provider = "draftheads"\nanalytics.enabled = false\n'
            f"check_for_update_on_startup = false\nmodel_providers.draftheads = {provider}\n"
        )
        write(home / ".codex/config.toml", config)
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return ["exec", *free, TASK]

    def calls(self, folder: Path) -> Sequence[str]:
        commands = ("cat notes.txt", f"echo {ANSWER} > answer.txt", "cat answer.txt")
        return [call("exec_command", cmd=command) for command in commands]


class OpenCode(Agent):
    variable = "DRAFTHEADS_OPENCODE"

    def command(self, url: str, home: Path) -> list[str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {MODEL: {"limit": {"context": 60000, "output": 4000}}},
        }
        config: dict[str, Any] = {"provider": {"draftheads": provider}}
        config |= {"model": f"draftheads/{MODEL}", "autoupdate": False, "share": "disabled"}
        write(home / ".config/opencode/opencode.json", json.dumps(config))
        return ["run", TASK]

    def calls(self, folder: Path) -> Sequence[str]:
        return (
            call("read", filePath=f"{folder}/notes.txt"),
            call("write", filePath=f"{folder}/answer.txt", content=ANSWER),
            call("bash", command="cat answer.txt", description="Shows the answer"),
        )


class QwenCode(Agent):
    variable = "DRAFTHEADS_QWEN_CODE"
    environment: ClassVar = {
        "OPENAI_BASE_URL": "{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
    }

    def command(self, url: str, home: Path) -> list[str]:
        write(home / ".qwen/settings.json", '{"privacy": {"usageStatisticsEnabled": false}}')
        return ["--yolo", "--auth-type", "openai", "--prompt", TASK]

    def calls(self, folder: Path) -> Sequence[str]:
        return (
            call("read_file", file_path=f"{folder}/notes.txt"),
            call("write_file", file_path=f"{folder}/answer.txt", content=ANSWER),
            call("run_shell_command", command="cat answer.txt", is_background=False),
        )


class Smolagents(Agent):
    """It requires a call in each answer, and shows results as the user's messages."""

    variable = "DRAFTHEADS_SMOLAGENTS"
    result = "user\nObservation:"

    def command(self, url: str, home: Path) -> list[str]:
        return [str(Path(__file__).with_name("smolagent.py")), f"{url}/v1", MODEL, TASK]

    def calls(self, folder: Path) -> Sequence[str]:
        return (
            call("read_file", path="notes.txt"),
            call("write_file", path="answer.txt", content=ANSWER),
            call("run", command="cat answer.txt"),
        )

    def script(self, folder: Path) -> Script:
        steps = super().script(folder)

        def answer(prompt: str) -> str:
            said = steps(prompt)
            called = said.partition("\n")[2]
            return called or call("final_answer", answer=said)

        return answer


AGENTS: dict[str, Agent] = {
    "aider": Aider(),
    "claude": Claude(),
    "codex": Codex(),
    "opencode": OpenCode(),
    "qwen": QwenCode(),
    "smolagents": Smolagents(),
}
