"""Tokens per second of distilling the same prompts in several ways, side by side.

    python scripts/benchmarks/distill_speed.py [--target T] [--prompts P] [--head H]

`generate` answers batches of consecutive prompts, as they come or sorted by length; transformers'
continuous batching and ours refill the places of finished answers. Also: the share of decode slots
that brought a token; whether greedy answers are equal; a chi-square test of the first sampled
tokens of ours against the target's distribution.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from draftheads.heads.formats.hub import load_head
from draftheads.heads.target.model import Target
from draftheads.infer.continuous import ContinuousBatch, Request, seeded
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.baseline import without_defaults
from draftheads.infer.prompt import PromptRenderer
from draftheads.train.data.conversation import Conversation
from draftheads.train.data.prompts import read_prompts

Prompts = Sequence[list[int]]
Answers = list[list[int]]


def by_generate(target: Target, prompts: Prompts, rows: int, limit: int) -> tuple[Answers, float]:
    """Batches of consecutive prompts, padded on the left. Returns answers and useful slots."""
    answers, slots = [], 0
    eos = list(target.eos_ids)
    config = GenerationConfig(max_new_tokens=limit, do_sample=False, pad_token_id=eos[0])
    config.eos_token_id = eos
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        width = max(map(len, batch))
        padding = [width - len(prompt) for prompt in batch]
        tokens = [[eos[0]] * n + prompt for n, prompt in zip(padding, batch, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in padding]
        with without_defaults(target):
            out_BT = target.model.generate(
                torch.tensor(tokens, device=target.device),
                attention_mask=torch.tensor(mask, device=target.device),
                generation_config=config,
            )
        new = out_BT[:, width:].tolist()
        slots += len(batch) * len(new[0])
        for ids in new:
            end = next((place for place, token in enumerate(ids, 1) if token in eos), len(ids))
            answers.append(ids[:end])
    return answers, sum(map(len, answers)) / slots


def sorted_generate(
    target: Target, prompts: Prompts, rows: int, limit: int
) -> tuple[Answers, float]:
    """`by_generate` of prompts in order of their length."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    answers, useful = by_generate(target, [prompts[place] for place in order], rows, limit)
    places = {place: rank for rank, place in enumerate(order)}
    return [answers[places[place]] for place in range(len(prompts))], useful


def by_transformers(
    target: Target, prompts: Prompts, rows: int, limit: int
) -> tuple[Answers, float]:
    """transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig

    eos = list(target.eos_ids)
    config = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=eos)
    config.pad_token_id = eos[0]
    settings = ContinuousBatchingConfig(max_batch_tokens=rows, num_blocks=rows * 64)
    with without_defaults(target):
        out = target.model.generate_batch(
            inputs=list(prompts), generation_config=config, continuous_batching_config=settings
        )
    found = sorted(out.values(), key=lambda each: int(each.request_id.rpartition("_")[2]))
    return [each.generated_tokens for each in found], float("nan")


def by_engine(
    target: Target,
    prompts: Prompts,
    rows: int,
    limit: int,
    head: Any = None,
    temperature: float = 0.0,
) -> tuple[Answers, float]:
    """Our continuous batches."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    waiting = iter([Request(prompts[place], limit, str(place)) for place in order])
    batch = ContinuousBatch(Speculator(target, head), seeded(temperature, 1.0, 0, limit), rows)
    answers: dict[int, list[int]] = {}
    for request, ids, error in batch.run(lambda: next(waiting, None)):
        assert error is None, error
        answers[int(request.seed)] = ids
    return [answers[place] for place in range(len(prompts))], batch.useful


def chi_square(target: Target, text: list[int], number: int) -> tuple[float, int]:
    """Statistic and degrees of freedom of `number` first tokens, sampled where the target is least
    certain in a text.
    """
    with torch.inference_mode():
        logits_TV = target.model(torch.tensor([text], device=target.device)).logits[0].double()
    p_TV = logits_TV.softmax(-1).cpu()
    place = int(torch.special.entr(p_TV).sum(-1).argmax())
    prompts, expected_V = [text[: place + 1]] * number, p_TV[place] * number
    answers, _ = by_engine(target, prompts, 64, 1, temperature=1.0)
    found = Counter(ids[0] for ids in answers)
    often = [token for token in range(len(expected_V)) if expected_V[token] >= 5]
    pairs = [(found[token], float(expected_V[token])) for token in often]
    rest = number - sum(count for count, _ in pairs), number - sum(mean for _, mean in pairs)
    if rest[1] >= 5:
        pairs.append(rest)
    return sum((count - mean) ** 2 / mean for count, mean in pairs), len(pairs) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="recipes/demo-target")
    parser.add_argument("--prompts", default="recipes/demo-prompts.jsonl")
    parser.add_argument("--head")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--skip", nargs="*", default=[])
    options = parser.parse_args()
    target = Target.load(options.target)
    renderer = PromptRenderer(target, {})
    prompts = []
    for prompt in read_prompts(options.prompts, limit=options.limit):
        row = Conversation(prompt, renderer, target.context)
        if row.ask():
            prompts.append(row.tokens)
    ways: dict[str, Callable[..., tuple[Answers, float]]] = {
        "generate, batch by batch": by_generate,
        "generate, sorted by length": sorted_generate,
        "transformers' continuous batching": by_transformers,
        "ours": by_engine,
    }
    if options.head:
        head = load_head(options.head, target=target)
        ways["ours with heads"] = lambda *given: by_engine(*given, head)
    limit = min(options.max_new_tokens, target.context - max(map(len, prompts)))
    print(f"{len(prompts)} prompts, {options.rows} rows, at most {limit} new tokens; greedy")
    print(f"{'way':36}{'tokens':>9}{'tokens/s':>10}{'per CPU s':>10}{'useful':>8}{'equal':>8}")
    reference: Answers = []
    for name, way in ways.items():
        if any(part in name for part in options.skip):
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        answers, useful = way(target, prompts, options.rows, limit)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        total = sum(map(len, answers))
        reference = reference or answers
        equal = sum(a == b for a, b in zip(answers, reference, strict=True)) / len(answers)
        print(f"{name:36}{total:9}{total / wall:10.0f}{total / cpu:10.0f}{useful:8.1%}{equal:8.1%}")
    statistic, freedom = chi_square(target, prompts[0], 4000)
    print(f"first sampled tokens: chi-square {statistic:.1f} with {freedom} degrees of freedom")


if __name__ == "__main__":
    main()
