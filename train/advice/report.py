"""A page about a head and its training: one HTML file that reads nothing else. It shows what the
run has recorded, and answers that are decoded for it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from jinja2 import ChainableUndefined, Environment

from draftheads.heads.formats.hub import HeadFolder
from draftheads.heads.terminal import printable
from draftheads.heads.tree import path_counts
from draftheads.infer.text import TextStream
from draftheads.train.advice.doctor import Evidence, diagnose
from draftheads.train.metrics import Line

SPACES = [digit * 10.0**power for power in range(-4, 16) for digit in (1, 2, 5)]
"""Between the ticks of an axis."""
TEMPLATE = Path(__file__).with_name("report.jinja")


def render_report(head: HeadFolder, metrics: list[Line], evidence: Evidence | None = None) -> str:
    """The page as HTML. metrics: of the head's run, none for a head alone. evidence: what is to be
    decoded; the page then has these answers and a diagnosis. Raises ValueError as `diagnose`.
    """
    # what is not recorded, or is not what it should be, is undefined
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=ChainableUndefined
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        head=head,
        name=shlex.quote(head.name),
        facts=head.facts,
        metrics=metrics,
        evidence=evidence,
        diagnosis=evidence and diagnose(evidence),
        counts=evidence and path_counts(evidence.used_MK),
        ticks=ticks,
        TextStream=TextStream,
        yaml=yaml.safe_dump,
    )
    return printable(page)


def ticks(high: float) -> list[float]:
    """Two to seven round numbers, equally spaced, from 0 to more than `high`."""
    high = min(SPACES[-1], abs(high))  # a damaged line may hold any number
    space = next(space for space in SPACES if high <= 5 * space)
    return [space * number for number in range(int(high / space) + 2)]
