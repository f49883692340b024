"""The picture of README.md: a chat with the demo target in a real terminal (tmux).

    draftheads demo --out out/demo
    python scripts/benchmarks/chat_session.py out/demo/sequential docs/chat.svg

Further arguments go to `draftheads chat`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftheads.heads.files import write_text

WIDTH, HEIGHT, PATIENCE = 98, 24, 60  # seconds for an answer
TYPED = ("What does os.path.join do?", "/compare What does shutil.copytree do?")


def tmux(*arguments: str) -> str:
    command = ["tmux", "-L", "chat-session", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wait_for_cursor(prompts: int) -> None:
    """Wait until the chat asks for this many lines, the earlier ones included."""
    until = time.monotonic() + PATIENCE
    while len(re.findall("^>", tmux("capture-pane", "-p"), re.MULTILINE)) < prompts:
        assert time.monotonic() < until, tmux("capture-pane", "-p")
        time.sleep(0.2)


def main() -> None:
    head, out, *options = sys.argv[1:]
    chat = [sys.executable, "-m", "draftheads.scripts.cli", "chat", "--head", head, *options]
    tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), *chat)
    for number, line in enumerate(TYPED, start=1):
        wait_for_cursor(number)
        tmux("send-keys", "-l", line)
        tmux("send-keys", "Enter")
    wait_for_cursor(len(TYPED) + 1)
    shown = tmux("capture-pane", "-p", "-e").rstrip()
    tmux("kill-server")
    console = Console(record=True, width=WIDTH, force_terminal=True)
    console.print(Text.from_ansi(shown), end="")
    svg = console.export_svg(title="draftheads chat")
    write_text(Path(out), re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
