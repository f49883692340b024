"""The commands that measure speed: bench and tune. Heavy imports wait until a command runs, so that
--help is instant.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Option

from draftheads.infer.pipeline.loading import load_fast_target, load_target
from draftheads.scripts.options import (
    HEAD_CHECK,
    Bits,
    Engine,
    Json,
    Lossy,
    MaybeTarget,
    MaybeTemplateArgs,
    Placement,
    Prompts,
    Revision,
    Sampling,
    Seed,
    Speed,
    TargetName,
    early,
    parsed_template_args,
    say_compiling,
    say_next,
    target_options,
    write_figures,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target.model import Target
    from draftheads.infer.measure.bench import BenchOptions, Entry, Result
    from draftheads.infer.measure.llamacpp import Chain
    from draftheads.infer.measure.tune import TuneOptions
    from draftheads.infer.race import RaceOptions
    from draftheads.infer.sources import DrafterSource
    from draftheads.infer.turns import Turns

logger = logging.getLogger(__name__)

MINUTES = "end after about so long: fewer prompts, the same for all rows"


@dataclass(frozen=True)
class BenchPrompts:
    """Prompts."""

    prompts: Prompts
    limit: Annotated[int, Option(min=1, help="prompts, taken evenly from all categories")] = 16
    template_args: MaybeTemplateArgs = None


@dataclass(frozen=True)
class BenchRuns:
    """Runs."""

    max_new_tokens: Annotated[int, Option(min=1)] = 128
    minutes: Annotated[float | None, Option(min=0.01, help=MINUTES)] = None
    seed: Seed = 0


def node_counts(text: str) -> list[int]:
    """The numbers in a text such as 4,8,16. Raises ValueError."""
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"--nodes: expected numbers such as 4,8,16, got {text!r}")
    return [int(count) for count in counts]


TREES = """4,2,1 or [[0],[0,0]] or nodes=16,depth=5,top_k=4 (not Medusa); default: the heads' own;
repeatable"""


@dataclass(frozen=True)
class Contestants:
    """Drafts."""

    head: Annotated[list[str], Option(callback=HEAD_CHECK, help="as for chat; repeatable")]
    nodes: Annotated[
        str | None, Option(callback=early(node_counts), help="draft nodes to try: 4,8,16")
    ] = None
    tree: Annotated[list[str] | None, Option(help=TREES)] = None


def bench_options(
    runs: BenchRuns, sampling: Sampling, lossy: Lossy, contestants: Contestants, speed: Speed
) -> BenchOptions:
    """The settings of a bench. Raises ValueError for --nodes beside --tree."""
    from draftheads.infer.measure.bench import BenchOptions

    if contestants.nodes and contestants.tree:
        raise ValueError("--nodes: expected a head without a --tree, got both; leave one out")
    return BenchOptions(
        sampling=sampling.rule(runs.seed, lossy),
        nodes=node_counts(contestants.nodes) if contestants.nodes else (),
        compile=speed.compile,
        max_new_tokens=runs.max_new_tokens,
        minutes=runs.minutes,
        seed=runs.seed,
    )


def bench(
    target: TargetName,
    texts: BenchPrompts,
    runs: BenchRuns,
    sampling: Sampling,
    contestants: Contestants,
    placement: Placement,
    speed: Speed,
    lossy: Lossy,
    revision: Revision = None,
    json_out: Json = None,
) -> None:
    """Measure heads and other drafters against `generate` and this engine without drafts."""
    from draftheads.infer.accept import Greedy
    from draftheads.infer.drafters.named import open_drafts
    from draftheads.infer.measure import bench as benches
    from draftheads.infer.measure.llamacpp import rivals_of
    from draftheads.infer.measure.report import best, print_report
    from draftheads.scripts.openings import openings, token_ids

    options = bench_options(runs, sampling, lossy, contestants, speed)
    drafts = open_drafts(contestants.head)
    folders = [folder for each in drafts.values() for folder in each.folders]
    place = placement.place(speed.bits, speed.engine)
    variables = parsed_template_args(texts.template_args)
    model = load_fast_target(target, place, revision, folders, variables)
    loaded = {name: each.load(model) for name, each in drafts.items()}
    entries = with_trees(loaded, contestants.tree or ())
    prompts = openings(texts.prompts, texts.limit)
    ids = token_ids(model, prompts)
    options = replace(options, categories=[prompt.category or "" for prompt in prompts])
    say_compiling(speed.compile)
    is_comparable = model.device.type == "cpu" and not model.lora
    longest = max(map(len, ids)) + runs.max_new_tokens
    sources = dict(zip(drafts, dict.fromkeys(contestants.head), strict=True))
    with ExitStack() as stack:
        turns = stack.enter_context(turns_of(json_out, model, folders, options, ids))
        if is_comparable and isinstance(options.sampling, Greedy):
            files = Path(stack.enter_context(TemporaryDirectory()))
            chains = llamacpp_chains(loaded, sources, target, options.nodes, files)
            rivals = stack.enter_context(rivals_of(target, longest, chains))
            options = replace(options, rivals=rivals)
        report = benches.bench(model, entries, ids, options, turns=turns)
        if model.bits:
            whole = load_target(
                target, replace(place, dtype="float32", bits=None, engine=None), revision, folders
            )
            report = replace(report, int8=benches.int8_cost(model, whole, ids))
        print_report(report)
        write_figures(json_out, asdict(report))
    after_bench(target_options(target, placement.lora), texts.prompts, sources, best(report))


def llamacpp_chains(
    heads: Mapping[str, DrafterSource],
    sources: Mapping[str, str],
    target: str,
    nodes: Sequence[int],
    folder: Path,
) -> dict[str, Chain]:
    """The heads that llama.cpp has, as files in `folder`, by the names of their rows in a bench;
    none without llama.cpp or for a target that is no GGUF file. sources: names of heads ->
    --head. nodes: lengths of chains to try; empty: that of the head's card.
    """
    from draftheads.heads.base import DraftHead
    from draftheads.heads.formats.card import CHAIN, method
    from draftheads.heads.formats.llamacpp import ARCHITECTURES, TargetFile
    from draftheads.heads.target.placement import is_gguf
    from draftheads.infer.measure.llamacpp import RIVAL, Chain, find_server
    from draftheads.recipes import target_path
    from draftheads.scripts.convert import converted

    chains: dict[str, Chain] = {}
    if not (find_server() and is_gguf(target)):
        return chains
    for number, (name, head) in enumerate(heads.items()):
        if not isinstance(head, DraftHead) or head.kind not in ARCHITECTURES:
            continue
        lengths = {min(each, head.depth) for each in nodes or [CHAIN]}
        if head.kind == "block":
            lengths = {head.depth}  # shorter blocks would have other drafts
        file = folder / f"{number}.gguf"
        try:
            converted(sources[name], file, "gguf", None, TargetFile.open(target_path(target)))
        except ValueError as error:
            logger.warning("without %s in %s: %s", name, RIVAL, error)
            continue
        drafts = method(head.kind, head.config())
        for length in sorted(lengths):
            chains[f"{RIVAL} {name}@{length}"] = Chain(file, drafts, length)
    return chains


def turns_of(
    json_out: Path | None,
    model: Target,
    folders: Sequence[HeadFolder],
    options: RaceOptions,
    prompts: Sequence[Sequence[int]],
) -> Turns:
    """Where a command that was stopped goes on: beside the file of --json, if target, heads and
    their trees, settings, prompts and machine are the same.
    """
    from draftheads.infer.race import describe_machine
    from draftheads.infer.turns import Turns

    files = [file for folder in folders for file in sorted(folder.path.glob("*.safetensors"))]
    facts: dict[str, object] = {
        "target": [model.title, model.fingerprint()],
        "heads": [(file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "trees": [folder.facts.json.get("tree") for folder in folders],
        "settings": replace(options, minutes=None),
        "prompts": prompts,
        "machine": {**describe_machine(model), "date": None},
    }
    digests = {
        name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in facts.items()
    }
    return Turns(json_out and json_out.with_name(f"{json_out.name}.turns"), digests)


def with_trees(drafts: Mapping[str, DrafterSource], texts: Sequence[str]) -> dict[str, Entry]:
    """Entries of a bench: each head with each tree of --tree, as "name@tree"; without such, with
    its own.
    """
    from draftheads.heads.tree import parse_tree

    if not texts:
        return dict(drafts)
    return {
        f"{name}@{text}": (source, parse_tree(text))
        for name, source in drafts.items()
        for text in texts
    }


def check_writable_head(source: str) -> None:
    """Raise ValueError for a head that is not on this machine or in another layout: nothing can be
    written into its config and card.
    """
    from draftheads.heads.formats.hub import open_head

    if not (Path(source).is_dir() and open_head(source).facts.is_ours):
        raise ValueError(
            "--head: expected a head folder on this machine in this project's own layout, got "
            f"{source}; draftheads convert {source} DIR --to draftheads writes one"
        )


def after_bench(
    model: Sequence[str], prompts: str, sources: Mapping[str, str], winner: Result | None
) -> None:
    """A head on this machine is tuned, unless it was; other drafters chat, if they won. model:
    `target_options`. sources: names of drafters -> --head; winner: None if no drafts were faster.
    """
    from draftheads.heads.formats.hub import open_head

    candidate = winner.name if winner else ""
    names = [name for name in sources if candidate.startswith(name)]
    source = sources[max(names, key=len, default=next(iter(sources)))]
    words = [*model, "--head", source]
    is_folder = os.path.isdir(os.path.expanduser(source))
    facts = open_head(source).facts if is_folder else None
    if facts and facts.is_ours and not facts.tuned:
        say_next("tune", *words, "--prompts", prompts)
    else:
        say_next("chat", *(words if winner else model))


@dataclass(frozen=True)
class TunePrompts(BenchPrompts):
    """Prompts."""

    limit: Annotated[int, Option(min=2, help="use only the first N prompts")] = 24


@dataclass(frozen=True)
class Search(BenchRuns):
    """Search."""

    max_new_tokens: Annotated[int, Option(min=2)] = 64
    nodes: Annotated[int, Option(min=1, help="draft nodes of the largest tree")] = 64

    def options(self, sampling: Sampling) -> TuneOptions:
        """The settings of the search."""
        from draftheads.infer.measure.tune import TuneOptions

        return TuneOptions(
            sampling=sampling.rule(self.seed),
            max_new_tokens=self.max_new_tokens,
            nodes=self.nodes,
            minutes=self.minutes,
            seed=self.seed,
        )


def tune(
    texts: TunePrompts,
    head: Annotated[str, Option(callback=HEAD_CHECK, help="head or run folder")],
    search: Search,
    sampling: Sampling,
    placement: Placement,
    bits: Bits = None,
    engine: Engine = None,
    target: MaybeTarget = None,
    revision: Revision = None,
    dry_run: Annotated[bool, Option("--dry-run", help="print only; keep the head's tree")] = False,
    json_out: Json = None,
) -> None:
    """Find the tree with the most tokens per second on this machine and write it into the head."""
    from draftheads.heads.formats.hub import open_head, record_tuned
    from draftheads.infer.measure.tune import tune as run
    from draftheads.scripts.openings import opening_ids
    from draftheads.scripts.printing import print_tuned
    from draftheads.train.metrics import more_tokens

    options = search.options(sampling)
    if not dry_run:
        check_writable_head(head)
    folder = open_head(head)
    name, commit = (target, revision) if target else folder.target
    place = placement.place(bits, engine)
    if target is None:
        place = place.recorded(folder)
    variables = parsed_template_args(texts.template_args)
    model = load_fast_target(name, place, commit, [folder], variables)
    ids = opening_ids(model, texts.prompts, texts.limit)
    source = folder.load(model).pack(model)
    trained = folder.facts.trained_tree
    with turns_of(json_out, model, [folder], options, ids) as turns:
        tuned = run(model, source, ids, options, others=[trained], turns=turns)
        print_tuned(tuned)
        if line := more_tokens(os.path.expanduser(head)):
            say(line.rstrip())
        write_figures(json_out, asdict(tuned))
        if not (dry_run or turns.stop):
            record_tuned(folder.path, tuned.best.tree, tuned.facts())
            say(f"written to {folder.path}")
            say_next("report", head)
    say_next("chat", *target_options(name, model.lora), "--head", head)
