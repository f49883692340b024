"""The picture of README.md: a chat with the demo target, accepted draft tokens in colour.

    draftheads demo --out out/demo
    python scripts/benchmarks/picture.py out/demo/sequential docs/chat.svg

The questions are ones whose answers fit on a line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from draftheads.heads import load_pair
from draftheads.heads.files import write_text
from draftheads.infer import Speculator
from draftheads.infer.chat import sample_chat

QUESTIONS = (
    "What is the signature of os.path.join?",
    "What does str.upper do?",
    "How do I import itertools.chain?",
)  # whose answers fit on a line each
NODES = 16


def main() -> None:
    head_folder, out = sys.argv[1:]
    target, head = load_pair(head_folder)
    tree = head.tree.head(NODES)
    console = Console(record=True, width=88, force_terminal=True)
    sample_chat(Speculator(target, head, tree=tree), QUESTIONS, console=console)
    svg = console.export_svg(title="draftheads chat --show-accepted")
    write_text(
        Path(out), re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    )  # no fonts from afar


if __name__ == "__main__":
    main()
