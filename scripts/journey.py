"""Steps between commands: prompts for a bench, figures into a head's card."""

from __future__ import annotations

from pathlib import Path

from draftheads.heads.hub import find_head, record_measured
from draftheads.heads.target import Target
from draftheads.infer.report import BenchReport, measured_facts
from draftheads.infer.text import encode_prompt
from draftheads.train.prompts import Prompt, read_prompts


def opening_ids(
    target: Target, source: str, prompt_words: int | None, limit: int | None
) -> list[list[int]]:
    """Token ids of the prompts in `source`; of a conversation, up to its first user turn."""
    prompts = read_prompts(source, limit=limit, prompt_words=prompt_words)
    return [encode_prompt(target.tokenizer, _opening(prompt)) for prompt in prompts]


def _opening(prompt: Prompt) -> str | list[dict[str, str]]:
    if prompt.messages is None:
        return prompt.text or ""
    turns = [message["role"] for message in prompt.messages]
    return [dict(message) for message in prompt.messages[: turns.index("user") + 1]]


def head_names(sources: list[str]) -> list[str]:
    """A short name for each head: its folder's, or all that was typed where that is ambiguous."""
    names = [Path(source).name for source in sources]
    return names if len(set(names)) == len(names) else sources


def write_measured(source: str, name: str, report: BenchReport) -> None:
    """Write what a bench found of the head called `name` into its config.json and model card.

    Raises ValueError for a head that is not a folder on this machine.
    """
    if not Path(source).is_dir():
        raise ValueError(f"--card: expected a head folder on this machine, got {source}")
    own = (name, f"{name}@")
    rows = [
        measured_facts(report, result.name)
        for result in report.heads
        if result.name == own[0] or result.name.startswith(own[1])
    ]
    record_measured(find_head(source), rows)
