"""Prints the measurements of a bench as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from draftheads.heads.terminal import SafeConsole
from draftheads.infer.costs import too_slow
from draftheads.infer.measure.bench import BASELINES, COMPILED, BenchReport, Result
from draftheads.infer.measure.grid import Grid
from draftheads.infer.measure.llamacpp import RIVAL
from draftheads.infer.race import GENERATE, PLAIN

MARK = "*"
"""Marks the name of the fastest candidate with drafts."""

COLUMNS: dict[str, Callable[[Result], str]] = {
    "τ": lambda result: f"{result.tokens_per_step:.2f}" if result.steps else "",
    "tok/s": lambda result: f"{result.tokens_per_second:.0f}",
    "speedup": lambda result: f"{result.speedup:.2f}",
    "95 %": lambda result: interval(*result.speedup_ci95),
    "vs best": lambda result: f"{result.speedup_over_best:.2f}",
    "draft": lambda result: f"{result.draft_seconds * 1e3:.2f}" if result.steps else "",
    "verify": lambda result: f"{result.verify_seconds * 1e3:.2f}" if result.steps else "",
    "lossless": lambda result: {True: "yes", False: "NO", None: "n/a"}[result.lossless],
}


def interval(low: float, high: float) -> str:
    """An interval; of a single prompt there is none."""
    return f"{low:.2f}-{high:.2f}" if low < high else ""


def results_grid(report: BenchReport) -> Grid:
    """One row per candidate, `generate` first."""
    plain = report.plain
    generate = f"{plain.baseline_tokens_per_second:.0f}"
    over_best = f"{plain.speedup_over_best / plain.speedup:.2f}"  # the same best
    rows = [[GENERATE, "", generate, "1.00", "", over_best, "", "", ""]]
    results = [plain, *report.heads, *report.rivals]
    winner = best(report)
    for result in results:
        label = result.name + MARK if result is winner else result.name  # which also a file shows
        rows.append([label, *[show(result) for show in COLUMNS.values()]])
    return Grid(["candidate", *COLUMNS], rows)


def categories_grid(report: BenchReport) -> list[Grid]:
    """One row per category, for the fastest candidate with drafts; none without categories."""
    if not report.categories or not drafted(report):
        return []
    name = max(drafted(report), key=_merit).name
    rows = []
    for category, results in report.categories.items():
        result = next(each for each in results if each.name == name)
        rows.append([category or "-", *[show(result) for show in COLUMNS.values()]])
    return [Grid([f"{name} by category", *COLUMNS], rows)]


def drafted(report: BenchReport) -> list[Result]:
    """The results with drafts."""
    return [result for result in report.heads if result.name not in BASELINES]


def fastest(report: BenchReport) -> list[Result]:
    """The fastest result of each head, and of each other drafter."""
    results: dict[str, Result] = {}
    for result in sorted(drafted(report), key=lambda each: -each.speedup):
        results.setdefault(result.name.removesuffix(COMPILED).partition("@")[0], result)
    return list(results.values())


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """Print the tables, the findings and cautions about them."""
    settings = report.settings
    heading = (
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens, seed {settings['seed']}"
    )
    tables = [results_grid(report), *categories_grid(report)]
    print_findings(heading, tables, verdict(report), cautions(report), LEGEND, console)


def print_findings(
    heading: str,
    tables: Sequence[Grid],
    found: str,
    notes: Sequence[str],
    legend: str,
    console: Console | None = None,
) -> None:
    """Print tables under a heading, then the findings, cautions about them, and a legend."""
    console = console or SafeConsole()
    console.print(Text(heading, "italic"), justify="center")
    for grid in tables:
        grid.print(console, _style)
    console.print(Text(found, "bold"))
    for note in notes:
        console.print(Text(note, "yellow"))
    console.print(Text(legend, "dim"))


def _style(row: Sequence[str]) -> str | None:
    if "NO" in row:
        return "bold red"
    return "bold green" if any(cell.endswith(MARK) for cell in row) else None


def best(report: BenchReport) -> Result | None:
    """The fastest result with drafts, if any is faster than the best decoding without."""
    faster = [result for result in drafted(report) if result.speedup_over_best > 1]
    return max(faster, key=_merit, default=None)


def _merit(result: Result) -> tuple[bool, float]:
    """Sort key of a result: correct texts first, then speed."""
    return result.lossless is not False, result.speedup


LEGEND = """τ: tokens per step. name@N: N draft nodes. plain: this engine without drafts.
speedup: over generate. vs best: over the faster of generate and plain.
draft, verify: ms per step. *: the fastest with drafts."""


def verdict(report: BenchReport) -> str:
    """The finding in a sentence."""
    results = drafted(report)
    if not results:
        return "Nothing with drafts was measured."
    result = best(report) or max(results, key=_merit)
    over_generate = times(result.speedup, result.speedup_ci95)
    over_best = times(result.speedup_over_best, result.speedup_over_best_ci95)
    rival = after_rival(report)
    if result.speedup_over_best <= 1:
        return (
            "No drafts are faster here than the best decoding without: the fastest, "
            f"{result.name}, has {over_best} its speed{rival}."
        )
    text = {
        True: "its text is the same, token for token",
        False: "ITS TEXT DIFFERS",
        None: "its text is not judged",
    }[result.lossless]
    if result.speedup_over_best_ci95[0] > 1:
        return (
            f"{result.name} is {over_generate} as fast as generate here, {over_best} the best "
            f"without drafts; {text}{rival}."
        )
    return (
        f"{result.name} may be no faster here than the best decoding without drafts: it has "
        f"{over_best} its speed, and {over_generate} that of generate; {text}{rival}."
    )


def after_rival(report: BenchReport) -> str:
    """The end of that sentence, if llama.cpp is faster without drafts than all others here."""
    speeds = [result.tokens_per_second for result in (report.plain, *report.heads)]
    best = max(report.plain.baseline_tokens_per_second, *speeds)
    if not report.rivals or report.rivals[0].tokens_per_second <= best:
        return ""
    theirs = report.rivals[0].tokens_per_second
    return (
        f". {RIVAL} without drafts is faster than all of them: {1e3 / theirs:.1f} ms a token, the "
        f"best here {1e3 / best:.1f}"
    )


def rival_verdict(report: BenchReport) -> list[str]:
    """Whether a head pays in llama.cpp on this machine; nothing if none ran there."""
    if not report.over_rival:
        return []
    name = max(report.over_rival, key=lambda each: report.over_rival[each][0])
    ratio, (low, high) = report.over_rival[name]
    plain, *drafted = report.rivals
    result = next(each for each in drafted if each.name == name)
    cost = ""
    if plain.steps and result.steps:
        tokens = result.step_seconds / plain.step_seconds
        cost = (
            f". It has τ {result.tokens_per_step:.2f}, and a step takes as long as {tokens:.2f} "
            "tokens without drafts"
        )
    found = "pay here" if low > 1 else "do not pay here" if high < 1 else "may pay here or not"
    return [
        f"In {RIVAL}, drafts {found}: {name} is {times(ratio, [low, high])} as fast as "
        f"without{cost}."
    ]


def times(ratio: float, interval: list[float]) -> str:
    """The ratio with one decimal, or with two if one would hide on which side of 1 it is."""
    places = 2 if any(round(each, 1) == 1 for each in (ratio, *interval)) else 1
    return "{:.{places}f} times ({:.{places}f} to {:.{places}f})".format(
        ratio, *interval, places=places
    )


def partial(settings: Mapping[str, Any]) -> list[str]:
    """A line for a race that ended early."""
    left_out = settings["turns_left_out"]
    if not left_out:
        return []
    return [
        f"PARTIAL: {left_out} more runs of each row were left out, for lack of time. With --json, "
        "the same command goes on."
    ]


def int8_line(cost: Mapping[str, float] | None) -> list[str]:
    """A line about the cost of int8 weights, if the target has them."""
    if cost is None:
        return []
    return [
        f"int8: after {cost['agreement']:.1%} of {cost['tokens']} tokens of the prompts, the "
        f"likeliest next one is float32's; KL divergence from float32 {cost['kl']:.3f} nats."
    ]


def cautions(report: BenchReport) -> list[str]:
    """Cautions before the figures are believed: heads whose fastest tree is slower than this engine
    without drafts, the reason why texts are not judged, outputs that differ, and prompts that were
    cut or left out.
    """
    settings = report.settings
    dtype = report.machine["dtype"]
    lines = partial(settings) + int8_line(report.int8)
    for result in fastest(report):
        is_compiled = result.name.endswith(COMPILED)
        plain = report.result(PLAIN + COMPILED if is_compiled else PLAIN)
        if result.steps and result.tokens_per_second < plain.tokens_per_second:
            break_even = result.step_seconds / plain.step_seconds
            if line := too_slow(result.tokens_per_step, break_even, dtype):
                lines.append(f"{result.name}: {line}")
    if report.rivals:
        lines.append(
            f"{RIVAL}: the same weights, its own rounding. Its verify: ms of a step and its draft, "
            "by its own clock."
        )
        lines += rival_verdict(report)
    if report.plain.lossless_reason:
        lines.append(report.plain.lossless_reason)
    for result in (report.plain, *report.heads):
        if quality := result.quality:
            lines.append(
                f"{result.name}: {quality['likeliest']:.1%} of its tokens are the likeliest after "
                f"what it wrote; log-probability {quality['log_probability']:.3f} a token."
            )
        if first := result.first_divergence:
            lines.append(
                f"{result.name}: differs from generate in {first.prompts} prompts, first in prompt "
                f"{first.prompt} at token {first.token}, where the target's top two logits are "
                f"{first.top2_margin:.2g} apart."
            )
    if settings["prompts_shortened"] or settings["prompts_skipped"]:
        lines.append(
            f"{settings['prompts_shortened']} prompts got fewer new tokens, for lack of context; "
            f"{settings['prompts_skipped']} prompts fill the context and were skipped."
        )
    return lines
