"""The target answers prompts; its own tokens become the training set.

`distill` fills a folder (see `draftheads.train.data.answers` for what is in it). Prompts are known
by what they say, and what is drawn for one depends on that and the seed alone. They are answered in
batches of consecutive ones; a batch that an interruption left unfinished is answered again as a
whole, so neither the number of processes nor an interruption changes a single token. With RANK and
WORLD_SIZE in the environment (torchrun, accelerate launch) each process answers its share.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from tqdm import tqdm

from draftheads.train.data.answers import (
    FORMAT,
    MANIFEST,
    Answer,
    Counts,
    Id,
    Journal,
    count,
    journals,
    locate,
    read_answers,
    read_manifest,
    write_ids,
    write_manifest,
)
from draftheads.train.data.conversation import Conversation, Renderer
from draftheads.train.data.generate import Answerer, LocalAnswerer, Sampling
from draftheads.train.data.manifest import describe, identify, refuse_other
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.turns import check_tools, with_tools
from draftheads.train.launch import check_environment

if TYPE_CHECKING:
    from draftheads.heads.target import Target

__all__ = ["Answer", "DistillOptions", "DistillReport", "distill", "read_answers", "read_manifest"]

MANY_CUT = 0.2
"""Share of answers ended by length above which the report warns."""
MAX_LOST_BATCHES = 3
"""Batches of prompts in a row without any answer after which the cause is not the prompts."""

logger = logging.getLogger("draftheads")


class DistillOptions(Sampling):
    """What `draftheads distill` takes, beside the target and the prompts."""

    out: Path = Field(description="folder to write; an unfinished one is continued")
    batch_size: int = Field(32, ge=1, description="prompts answered together")
    seed: int = Field(0, description="of all draws")
    max_turns: int | None = Field(None, ge=1, description="user turns asked per conversation")
    template_args: dict[str, Any] = Field(
        default_factory=dict, description='chat template variables, e.g. {"enable_thinking": false}'
    )
    reasoning: Literal["keep", "drop"] = Field(
        "keep",
        description="thoughts, <think> ... </think>, that open the target's answers: learned, or "
        "kept where they are as context alone",
    )
    source: str = Field("", description="where the prompts came from; for the manifest")


@dataclass(frozen=True)
class DistillReport:
    """What the folder holds when this process ends.

    missing: of this process's share, prompts that its server failed to answer. complete: every
    prompt of all processes was answered, or refused for its own fault. seconds: wall time.
    """

    out: Path
    prompts: int
    counts: Counts
    missing: int
    complete: bool
    seconds: float

    def __str__(self) -> str:
        counts = self.counts
        mean = counts.learned_tokens / max(1, counts.turns)
        lines = [
            f"{self.out}: {self.prompts} prompts = {counts.done} done + {counts.skipped} skipped "
            f"+ {counts.failed} failed{self._rest()}",
            f"{counts.learned_tokens} tokens to learn in {counts.turns} answers, {mean:.1f} on "
            f"average; {counts.cut} cut by length; {self.seconds:.1f} s",
        ]
        if counts.documents > counts.done:
            why = "as the chat template rewrites earlier turns"
            lines.append(f"{counts.done} conversations became {counts.documents} documents, {why}")
        if counts.retokenized:
            lines.append(f"{counts.retokenized} answers came as text and were tokenised here")
        return "\n".join(lines + [f"  {number} {why}" for why, number in counts.reasons.items()])

    def _rest(self) -> str:
        rest = self.prompts - self.counts.done - self.counts.skipped - self.counts.failed
        if self.missing:
            why = "as the server failed; run the same command again to ask them again"
            return f" + {rest} not answered, {why}"
        return f" + {rest} not answered yet, by other processes" if rest else ""


def distill(
    target: Target | Answerer, prompts: Sequence[Prompt], options: DistillOptions
) -> DistillReport:
    """Let the target answer the prompts and store its tokens in `options.out`, or resume that.

    Learned is what the target writes, thoughts included unless `options.reasoning` says otherwise;
    tool calls and results of the prompts are context. target: in this process, or a
    `ServedTarget`. Raises ValueError when the folder belongs to other options or another process,
    or cannot be written, and for prompts with tool calls that the chat template does not show;
    OSError when a server goes away. After these and a KeyboardInterrupt everything answered so far
    is kept.
    """
    started = time.monotonic()
    rank, world = _place()
    answerer = target if isinstance(target, Answerer) else LocalAnswerer(target)
    renderer = Renderer(answerer, options.template_args)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(renderer.tokenizer, options.template_args)
    manifest = describe(answerer.origin(), prompts, options)
    names = identify(prompts)
    ids: Sequence[Id] = names
    if (options.out / MANIFEST).is_file():
        old = read_manifest(options.out)
        refuse_other(options.out, old, manifest)
        if old["format"] == FORMAT:  # of an older version, with the same prompts
            manifest["format"], ids = FORMAT, range(len(prompts))
    with _open(options.out, rank, world) as journal:
        _begin(options.out, manifest, ids)
        seeds = [f"{options.seed}/{name}" for name in names]
        work = _Work(answerer, renderer, prompts, options, ids, seeds)
        try:
            missing = _answer_missing(work, journal, rank, world)
        except KeyboardInterrupt:  # only to say how to resume
            logger.warning("%s: interrupted; run the same command again to resume", options.out)
            raise
        counts, complete = _finish(options.out, manifest, ids)
    seconds = time.monotonic() - started
    report = DistillReport(options.out, len(prompts), counts, missing, complete, seconds)
    print(report)
    _warn(report, options)
    return report


@dataclass(frozen=True)
class _Work:
    answerer: Answerer
    renderer: Renderer
    prompts: Sequence[Prompt]
    options: DistillOptions
    ids: Sequence[Id]
    seeds: Sequence[str]

    def conversation(self, place: int) -> Conversation:
        choices = self.options.max_turns, self.options.reasoning
        prompt, context = self.prompts[place], self.answerer.context
        return Conversation(prompt, self.renderer, context, *choices)


def _answer_missing(work: _Work, journal: Journal, rank: int, world: int) -> int:
    """Answer this process's share; returns how many of it the answerer left out."""
    size, answerer = work.options.batch_size, work.answerer
    starts = range(rank * size, len(work.prompts), world * size)
    batches = [list(range(len(work.prompts))[start : start + size]) for start in starts]
    there = locate(work.options.out, work.ids).keys()
    missing = {place for batch in batches for place in batch if place not in there}
    asked = [batch for batch in batches if not missing.isdisjoint(batch)]
    if not answerer.together:
        asked = [[place for place in batch if place in missing] for batch in asked]
    rows = ([work.conversation(place) for place in batch] for batch in asked)
    answers = answerer.answer(rows, work.options, work.seeds)
    enough = MAX_LOST_BATCHES * size if there else min(MAX_LOST_BATCHES * size, len(missing))
    lost, kept = 0, journal.tell()
    total = sum(map(len, batches))
    with _Progress(total, total - len(missing), rank, world) as progress, closing(answers):
        for conversations, error in answers:
            if error is None or any(row.answered for row in conversations):
                lost = 0
            else:
                kept = kept if lost else journal.tell()
                lost += len(conversations)
            if error is not None and lost >= enough:
                journal.cut(kept)  # what broke is not these prompts: ask them again next time
                raise error
            new = [row for row in conversations if row.prompt.index in missing]
            missing -= {row.prompt.index for row in new}
            records = [row.record() | {"id": work.ids[row.prompt.index]} for row in new]
            journal.append(records)
            progress.add(records)
    return len(missing)


class _Progress:
    """A progress bar of prompts, with tokens per second and the mean length of an answer."""

    def __init__(self, total: int, done: int, rank: int, world: int) -> None:
        name = "distill" if world == 1 else f"distill {rank}/{world}"
        self._bar = tqdm(total=total, initial=done, desc=name, unit="prompt", disable=rank > 0)
        self._counts = Counts()
        self._started = time.monotonic()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self._counts.add(record)
        tokens = self._counts.learned_tokens
        speed = tokens / (time.monotonic() - self._started)
        mean = tokens / max(1, self._counts.turns)
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s, {mean:.0f} tokens/answer", refresh=False)
        self._bar.update(len(records))

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _place() -> tuple[int, int]:
    check_environment(os.environ, has_gpu=torch.cuda.is_available())
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world:
        raise ValueError(
            f"RANK: expected 0 to WORLD_SIZE - 1 = {world - 1}, got {rank}; "
            "let torchrun or accelerate launch set both"
        )
    return rank, world


@contextmanager
def _open(out: Path, rank: int, world: int) -> Iterator[Journal]:
    """Make the folder and open this process's file, before anything is generated."""
    with _writable(out):
        out.mkdir(parents=True, exist_ok=True)
        journal = Journal(out, rank, world)
    with journal:
        yield journal


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a bare OSError does not say what the folder was wanted for
        raise ValueError(
            f"{out}: expected a folder that can be written, got {error}; choose another --out"
        ) from error


def _begin(out: Path, manifest: dict[str, Any], ids: Sequence[Id]) -> None:
    """Record which prompts are asked.

    Raises ValueError where the folder has answers to none of them: another --out was meant.
    """
    old = read_manifest(out) if (out / MANIFEST).is_file() else None
    if old is not None:
        refuse_other(out, old, manifest)  # once more: another process may have been faster
        was, now = old["prompts"]["count"], len(ids)
        if old["prompts"]["sha256"] != manifest["prompts"]["sha256"]:
            kept = len(locate(out, ids))
            if not kept and any(path.stat().st_size for path in journals(out)):
                raise ValueError(
                    f"{out}: expected some of the {was} prompts that it was begun with, got {now} "
                    "others; use another --out, or check --prompts"
                )
            logger.warning(
                "%s: the prompts have changed, from %d to %d; %d of them are answered already",
                *(out, was, now, kept),
            )
            old = None
    with _writable(out):
        write_ids(out, manifest, ids)
        if old is None:
            write_manifest(out, manifest)


def _finish(out: Path, manifest: dict[str, Any], ids: Sequence[Id]) -> tuple[Counts, bool]:
    """Write the manifest with what all processes have done; the last one to end finds it complete.

    Counted again after writing: another process may have ended in between, and the last manifest
    written must not be older than the last answer.
    """
    written: Counts | None = None
    while (counts := count(out, manifest)) != written:
        seen = counts.done + counts.skipped + counts.failed
        manifest["complete"] = seen == len(ids)
        manifest["counts"] = counts.numbers()
        write_manifest(out, manifest)
        written = counts
    return counts, manifest["complete"]


def _warn(report: DistillReport, options: DistillOptions) -> None:
    counts = report.counts
    if counts.cut > MANY_CUT * max(1, counts.documents):
        logger.warning(
            "%d of %d documents were cut at %d tokens or at the context's end and teach no ending; "
            "raise --max-new-tokens (and use another --out)",
            *(counts.cut, counts.documents, options.max_new_tokens),
        )
    if report.complete and not counts.done:
        logger.warning("no prompt was answered; the reasons are listed above")
