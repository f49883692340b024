"""The target answers prompts; its own tokens become the training set.

`distill` fills a folder (its files: `draftheads.train.data.answers`). What is drawn for a prompt
depends on the prompt and the seed alone. Prompts are answered in batches of consecutive ones; an
interrupted batch is answered again as a whole, so neither the number of processes nor an
interruption changes a token. With RANK and WORLD_SIZE in the environment (torchrun, accelerate
launch) each process answers its share.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
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
    FORMAT,
    MANIFEST,
    Counts,
    Id,
    Journal,
    count,
    journals,
    locate,
    new_manifest,
    read_manifest,
    write_ids,
    write_manifest,
)
from draftheads.train.data.conversation import Conversation, Renderer, TextSide, turns_of
from draftheads.train.data.prompts import Prompt, check_tools, with_tools
from draftheads.train.launch import check_environment

if TYPE_CHECKING:
    from draftheads.heads.target import Target

MANY_CUT = 0.2
"""Share of documents cut by length above which the user is warned."""
MAX_LOST_BATCHES = 3
"""Batches of prompts in a row without any answer after which the cause is not the prompts."""
UNRECORDED = {"out", "batch_size", "seed", "source"}
"""Options that a manifest has elsewhere, or not at all."""

logger = logging.getLogger("draftheads")

Answered = tuple[list[Conversation], Exception | None]


class Sampling(BaseModel):
    """How the target's tokens are drawn."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.3, ge=0, description="softmax temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass kept; 1 keeps all")
    top_k: int = Field(0, ge=0, description="tokens kept; 0 keeps all")
    max_new_tokens: int = Field(512, ge=1, description="tokens per answer, end token included")


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
        "keep", description="<think> ... </think> that opens answers: learned, or context alone"
    )
    source: str = Field("", description="where the prompts came from; for the manifest")


@dataclass(frozen=True)
class DistillReport:
    """What the folder holds when this process ends."""

    out: Path
    prompts: int
    counts: Counts
    missing: int  # prompts of this process's share that its server failed to answer
    complete: bool  # every prompt of all processes was answered or refused
    seconds: float

    def __str__(self) -> str:
        counts = self.counts
        rest = self.prompts - counts.done - counts.skipped - counts.failed
        left = f" + {rest} not answered yet, by other processes" if rest else ""
        if self.missing:
            why = "as the server failed; run the same command again to ask them again"
            left = f" + {rest} not answered, {why}"
        mean = counts.learned_tokens / max(1, counts.turns)
        lines = [
            f"{self.out}: {self.prompts} prompts = {counts.done} done + {counts.skipped} skipped "
            f"+ {counts.failed} failed{left}",
            f"{counts.learned_tokens} tokens to learn in {counts.turns} answers, {mean:.1f} on "
            f"average; {counts.cut} cut by length; {self.seconds:.1f} s",
        ]
        if counts.documents > counts.done:
            why = "as the chat template rewrites earlier turns"
            lines.append(f"{counts.done} conversations became {counts.documents} documents, {why}")
        if counts.retokenized:
            lines.append(f"{counts.retokenized} answers came as text and were tokenised here")
        return "\n".join(lines + [f"  {number} {why}" for why, number in counts.reasons.items()])


class Answerer(ABC):
    """Who answers. together: answers of one batch are computed together, so rounding may make one
    depend on another. context: tokens that fit.
    """

    together = True

    def __init__(self, side: Target | TextSide, context: int) -> None:
        self.side = side
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
        of a prompt that could not be answered, or None. Conversations that failed for no fault of
        theirs are not yielded.
        """


class LocalAnswerer(Answerer):
    """The target, in this process."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, target.context)
        self._target = target

    def origin(self) -> dict[str, Any]:
        """Name, and what tells these weights from others."""
        return {
            "name": str(self._target.name),
            "revision": self._target.revision,
            "fingerprint": self._target.fingerprint(),
            "dtype": str(self._target.model.dtype).removeprefix("torch."),
        }

    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """One batch after the other."""
        for batch in batches:
            error: RuntimeError | None = None
            while rows := [row for row in batch if row.ask()]:
                try:
                    self._answer_turn(rows, sampling, seeds)
                except RuntimeError:  # out of memory, most often from one long prompt
                    for row in rows:
                        error = self._answer_alone(row, sampling, seeds) or error
            yield batch, error

    def _answer_turn(
        self, rows: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
    ) -> None:
        drawn = [f"{seeds[row.prompt.index]}/{len(row.answers)}" for row in rows]
        answers = generate(self._target, [row.tokens for row in rows], sampling, drawn)
        for row, ids in zip(rows, answers, strict=True):
            row.answer(ids)

    def _answer_alone(
        self, row: Conversation, sampling: Sampling, seeds: Sequence[str]
    ) -> RuntimeError | None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            self._answer_turn([row], sampling, seeds)
        except RuntimeError as error:  # this prompt is lost, the run is not
            row.end("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            return error
        return None


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
    that `generate`'s argmax takes it. Raises RuntimeError for logits that are not finite.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[str], limit: int) -> None:
        self._sampling = sampling
        self._step = 0
        rows = []
        for seed in seeds:
            number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
            generator = torch.Generator().manual_seed(number)
            rows.append(torch.rand(limit, generator=generator, dtype=torch.float64))
        self._uniform_BT = torch.stack(rows)

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


def distill(
    target: Target | Answerer, prompts: Sequence[Prompt], options: DistillOptions
) -> DistillReport:
    """Let the target answer the prompts and store its tokens in `options.out`, or resume that.

    target: in this process, or a `ServedTarget`. Raises ValueError when the folder belongs to other
    options or another process, and for prompts with tool calls that the chat template does not
    show; OSError when the folder cannot be written or a server goes away. After these and a
    KeyboardInterrupt everything answered so far is kept.
    """
    started = time.monotonic()
    check_environment(os.environ, has_gpu=torch.cuda.is_available())
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    answerer = target if isinstance(target, Answerer) else LocalAnswerer(target)
    renderer = Renderer(answerer.side, options.template_args)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(renderer.tokenizer, options.template_args)
    manifest = _describe(answerer.origin(), prompts, options)
    names = _identify(prompts)
    ids: Sequence[Id] = range(len(prompts)) if manifest["format"] == FORMAT else names

    def conversation(place: int) -> Conversation:
        turns = turns_of(prompts[place])[: options.max_turns]
        context, reasoning = answerer.context, options.reasoning
        return Conversation(prompts[place], renderer, context, turns, reasoning)

    options.out.mkdir(parents=True, exist_ok=True)
    with Journal(options.out, rank, world) as journal:
        _begin(options.out, manifest, ids)
        size, there = options.batch_size, locate(options.out, ids).keys()
        starts = range(rank * size, len(prompts), world * size)
        batches = [range(start, min(start + size, len(prompts))) for start in starts]
        total = sum(map(len, batches))
        asked = [[place for place in batch if place not in there] for batch in batches]
        missing = set(itertools.chain.from_iterable(asked))
        if answerer.together:  # what is there is computed again, so that rounding is equal
            asked = [list(batch) for batch in batches if not missing.isdisjoint(batch)]
        patience = MAX_LOST_BATCHES * size if there else min(MAX_LOST_BATCHES * size, len(missing))
        rows = ([conversation(place) for place in batch] for batch in asked)
        answers = answerer.answer(rows, options, [f"{options.seed}/{name}" for name in names])
        done = total - len(missing)
        bar = tqdm(total=total, initial=done, desc="distill", unit="prompt", disable=rank > 0)
        try:
            with bar, closing(answers):
                _store(answers, journal, ids, missing, patience, bar)
        except KeyboardInterrupt:  # only to say how to resume
            logger.warning("%s: interrupted; run the same command again to resume", options.out)
            raise
        counts = _finish(options.out, manifest, ids)
    seconds = time.monotonic() - started
    complete = manifest["complete"]
    report = DistillReport(options.out, len(prompts), counts, len(missing), complete, seconds)
    print(report)
    if counts.cut > MANY_CUT * max(1, counts.documents):
        logger.warning(
            "%d of %d documents were cut at %d tokens or at the context's end and teach no ending; "
            "raise --max-new-tokens (and use another --out)",
            *(counts.cut, counts.documents, options.max_new_tokens),
        )
    return report


def _said(prompt: Prompt) -> bytes:
    return json.dumps([prompt.messages, prompt.text]).encode()


def _identify(prompts: Sequence[Prompt]) -> list[str]:
    """An id for each prompt: a hash of its content, numbered where several are equal."""
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.sha256(_said(prompt)).hexdigest()[:32]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def _describe(
    origin: dict[str, Any], prompts: Sequence[Prompt], options: DistillOptions
) -> dict[str, Any]:
    """The manifest of a distillation that begins or, if it belongs to this one, resumes a folder's.

    Raises ValueError without prompts, and for a folder that was begun with other options.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, got none; check --prompts")
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_said(prompt) + b"\n")
    manifest = new_manifest(
        origin,
        options.model_dump(mode="json", exclude=UNRECORDED),
        {"source": options.source, "count": len(prompts), "sha256": digest.hexdigest()},
        seed=options.seed,
        batch_size=options.batch_size,
    )
    if (options.out / MANIFEST).is_file():
        old = read_manifest(options.out)
        _refuse_other(options.out, old, manifest)
        manifest["format"] = old["format"]
    return manifest


def _refuse_other(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError, naming each difference between two manifests that would change answers.

    Prompts may differ, except in folders of format 1, which know them by their numbers.
    """
    by_number = old["format"] == FORMAT
    was, now = _identity(old, by_number), _identity(new, by_number)
    different = [
        f"{key}: expected {was.get(key)!r}, got {value!r}"
        for key, value in now.items()
        if was.get(key) != value
    ]
    if different:
        raise ValueError(
            f"{out} was begun with other options (target {old['target']['name']}, prompts "
            f"{old['prompts']['source'] or 'unnamed'}): {'; '.join(different)}. "
            "Use another --out, or the same options to resume"
        )


def _identity(manifest: dict[str, Any], by_number: bool) -> dict[str, Any]:
    target, source = manifest["target"], "this process"
    if server := target.get("server"):  # its address may change, its model may not
        model, context = server["model"], server["context"]
        source = f"a server with model {model}, context {context}, target {target['name']}"
    made: dict[str, Any] = {"answers come from": source, "seed": manifest["seed"]}
    made |= {"reasoning": "keep"} | manifest["sampling"]  # early manifests do not name reasoning
    parts = [("target", "fingerprint"), ("target", "dtype")]
    if by_number:
        parts += [("prompts", "count"), ("prompts", "sha256")]
    return made | {f"{part} {key}": manifest[part][key] for part, key in parts}


def _begin(out: Path, manifest: dict[str, Any], ids: Sequence[Id]) -> None:
    """Record which prompts are asked.

    Raises ValueError if the folder has answers to none of them: another --out was meant.
    """
    old = read_manifest(out) if (out / MANIFEST).is_file() else None
    if old and old["prompts"]["sha256"] != manifest["prompts"]["sha256"]:
        was, now, kept = old["prompts"]["count"], len(ids), len(locate(out, ids))
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
    write_ids(out, manifest, ids)
    if old is None:
        write_manifest(out, manifest)


def _finish(out: Path, manifest: dict[str, Any], ids: Sequence[Id]) -> Counts:
    """Write the manifest with what all processes have done; the last one to end finds it complete.

    Counted again after writing: another process may have ended in between, and the last manifest
    written must not be older than the last answer.
    """
    written: Counts | None = None
    while (counts := count(out, manifest)) != written:
        manifest["complete"] = counts.done + counts.skipped + counts.failed == len(ids)
        manifest["counts"] = vars(counts) | {"reasons": dict(counts.reasons)}
        write_manifest(out, manifest)
        written = counts
    return counts


def _store(
    answers: Iterable[Answered],
    journal: Journal,
    ids: Sequence[Id],
    missing: set[int],
    patience: int,
    bar: tqdm[Any],
) -> None:
    """Append answers as they come, and remove their prompts from `missing`.

    Raises the answerer's error after `patience` prompts in a row without an answer; their lines are
    taken back, as the cause is not these prompts.
    """
    counts, started = Counts(), time.monotonic()
    lost, kept = 0, journal.tell()
    for conversations, error in answers:
        if error is None or any(row.answers for row in conversations):
            lost = 0
        else:
            kept = kept if lost else journal.tell()
            lost += len(conversations)
        if error is not None and lost >= patience:
            journal.cut(kept)
            raise error
        new = [row for row in conversations if row.prompt.index in missing]
        records = [row.record() | {"id": ids[row.prompt.index]} for row in new]
        journal.append(records)
        missing.difference_update(row.prompt.index for row in new)
        for record in records:
            counts.add(record)
        speed = counts.learned_tokens / (time.monotonic() - started)
        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        bar.update(len(records))
