"""Steps between commands: prompts and trees for a bench, its figures into files and cards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HeadFolder, open_head, record_measured
from draftheads.heads.target import Target
from draftheads.heads.tree import parse_tree
from draftheads.infer.bench import BenchReport, Entry, measured_facts, new_figure, plot, write_json
from draftheads.infer.text import encode_prompt
from draftheads.train.data.prompts import read_prompts


def opening_ids(
    target: Target, source: str, prompt_words: int | None, limit: int | None
) -> list[list[int]]:
    """Token ids of the prompts in `source`; of a conversation, up to its first user turn."""
    ids = []
    for prompt in read_prompts(source, limit=limit, prompt_words=prompt_words):
        if prompt.messages is None:
            ids.append(encode_prompt(target.tokenizer, prompt.text or ""))
        else:
            first = [message["role"] for message in prompt.messages].index("user")
            ids.append(encode_prompt(target.tokenizer, prompt.messages[: first + 1]))
    return ids


def head_names(sources: list[str]) -> list[str]:
    """A short name for each head: its folder's, or all that was typed where that is ambiguous."""
    names = [Path(source).name for source in sources]
    return names if len(set(names)) == len(names) else sources


def with_trees(heads: Mapping[str, DraftHead], texts: Sequence[str]) -> dict[str, Entry]:
    """Each head with each of the trees that were typed, as "name@tree", or else by itself.

    A tree that is typed as "name@tree" is for the head of that name alone. Raises ValueError when
    there is none.
    """
    trees: dict[str, Entry] = {}
    plain: dict[str, Entry] = dict(heads)
    for text in texts:
        name, _, tree = text.rpartition("@")
        if name and name not in heads:
            raise ValueError(
                f"--tree {text}: expected a tree, or one of {', '.join(heads)} before the @, "
                f"got {name}"
            )
        for each in [name] if name else heads:
            trees[f"{each}@{tree}"] = (heads[each], parse_tree(tree))
            plain.pop(each, None)
    return {**plain, **trees}


def check_outputs(
    files: Sequence[Path | None], card_heads: Sequence[str], picture: Path | None = None
) -> None:
    """Refuse, before anything is measured, what could not be written afterwards.

    Raises ValueError for a folder, for a file in one that cannot be written, for a picture that
    cannot be drawn, and for a head that is not on this machine or in another layout, and so has no
    card here.
    """
    for file in [file for file in (*files, picture) if file]:
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{file}: expected a folder that can be written, {folder} is not one")
        if file.is_dir():
            raise ValueError(f"{file}: expected a file to write, found a folder; add a file's name")
    if picture:
        try:
            formats = new_figure(1, 1).canvas.get_supported_filetypes()
        except ImportError as error:  # matplotlib is optional
            raise ValueError(str(error)) from error
        if picture.suffix and picture.suffix[1:].lower() not in formats:
            raise ValueError(f"{picture}: expected a file ending in .png, .pdf or .svg; rename it")
    for source in card_heads:
        if not Path(source).is_dir():
            raise ValueError(f"--card: expected a head folder on this machine, got {source}")
        if "format" not in open_head(source).facts:
            raise ValueError(
                f"--card: expected a head in this project's own layout, got {source}; "
                f"draftheads convert {source} DIR --to draftheads writes one"
            )


def write_outputs(
    report: BenchReport,
    json_out: Path | None,
    picture: Path | None,
    cards: Mapping[str, HeadFolder],
) -> None:
    """Write a bench's figures where they were asked for.

    cards: name in the report -> head folder, whose config.json and model card get its rows.
    """
    if json_out:
        write_json(report, json_out)
    if picture:
        plot(report, picture)
    for name, folder in cards.items():
        names = [result.name for result in report.heads]
        trees = [each for each in names if each == name or each.startswith(f"{name}@")]
        record_measured(folder.path, [measured_facts(report, each) for each in trees])
