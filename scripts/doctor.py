"""`draftheads doctor`: why is my acceptance low?"""

from __future__ import annotations

import re
import warnings
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Exit, Option

from draftheads.infer.pipeline.loading import load_fast_target, load_target
from draftheads.infer.threads import set_threads
from draftheads.scripts import models
from draftheads.scripts.following import after_doctor, say_next, target_options
from draftheads.scripts.options import (
    DECODED,
    EXAMINED,
    PROMPT_CHECK,
    Device,
    Dtype,
    Head,
    Json,
    KeyVariable,
    MaybeLora,
    MaybeTemplateArgs,
    PromptWords,
    ServerModel,
    TargetName,
    Threads,
    check_places,
    write_figures,
)

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target.model import Target
    from draftheads.train.advice.doctor import Diagnosis, Evidence
    from draftheads.train.batches import Documents
    from draftheads.train.recipe import FeatureChoices

SERVER = """http://HOST:PORT of a vLLM that captures hidden states (`plan` prints how) for a target
whose layers are not loaded; repeatable"""
LAYERS = """states that it captures, such as 0,18,36; default: the recipe's, or what the head reads,
the first and the last"""

KEY = re.compile(r"\bfeatures\.(server_model|server|api_key_env|exchange|layers)\b")
"""Keys of recipes, which are options here."""


def _nothing_to_read(needed: str, recorded: str, folder: HeadFolder) -> ValueError:
    return ValueError(
        f"expected {needed}, got none, and the head's training data, {recorded or 'not recorded'}, "
        f"is neither here nor in a folder above {folder.path}; give {needed}"
    )


def doctor(
    context: Context,
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
    server: Annotated[list[str] | None, Option(help=SERVER)] = None,
    server_model: ServerModel = None,
    api_key_env: KeyVariable = None,
    exchange: Annotated[Path | None, Option(help="folder to which it writes states")] = None,
    layers: Annotated[str | None, Option(help=LAYERS)] = None,
    json_out: Json = None,
    template_args: MaybeTemplateArgs = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Find out why few draft tokens are accepted: faults, the numbers that show them, next steps.

    With --server nothing is decoded. Exit code 0: healthy. 1: something was found.
    """
    from draftheads.heads.formats.hub import open_head
    from draftheads.scripts.openings import opening_ids
    from draftheads.train.advice.doctor import Evidence, openings_of, unseen
    from draftheads.train.data.answers import read_manifest

    check_places(context, EXAMINED, DECODED, "nothing is decoded")
    folder = open_head(head)
    training = folder.facts.training
    features = _features(
        training,
        server=server,
        server_model=server_model,
        api_key_env=api_key_env,
        exchange=exchange,
        layers=layers and layers.split(","),
    )
    place = models.Place(
        dtype, device, threads, lora=adapter, placement="skeleton" if server else "whole"
    )
    model, drafter = _load(target, folder, place, template_args)
    recorded = str(training.get("recipe", {}).get("data", {}).get("path") or "")
    path = data or data_of(folder.path, recorded)
    documents = documents_in(path, model)
    manifest = read_manifest(path) if path else {}
    if prompts:
        openings = opening_ids(model, prompts, prompt_words, limit)
    elif documents:
        spans = unseen(training, documents)
        openings = openings_of(documents, spans[:: max(1, len(spans) // limit)][:limit])
    else:
        raise _nothing_to_read("--data" if server else "--prompts or --data", recorded, folder)
    evidence = Evidence(
        model,
        drafter,
        folder.facts,
        openings,
        documents,
        manifest,
        max_new_tokens,
        features,
        models.say_beside,
    )
    diagnosis = _diagnosis(evidence)
    print_diagnosis(evidence, diagnosis)
    write_figures(json_out, {"healthy": not diagnosis.findings, **asdict(diagnosis)})
    if not server:
        checks = [finding.check for finding in diagnosis.findings]
        after_doctor(target_options(target, adapter), head, checks)
    elif not diagnosis.findings:
        say_next("bench", "--server", "http://HOST:PORT", "--prompts", "PROMPTS")
    raise Exit(1 if diagnosis.findings else 0)


def _load(
    target: str, folder: HeadFolder, place: models.Place, template_args: str | None
) -> tuple[Target, DraftHead]:
    """The target, and the head on it, as they decode elsewhere: a step is priced."""
    set_threads(place.threads)
    load = load_target if place.placement == "skeleton" else load_fast_target
    model = load(target, place, None, [folder], models.prepared(template_args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a changed target is a finding with a price
        return model, folder.load(model).pack(model)


def _features(training: dict[str, Any], **options: Any) -> FeatureChoices:
    """Where features come from by these options; states and the exchange folder are those of the
    training by default.
    """
    from draftheads.train.recipe import FeatureChoices

    choices = {key: value for key, value in options.items() if value}
    recorded = training.get("recipe", {}).get("features", {})
    kept = {key: recorded[key] for key in ("layers", "exchange") if key in recorded}
    return FeatureChoices(mode="served" if choices else "online", **(kept | choices))


def _diagnosis(evidence: Evidence) -> Diagnosis:
    """That of `diagnose`. Raises its errors with options in place of a recipe's keys."""
    from draftheads.train.advice.doctor import diagnose
    from draftheads.train.data.server import ServerError

    try:
        with closing(evidence.connection):
            return diagnose(evidence)
    except (ValueError, ServerError) as error:
        line = KEY.sub(lambda key: "--" + key[1].replace("_", "-"), str(error))
        raise ValueError(line) from error


def data_of(head: Path, recorded: str) -> Path | None:
    """The recorded training data: relative to the working directory or to a folder above the
    head's, as the run's output was; None if it is in none of them.
    """
    from draftheads.train.data.answers import has_answers

    places = [place / recorded for place in (Path(), *head.absolute().parents)]
    return next((place for place in places if recorded and has_answers(place)), None)


def documents_in(folder: Path | None, target: Target) -> Documents | None:
    """Those of a folder that `data_of` has found."""
    from draftheads.train.batches import Documents

    return Documents.open(folder, target.vocab_size, str(target.name)) if folder else None


def print_diagnosis(evidence: Evidence, diagnosis: Diagnosis) -> None:
    """Print findings, then remarks."""
    from draftheads.heads.terminal import SafeConsole
    from draftheads.scripts.printing import labelled

    console = SafeConsole(highlight=False)
    recorded = f", training recorded {diagnosis.expected:.2f}" if diagnosis.expected else ""
    measured = "nothing was decoded (measure it with draftheads bench --server)"
    if diagnosis.measured is not None:
        measured = (
            f"{diagnosis.measured:.2f} tokens per step measured (greedy, with the target's own "
            "token)"
        )
    console.print(
        f"{evidence.head.kind} head on {evidence.target.title}: {measured}; "
        f"{diagnosis.predicted:.2f} tokens per step predicted for the best fixed tree of "
        f"{evidence.nodes} draft nodes{recorded}"
    )
    if diagnosis.measured and diagnosis.break_even and evidence.head.tree.draft_nodes:
        console.print(
            f"a step costs {diagnosis.break_even:.2f} plain ones here (break-even τ): "
            f"{diagnosis.measured / diagnosis.break_even:.2f} times the speed without drafts"
        )
    if origin := evidence.training.get("continued"):
        before = origin.get("tokens_per_step")
        console.print(
            f"continued from {origin['name']}" + (f", whose τ was {before:.2f}" if before else "")
        )
    if not diagnosis.findings:
        console.print("healthy: no fault was found", style="green")
    for number, finding in enumerate([*diagnosis.findings, *diagnosis.remarks], start=1):
        if number <= len(diagnosis.findings):
            verb = "lacks" if finding.check == "speed" else "explains"
            title = f"{number}. {finding.check}: {verb} {finding.explains:.2f} tokens per step"
            console.print(title, style="bold red")
        else:
            console.print(f"also seen, at no measured cost: {finding.check}", style="yellow")
        lines = {"  found": finding.shown, "  normal": finding.normal, "  next": finding.advice}
        console.print(labelled(lines))
