"""Suggests a recipe for one model on this machine, with a reason for each choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from draftheads.heads.block import spare_token
from draftheads.heads.mtp.checkpoint import NATIVE
from draftheads.heads.mtp.families import FAMILIES
from draftheads.heads.target.load import answering_dtype
from draftheads.heads.target.placement import default_device, read_config
from draftheads.train.batches import Documents
from draftheads.train.data.answers import Counts, count, read_manifest
from draftheads.train.data.text_side import TextSide

WHY_KIND = {
    "sequential": "fastest in this project's own engine; --kind eagle3 or block for others",
    "medusa": "quickest to train, nearly free to draft",
    "eagle3": "vLLM serves it, SGLang with trees",
    "block": "most tokens per step in small trees; vLLM, SGLang and llama.cpp serve it",
    "mtp": "one more layer of the target's kind; engines serve it inside the checkpoint",
}
SMALL = 512
"""Width below which a target counts as a toy, for which the demo's numbers are used."""
RATES = {"sequential": 1e-3, "medusa": 1e-3, "eagle3": 3e-4, "block": 6e-4, "mtp": 3e-4}
"""Peak learning rates of the shipped recipes for targets of 0.6 B parameters."""
TUNED = 5e-5
"""Peak learning rate for a layer that is already trained."""
SHARED = 3e-3
"""Peak learning rate with the target's lm_head: 100 steps at this rate reach what 200 at 1e-3 do.
"""
REDUCED = 32_768
"""Largest draft vocabulary for a large target, as in the shipped recipes."""
REDUCED_ON_CPU = 8_192
"""Largest draft vocabulary on a CPU if there are no answers to count yet."""
COVERED = 0.97
"""Share of the answers' tokens that the draft vocabulary must cover."""
LONGEST = 2048
"""Most tokens per row, unless the answers need more."""
EPOCHS = {300_000: 12, 3_000_000: 6}
"""Tokens of the data, at most -> passes over them; three passes over more tokens."""
STATES = {"eagle3": 3, "block": 5}
"""Hidden states per token that heads of these kinds read; other kinds read one."""
CACHED = 0.25
"""Share of the memory for hidden states."""
MINUTES = 30
"""Minutes of training on a CPU."""


@dataclass(frozen=True)
class Setting:
    """A key of a recipe, its value, and the reason for it."""

    key: str
    value: Any
    why: str = ""


def suggest(
    target: str,
    kind: str,
    data: Path | None,
    revision: str | None = None,
    lora: str | None = None,
) -> str:
    """The text of a recipe for this target. data: a folder of answers, which need not exist yet.
    lora: as in `Target.load`.

    Raises ValueError for an unknown kind, and the errors of reading the target's config.
    """
    if kind not in WHY_KIND:
        raise ValueError(f"--kind: expected {', '.join(WHY_KIND)}, got {kind!r}; choose one")
    name = target.rstrip("/").rpartition("/")[2].lower()
    folder = data or Path("out") / name / "answers"
    config = read_config(target, revision).get_text_config(decoder=True)
    counts = None
    covered = None
    if (folder / "manifest.json").is_file():
        manifest = read_manifest(folder)
        counts = count(folder, manifest)
        if manifest.complete and counts.documents:
            covered = answer_vocabulary(folder, config.vocab_size)
    has_bf16 = default_device() != "cpu" or answering_dtype(target, revision) == "bfloat16"
    choices = [Setting("target", target)]
    if revision:
        choices.append(Setting("target_revision", revision))
    if lora:
        choices.append(Setting("target_adapter", lora))
    if has_bf16:
        choices.append(Setting("target_dtype", "bfloat16", "as it will decode here"))
    choices += [
        *_data(config, folder, counts, kind),
        *_head(config, target, revision, kind, covered),
        *_run(name, kind, counts, config.hidden_size, has_bf16),
    ]
    text = StringIO()
    YAML().dump(nested(choices), text)
    return text.getvalue()


def _data(config: Any, folder: Path, counts: Counts | None, kind: str) -> Iterator[Setting]:
    context = getattr(config, "max_position_embeddings", LONGEST)
    on_cpu = default_device() == "cpu"
    length = LONGEST // 4 if on_cpu else LONGEST
    why = "the answers are not there yet"
    if counts and counts.documents:
        mean = counts.tokens / counts.documents
        length = min(LONGEST, max(256, 1 << int(4 * mean).bit_length()))
        why = f"answers have {mean:.0f} tokens on average; rows hold several"
    if length >= context:
        length = context
        why = "the target's context"
    yield Setting("data.path", str(folder))
    yield Setting("data.sequence_length", length, why)
    tokens = 2_048 if on_cpu else 16_384
    rows = max(1, min(16, tokens // length))
    yield Setting("data.rows_per_batch", rows, "draftheads plan measures whether they fit")
    if config.hidden_size < SMALL:
        yield Setting("data.cache_gb", 1, "features of a small target fit into memory")
    elif on_cpu and counts:
        size = counts.tokens * config.hidden_size * 2 * STATES.get(kind, 1)
        if size <= CACHED * psutil.virtual_memory().total:
            why = "so the target reads each answer once"
            yield Setting("data.cache_gb", math.ceil(size / 1e9), why)


def answer_vocabulary(folder: Path, vocab_size: int) -> int:
    """The size of a draft vocabulary that holds most tokens of the answers: a power of two."""
    documents = Documents.open(folder, vocab_size, str(folder))
    counts_V = -np.sort(-documents.token_counts(vocab_size))
    least = int(np.searchsorted(counts_V.cumsum(), COVERED * counts_V.sum())) + 1
    return 1 << (least - 1).bit_length()


def _head(
    config: Any, target: str, revision: str | None, kind: str, covered: int | None
) -> Iterator[Setting]:
    width = config.hidden_size
    vocabulary = config.vocab_size
    is_small = width < SMALL
    on_cpu = default_device() == "cpu"
    rate = 5e-3 if is_small else RATES[kind]
    yield Setting("head.kind", kind, WHY_KIND[kind])
    if kind in ("sequential", "medusa"):
        yield Setting("head.depth", 5, "tokens drafted ahead")
    if kind == "sequential":
        rank = max(16, min(512, width // 4))
        yield Setting("head.rank", rank, f"a quarter of the width, {width}")
        if on_cpu and not is_small:
            why = "the target's: a ninth of what there is to learn, and little to read for a draft"
            yield Setting("head.lm_head", "shared", why)
            rate = SHARED
    is_native = kind == "mtp" and any(getattr(config, each.count, 0) for each in FAMILIES)
    if is_native:
        yield Setting("head.from", NATIVE, "its checkpoint has such a layer, which this tunes")
    if kind == "block":
        yield Setting("head.layers", 2, "two with conditioning are better than five without")
        side = TextSide.load(target, revision)
        mask = spare_token(side.tokenizer, vocabulary, side.eos_ids)
        if mask is not None:
            yield Setting("head.mask", mask, "no text contains it; engines read no learned mask")
    if kind in ("sequential", "medusa") and is_small:
        yield Setting("head.layers", 2, "they cost little at this width")
    reduced = REDUCED_ON_CPU if on_cpu else REDUCED
    share = f"of {vocabulary:,}: the last matrix is what drafting reads most"
    if covered and not is_small:
        reduced = min(REDUCED, max(1024, covered))
        share = f"{COVERED:.0%} of the answers' tokens, {share}"
    reduced = vocabulary // 4 if is_small else reduced
    is_served = kind == "block" and not on_cpu  # engines that serve blocks need all tokens
    if not is_served and vocabulary >= 1.5 * reduced and reduced >= 512:
        yield Setting("head.vocabulary", reduced, share)
    yield Setting("optim.lr", TUNED if is_native else rate, "lower it if the loss jumps")


def _run(
    name: str, kind: str, counts: Counts | None, width: int, has_bf16: bool
) -> Iterator[Setting]:
    yield Setting("run.output", f"out/{name}/{kind}")
    if has_bf16:
        yield Setting("run.precision", "bf16", "weights stay float32")
    yield Setting("run.save_every", 200, "each save measures the heads, too")
    if default_device() == "cpu" and width >= SMALL:
        why = "of training, however fast this machine is; run.epochs in its place counts passes"
        yield Setting("run.minutes", MINUTES, why)
        return
    epochs = 4
    why = "run.minutes=20 in its place sets a time"
    if counts:
        sizes = [limit for limit in EPOCHS if counts.tokens <= limit]
        epochs = EPOCHS[sizes[0]] if sizes else 3
        why = f"over {counts.tokens:,} tokens; {why}"
    yield Setting("run.epochs", epochs, why)


def nested(choices: list[Setting]) -> CommentedMap:
    """The values of a recipe by section, with the reasons as comments."""
    values = CommentedMap()
    for choice in choices:
        section, dot, key = choice.key.rpartition(".")
        place = values.setdefault(section, CommentedMap()) if dot else values
        place[key] = choice.value
        if choice.why:
            place.yaml_add_eol_comment(choice.why, key, column=28)
    return values
