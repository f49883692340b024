"""The target answers prompts; its own tokens become the training set.

`distill` fills a folder (its files: `draftheads.train.data.answers`). A prompt's random numbers
depend on the prompt and the seed alone, so that neither the prompts beside it, nor draft heads, nor
the number of processes, nor an interruption changes its answer, but where the rounding of logits
decides. With RANK and WORLD_SIZE in the environment (torchrun, accelerate launch) the processes
share the prompts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tqdm import tqdm

from draftheads.heads.files import write_text
from draftheads.heads.tensors import dtype_name
from draftheads.heads.terminal import printable, progress_bar
from draftheads.infer.accept import LEAST_TEMPERATURE
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer
from draftheads.train.data.answers import (
    MANIFEST,
    Counts,
    Entry,
    Journal,
    Manifest,
    Record,
    answered,
    columns,
    count,
    delete_records,
    finish,
    finished,
    ids_file,
    journals,
    new_manifest,
    read_manifest,
    set_aside,
    write_manifest,
)
from draftheads.train.data.conversation import Conversation, Part, check_tools
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.text_side import TextSide
from draftheads.train.launch import check_environment

if TYPE_CHECKING:
    from draftheads.heads.target.model import Target

MANY_CUT = 0.2
"""Share of documents cut by length above which the report gives advice."""
PROBE = "It's 1,234.5  \n\tna\u00efve \u6771\u4eac \u041f\u0440\u0438 \U0001f642 def f(x):\n  x**2"
"""A text that tokenizers divide in many ways."""
MAX_LOST_BATCHES = 3
"""Consecutive batches of prompts without any answer after which the cause is not the prompts."""
MAX_EMPTY = 8
"""Consecutive prompts with empty answers alone, after which the server is the cause."""
UNRECORDED = {"out", "batch_size", "seed", "source"}
"""Options that the manifest records elsewhere, or not at all."""

logger = logging.getLogger("draftheads")

Answered = tuple[Conversation, Exception | None]


class AnswerSampling(BaseModel):
    """How the target's tokens are sampled."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.3, ge=0, allow_inf_nan=False)  # 0 is greedy
    top_p: float = Field(1.0, gt=0, le=1)  # probability mass kept; 1 keeps all
    top_k: int = Field(0, ge=0)  # tokens kept; 0 keeps all
    max_new_tokens: int = Field(512, ge=1)  # per answer, end token included
    seed: int = 0

    def seed_of(self, row: Conversation) -> str:
        """Seed of a conversation's next answer."""
        return f"{self.seed}/{row.name}/{len(row.answers)}"

    @field_validator("temperature")
    @classmethod
    def _is_greedy_or_sampled(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:  # logits would overflow
            raise ValueError(f"expected 0 (greedy) or {LEAST_TEMPERATURE} and more")
        return temperature


class DistillOptions(AnswerSampling):
    """Options of `draftheads distill`, except the target and the prompts."""

    out: Path  # folder to write; an unfinished one is resumed
    batch_size: int = Field(32, ge=1)  # prompts answered together
    template_args: dict[str, Any] = {}  # chat template variables
    reasoning: Part = "keep"  # "drop": it is context, not learned; "only": the answer is
    source: str = ""  # where the prompts came from; for the manifest


@dataclass(frozen=True)
class DistillReport:
    """State of the folder when this process ends."""

    out: Path
    prompts: int
    counts: Counts
    missing: int  # prompts of this process's share that its server failed to answer
    seconds: float
    others: int = 0  # processes of this launch that were still answering

    @property
    def open(self) -> int:
        """Prompts of all processes that were neither answered nor refused."""
        return self.prompts - self.counts.done - self.counts.skipped - self.counts.failed

    @property
    def complete(self) -> bool:
        """Whether all prompts of all processes were answered or refused."""
        return self.open == 0

    def __str__(self) -> str:
        lines = self._lines()
        if self.others:
            lines = [
                f"{self.out}: this process has no more prompts, {self.others} still answer theirs; "
                "the last one reports"
            ]
        if self.missing:
            lines.append(
                f"the server failed on {self.missing} prompts; run the same command again to retry"
            )
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        """What the folder holds."""
        counts = self.counts
        learned, _, *reasons = counts.lines()
        lines = [
            f"{self.out}: {self.prompts} prompts = {counts.done} done + {counts.skipped} skipped "
            f"+ {counts.failed} failed" + (f" + {self.open} not answered yet" if self.open else ""),
            f"{learned}; {self.seconds:.1f} s",
        ]
        if counts.cut > MANY_CUT * max(1, counts.documents):
            lines.append(
                f"{counts.cut} of {counts.documents} documents were cut and teach no ending; "
                "raise --max-new-tokens (with another --out)"
            )
        if counts.retokenized:
            lines.append(f"{counts.retokenized} answers came as text and were tokenized here")
        return lines + reasons


class EmptyAnswer(OSError):
    """A server answered with no text at all."""


class Answerer(ABC):
    """Answers prompts. context: length of prompt and answer in tokens."""

    def __init__(self, side: Target | TextSide, context: int) -> None:
        self.side = side
        self.context = context

    @abstractmethod
    def origin(self) -> Entry:
        """The manifest's entry for the target."""

    @abstractmethod
    def answer(
        self,
        rows: Iterable[Conversation],
        sampling: AnswerSampling,
    ) -> Generator[Answered]:
        """Answer all turns of the conversations, in place.

        Yields each finished conversation, with the last error of a prompt that could not be
        answered, or None. Those that failed for a reason other than their prompt are not yielded.
        """


class LocalAnswerer(Answerer):
    """The target in this process, with or without draft heads, which change no answer.

    rows: prompts answered together.
    """

    def __init__(self, engine: Speculator, rows: int = 32) -> None:
        super().__init__(engine.target, engine.target.context)
        self._engine = engine
        self._rows = rows

    def origin(self) -> Entry:
        """The target's name, revision, LoRA, fingerprint and dtype."""
        target = self._engine.target
        return {
            "name": str(target.name),
            "revision": target.revision,
            "lora": target.lora,
            "fingerprint": target.fingerprint(),
            "dtype": dtype_name(target.model.dtype),
        }

    def answer(
        self,
        rows: Iterable[Conversation],
        sampling: AnswerSampling,
    ) -> Generator[Answered]:
        """Answer as many conversations at a time as there are rows."""
        accept = checked(sampling.temperature, sampling.top_p, sampling.top_k)
        asking: dict[Request, Conversation] = {}
        asked = deque[Conversation]()  # with their next question
        ended: list[Answered] = []  # without an answer
        new = iter(rows)

        def take() -> Request | None:
            while not asked:
                row = next(new, None)
                if row is None:
                    return None
                if row.ask():
                    asked.append(row)
                else:
                    ended.append((row, None))
            row = asked.popleft()
            limit = min(sampling.max_new_tokens, self.context - len(row.tokens))
            request = Request(row.tokens, limit, sampling.seed_of(row))
            asking[request] = row
            return request

        for request, ids, error in answer_all(self._engine, accept, self._rows, take):
            row = asking.pop(request)
            if error is None:
                row.answer(ids)
                if row.ask():
                    asked.append(row)
                    continue
            else:  # this prompt is lost, the run is not
                reason = str(error).splitlines()[0][:200]
                row.end("failed", f"{type(error).__name__}: {reason}")
            yield row, error
            yield from ended
            ended.clear()
        yield from ended


def distill(
    target: Target | Answerer, prompts: Sequence[Prompt], options: DistillOptions
) -> DistillReport:
    """Answer the prompts and store the target's tokens in `options.out`, or resume that folder.

    target: in this process, or a `ServedTarget`. Raises ValueError without prompts, for a folder of
    other options or one that another launch writes to, and for tool calls that the chat template
    does not render; OSError if the folder cannot be written or a server goes away. After these and
    a KeyboardInterrupt everything answered so far is kept.
    """
    started = time.monotonic()
    check_environment(os.environ, has_gpu=torch.cuda.is_available())
    answerer = target
    if not isinstance(answerer, Answerer):
        answerer = LocalAnswerer(Speculator(answerer), options.batch_size)
    renderer = PromptRenderer(answerer.side, options.template_args)
    check_tools(renderer, prompts)
    names, sha256 = _identify(prompts)
    manifest = _begin(answerer, renderer, names, sha256, options)
    missing = set[int]()
    others = 0
    if not finished(options.out, manifest):
        with Journal(options.out, *_launched()) as journal:
            write_text(ids_file(options.out, manifest), "".join(f"{name}\n" for name in names))
            write_manifest(options.out, manifest)
            missing = _answer(answerer, renderer, prompts, names, options, journal)
        others = journal.others
    counts = Counts() if others else finish(options.out, manifest)
    seconds = time.monotonic() - started
    report = DistillReport(options.out, len(prompts), counts, len(missing), seconds, others)
    print(printable(str(report)))
    return report


def _launched() -> tuple[int, int]:
    """Rank and number of the processes."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _answer(
    answerer: Answerer,
    renderer: PromptRenderer,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    options: DistillOptions,
    journal: Journal,
) -> set[int]:
    """Store the answers to this process's part of the prompts that have none; returns the places
    of those that its server failed on.
    """
    rank, world = _launched()
    stored = set(answered(options.out, names))
    mine = [place for place in range(rank, len(prompts), world) if place not in stored]
    missing = set(mine)
    rows = (
        Conversation(
            prompts[place],
            renderer,
            answerer.context,
            reasoning=options.reasoning,
            name=names[place],
        )
        for place in mine
    )
    patience = MAX_LOST_BATCHES * options.batch_size
    if not stored:
        patience = max(1, min(patience, len(mine)))
    answers = answerer.answer(rows, options)
    bar = progress_bar(total=len(mine), desc="distill", unit="prompt", disable=rank > 0)
    try:
        with bar, closing(answers):
            _store(answers, journal, missing, patience, bar)
    except KeyboardInterrupt:
        logger.warning("%s: interrupted; run the same command again to resume", options.out)
        raise
    return missing


def _identify(prompts: Sequence[Prompt]) -> tuple[list[str], str]:
    """The ids of prompts, hashes of their content, numbered if several are equal; a hash of all."""
    seen = Counter[str]()
    names = []
    together = hashlib.sha256()
    for prompt in prompts:
        parts = [prompt.messages, prompt.text, *filter(None, [prompt.template_args])]
        content = json.dumps(parts).encode()
        together.update(content + b"\n")
        name = hashlib.sha256(content).hexdigest()[:32]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names, together.hexdigest()


def _text_identity(renderer: PromptRenderer) -> dict[str, str]:
    """What makes token ids of prompts and ends answers, as digests. By what a tokenizer does, not
    by its files, which other versions of the same library write differently.
    """
    tokenizer = renderer.tokenizer
    template = [tokenizer.chat_template, tokenizer.special_tokens_map]
    ids = [tokenizer(PROBE)["input_ids"], renderer.encode(PROBE)]
    words = sorted(tokenizer.get_vocab().items())
    return {
        "chat template": _digest(template),
        "tokenizer": _digest([ids, words]),
        "end tokens": ", ".join(map(str, sorted(renderer.eos_ids))),
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:12]


def _begin(
    answerer: Answerer,
    renderer: PromptRenderer,
    names: Sequence[str],
    sha256: str,
    options: DistillOptions,
) -> Manifest:
    """The manifest of this distillation, after checking that it may write to `options.out`.

    Damaged files of a finished folder are set aside. Raises ValueError without prompts, and for a
    folder of other options (the message names each difference) or of other prompts only: another
    --out was meant.
    """
    if not names:
        raise ValueError("prompts: expected at least one, got none; check --prompts")
    out = options.out
    manifest = new_manifest(
        answerer.origin(),
        options.model_dump(mode="json", exclude=UNRECORDED),
        {"source": options.source, "count": len(names), "sha256": sha256},
        seed=options.seed,
        batch_size=options.batch_size,
        text=_text_identity(renderer),
    )
    if not (out / MANIFEST).is_file():
        return manifest
    old = read_manifest(out)
    _check_options(out, old, manifest)
    set_aside(out, old)
    if old.prompts.sha256 != sha256:
        _note_other_prompts(out, old.prompts.count, names)
    return manifest


def _check_options(out: Path, old: Manifest, manifest: Manifest) -> None:
    """Raise ValueError, naming each difference, if a folder has answers by other options; without
    any, remove what is left of them.
    """
    before = _settings(old)
    now = _settings(manifest)
    changes = [key for key, value in now.items() if before.get(key) != value]
    if changes and count(out, old).done:
        listed = [f"{key}: expected {before.get(key)!r}, got {now[key]!r}" for key in changes]
        raise ValueError(
            f"{out} was begun with other options (target {old.target.name}, prompts "
            f"{old.prompts.source or 'unnamed'}): {'; '.join(listed)}. "
            "Use another --out, or the same options to resume"
        )
    if changes:
        delete_records(out)  # nothing is lost; a template may be mended that refused all prompts


def _note_other_prompts(out: Path, count_before: int, names: Sequence[str]) -> None:
    """Log how many of the prompts are answered already. Raises ValueError if none of those that the
    folder was begun with is left.
    """
    number = len(answered(out, names))
    if not number and (columns(out) or any(b"\n" in path.read_bytes() for path in journals(out))):
        raise ValueError(
            f"{out}: expected some of the {count_before} prompts that it was begun with, got "
            f"{len(names)} others; use another --out, or check --prompts"
        )
    logger.warning(
        "%s: the prompts have changed, from %d to %d; %d of them are answered already",
        *(out, count_before, len(names), number),
    )


def _settings(manifest: Manifest) -> Entry:
    """Everything that changes answers and must stay equal when a folder is resumed."""
    target = manifest.target
    source = "this process"
    if server := target.server:  # its address may change, its model may not
        source = (
            f"a server with model {server.model}, context {server.context}, target {target.name}"
        )
    return {
        "answers come from": source,
        "seed": manifest.seed,
        **manifest.sampling.model_dump(exclude_unset=True),
        "target fingerprint": target.fingerprint,
        "target dtype": target.dtype,
        **manifest.text,
    }


def _store(
    answers: Iterable[Answered],
    journal: Journal,
    missing: set[int],
    patience: int,
    bar: tqdm[Any],
) -> None:
    """Append answers as they arrive, and remove their prompts from `missing`.

    Raises the answerer's error after `patience` consecutive prompts without an answer. Their lines
    are not written, as these prompts are not the cause.
    """
    lost = 0
    held = list[Record]()
    for row, error in answers:
        held.append(row.record())
        if error is not None and not row.has_text:
            lost += 1
            if lost >= (min(patience, MAX_EMPTY) if isinstance(error, EmptyAnswer) else patience):
                raise error
        else:
            journal.append(held)
            lost = 0
            held = []
        missing.discard(row.prompt.index)
        bar.update()
    journal.append(held)
