"""An agent of smolagents with three tools, run by the Python that has it: URL MODEL TASK."""

import subprocess
import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


@tool
def write_file(path: str, content: str) -> str:
    """Write a file.

    Args:
        path: Its path.
        content: Its whole text.
    """
    Path(path).write_text(content)
    return "written"


@tool
def run(command: str) -> str:
    """Run a command of the shell, and return what it prints.

    Args:
        command: The command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


url, model, task = sys.argv[1:]
served = OpenAIServerModel(model, api_base=url, api_key="none")
agent = ToolCallingAgent([read_file, write_file, run], served, max_steps=5)
print(agent.run(task))
