"""Files that commands read, and the line of a command that was refused."""

from __future__ import annotations

import json
from pathlib import Path


def prompt_file(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def questions(folder: Path, count: int = 12) -> Path:
    return prompt_file(folder, *(json.dumps({"prompt": f"question {n}"}) for n in range(count)))


def failed(answer: tuple[int, str, list[str]], *parts: str) -> None:
    code, _, errors = answer
    assert code == 2
    assert len(errors) == 1, "exactly one line"
    for part in parts:
        assert part in errors[0]
