"""`draftheads doctor`: why is my acceptance low?"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftheads.scripts.commands import (
    Device,
    Dtype,
    PromptWords,
    Seed,
    TargetName,
    Temperature,
    Threads,
    choose_threads,
    load_target,
    rule,
)

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.heads.target import Target
    from draftheads.train.batches import Documents
    from draftheads.train.doctor.measurements import Case, Diagnosis, Finding


def doctor(
    target: TargetName,
    head: Annotated[str, typer.Option("--head", help="head folder, run folder or Hub id")],
    data: Annotated[
        Path | None,
        typer.Option(help="a folder that distill wrote; default: the one the head was trained on"),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="decode these prompts instead of the data's own")
    ] = None,
    prompt_words: PromptWords = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts to decode")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens per answer")] = 64,
    temperature: Temperature = 0.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="write the findings here")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Say why few drafts are accepted: what is wrong, the number that shows it, and the next step.

    Exit code 0: healthy. 1: something was found.
    """
    from draftheads.heads.hub import open_head
    from draftheads.scripts.journey import opening_ids
    from draftheads.train.doctor.checks import diagnose
    from draftheads.train.doctor.measurements import Case

    model = load_target(target, dtype, device, heads=[open_head(head)])
    choose_threads(threads, model)
    heads, facts = _read_head(head, model)
    documents, manifest = _read_data(data or _recorded(facts), model)
    if prompts:
        openings = opening_ids(model, prompts, prompt_words, limit)
    else:
        openings = _openings(facts, documents, limit)
    sampling = rule(temperature, 1.0, 0, False, seed) if temperature else None
    case = Case(model, heads, facts, openings, documents, manifest, max_new_tokens, sampling)
    diagnosis = diagnose(case)
    print_diagnosis(case, diagnosis)
    if json_out:
        write_diagnosis(diagnosis, json_out)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def print_diagnosis(case: Case, diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Findings, the one that explains most first, then what costs nothing that can be noticed."""
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    recorded = f", training recorded {diagnosis.expected:.2f}" if diagnosis.expected else ""
    console.print(
        f"{case.head.kind} head on {case.target.name}: {diagnosis.measured:.2f} tokens per step "
        f"measured (greedy, {diagnosis.steps} steps, the target's own token counted); "
        f"{diagnosis.predicted:.2f} predicted for the best fixed tree of {case.nodes} draft nodes "
        f"({diagnosis.positions} positions){recorded}"
    )
    if diagnosis.healthy:
        console.print("healthy: nothing found that costs tokens", style="green")
    for number, finding in enumerate(diagnosis.findings, start=1):
        title = f"{number}. {finding.check}: explains {finding.explains:.2f} tokens per step"
        console.print(title, style="bold red")
        _print_body(console, finding)
    for finding in diagnosis.remarks:
        console.print(f"also seen, at no price: {finding.check}", style="yellow")
        _print_body(console, finding)


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """The diagnosis as JSON; the file appears complete or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(
        json.dumps({"healthy": diagnosis.healthy, **asdict(diagnosis)}, indent=2) + "\n"
    )
    os.replace(part, path)


def _print_body(console: Console, finding: Finding) -> None:
    console.print(f"   found:  {finding.shown}")
    console.print(f"   normal: {finding.normal}")
    console.print(f"   next:   {finding.advice}")


def _read_head(name: str, target: Target) -> tuple[DraftHead, dict[str, Any]]:
    """The head, and what it records of itself."""
    from draftheads.heads.hub import open_head

    folder = open_head(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the target has changed is a finding with a price
        head = folder.load(target)
    return head, folder.facts


def _recorded(facts: dict[str, Any]) -> Path | None:
    """The folder of the data that the head was trained on, where it is still there."""
    from draftheads.train.data.answers import MANIFEST

    recipe = (facts.get("training") or {}).get("recipe", {})
    path = recipe.get("data", {}).get("path")
    return Path(path) if path and (Path(path) / MANIFEST).is_file() else None


def _read_data(folder: Path | None, target: Target) -> tuple[Documents | None, dict[str, Any]]:
    """The data and its manifest. Raises ValueError for tokens that the target does not have."""
    from draftheads.train.batches import Documents
    from draftheads.train.data.answers import read_answers, read_manifest

    if folder is None:
        return None, {}
    manifest = read_manifest(folder)
    documents = Documents.read(read_answers(folder))
    largest = int(documents.tokens_N.max())
    if largest >= target.vocab_size:
        raise ValueError(
            f"{folder}: expected token ids below {target.vocab_size} ({target.name}), got "
            f"{largest}; give the data of this target"
        )
    return documents, manifest


def _openings(facts: dict[str, Any], documents: Documents | None, limit: int) -> list[list[int]]:
    """Prompts of documents that were not trained on."""
    from draftheads.train.doctor.checks import openings_of
    from draftheads.train.doctor.measurements import unseen

    if documents is None:
        raise ValueError(
            "expected something to decode, got neither --prompts nor --data, and the folder that "
            "the head was trained on is not here; give one of them"
        )
    spans = unseen(facts.get("training") or {}, documents)
    return openings_of(documents, spans[:: max(1, len(spans) // limit)][:limit])
