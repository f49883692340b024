"""Batches of conversations answered by the target's own `generate`, repeatable from seeds.

Each row draws from a seed of its own, so what is drawn for a prompt does not depend on the prompts
that it is answered with.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from draftheads.infer.accept import filtered_logits
from draftheads.infer.engine import without_defaults
from draftheads.train.data.answers import (
    BY_CONTENT,
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
from draftheads.train.data.prompts import Prompt, check_tools, with_tools
from draftheads.train.launch import check_environment

if TYPE_CHECKING:
    from draftheads.heads.target import Target


class Sampling(BaseModel):
    """How the target's tokens are drawn."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.3, ge=0, description="softmax temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass kept; 1 keeps all")
    top_k: int = Field(0, ge=0, description="tokens kept; 0 keeps all")
    max_new_tokens: int = Field(512, ge=1, description="tokens per answer, end token included")


Answered = tuple[list[Conversation], Exception | None]


class Answerer(ABC):
    """Who answers. eos_ids: what ends an answer; context: tokens that fit; together: answers of one
    batch are computed together, so rounding may make one depend on another.
    """

    together = True

    def __init__(self, name: str, tokenizer: Any, eos_ids: tuple[int, ...], context: int) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.context = context

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What a manifest says of it."""

    @abstractmethod
    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Ask and answer all turns of the batches' conversations, in place.

        seeds: by the prompts' indices. Yields conversations when they are done, with the last error
        of a prompt that could not be answered, or None. Those that nobody could be asked are left
        out.
        """


class LocalAnswerer(Answerer):
    """The target, in this process."""

    def __init__(self, target: Target) -> None:
        super().__init__(str(target.name), target.tokenizer, target.eos_ids, target.context)
        self._target = target

    def origin(self) -> dict[str, Any]:
        """Name, and what tells these weights from others."""
        return {
            "name": self.name,
            "revision": self._target.revision,
            "fingerprint": self._target.fingerprint(),
            "dtype": str(self._target.model.dtype).removeprefix("torch."),
        }

    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """One batch after the other."""
        for rows in batches:
            yield rows, answer_batch(self._target, rows, sampling, seeds)


def answer_batch(
    target: Target, conversations: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
) -> RuntimeError | None:
    """Ask and answer all turns of the conversations, in place.

    seeds: as of `Answerer.answer`; the same seeds, conversations and machine give the same tokens.
    Returns the last error of a prompt that could not be answered even alone, or None.
    """
    error: RuntimeError | None = None
    turn = 0
    while rows := [row for row in conversations if row.ask()]:
        drawn = [f"{seeds[row.prompt.index]}/{turn}" for row in rows]
        try:
            answers = generate(target, [row.tokens for row in rows], sampling, drawn)
        except RuntimeError:  # out of memory, most often from one long prompt: spare the others
            _free_memory()
            error = _answer_alone(target, rows, sampling, drawn) or error
        else:
            for row, ids in zip(rows, answers, strict=True):
                row.answer(ids)
        turn += 1
    return error


def _answer_alone(
    target: Target, rows: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
) -> RuntimeError | None:
    last: RuntimeError | None = None
    for row, seed in zip(rows, seeds, strict=True):
        try:
            [ids] = generate(target, [row.tokens], sampling, [seed])
        except RuntimeError as error:  # the second time: this prompt is lost, the run is not
            _free_memory()
            row.end("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            last = error
        else:
            row.answer(ids)
    return last


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[str]
) -> list[list[int]]:
    """The target's continuations, each ending with its end token or at the length limit.

    seeds: one per prompt. A row never leaves the context: rows with a similar room left are
    generated together, and the smallest room limits them all, so a row loses at most half of its
    room to its neighbours.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    rooms = [min(sampling.max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    for row, room in enumerate(rooms):
        assert room > 0, "prompts that do not fit are skipped before"
        groups[0 if room == sampling.max_new_tokens else room.bit_length()].append(row)
    answers: list[list[int]] = [[] for _ in prompts]
    for _, group in sorted(groups.items()):
        limit = min(rooms[row] for row in group)
        draws = _Draws(sampling, [seeds[row] for row in group], limit)
        new_BT = _generate(target, [prompts[row] for row in group], draws, limit)
        for row, ids in zip(group, new_BT.tolist(), strict=True):
            answers[row] = until_end(ids, target.eos_ids)
    return answers


class _Draws(LogitsProcessor):  # type: ignore[misc]
    """Draws each row's next tokens by numbers of its own: only the drawn token keeps its logit, so
    that `generate`'s argmax takes it. Raises RuntimeError for logits that are not numbers.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[str], limit: int) -> None:
        self._sampling = sampling
        self._step = 0
        generators = [
            torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
            )
            for seed in seeds
        ]
        self._uniform_BT = torch.stack(
            [torch.rand(limit, generator=one, dtype=torch.float64) for one in generators]
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return scores
        chosen = self._sampling.temperature, self._sampling.top_p, self._sampling.top_k
        below_BV = filtered_logits(scores, *chosen).double().softmax(-1).cumsum(-1)
        total_B1 = below_BV[:, -1:]
        if not total_B1.isfinite().all():
            raise RuntimeError("the target's logits are not finite")
        self._uniform_BT = self._uniform_BT.to(scores.device)
        uniform_B1 = self._uniform_BT[:, self._step, None]
        self._step += 1
        drawn_B1 = torch.searchsorted(below_BV, uniform_B1 * total_B1, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn_B1, 0.0)


def _generate(
    target: Target, prompts: Sequence[Sequence[int]], draws: _Draws, limit: int
) -> Tensor:
    width = max(map(len, prompts))
    pad = target.eos_ids[0] if target.eos_ids else 0
    tokens_BT = torch.full((len(prompts), width), pad)
    mask_BT = torch.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=pad,
    )
    with without_defaults(target):
        out_BT = target.model.generate(
            tokens_BT.to(target.device),
            attention_mask=mask_BT.to(target.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([draws]),
        )
    new_BT: Tensor = out_BT[:, width:]
    return new_BT


def until_end(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """Up to and including the first end token; what follows is padding."""
    end = next((place for place, token in enumerate(ids) if token in eos_ids), len(ids))
    return ids[: end + 1]


# What a distillation was begun with, and whether a call resumes just that.


BEFORE = {"reasoning": "keep"}
"""What folders that do not record these options were made with."""


def identify(prompts: Sequence[Prompt]) -> list[str]:
    """An id for each prompt: a hash of what it says, numbered where several are equal."""
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.sha256(_said(prompt)).hexdigest()[:32]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def _said(prompt: Prompt) -> bytes:
    return json.dumps([prompt.messages, prompt.text]).encode()


def describe(
    origin: dict[str, Any], prompts: Sequence[Prompt], options: DistillOptions
) -> dict[str, Any]:
    """The manifest of a distillation that begins. origin: of who answers, see `Answerer.origin`.

    Raises ValueError for no prompts, or prompts that are not numbered from 0.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, got none; check --prompts")
    if [prompt.index for prompt in prompts] != list(range(len(prompts))):
        raise ValueError("prompts: expected the indices 0, 1, 2, ...; use read_prompts")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_said(prompt) + b"\n")
    packages = ("draftheads", "torch", "transformers", "tokenizers")
    sampling = {"temperature", "top_p", "top_k", "max_new_tokens", "max_turns", "template_args"}
    sampling |= set(BEFORE)
    return {
        "format": BY_CONTENT,
        "target": origin,
        "sampling": options.model_dump(mode="json", include=sampling),
        "seed": options.seed,
        "batch_size": options.batch_size,
        "prompts": {
            "source": options.source,
            "count": len(prompts),
            "sha256": digest.hexdigest(),
        },
        "complete": False,
        "counts": {},
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def refuse_other(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError, naming each difference between two manifests that would change answers.

    Prompts may differ, except in folders of format 1, which know them by their numbers.
    """
    was_by, now_by = _answered_by(old["target"]), _answered_by(new["target"])
    pairs = [("answers come from", was_by, now_by), ("seed", old["seed"], new["seed"])]
    was = BEFORE | old["sampling"]
    pairs += [(key, was.get(key), value) for key, value in new["sampling"].items()]
    if was_by == now_by:
        pairs += _differing(old, new, "target", ("fingerprint", "dtype"))
    if old["format"] == FORMAT:
        pairs += _differing(old, new, "prompts", ("count", "sha256"))
    different = [f"{key}: expected {was!r}, got {now!r}" for key, was, now in pairs if was != now]
    if different:
        raise ValueError(
            f"{out} was begun with other options (target {old['target']['name']}, prompts "
            f"{old['prompts']['source'] or 'unnamed'}): {'; '.join(different)}. "
            "Use another --out, or the same options to resume"
        )


def _answered_by(target: dict[str, Any]) -> str:
    """A server's address is left out: it may move, its model may not."""
    server = target.get("server")
    if server is None:
        return "this process"
    return (
        f"a server with model {server['model']}, context {server['context']}, target "
        f"{target['name']}"
    )


def _differing(
    old: dict[str, Any], new: dict[str, Any], part: str, keys: tuple[str, ...]
) -> list[tuple[str, Any, Any]]:
    return [(f"{part} {key}", old[part][key], new[part][key]) for key in keys]


# The target answers prompts; its own tokens become the training set.
#
# `distill` fills a folder (see `draftheads.train.data.answers` for what is in it). Prompts are
# known by what they say, and what is drawn for one depends on that and the seed alone. They are
# answered in batches of consecutive ones; a batch that an interruption left unfinished is answered
# again as a whole, so neither the number of processes nor an interruption changes a single token.
# With RANK and WORLD_SIZE in the environment (torchrun, accelerate launch) each process answers
# its share.


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
