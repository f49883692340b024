"""Prompts and trees for a bench, and checks of its outputs."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import open_head
from draftheads.heads.target import Target
from draftheads.heads.tree import parse_tree
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.drafters.adaptive import Adaptive
from draftheads.infer.drafters.draft_model import DraftModel, EarlyExit, drawing
from draftheads.infer.drafters.named import NamedDrafts
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import DrafterSource
from draftheads.infer.measure.baseline import Baseline
from draftheads.infer.measure.bench import BenchOptions, Entry
from draftheads.infer.measure.costs import Costs
from draftheads.infer.measure.plot import new_figure
from draftheads.infer.prompt import encode_prompt
from draftheads.train.data.conversation import turns_of
from draftheads.train.data.prompts import Prompt, read_prompts

LOOKUP_TOKENS = 10
"""prompt_lookup_num_tokens of transformers' own prompt lookup, as in its documentation."""
CATEGORISED = 10_000
"""Prompts that are read, at most, to take some of every category."""


def load_drafts(
    drafts: Mapping[str, NamedDrafts], target: Target, rule: Acceptance, adaptive: bool
) -> dict[str, DrafterSource]:
    """Load what --head options name, for decoding by this rule. adaptive: each once more, after it,
    as `Adaptive`.
    """
    loaded: dict[str, DrafterSource] = {}
    for name, option in drafts.items():
        loaded[name] = drawing(option.load(target), rule)
        if adaptive:
            loaded[f"{name} adaptive"] = _adaptive(option, loaded[name], target)
    return loaded


def _adaptive(option: NamedDrafts, loaded: DrafterSource, target: Target) -> Adaptive:
    """Raises ValueError unless this is a tuned head; warns if it was tuned in another dtype."""
    facts = option.folders[0].facts if isinstance(loaded, DraftHead) else {}
    found = facts.get("tuned")
    tuned: dict[str, Any] = found if isinstance(found, dict) else {}
    costs = tuned.get("costs")
    if costs is None:
        raise ValueError(
            f"--adaptive: expected a head with measured costs, got {option.name}; run draftheads "
            "tune --head HEAD --prompts PROMPTS first"
        )
    now = str(target.dtype).removeprefix("torch.")
    then = tuned.get("dtype", now)
    if then != now:
        warnings.warn(
            f"--adaptive: expected a target in {then}, in which the steps of {option.name} were "
            f"timed, got {now}; drafts may pause where they pay: use --dtype {then}, or tune again",
            stacklevel=2,
        )
    return Adaptive(loaded, Costs.from_json(costs))


def opening_ids(
    target: Target, source: str, prompt_words: int | None, limit: int | None
) -> list[list[int]]:
    """Token ids of the prompts in `source`; conversations end with their first user turn."""
    return openings(target, source, prompt_words, limit)[0]


def openings(
    target: Target, source: str, prompt_words: int | None, limit: int | None
) -> tuple[list[list[int]], list[str | None]]:
    """Token ids as of `opening_ids`, and categories. If the prompts have categories, the first
    CATEGORISED are read, and `limit` are taken in turns from each.
    """
    prompts = read_prompts(source, limit=limit, prompt_words=prompt_words)
    if limit and any(prompt.category for prompt in prompts):
        by_category: dict[str | None, list[Prompt]] = defaultdict(list)
        for prompt in read_prompts(source, limit=CATEGORISED, prompt_words=prompt_words):
            by_category[prompt.category].append(prompt)
        turns = chain.from_iterable(zip_longest(*by_category.values()))
        prompts = list(islice(filter(None, turns), limit))
    ids = [
        encode_prompt(target, turns_of(prompt)[0] if prompt.text is None else prompt.text)
        for prompt in prompts
    ]
    return ids, [prompt.category for prompt in prompts]


def contestants(
    target: Target, drafts: Mapping[str, DrafterSource], trees: Sequence[str], options: BenchOptions
) -> dict[str, Entry]:
    """The drafters, `with_trees`. With a greedy rule and single prompts also transformers' own
    `generate` with each kind of drafter that it has, too.
    """
    entries = with_trees(drafts, trees)
    has_rivals = isinstance(options.sampling, Greedy) and options.batch == 1
    for name, each in drafts.items() if has_rivals else ():
        if isinstance(each, NGram):
            extra: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif isinstance(each, DraftModel):
            extra = {"assistant_model": each.model.model}
        elif isinstance(each, EarlyExit):
            extra = {"assistant_early_exit": each.layers}
        else:
            continue
        entries[f"generate {name}"] = Baseline(target, **extra)
    return entries


def with_trees(heads: Mapping[str, DrafterSource], texts: Sequence[str]) -> dict[str, Entry]:
    """Each head with each tree, as "name@tree"; "name@tree" is for that head alone. A head without
    a tree keeps its own. Raises ValueError for an unknown name.
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
    files: Sequence[Path | None],
    card_heads: Sequence[str],
    picture: Path | None = None,
    *,
    option: str = "--card",
) -> None:
    """Raise ValueError, before anything is measured, for outputs that cannot be written: files,
    a picture, and configs and cards of heads that are not on this machine or in another layout.
    option: what asks for these.
    """
    for file in filter(None, (*files, picture)):
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{file}: expected a folder that can be written, {folder} is not one")
        if file.is_dir():
            raise ValueError(f"{file}: expected a file to write, got a folder; add a file's name")
    if picture:
        try:
            formats = new_figure(1, 1).canvas.get_supported_filetypes()
        except ImportError as error:  # matplotlib is optional
            raise ValueError(str(error)) from error
        if picture.suffix and picture.suffix[1:].lower() not in formats:
            raise ValueError(f"{picture}: expected a file ending in .png, .pdf or .svg; rename it")
    for source in card_heads:
        if not Path(source).is_dir():
            raise ValueError(f"{option}: expected a head folder on this machine, got {source}")
        if "format" not in open_head(source).facts:
            raise ValueError(
                f"{option}: expected a head in this project's own layout, got {source}; "
                f"draftheads convert {source} DIR --to draftheads writes one"
            )
