"""Benchmark of a head where it is served: an engine with drafts beside the same one without, both
behind HTTP, decode the same prompts in turns. Acceptance is what the engine itself counted.

Sources: v1/spec_decode/metrics.py of vLLM 0.32; SGLang's scheduler metrics.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from draftheads.heads.terminal import SafeConsole
from draftheads.infer.accept import Greedy
from draftheads.infer.measure.bench import BenchOptions, arranged, compared, sums_of
from draftheads.infer.measure.grid import Grid
from draftheads.infer.measure.report import times
from draftheads.infer.race import (
    BenchPrompt,
    Candidate,
    Engine,
    Runs,
    batched,
    race,
    rule_name,
    speed,
)

HEAD, PLAIN = "with drafts", "without"
SAMPLE = re.compile(r"(?m)^([\w:]+)(?:\{(.*)\})?[ \t]+(\S+)")
"""A line of Prometheus' text: name, labels, value."""
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
GAUGE = "sglang:spec_accept_length"
"""SGLang's tokens per step, of its last steps."""


class Served(Engine, Protocol):
    """An engine behind a server. retokenized: answers whose token ids it did not tell."""

    url: str
    retokenized: int

    def metrics(self) -> str | None:
        """The page of its counters; None if it has none."""
        ...


@dataclass(frozen=True)
class Names:
    """What an engine calls its counters. drafts: verified drafts; a step per answer verifies none
    where `prefill` is set. tokens: of all answers.
    """

    drafts: str
    accepted: str
    positions: str
    tokens: str
    prefill: bool = False


ENGINES = {
    "vLLM": Names(
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:generation_tokens_total",
    ),
    "draftheads": Names(
        "draftheads_steps_total",
        "draftheads_accepted_prediction_tokens_total",
        "",
        "draftheads_completion_tokens_total",
        prefill=True,
    ),
}


@dataclass(frozen=True)
class Counters:
    """What an engine has counted. positions: draft tokens accepted at each position."""

    engine: str
    drafts: int
    accepted: int
    tokens: int
    positions: dict[int, int]


@dataclass(frozen=True)
class Difference:
    """The first answer that is not the plain server's."""

    prompts: int  # number of prompts that differ
    prompt: int  # number of the first
    token: int  # index in its answer


@dataclass(frozen=True)
class ServedReport:
    """What was measured; what could not be is None or empty."""

    settings: dict[str, Any]
    engine: str | None
    tokens_per_step: float | None
    acceptance_by_depth: list[float]  # as of `bench.Result`, of the engine's own drafts
    drafts: int  # verified, by the engine's counters
    tokens: int  # received with drafts
    foreign_tokens: int  # counted by the engine, not received: negative if it missed some
    tokens_per_second: float
    plain_tokens_per_second: float | None
    speedup: float | None
    speedup_ci95: list[float]
    same_text: bool | None
    first_difference: Difference | None
    retokenized: int  # answers of which the server told the text alone


def measure(
    head: Served,
    plain: Served | None,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    settings: dict[str, Any],
) -> ServedReport:
    """Race a server with drafts against one without, `options.batch` requests at a time.

    settings: more entries for those of the report. Raises ValueError for servers that are not what
    they should be, and for counters that cannot be right; OSError for one that does not answer.
    """
    prompts = arranged(prompts, (), options.batch)
    engines = {HEAD: head, PLAIN: plain} if plain else {HEAD: head}
    candidates = [
        Candidate(name, None, engine, options.sampling) for name, engine in engines.items()
    ]
    before: list[Counters | None] = []

    def begin() -> None:
        before.append(_drafting(head))
        if plain:
            _check_plain(plain)

    runs = race(candidates, prompts, options, begin=begin)
    return _report(head, before[0], runs, prompts, options, settings)


def _drafting(head: Served) -> Counters | None:
    """The counters of a server with drafts. Raises ValueError for a vLLM without any."""
    page = head.metrics() or ""
    counters = read_counters(page, head.url)
    if counters is None and re.search(r"(?m)^vllm:", page):
        raise ValueError(
            f"{head.url}: expected a vLLM that verifies drafts, got one without; start it with "
            "--speculative-config, or swap --server and --server-plain"
        )
    return counters


def _check_plain(plain: Served) -> None:
    counters = read_counters(plain.metrics(), plain.url)
    if counters and counters.accepted:
        raise ValueError(
            f"{plain.url}: expected a server without drafts, got one that accepted "
            f"{counters.accepted} draft tokens; start it without, or swap --server and "
            "--server-plain"
        )


def _report(
    head: Served,
    before: Counters | None,
    runs: Runs,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    settings: dict[str, Any],
) -> ServedReport:
    page = head.metrics()
    answers = [run for repeated in runs[HEAD] for run in repeated]
    tokens = sum(len(run.tokens) for run in answers)
    growth = None
    foreign = 0
    if before:
        growth = growth_of(before, read_counters(page, head.url), len(answers), head.url)
        foreign = foreign_tokens(growth, tokens, len(answers))
    drafts = growth.drafts if growth else 0
    tau = 1 + growth.accepted / drafts if growth and drafts else None
    positions = growth.positions.values() if growth else ()
    gauge = None if before else read_gauge(page, head.url)
    units = batched(prompts, options.batch)
    sums = {name: sums_of(repeated, units) for name, repeated in runs.items()}
    speedup, interval = compared(sums[HEAD], sums[PLAIN], options) if PLAIN in sums else (None, [])
    is_comparable = PLAIN in runs and isinstance(options.sampling, Greedy)
    difference = first_difference(runs, prompts) if is_comparable else None
    return ServedReport(
        settings={
            **settings,
            "sampling": rule_name(options.sampling),
            "prompts": len(prompts),
            "max_new_tokens": options.max_new_tokens,
            "repetitions": options.repetitions,
            "concurrency": options.batch,
            "seed": options.seed,
        },
        engine=growth.engine if growth else ("SGLang" if gauge else None),
        tokens_per_step=tau or gauge,
        acceptance_by_depth=[count / drafts for count in positions] if drafts else [],
        drafts=drafts,
        tokens=tokens,
        foreign_tokens=foreign,
        tokens_per_second=speed(sums[HEAD]),
        plain_tokens_per_second=speed(sums[PLAIN]) if PLAIN in sums else None,
        speedup=speedup,
        speedup_ci95=interval,
        same_text=difference is None if is_comparable else None,
        first_difference=difference,
        retokenized=head.retokenized,
    )


def read_counters(page: str | None, url: str) -> Counters | None:
    """The counters of a page of Prometheus' text, over all engines of the server; None if it has
    none of drafts. Raises ValueError for values that are no counts.
    """
    samples = [match.groups() for match in SAMPLE.finditer(page or "")]
    present = {name for name, _, _ in samples}
    for engine, names in ENGINES.items():
        if names.drafts not in present:
            continue
        sums = Counter[str]()
        positions = Counter[int]()
        for name, labels, text in samples:
            if name in (names.drafts, names.accepted, names.tokens):
                sums[name] += round(_number(name, text, url))
            elif name == names.positions and (position := POSITION.search(labels or "")):
                positions[int(position[1])] += round(_number(name, text, url))
        missing = {names.accepted, names.tokens} - present
        if missing:
            raise ValueError(
                f"{url}: expected {' and '.join(sorted(missing))} in its /metrics, got none; is "
                "there a proxy that leaves them out?"
            )
        counts = (sums[names.drafts], sums[names.accepted], sums[names.tokens])
        return Counters(engine, *counts, dict(sorted(positions.items())))
    return None


def read_gauge(page: str | None, url: str) -> float | None:
    """SGLang's own tokens per step; None if there are none yet."""
    samples = [match.groups() for match in SAMPLE.finditer(page or "")]
    values = [_number(name, text, url) for name, _, text in samples if name == GAUGE]
    return max(values, default=0.0) or None


def _number(name: str, text: str, url: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{url}: expected a number for {name} in its /metrics, got {text!r:.40}; start the "
            "server again"
        )
    return value


def growth_of(before: Counters, after: Counters | None, answers: int, url: str) -> Counters:
    """What was counted between two looks, without the steps of `answers` that verify nothing.
    Raises ValueError for counters that went back.
    """
    if after is None:
        raise ValueError(f"{url}: expected /metrics as before, got no counters; start over")
    steps = answers if ENGINES[before.engine].prefill else 0
    drafts = after.drafts - before.drafts - steps
    accepted = after.accepted - before.accepted
    tokens = after.tokens - before.tokens
    positions = {
        place: count - before.positions.get(place, 0) for place, count in after.positions.items()
    }
    counts = [*positions.values(), accepted, tokens]
    if min(drafts, *counts) < 0 or max(positions.values(), default=0) > drafts:
        raise ValueError(
            f"{url}: expected counters that grow and agree, got others; if the server was started "
            "again, run the same command again"
        )
    return Counters(before.engine, drafts, accepted, tokens, positions)


def foreign_tokens(growth: Counters, tokens: int, answers: int) -> int:
    """Tokens that the engine counted beyond those of our answers, negative if it missed some.

    First by its tokens, then by its drafts: an answer has its first token without one, and the last
    draft may be accepted beyond the answer's end.
    """
    beyond = answers * (len(growth.positions) - 1)
    drafted = growth.drafts + growth.accepted - (tokens - answers) - beyond
    return growth.tokens - tokens or (max(drafted, 0) if growth.positions else 0)


def first_difference(runs: Runs, prompts: Sequence[BenchPrompt]) -> Difference | None:
    """Compare every answer with the plain server's first one to the same prompt."""
    differing = []
    for prompt, references, repeated in zip(prompts, runs[PLAIN], runs[HEAD], strict=True):
        expected = references[0].tokens
        for run in repeated:
            if run.tokens != expected:
                pairs = enumerate(zip(expected, run.tokens, strict=False))
                end = min(len(expected), len(run.tokens))
                token = next((place for place, (a, b) in pairs if a != b), end)
                differing.append((prompt.number, token))
                break
    return Difference(len(differing), *differing[0]) if differing else None


def grids(report: ServedReport) -> list[Grid]:
    """The tables: both servers, and acceptance by position."""
    tau = f"{report.tokens_per_step:.2f}" if report.tokens_per_step else ""
    rows = [[HEAD, tau, f"{report.tokens_per_second:.0f}"]]
    columns = ["server", "τ", "tok/s"]
    if report.plain_tokens_per_second and report.speedup:
        text = {True: "yes", False: "NO", None: "n/a"}[report.same_text]
        interval = "{:.2f}-{:.2f}".format(*report.speedup_ci95)
        rows[0] += [f"{report.speedup:.2f}", interval, text]
        rows.append([PLAIN, "", f"{report.plain_tokens_per_second:.0f}", "1.00", "", ""])
        columns += ["speedup", "95 %", "same text"]
    shares = [f"{share:.2f}" for share in report.acceptance_by_depth]
    places = [str(place + 1) for place in range(len(shares))]
    tables = [Grid(columns, rows), Grid(["draft token", *places], [["accepted", *shares]])]
    return tables if shares else tables[:1]


def cautions(report: ServedReport) -> list[str]:
    """What a reader must know before the figures are believed."""
    lines = []
    if report.engine is None:
        lines.append("This server counts no drafts in /metrics: speed and text alone are measured.")
    elif report.engine == "SGLang":
        lines.append("τ is SGLang's own mean of its last steps; it counts nothing by position.")
    elif report.tokens_per_step is None:
        lines.append("The engine verified no drafts.")
    if report.foreign_tokens:
        lines.append(
            f"The engine counted {report.foreign_tokens:+,} tokens beside the {report.tokens:,} of "
            "these answers: τ is also of other requests, or of one server of several."
        )
    if first := report.first_difference:
        lines.append(
            f"Texts differ in {first.prompts} prompts, first in prompt {first.prompt} at token "
            f"{first.token}. In float32 that is an error; in half precision, or with several "
            "requests at a time, near-ties may be rounded otherwise."
        )
    if report.retokenized:
        lines.append("The server returns text alone: it was tokenized here to be counted.")
    return lines


def verdict(report: ServedReport) -> str:
    """What was found, in a sentence."""
    if report.speedup is None:
        return "Without --server-plain there is no speedup and no text to compare with."
    text = {
        True: "the text is the same, token for token",
        False: "THE TEXT DIFFERS",
        None: "texts of sampling are not compared",
    }[report.same_text]
    ratio = times(report.speedup, report.speedup_ci95)
    return f"With drafts, this server is {ratio} as fast as without; {text}."


def print_served(report: ServedReport, console: Console | None = None) -> None:
    """Print the tables, what was found, and what to know about it."""
    console = console or SafeConsole()
    settings = report.settings
    title = (
        f"{settings['model']}: {report.engine or 'server'}, {settings['sampling']}, "
        f"{settings['prompts']} prompts, {settings['concurrency']} at a time, "
        f"{settings['max_new_tokens']} new tokens"
    )
    console.print(title, style="italic", justify="center", markup=False, highlight=False)
    for grid in grids(report):
        grid.print(console, lambda row: "bold red" if "NO" in row else None)
    console.print(verdict(report), style="bold", markup=False, highlight=False)
    for caution in cautions(report):
        console.print(caution, style="yellow", markup=False, highlight=False)
    legend = "τ: tokens per step. Speeds count the prompt, which a server may have cached."
    console.print(legend, style="dim", markup=False, highlight=False)
