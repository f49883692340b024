"""The target answers prompts; its own tokens become the training set.

`distill` fills a folder (its files: `draftheads.train.data.answers`). A prompt's random numbers
depend on the prompt and the seed alone. Prompts are answered in batches of consecutive ones; an
interrupted batch is answered again as a whole, so neither the number of processes nor an
interruption changes a token. With RANK and WORLD_SIZE in the environment (torchrun, accelerate
launch) each process answers its share.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from draftheads.heads.files import write_text
from draftheads.infer.accept import filtered_logits
from draftheads.infer.engine import without_defaults
from draftheads.train.data.answers import (
    BY_NUMBER,
    MANIFEST,
    Counts,
    Journal,
    Record,
    count,
    ids_file,
    journals,
    locate,
    new_manifest,
    read_manifest,
    write_manifest,
)
from draftheads.train.data.conversation import Conversation, Renderer, TextSide, turns_of
from draftheads.train.data.prompts import Prompt, check_tools, with_tools
from draftheads.train.launch import check_environment

if TYPE_CHECKING:
    from draftheads.heads.target import Target

MANY_CUT = 0.2
"""Share of documents cut by length above which the report gives advice."""
MAX_LOST_BATCHES = 3
"""Consecutive batches of prompts without any answer after which the cause is not the prompts."""
UNRECORDED = {"out", "batch_size", "seed", "source"}
"""Options that the manifest records elsewhere, or not at all."""

logger = logging.getLogger("draftheads")

Answered = tuple[list[Conversation], Exception | None]


class Sampling(BaseModel):
    """How the target's tokens are sampled."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.3, ge=0)  # 0 is greedy
    top_p: float = Field(1.0, gt=0, le=1)  # probability mass kept; 1 keeps all
    top_k: int = Field(0, ge=0)  # tokens kept; 0 keeps all
    max_new_tokens: int = Field(512, ge=1)  # per answer, end token included


class DistillOptions(Sampling):
    """Options of `draftheads distill`, except the target and the prompts."""

    out: Path  # folder to write; an unfinished one is resumed
    batch_size: int = Field(32, ge=1)  # prompts answered together
    seed: int = 0
    max_turns: int | None = Field(None, ge=1)  # user turns asked per conversation
    template_args: dict[str, Any] = {}  # chat template variables
    reasoning: Literal["keep", "drop"] = "keep"  # "drop": <think> blocks are context, not learned
    source: str = ""  # where the prompts came from; for the manifest


@dataclass(frozen=True)
class DistillReport:
    """State of the folder when this process ends."""

    out: Path
    prompts: int
    counts: Counts
    missing: int  # prompts of this process's share that its server failed to answer
    complete: bool  # all prompts of all processes were answered or refused
    seconds: float

    def __str__(self) -> str:
        counts = self.counts
        rest = self.prompts - counts.done - counts.skipped - counts.failed
        mean = counts.learned_tokens / max(1, counts.turns)
        lines = [
            f"{self.out}: {self.prompts} prompts = {counts.done} done + {counts.skipped} skipped "
            f"+ {counts.failed} failed" + (f" + {rest} not answered yet" if rest else ""),
            f"{counts.learned_tokens} tokens to learn in {counts.turns} answers, {mean:.1f} on "
            f"average; {counts.cut} cut by length; {self.seconds:.1f} s",
        ]
        if self.missing:
            lines.append(
                f"the server failed on {self.missing} prompts; run the same command again to retry"
            )
        if counts.cut > MANY_CUT * max(1, counts.documents):
            lines.append(
                f"{counts.cut} of {counts.documents} documents were cut and teach no ending; "
                "raise --max-new-tokens (with another --out)"
            )
        if counts.documents > counts.done:
            why = "because the chat template rewrites earlier turns"
            lines.append(f"{counts.done} conversations became {counts.documents} documents, {why}")
        if counts.retokenized:
            lines.append(f"{counts.retokenized} answers came as text and were tokenized here")
        return "\n".join(lines + [f"  {number} {why}" for why, number in counts.reasons.items()])


class Answerer(ABC):
    """Answers prompts. together: answers of one batch are computed together, so rounding may make
    them depend on one another. context: length of prompt and answer in tokens.
    """

    together = True

    def __init__(self, side: Target | TextSide, context: int) -> None:
        self.side = side
        self.context = context

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """The manifest's entry for the target."""

    @abstractmethod
    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Answer all turns of the batches' conversations, in place.

        seeds: by index of the prompt. Yields finished conversations, with the last error of a
        prompt that could not be answered, or None. Conversations that failed for a reason other
        than their prompt are not yielded.
        """


class LocalAnswerer(Answerer):
    """The target in this process."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, target.context)
        self._target = target

    def origin(self) -> dict[str, Any]:
        """The target's name, revision, fingerprint and dtype."""
        return {
            "name": str(self._target.name),
            "revision": self._target.revision,
            "fingerprint": self._target.fingerprint(),
            "dtype": str(self._target.model.dtype).removeprefix("torch."),
        }

    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Answer one batch after another."""
        for batch in batches:
            error: RuntimeError | None = None
            while rows := [row for row in batch if row.ask()]:
                try:
                    self._answer_turn(rows, sampling, seeds)
                except RuntimeError:  # usually out of memory because of one long prompt
                    for row in rows:
                        error = self._answer_alone(row, sampling, seeds) or error
            yield batch, error

    def _answer_turn(
        self, rows: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
    ) -> None:
        turn_seeds = [f"{seeds[row.prompt.index]}/{len(row.answers)}" for row in rows]
        answers = generate(self._target, [row.tokens for row in rows], sampling, turn_seeds)
        for row, ids in zip(rows, answers, strict=True):
            row.answer(ids)

    def _answer_alone(
        self, row: Conversation, sampling: Sampling, seeds: Sequence[str]
    ) -> RuntimeError | None:
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

    seeds: one per prompt. No row exceeds the context: rows with similar room left are generated
    together, limited by the smallest room, so a row loses at most half of its room.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    rooms = [min(sampling.max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    for row, room in enumerate(rooms):
        assert room > 0, "prompts that do not fit were skipped"
        groups[0 if room == sampling.max_new_tokens else room.bit_length()].append(row)
    pad = target.eos_ids[0] if target.eos_ids else 0
    answers: list[list[int]] = [[] for _ in prompts]
    for _, group in sorted(groups.items()):
        limit = min(rooms[row] for row in group)
        width = max(len(prompts[row]) for row in group)
        tokens_BT = torch.full((len(group), width), pad)
        mask_BT = torch.zeros_like(tokens_BT)
        for place, row in enumerate(group):
            start = width - len(prompts[row])
            tokens_BT[place, start:] = torch.tensor(prompts[row])
            mask_BT[place, start:] = 1
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=limit,
            eos_token_id=list(target.eos_ids) or None,
            pad_token_id=pad,
        )
        draws = _RowSampler(sampling, [seeds[row] for row in group], limit)
        with without_defaults(target):
            out_BT = target.model.generate(
                tokens_BT.to(target.device),
                attention_mask=mask_BT.to(target.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([draws]),
            )
        for row, ids in zip(group, out_BT[:, width:].tolist(), strict=True):
            answers[row] = until_end(ids, target.eos_ids)
    return answers


class _RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Samples each row with random numbers of its own: only the sampled token keeps a finite logit,
    so `generate`'s argmax selects it. Raises RuntimeError for logits that are not finite.
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
        settings = self._sampling.temperature, self._sampling.top_p, self._sampling.top_k
        below_BV = filtered_logits(scores, *settings).double().softmax(-1).cumsum(-1)
        total_B1 = below_BV[:, -1:]
        if not total_B1.isfinite().all():
            raise RuntimeError("the target's logits are not finite")
        self._uniform_BT = self._uniform_BT.to(scores.device)
        uniform_B1 = self._uniform_BT[:, self._step, None]
        self._step += 1
        sampled_B1 = torch.searchsorted(below_BV, uniform_B1 * total_B1, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, sampled_B1, 0.0)


def until_end(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The ids up to the first end token, included; the rest is padding."""
    end = next((place for place, token in enumerate(ids) if token in eos_ids), len(ids))
    return ids[: end + 1]


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
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    answerer = target if isinstance(target, Answerer) else LocalAnswerer(target)
    renderer = Renderer(answerer.side, options.template_args)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(renderer.tokenizer, options.template_args)
    names, sha256 = _identify(prompts)
    manifest = _begin(answerer.origin(), names, sha256, options)
    with Journal(options.out, rank, world) as journal:
        write_text(ids_file(options.out, manifest), "".join(f"{name}\n" for name in names))
        write_manifest(options.out, manifest)
        size, answered = options.batch_size, locate(options.out, names).keys()
        starts = range(rank * size, len(prompts), world * size)
        batches = [range(start, min(start + size, len(prompts))) for start in starts]
        share = list(chain.from_iterable(batches))
        missing = set(share) - answered

        def conversations(batch: range) -> list[Conversation]:
            whole = answerer.together and not missing.isdisjoint(batch)  # so that rounding is equal
            asked = [prompts[place] for place in batch if whole or place in missing]
            context, turns, reasoning = answerer.context, options.max_turns, options.reasoning
            return [
                Conversation(p, renderer, context, turns_of(p)[:turns], reasoning) for p in asked
            ]

        patience = MAX_LOST_BATCHES * size
        if not answered:
            patience = min(patience, len(missing))
        rows = filter(None, map(conversations, batches))
        answers = answerer.answer(rows, options, [f"{options.seed}/{name}" for name in names])
        done = len(share) - len(missing)
        bar = tqdm(total=len(share), initial=done, desc="distill", unit="prompt", disable=rank > 0)
        try:
            with bar, closing(answers):
                _store(answers, journal, names, missing, patience, bar)
        except KeyboardInterrupt:
            logger.warning("%s: interrupted; run the same command again to resume", options.out)
            raise
        counts = _finish(options.out, manifest)
    complete, seconds = manifest["complete"], time.monotonic() - started
    report = DistillReport(options.out, len(prompts), counts, len(missing), complete, seconds)
    print(report)
    return report


def _identify(prompts: Sequence[Prompt]) -> tuple[list[str], str]:
    """The ids of prompts, hashes of their content, numbered if several are equal; a hash of all."""
    seen, names, together = Counter[str](), [], hashlib.sha256()
    for prompt in prompts:
        content = json.dumps([prompt.messages, prompt.text]).encode()
        together.update(content + b"\n")
        name = hashlib.sha256(content).hexdigest()[:32]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names, together.hexdigest()


def _begin(
    origin: dict[str, Any], names: Sequence[str], sha256: str, options: DistillOptions
) -> dict[str, Any]:
    """The manifest of this distillation, after checking that it may write to `options.out`.

    Raises ValueError without prompts, and for a folder of an earlier version, of other options (the
    message names each difference) or of other prompts only: another --out was meant.
    """
    if not names:
        raise ValueError("prompts: expected at least one, got none; check --prompts")
    out = options.out
    manifest = new_manifest(
        origin,
        options.model_dump(mode="json", exclude=UNRECORDED),
        {"source": options.source, "count": len(names), "sha256": sha256},
        seed=options.seed,
        batch_size=options.batch_size,
    )
    if not (out / MANIFEST).is_file():
        return manifest
    old = read_manifest(out)
    if old["format"] == BY_NUMBER:
        raise ValueError(
            f"{out}: expected a folder to resume, got one made by an earlier version or by "
            "import-answers; train on it, or distill into another --out"
        )
    was, now = _settings(old), _settings(manifest)
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
    if old["prompts"]["sha256"] != manifest["prompts"]["sha256"]:
        count_before, kept = old["prompts"]["count"], len(locate(out, names))
        if not kept and any(path.stat().st_size for path in journals(out)):
            raise ValueError(
                f"{out}: expected some of the {count_before} prompts that it was begun with, got "
                f"{len(names)} others; use another --out, or check --prompts"
            )
        logger.warning(
            "%s: the prompts have changed, from %d to %d; %d of them are answered already",
            *(out, count_before, len(names), kept),
        )
    return manifest


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """Everything that changes answers and must stay equal when a folder is resumed."""
    target, source = manifest["target"], "this process"
    if server := target.get("server"):  # its address may change, its model may not
        model, context = server["model"], server["context"]
        source = f"a server with model {model}, context {context}, target {target['name']}"
    return {
        "answers come from": source,
        "seed": manifest["seed"],
        **manifest["sampling"],
        "target fingerprint": target["fingerprint"],
        "target dtype": target["dtype"],
    }


def _finish(out: Path, manifest: dict[str, Any]) -> Counts:
    """Write the manifest with the counts of all processes; the last one to end completes it.

    Counts again after writing: another process may have ended in between, and the last manifest
    written must not be older than the last answer.
    """
    written: Counts | None = None
    while (counts := count(out, manifest)) != written:
        done = counts.done + counts.skipped + counts.failed
        manifest["complete"] = done == manifest["prompts"]["count"]
        manifest["counts"] = vars(counts) | {"reasons": dict(counts.reasons)}
        write_manifest(out, manifest)
        written = counts
    return counts


def _store(
    answers: Iterable[Answered],
    journal: Journal,
    names: Sequence[str],
    missing: set[int],
    patience: int,
    bar: tqdm[Any],
) -> None:
    """Append answers as they arrive, and remove their prompts from `missing`.

    Raises the answerer's error after `patience` consecutive prompts without an answer. Their lines
    are not written, as these prompts are not the cause.
    """
    counts, started = Counts(), time.monotonic()
    lost, held = 0, list[Record]()
    for conversations, error in answers:
        new = [row for row in conversations if row.prompt.index in missing]
        records = [row.record() | {"id": names[row.prompt.index]} for row in new]
        held += records
        if error is not None and not any(row.answers for row in conversations):
            lost += len(conversations)
            if lost >= patience:
                raise error
        else:
            journal.append(held)
            lost, held = 0, []
        missing.difference_update(row.prompt.index for row in new)
        for record in records:
            counts.add(record)
        speed = counts.learned_tokens / (time.monotonic() - started)
        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        bar.update(len(new))
    journal.append(held)
