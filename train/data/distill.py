"""The target answers prompts; its own tokens become the training set.

`distill` fills a folder (see `draftheads.train.data.answers` for what is in it). Work is divided
into batches of consecutive prompts, numbered from 0. What a batch holds and what is drawn for it
depend on its number and the seed alone, so neither the number of processes nor an interruption
changes a single token. With RANK and WORLD_SIZE in the environment (torchrun, accelerate launch)
each process answers its share.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from tqdm import tqdm

from draftheads.train.data.answers import (
    MANIFEST,
    Answer,
    Counts,
    Journal,
    count,
    read_answers,
    read_manifest,
    write_manifest,
)
from draftheads.train.data.conversation import Conversation, Renderer
from draftheads.train.data.generate import Answerer, LocalAnswerer, Sampling
from draftheads.train.data.manifest import describe, refuse_other
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.turns import check_tools, with_tools

if TYPE_CHECKING:
    from draftheads.heads.target import Target

__all__ = ["Answer", "DistillOptions", "DistillReport", "distill", "read_answers", "read_manifest"]

MANY_CUT = 0.2
"""Share of answers ended by length above which the report warns."""
MAX_LOST_BATCHES = 3
"""Batches in a row without any answer after which the cause is not the prompts."""

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
    """What the folder holds when this process ends. seconds: wall time of this run."""

    out: Path
    prompts: int
    counts: Counts
    complete: bool
    seconds: float

    def __str__(self) -> str:
        counts = self.counts
        mean = counts.learned_tokens / max(1, counts.turns)
        lines = [
            f"{self.out}: {self.prompts} prompts = {counts.done} done + {counts.skipped} skipped "
            f"+ {counts.failed} failed"
            + ("" if self.complete else " + the rest not answered yet (other processes?)"),
            f"{counts.learned_tokens} tokens to learn in {counts.turns} answers, {mean:.1f} on "
            f"average; {counts.cut} cut by length; {self.seconds:.1f} s",
        ]
        if counts.documents > counts.done:
            why = "as the chat template rewrites earlier turns"
            lines.append(f"{counts.done} conversations became {counts.documents} documents, {why}")
        if counts.retokenized:
            lines.append(f"{counts.retokenized} answers came as text and were tokenised here")
        return "\n".join(lines + [f"  {number} {why}" for why, number in counts.reasons.items()])


def distill(
    target: Target | Answerer, prompts: Sequence[Prompt], options: DistillOptions
) -> DistillReport:
    """Let the target answer the prompts and store its tokens in `options.out`, or go on with it.

    Learned is what the target writes, thoughts included unless `options.reasoning` says otherwise;
    tool calls and results of the prompts are context. target: in this process, or a
    `ServedTarget`. Raises ValueError when the folder belongs to other options or cannot be written,
    and for prompts with tool calls that the chat template does not show; OSError when a server goes
    away. After these and a KeyboardInterrupt everything answered so far is kept.
    """
    started = time.monotonic()
    rank, world = _place()
    answerer = target if isinstance(target, Answerer) else LocalAnswerer(target)
    renderer = Renderer(answerer, options.template_args)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(renderer.tokenizer, options.template_args)
    manifest = describe(answerer.origin(), prompts, options)
    journal = _open(options.out, manifest, rank, world)
    work = _Work(answerer, renderer, prompts, options)
    with journal:
        try:
            _answer_missing(work, journal, manifest, (rank, world))
        except KeyboardInterrupt:  # only to say how to go on
            logger.warning("%s: interrupted; run the same command again to go on", options.out)
            raise
    counts, complete = _finish(options.out, manifest)
    report = DistillReport(options.out, len(prompts), counts, complete, time.monotonic() - started)
    print(report)
    _warn(report, options)
    return report


@dataclass(frozen=True)
class _Work:
    answerer: Answerer
    renderer: Renderer
    prompts: Sequence[Prompt]
    options: DistillOptions

    def batch(self, number: int) -> list[Conversation]:
        size = self.options.batch_size
        choices = self.options.max_turns, self.options.reasoning
        return [
            Conversation(prompt, self.renderer, self.answerer.context, *choices)
            for prompt in self.prompts[number * size : (number + 1) * size]
        ]


def _answer_missing(
    work: _Work, journal: Journal, manifest: dict[str, Any], place: tuple[int, int]
) -> None:
    rank, world = place
    size = work.options.batch_size
    there = count(work.options.out, manifest).batches
    mine = range(rank, -(-len(work.prompts) // size), world)
    sizes = {number: len(work.prompts[number * size : (number + 1) * size]) for number in mine}
    done = sum(sizes[number] for number in mine if number in there)
    missing = ((number, work.batch(number)) for number in mine if number not in there)
    answers = work.answerer.answer(missing, work.options, work.options.seed)
    lost: list[int] = []
    with _Progress(sum(sizes.values()), done, rank, world) as progress, closing(answers):
        for conversations, error in answers:
            answered = any(row.answered for row in conversations)
            lost = [] if answered or error is None else [*lost, journal.tell()]
            if error is not None and len(lost) == MAX_LOST_BATCHES:
                journal.cut(lost[0])  # what broke is not these prompts: ask them again next time
                raise error
            records = [row.record() for row in conversations]
            journal.append(records)
            progress.add(records)


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
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world:
        raise ValueError(
            f"RANK: expected 0 to WORLD_SIZE - 1 = {world - 1}, got {rank}; "
            "let torchrun or accelerate launch set both"
        )
    return rank, world


def _open(out: Path, manifest: dict[str, Any], rank: int, world: int) -> Journal:
    """Make or check the folder and open this process's file, before anything is generated."""
    if (out / MANIFEST).is_file():
        refuse_other(out, read_manifest(out), manifest)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / MANIFEST).is_file():
            write_manifest(out, manifest)
        return Journal(out, rank, world, manifest)
    except OSError as error:  # a bare OSError does not say what the folder was wanted for
        raise ValueError(
            f"{out}: expected a folder that can be written, got {error}; choose another --out"
        ) from error


def _finish(out: Path, manifest: dict[str, Any]) -> tuple[Counts, bool]:
    """Write the manifest with what all processes have done; the last one to end finds it complete.

    Counted again after writing: another process may have ended in between, and the last manifest
    written must not be older than the last answer.
    """
    written: Counts | None = None
    while (counts := count(out, manifest)) != written:
        prompts, size = manifest["prompts"]["count"], manifest["batch_size"]
        complete = len(counts.batches) == -(-prompts // size)
        seen = counts.done + counts.skipped + counts.failed
        assert not complete or seen == prompts, f"{seen} outcomes for {prompts} prompts"
        manifest["complete"] = complete
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
