"""Benchmark of a head where it is served: an engine with drafts beside the same one without, both
behind HTTP, decode the same prompts in turns. Acceptance is what the engine itself counted.

Source: v1/spec_decode/metrics.py of vLLM 0.32.

Legend: P units of the bootstrap (prompts, or batches of them).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftheads.infer.accept import Greedy
from draftheads.infer.measure.bench import (
    BenchOptions,
    compared,
    differing_outputs,
    sums_of,
)
from draftheads.infer.measure.grid import Grid
from draftheads.infer.measure.report import print_findings, times
from draftheads.infer.race import (
    BatchEngine,
    BenchPrompt,
    Candidate,
    race,
    rule_name,
    speed,
)
from draftheads.infer.turns import Turns

HEAD, PLAIN = "with drafts", "without"
SAMPLE = re.compile(r"(?m)^([\w:]+)(?:\{(.*)\})?[ \t]+(\S+)")
"""A line of Prometheus' text: name, labels, value."""
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
NAMES = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "position ",
    "vllm:generation_tokens_total": "tokens",
}
"""What vLLM calls what it counts."""
LEGEND = "τ: tokens per step. Speeds count the prompt, which a server may have cached."


class Served(BatchEngine, Protocol):
    """An engine behind a server."""

    url: str

    def metrics(self) -> str | None:
        """The page of its counters; None if it has none."""
        ...


@dataclass(frozen=True)
class ServedReport:
    """What was measured; what could not be is None or empty."""

    settings: dict[str, Any]
    tokens_per_step: float | None
    acceptance_by_depth: list[float]  # as of `bench.Result`, of the engine's own drafts
    drafts: int  # verified, by the engine's counters
    tokens: int  # received with drafts
    foreign_tokens: int  # counted by the engine, not received; negative if it missed some
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_ci95: list[float]
    different_texts: int | None  # prompts with an answer other than the plain server's first


def measure(
    head: Served,
    plain: Served,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    settings: dict[str, Any],
) -> ServedReport:
    """Race a server with drafts against one without.

    settings: more entries for those of the report; "batch": requests at a time. Raises ValueError
    for servers that are not what they should be, and for counters that cannot be right; OSError for
    one that does not answer.
    """
    candidates = [Candidate(HEAD, head), Candidate(PLAIN, plain)]
    before: dict[str, float] = {}

    def begin() -> None:
        before.update(counts_of(head))
        if counts_of(plain).get("accepted"):
            raise ValueError(
                f"{plain.url}: expected a server without drafts, got one that accepted some; start "
                "it without, or swap --server and --server-plain"
            )

    batch = settings["batch"]
    # counters do not tell requests apart, so what is stopped is lost
    with Turns(batch=batch) as turns:
        prompts, runs = race(candidates, prompts, options, begin=begin, turns=turns)
    growth = growth_of(before, counts_of(head), head.url)
    drafts = growth.get("drafts")
    ours_P2 = sums_of(runs[HEAD], batch)
    plain_P2 = sums_of(runs[PLAIN], batch)
    tokens = int(ours_P2[:, 0].sum())
    speedup, interval = compared(ours_P2, plain_P2)
    differing = None
    if isinstance(options.sampling, Greedy):
        differing = len(differing_outputs(prompts, runs[PLAIN], runs[HEAD]))
    return ServedReport(
        settings={
            **vars(options),
            **settings,
            "sampling": rule_name(options.sampling),
            "prompts": len(prompts),
            "turns_left_out": turns.left_out,
        },
        tokens_per_step=1 + growth["accepted"] / drafts if drafts else None,
        acceptance_by_depth=[count / (drafts or 1) for count in by_position(growth)],
        drafts=int(drafts or 0),
        tokens=tokens,
        foreign_tokens=int(growth.get("tokens", tokens)) - tokens,
        tokens_per_second=speed(ours_P2),
        plain_tokens_per_second=speed(plain_P2),
        speedup=speedup,
        speedup_ci95=interval,
        different_texts=differing,
    )


def counts_of(engine: Served) -> dict[str, float]:
    """What an engine has counted, by the values of `NAMES`, over all of its processes."""
    counts: dict[str, float] = defaultdict(float)
    for name, labels, text in SAMPLE.findall(engine.metrics() or ""):
        if name in NAMES:
            place = POSITION.search(labels)
            counts[NAMES[name] + (place[1] if place else "")] += float(text)
    return counts


def growth_of(
    before: Mapping[str, float], after: Mapping[str, float], url: str
) -> dict[str, float]:
    """What was counted between two looks. Raises ValueError for counters that cannot be right."""
    growth = {key: after[key] - before.get(key, 0.0) for key in after}
    needed = {"drafts", "accepted", "tokens"} if "drafts" in growth else set()
    is_whole = before.keys() | needed <= growth.keys()
    most = max(by_position(growth), default=0.0)
    if not is_whole or min(growth.values(), default=0.0) < 0 or most > growth.get("drafts", 0.0):
        raise ValueError(
            f"{url}: expected counters in its /metrics that grow and agree, got others; if it was "
            "started again, run the same command again"
        )
    return growth


def by_position(counts: Mapping[str, float]) -> list[float]:
    """Drafts accepted at each position, the first one first."""
    places = sum(key.startswith("position") for key in counts)
    return [counts[f"position {place}"] for place in range(places)]


def grids(report: ServedReport) -> list[Grid]:
    """The tables: both servers, and acceptance by position."""
    tau = f"{report.tokens_per_step:.2f}" if report.tokens_per_step else ""
    text = {None: "n/a", 0: "yes"}.get(report.different_texts, "NO")
    interval = "{:.2f}-{:.2f}".format(*report.speedup_ci95)
    columns = ["server", "τ", "tok/s", "speedup", "95 %", "same text"]
    rows = [
        [HEAD, tau, f"{report.tokens_per_second:.0f}", f"{report.speedup:.2f}", interval, text],
        [PLAIN, "", f"{report.plain_tokens_per_second:.0f}", "1.00", "", ""],
    ]
    shares = [f"{share:.2f}" for share in report.acceptance_by_depth]
    places = [str(place + 1) for place in range(len(shares))]
    tables = [Grid(columns, rows), Grid(["draft token", *places], [["accepted", *shares]])]
    return tables if shares else tables[:1]


def cautions(report: ServedReport) -> list[str]:
    """What a reader must know before the figures are believed."""
    lines = []
    if left_out := report.settings["turns_left_out"]:
        lines.append(f"{left_out} more runs of each server were left out, for lack of time.")
    if report.tokens_per_step is None:
        lines.append("This server counts no drafts in /metrics: speed and text alone are measured.")
    if report.foreign_tokens:
        lines.append(
            f"The engine counted {report.foreign_tokens:+,} tokens beside the {report.tokens:,} of "
            "these answers: τ is also of other requests, or of one server of several."
        )
    if report.different_texts:
        lines.append(
            f"Texts differ in {report.different_texts} prompts. In float32 that is an error; in "
            "half precision, or with several requests at a time, near-ties may be rounded "
            "otherwise."
        )
    return lines


def served_verdict(report: ServedReport) -> str:
    """What was found, in a sentence."""
    text = {
        None: "texts of sampling are not compared",
        0: "the text is the same, token for token",
    }.get(report.different_texts, "THE TEXT DIFFERS")
    ratio = times(report.speedup, report.speedup_ci95)
    return f"With drafts, this server is {ratio} as fast as without; {text}."


def print_served(report: ServedReport) -> None:
    """Print the tables, what was found, and what to know about it."""
    settings = report.settings
    heading = (
        f"{settings['model']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['batch']} at a time, {settings['max_new_tokens']} new tokens"
    )
    print_findings(heading, grids(report), served_verdict(report), cautions(report), LEGEND)
