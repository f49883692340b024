"""`draftheads doctor`: why is my acceptance low?"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from draftheads.infer.threads import choose_threads
from draftheads.scripts import models
from draftheads.scripts.following import after_doctor, target_options
from draftheads.scripts.options import (
    PROMPT_CHECK,
    Device,
    Dtype,
    Head,
    Json,
    MaybeLora,
    MaybeTemplateArgs,
    PromptWords,
    Seed,
    TargetName,
    Temperature,
    Threads,
    rule,
    write_figures,
)

if TYPE_CHECKING:
    from draftheads.heads.target import Target
    from draftheads.train.batches import Documents
    from draftheads.train.doctor import Diagnosis, Evidence


def doctor(
    target: TargetName,
    head: Head,
    adapter: MaybeLora = None,
    data: Annotated[
        Path | None, Option(help="a folder that distill wrote; default: the head's training data")
    ] = None,
    prompts: Annotated[
        str | None,
        Option(callback=PROMPT_CHECK, help="decode these prompts instead of the data's own"),
    ] = None,
    prompt_words: PromptWords = None,
    limit: Annotated[int, Option(min=1, help="prompts to decode")] = 16,
    max_new_tokens: Annotated[int, Option(min=2, help="tokens per answer")] = 64,
    temperature: Temperature = 0.0,
    json_out: Json = None,
    template_args: MaybeTemplateArgs = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Find out why few draft tokens are accepted: faults, the numbers that show them, next steps.

    Exit code 0: healthy. 1: something was found.
    """
    from draftheads.heads.formats.hub import open_head
    from draftheads.scripts.openings import opening_ids
    from draftheads.train.doctor import Evidence, diagnose, openings_of, unseen

    folder = open_head(head)
    place = models.Place(dtype, device, lora=adapter)
    model = models.load_target(target, place, heads=[folder], template_args=template_args)
    choose_threads(threads, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a changed target is a finding with a price
        drafter = folder.load(model)
    training = folder.facts.training
    recorded = str(training.get("recipe", {}).get("data", {}).get("path") or "")
    documents, manifest = _read_data(data or _data_of(folder.path, recorded), model)
    if prompts:
        openings = opening_ids(model, prompts, prompt_words, limit)
    elif documents:
        spans = unseen(training, documents)
        openings = openings_of(documents, spans[:: max(1, len(spans) // limit)][:limit])
    else:
        raise ValueError(
            "expected --prompts or --data, got neither, and the head's training data, "
            f"{recorded or 'not recorded'}, is neither here nor in a folder above {folder.path}; "
            "give one of them"
        )
    sampling = rule(temperature, seed=seed) if temperature else None
    evidence = Evidence(
        model, drafter, folder.facts, openings, documents, manifest, max_new_tokens, sampling
    )
    diagnosis = diagnose(evidence)
    print_diagnosis(evidence, diagnosis)
    write_figures(json_out, {"healthy": not diagnosis.findings, **asdict(diagnosis)})
    words = target_options(target, adapter)
    after_doctor(words, head, [finding.check for finding in diagnosis.findings])
    raise Exit(1 if diagnosis.findings else 0)


def _data_of(head: Path, recorded: str) -> Path | None:
    """The recorded training data: relative to the working directory or to a folder above the
    head's, as the run's output was; None if it is in none of them.
    """
    from draftheads.train.data.answers import has_answers

    places = [place / recorded for place in (Path(), *head.absolute().parents)]
    return next((place for place in places if recorded and has_answers(place)), None)


def _read_data(folder: Path | None, target: Target) -> tuple[Documents | None, dict[str, Any]]:
    """The data and its manifest."""
    from draftheads.train.batches import Documents
    from draftheads.train.data.answers import read_manifest

    if folder is None:
        return None, {}
    documents = Documents.open(folder, target.vocab_size, str(target.name))
    return documents, read_manifest(folder)


def print_diagnosis(evidence: Evidence, diagnosis: Diagnosis) -> None:
    """Print findings, then remarks."""
    from draftheads.heads.terminal import SafeConsole
    from draftheads.scripts.printing import labelled

    console = SafeConsole(highlight=False)
    recorded = f", training recorded {diagnosis.expected:.2f}" if diagnosis.expected else ""
    console.print(
        f"{evidence.head.kind} head on {evidence.target.title}: {diagnosis.measured:.2f} tokens "
        "per step measured (greedy, with the target's own token); "
        f"{diagnosis.predicted:.2f} predicted for the best fixed tree of {evidence.nodes} draft "
        f"nodes{recorded}"
    )
    if diagnosis.break_even and evidence.head.tree.draft_nodes:
        console.print(
            f"a step costs {diagnosis.break_even:.2f} plain ones here (break-even τ): "
            f"{diagnosis.measured / diagnosis.break_even:.2f} times the speed without drafts"
        )
    if not diagnosis.findings:
        console.print("healthy: nothing found that costs tokens or time", style="green")
    for number, finding in enumerate([*diagnosis.findings, *diagnosis.remarks], start=1):
        if number <= len(diagnosis.findings):
            verb = "lacks" if finding.check == "speed" else "explains"
            title = f"{number}. {finding.check}: {verb} {finding.explains:.2f} tokens per step"
            console.print(title, style="bold red")
        else:
            console.print(f"also seen, at no cost: {finding.check}", style="yellow")
        lines = {"  found": finding.shown, "  normal": finding.normal, "  next": finding.advice}
        console.print(labelled(lines))
