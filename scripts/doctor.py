"""`draftheads doctor`: why is my acceptance low? `draftheads report`: a page about a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from draftheads.infer.pipeline.loading import load_fast_target, load_parts
from draftheads.scripts.options import (
    DATA_CHECK,
    HEAD,
    HEAD_CHECK,
    PROMPT_CHECK,
    ApiKeyEnv,
    Json,
    MaybeTarget,
    MaybeTemplateArgs,
    Placement,
    ServerModel,
    TargetName,
    check_file,
    early,
    parsed_template_args,
    say_beside,
    say_next,
    target_options,
    write_figures,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from rich.console import Console

    from draftheads.heads.base import DraftHead
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target.model import Target
    from draftheads.train.advice.bounds import Bounds
    from draftheads.train.advice.doctor import Diagnosis, Evidence
    from draftheads.train.advice.gains import Gain
    from draftheads.train.batches import Documents

ENGINE = """compare a running server (vLLM, llama-server, draftheads serve; http://HOST:PORT) with
our own decoding, and name the first difference"""
PageFile = Annotated[
    Path | None, Option(callback=early(check_file), help="default: report.html in HEAD")
]


@dataclass(frozen=True)
class DoctorPrompts:
    """Prompts."""

    prompts: Annotated[
        str | None,
        Option(callback=PROMPT_CHECK, help="decode these prompts instead of the data's own"),
    ] = None
    sample: Annotated[str | None, Option(help="decode this prompt")] = None
    limit: Annotated[int, Option(min=1, help="prompts to decode")] = 16
    max_new_tokens: Annotated[int, Option(min=2, help="tokens per answer")] = 64


def doctor(
    target: TargetName,
    head: Annotated[str, Option(callback=HEAD_CHECK, help=HEAD)],
    texts: DoctorPrompts,
    placement: Placement,
    data: Annotated[
        Path | None,
        Option(callback=DATA_CHECK, help="answers of distill; default: the head's training data"),
    ] = None,
    template_args: MaybeTemplateArgs = None,
    engine: Annotated[str | None, Option(help=ENGINE)] = None,
    server_model: ServerModel = None,
    api_key_env: ApiKeyEnv = None,
    json_out: Json = None,
) -> None:
    """Find out why few draft tokens are accepted: faults, the numbers that show them, next steps.

    Exit code 0: healthy. 1: something was found.
    """
    from draftheads.heads.formats.hub import open_head
    from draftheads.infer.remote import ServerOptions
    from draftheads.train.advice.doctor import diagnose
    from draftheads.train.advice.engine import first_difference
    from draftheads.train.data.server import ServedTarget

    served = None
    if engine is None and (server_model or api_key_env):
        raise ValueError("--server-model, --api-key-env: expected --engine, too; pass it")
    if engine is not None:  # a server that is down is said before a model is loaded
        options = ServerOptions(urls=[engine], model=server_model, api_key_env=api_key_env)
        served = ServedTarget(target, options)
    folder = open_head(head)
    path = data or data_of(folder)
    if not (path or texts.prompts or texts.sample):
        raise ValueError(
            "expected --prompts or --data, got none, and the head's training data, "
            f"{recorded_data(folder) or 'not recorded'}, is neither here nor in a folder above "
            f"{folder.path}; give --prompts or --data"
        )
    variables = parsed_template_args(template_args)
    model = load_fast_target(target, placement.place(), None, [folder], variables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a changed target is a finding
        drafter = folder.load(model).pack(model)  # as it decodes elsewhere: a step is priced
    run = Path(os.path.expanduser(head))
    evidence = evidence_of(folder, drafter, model, texts, path, run)
    diagnosis = diagnose(evidence)
    difference = served and first_difference(evidence, served)
    if difference:
        diagnosis.findings.insert(0, difference)
    elif served:
        say_beside(f"{engine} answers and drafts as we do here")
    print_diagnosis(evidence, diagnosis)
    write_figures(json_out, {"healthy": not diagnosis.findings, **asdict(diagnosis)})
    if diagnosis.findings:
        raise Exit(1)
    say_next("chat", *target_options(target, placement.lora), "--head", head)


def report(
    head: Annotated[str, Argument(callback=HEAD_CHECK, help="run folder, head folder or Hub id")],
    placement: Placement,
    texts: DoctorPrompts = DoctorPrompts(limit=3),
    target: MaybeTarget = None,
    out: PageFile = None,
) -> None:
    """Write a page about a run or a head: speed, curves, accuracy, tree and facts in one HTML file.

    --prompts or --sample load the target, and add answers and what doctor finds.
    """
    from draftheads.heads.base import DraftHead
    from draftheads.heads.files import write_text
    from draftheads.heads.formats.hub import open_head
    from draftheads.train.advice.report import render_report
    from draftheads.train.metrics import read_metrics

    folder = open_head(head)
    run = Path(os.path.expanduser(head))
    page = out or (run if run.is_dir() else Path()) / "report.html"  # not beside a download
    check_file(page)
    evidence = None
    if texts.prompts or texts.sample:
        model, drafter = load_parts(head, target, placement.place())
        assert isinstance(drafter, DraftHead)
        evidence = evidence_of(folder, drafter, model, texts, data_of(folder), run)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, render_report(folder, read_metrics(run), evidence))
    say(f"written to {page}: open it in a browser")
    say_next("chat", "--head", head)


def evidence_of(
    folder: HeadFolder,
    head: DraftHead,
    target: Target,
    texts: DoctorPrompts,
    data: Path | None,
    run: Path,
) -> Evidence:
    """The head of this folder on --sample or --prompts, else on documents of the data that were not
    trained on. data: answers, if there are any. run: where metrics may be.
    """
    from draftheads.infer.prompt import encode_prompt
    from draftheads.scripts.openings import opening_ids
    from draftheads.train.advice.doctor import Evidence, openings_of, unseen
    from draftheads.train.metrics import read_metrics

    documents = documents_in(data, target)
    if texts.sample:
        openings = [encode_prompt(target, [{"role": "user", "content": texts.sample}])]
    elif texts.prompts:
        openings = opening_ids(target, texts.prompts, texts.limit)
    else:
        assert documents
        spans = unseen(folder.facts.training, documents)
        step = max(1, len(spans) // texts.limit)
        openings = openings_of(documents, spans[::step][: texts.limit])
    metrics = read_metrics(run)
    return Evidence(target, head, folder.facts, openings, documents, texts.max_new_tokens, metrics)


def recorded_data(folder: HeadFolder) -> str:
    """The path of the training data in a head's config.json, or ""."""
    return str(folder.facts.training.get("recipe", {}).get("data", {}).get("path") or "")


def data_of(folder: HeadFolder) -> Path | None:
    """The recorded training data: relative to the working directory or to a folder above the
    head's, as the run's output was; None if it is in none of them.
    """
    from draftheads.train.data.answers import has_answers

    recorded = recorded_data(folder)
    places = [place / recorded for place in (Path(), *folder.path.absolute().parents)]
    return next((place for place in places if recorded and has_answers(place)), None)


def documents_in(folder: Path | None, target: Target) -> Documents | None:
    """The documents of a folder that `data_of` has found."""
    from draftheads.train.batches import Documents

    return Documents.open(folder, target.vocab_size, str(target.name)) if folder else None


def print_diagnosis(evidence: Evidence, diagnosis: Diagnosis) -> None:
    """Print τ, and what was found."""
    from draftheads.heads.terminal import SafeConsole

    console = SafeConsole()
    recorded = f", training recorded {diagnosis.expected:.2f}" if diagnosis.expected else ""
    console.print(
        f"{evidence.head.kind} head on {evidence.target.title}: {diagnosis.measured:.2f} tokens "
        "per step measured (greedy, with the target's own token); "
        f"{diagnosis.predicted:.2f} tokens per step predicted for the best fixed tree of "
        f"{evidence.nodes} draft nodes{recorded}"
    )
    if diagnosis.break_even and evidence.head.tree.draft_nodes:
        console.print(
            f"a step costs {diagnosis.break_even:.2f} plain ones here (break-even τ): "
            f"{diagnosis.measured / diagnosis.break_even:.2f} times the speed without drafts"
        )
    if diagnosis.bounds:
        print_bounds(diagnosis.bounds, diagnosis.by_context, console)
    if diagnosis.gains:
        print_gains(diagnosis.gains, evidence.training.get("seconds"), console)
    if not diagnosis.findings:
        console.print("healthy: no fault was found", style="green")
    for finding in diagnosis.findings:
        console.print(f"{finding.check}: {finding.found}", style="bold red")
        console.print(f"  next: {finding.advice}")


def print_gains(gains: Sequence[Gain], seconds: object, console: Console) -> None:
    """Print what would help. seconds: of the head's training, a float if it is known."""
    from draftheads.scripts.printing import duration

    time = f", {duration(seconds)}" if isinstance(seconds, float) else ""
    console.print(
        "what would raise τ, the most for its effort first (effort 1: as long as this head's "
        f"training{time})"
    )
    for each in gains:
        factor = f"up to {each.high:.2f}" if each.low == 1 else f"{each.low:.2f} to {each.high:.2f}"
        console.print(f"  {factor:>12} times, effort {each.trainings:g}: {each.change}")


def print_bounds(bounds: Bounds, by_context: Mapping[int, float], console: Console) -> None:
    """Print what better trees, vocabularies and depths would bring, and where drafts are lost."""
    lines = {
        f"with the best fixed tree of {bounds.nodes} nodes for these texts": bounds.tree,
        "and no token outside the draft vocabulary": bounds.vocabulary,
        "or all depths as good as the first": bounds.depths,
        "or every draft token right, in the head's own tree": bounds.oracle,
    }
    console.print(f"τ on these {bounds.tokens} tokens would be at most")
    for what, tau in lines.items():
        console.print(f"  {tau:5.2f}  {what}")
    if len(by_context) > 1:
        each = ", ".join(f"{tau:.2f} to {most:,}" for most, tau in by_context.items())
        console.print(f"τ by tokens of context: {each}")
