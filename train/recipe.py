"""The recipe of a run: a YAML file checked by pydantic models, with `key.path=value` overrides.

Derived values are not in it: width and vocabulary come from the target, gradient accumulation from
`run.tokens_per_step`. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Lt
from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftheads.arguments import expected, suggestion
from draftheads.heads.choices import LARGEST, MOST_RANKS, HeadChoices, Section
from draftheads.heads.kinds import HEADS
from draftheads.heads.medusa import MedusaChoices
from draftheads.heads.tables import flat
from draftheads.recipes import find_recipe, parse_yaml, read_recipe

logger = logging.getLogger("draftheads")

Precision = Literal["fp32", "bf16"]
Measure = Literal["tokens_per_step", "simulated"]

LENGTHS = ("epochs", "minutes", "steps")
"""Keys of `run` that give it its length, one at a time."""

SERVER_KEYS = frozenset(
    {"server", "server_model", "api_key_env", "exchange", "in_flight", "timeout"}
)
"""Keys of features that say where servers are."""

Beta = Annotated[float, Ge(0), Lt(1)]


class DataChoices(Section):
    """The target's answers and their layout in rows."""

    path: Path = Field(description="folder of `draftheads distill --out`")
    sequence_length: int = Field(1024, ge=2, description="tokens per row")
    rows_per_batch: int = Field(8, ge=1, description="rows per process and forward")
    pack: bool = Field(True, description="pack several documents per row; false: one")
    cache_gb: float = Field(0.0, ge=0, description="GB of features cached in memory, per process")
    heldout: float = Field(0.02, gt=0, le=0.5, description="share of documents held out")


class FeatureChoices(Section):
    """Source of the target's features: a forward in every step, files written once, or servers."""

    mode: Literal["online", "cached"] = Field(
        "online", description="online: at every step; cached: once, into features.path"
    )
    path: Path | None = Field(None, description="null: next to data.path")
    layers: list[int] | None = Field(
        None,
        description="states that servers capture, by transformers' numbers; null: 0, what the head "
        "reads and the last",
    )
    server: list[str] = Field(
        default_factory=list,
        description="addresses of vLLM servers that hold the target, whose layers are not loaded",
    )
    server_model: str | None = Field(None, description="its name there; null: the only one")
    api_key_env: str | None = Field(None, description="environment variable with the servers' key")
    exchange: Path = Field(
        Path("/dev/shm/draftheads"),  # noqa: S108
        description="folder to which the servers write states",
    )
    in_flight: int = Field(32, ge=1, description="documents asked for at a time, at each server")
    timeout: float | None = Field(None, gt=0, description="seconds for an answer; null: 60")


class OptimChoices(Section):
    """AdamW and its learning rate. Biases have no weight decay."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of AdamW's moments")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay; none on biases")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of steps in which the lr rises")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="of the lr after warm-up")
    clip: float = Field(1.0, gt=0, description="gradient norm to clip at")


class AdapterChoices(Section):
    """A LoRA adapter on the target. Its loss adds the divergence from the unadapted target
    (arXiv 2401.10774, 2.2 and 2.3: two stages; self-distillation).
    """

    rank: int = Field(32, ge=1, le=MOST_RANKS, description="LoRA rank")
    alpha: float = Field(16.0, gt=0, description="LoRA alpha; updates are scaled by alpha / rank")
    layers: int | None = Field(None, ge=1, description="adapt the last N layers; null: all")
    modules: list[str] | None = Field(
        None, min_length=1, description="linear modules, e.g. [q_proj, v_proj]; null: all"
    )
    lr: float = Field(5e-4, gt=0, description="peak learning rate of the adapter")
    start: float = Field(0.25, ge=0, lt=1, description="share of steps that train only the heads")
    heads_weight: float = Field(1.0, gt=0, description="weight of the heads' loss; divergence: 1")
    agreement: float = Field(
        0.98, ge=0, le=1, description="least share of unchanged greedy tokens in a best checkpoint"
    )


class EvalChoices(Section):
    """Evaluation during training, by greedy decoding of held-out prompts with the heads."""

    every: int | None = Field(
        None, ge=0, description="steps between evaluations; null: at every save; 0: never decode"
    )
    prompts: int = Field(32, ge=1, description="held-out prompts to continue")
    new_tokens: int = Field(64, ge=2, description="new tokens per prompt")
    best: Measure | None = Field(
        None,
        description="measure that picks the best checkpoint; simulated: from held-out ranks; "
        "null: tokens_per_step, or simulated if every: 0",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="evaluations to wait for improvement; null: all, or 3 with head.from",
    )


class RunChoices(Section):
    """Length, output and settings of a run."""

    output: Path = Field(description="folder for checkpoints; a run in it is resumed")
    steps: int | None = Field(None, ge=1, description="optimizer steps; or set epochs or minutes")
    epochs: float | None = Field(None, gt=0, description="passes over the data")
    minutes: float | None = Field(
        None,
        gt=0,
        description="time for steps and evaluations, by which the lr goes, too; loading is not "
        "counted",
    )
    tokens_per_step: int | None = Field(
        None, ge=1, description="over all processes; null: 1 % of all tokens, at most 65536"
    )
    save_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints to keep; the best is kept too")
    seed: int = Field(0, ge=0, lt=LARGEST, description="of data order, initialisation and anchors")
    precision: Precision = Field("fp32", description="of matmuls in the heads; weights are fp32")
    trackers: list[str] = Field(default_factory=list, description="e.g. [tensorboard]")
    log_every: int = Field(10, ge=1, description="steps between lines in metrics.jsonl")
    max_skipped: int = Field(3, ge=1, description="consecutive non-finite steps that end the run")
    gradient_checkpointing: bool = Field(False, description="save memory, slower")

    @property
    def epochs_of_size(self) -> float | None:
        """Passes over the data that the size of a step follows from; None: of many."""
        return 1.0 if self.minutes else self.epochs

    @model_validator(mode="after")
    def _check_length(self) -> RunChoices:
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) != 1:
            got = " and ".join(lengths) or "none"
            raise ValueError(
                f"set exactly one of steps, epochs and minutes, the others null, got {got}"
            )
        return self


class Recipe(Section):
    """All choices of a run."""

    target: str = Field(description="folder or Hub id of the frozen causal LM")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, else as saved"
    )
    target_revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    target_adapter: str | None = Field(
        None, description="LoRA in PEFT's format, merged into the target: folder or Hub id"
    )
    target_placement: Literal["whole", "split", "sharded"] = Field(
        "whole",
        description="whole: a copy per process; split: over all GPUs of a single process; sharded: "
        "layers divided over all processes",
    )
    target_bits: Literal[4, 8] | None = Field(None, description="quantise with bitsandbytes")
    data: DataChoices
    features: FeatureChoices = Field(default_factory=FeatureChoices)
    head: SerializeAsAny[HeadChoices] = Field(default_factory=MedusaChoices)
    optim: OptimChoices = Field(default_factory=OptimChoices)
    adapter: AdapterChoices | None = Field(None, description="Medusa-2; null: a frozen target")
    eval: EvalChoices = Field(default_factory=EvalChoices)
    run: RunChoices

    @property
    def decodes(self) -> bool:
        """True if evaluation decodes. Not with a sharded target, where all processes must run the
        same number of forwards, and not with one whose layers are at a server.
        """
        is_whole = self.target_placement != "sharded" and not self.features.server
        return self.eval.every != 0 and is_whole

    @property
    def measure(self) -> Measure:
        """The measure that picks the best checkpoint."""
        return self.eval.best or ("tokens_per_step" if self.decodes else "simulated")

    @field_validator("head", mode="before")
    @classmethod
    def _of_kind(cls, value: Any) -> HeadChoices:
        union: Any = reduce(or_, (kind.Choices for kind in HEADS.values()))
        choices = TypeAdapter[HeadChoices](Annotated[union, Field(discriminator="kind")])
        return choices.validate_python(value)

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        sharded = self.target_placement == "sharded"
        if sharded and self.features.mode == "online" and self.data.cache_gb:
            raise ValueError(
                f"data.cache_gb should be 0 with target_placement=sharded, got "
                f"{self.data.cache_gb}; set features.mode=cached instead"
            )
        is_changed = self.adapter or self.target_bits or self.target_placement != "whole"
        if self.features.server and is_changed:
            raise ValueError(
                "features.server: expected adapter and target_bits null and target_placement "
                "whole, as the layers of the target are not loaded; leave these keys out"
            )
        if self.eval.best == "tokens_per_step" and not self.decodes:
            raise ValueError(
                f"eval.best: expected simulated, got {self.eval.best}, which needs "
                "decoding; eval.every=0, target_placement=sharded and features.server turn it off"
            )
        if self.adapter and not self.head.takes_adapter:
            kinds = " or ".join(kind for kind in HEADS if HEADS[kind].Choices.takes_adapter)
            raise ValueError(f"adapter needs head.kind {kinds}, got {self.head.kind}")
        elsewhere = self.target_placement != "whole" or self.features.server
        if self.target_adapter and (self.target_bits or elsewhere):
            raise ValueError(
                "target_adapter needs target_bits null, target_placement whole and no "
                "features.server; or merge it with PEFT (merge_and_unload), save the result, and "
                "set target to that"
            )
        if self.adapter and (self.target_bits or sharded):
            raise ValueError("adapter needs target_bits null and target_placement whole or split")
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: str = "medusa") -> Recipe:
    """Read a recipe: a file, or one that comes with the package, by name. Overrides are like
    "optim.lr=1e-3": literal text where the key takes text, else YAML. `head.kind=...` drops the
    keys that only the previous kind has, `run.steps=...` the length that the recipe has otherwise.
    kind: of the head, if neither the file nor an override sets `head.kind`.

    Raises FileNotFoundError for a missing file and ValueError for a mistake in it, both of one
    line.
    """
    path = find_recipe(path)
    values = read_recipe(path)
    # None: a section whose keys are all commented out
    values = {key: value for key, value in values.items() if value is not None}
    head = values.setdefault("head", {})
    if isinstance(head, dict) and head.get("kind") is None:
        head["kind"] = kind
    overridden = [_override(values, text) for text in overrides]
    run = values.get("run")
    if isinstance(run, dict):  # lengths of the file go, if overrides set one
        typed = {name for name in LENGTHS if f"run.{name}" in overridden}
        lengths = {name for name in typed if run.get(name) is not None}
        for name in set(LENGTHS) - lengths if lengths else ():
            run.pop(name, None)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:  # its message has several lines and a link
        raise ValueError(_explain(error.errors()[0], path, overridden)) from error


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Lines "key: old -> new" for the choices that must not change when a run is resumed."""
    before, after = _fixed_choices(old), _fixed_choices(new)
    # a run resumed with null keeps its tokens per step
    keys = after.keys() | (before.keys() - {"run.tokens_per_step"})
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(keys)
        if before.get(key) != after.get(key)
    ]


def _fixed_choices(recipe: Recipe) -> dict[str, Any]:
    """Choices that must not change when a run is resumed. The target is compared by fingerprint."""
    compared = {"prompts", "new_tokens"} if recipe.measure == "tokens_per_step" else set()
    free: Any = {
        **dict.fromkeys(("target", "target_revision", "target_adapter", "target_placement"), True),
        "data": {"rows_per_batch", "cache_gb", "path"},
        "features": {"path", *SERVER_KEYS},
        "head": set(recipe.head.decoding_keys),
        "eval": EvalChoices.model_fields.keys() - compared,
        "run": RunChoices.model_fields.keys() - {"seed", "tokens_per_step", "precision"},
    }
    choices = flat(recipe.model_dump(mode="json", exclude=free))
    return {**choices, "eval.best": recipe.measure}


def recipe_keys(
    kind: str, model: type[BaseModel] = Recipe, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """All keys of recipes with a head of this kind, each section before its keys."""
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        yield prefix + name, field
        types = (field.annotation, *get_args(field.annotation))
        if name == "head":
            types = (HEADS[kind].Choices,)
        for section in types:
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from recipe_keys(kind, section, f"{prefix}{name}.")


def key_table() -> list[tuple[str, ...]]:
    """(key, type, default or "required", description) of the keys of all kinds."""
    kinds_of: dict[tuple[str, ...], list[str]] = {}
    for kind in HEADS:
        for key, field in recipe_keys(kind):
            default = field.get_default(call_default_factory=True)
            if isinstance(default, BaseModel) or not field.description:
                continue  # a section, whose keys follow
            value = json.dumps(default, default=str).strip('"')
            shown = "required" if field.is_required() else value
            annotation = inspect.formatannotation(field.annotation).replace("typing.", "")
            takes = re.sub(r"Annotated\[(\w+), [^\]]*\]", r"\1", annotation)
            row = (key, takes, shown, field.description)
            kinds_of.setdefault(row, []).append(kind)
    sections = list(Recipe.model_fields)
    table = []
    for key, *rest in sorted(kinds_of, key=lambda row: sections.index(row[0].partition(".")[0])):
        kinds = kinds_of[key, *rest]
        shown = key if len(kinds) == len(HEADS) else f"{key} ({', '.join(kinds)})"
        table.append((shown, *rest))
    return table


def _override(values: dict[str, Any], text: str) -> str:
    """Set one override in `values`; returns its key."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ValueError(f"override {text!r}: expected key.path=value, e.g. optim.lr=1e-3")
    if not value:  # of an unset variable, as in head.from=$HEAD
        raise ValueError(
            f"command line: {key}: expected a value, got an empty one; write {key}=null for none"
        )
    *sections, name = key.split(".")
    section = values
    for each in sections:
        if not isinstance(section.get(each), dict):
            section[each] = {}
        section = section[each]
    fields = [dict(recipe_keys(kind)).get(key) for kind in HEADS]
    types = [str(field.annotation) for field in fields if field]
    takes_text = re.search(r"\bstr\b|Path|\['", " ".join(types))
    is_text = takes_text and not re.match(r"[\[{'\"]|~$|null$", value)
    old_kind = str(section.get(name))
    try:
        section[name] = value if is_text else parse_yaml(value)
    except ValueError as error:
        raise ValueError(f"override {text!r}: {value!r} is not a YAML value") from error
    if key == "head.kind" and old_kind in HEADS and value in HEADS:
        _drop_keys(section, old_kind, value, text)
    return key


def _drop_keys(head: dict[str, Any], old_kind: str, new_kind: str, text: str) -> None:
    """Remove the keys that only the old kind has, and say so. text: the override."""
    old, new = HEADS[old_kind].Choices.model_fields, HEADS[new_kind].Choices.model_fields
    dropped = [key for key in head if key in old and key not in new]
    for key in dropped:
        del head[key]
    if dropped:
        logger.warning("%s: dropped keys of %s: %s", text, old_kind, ", ".join(dropped))


def _explain(fault: ErrorDetails, path: Path, overridden: list[str]) -> str:
    """One line for a fault that pydantic found."""
    names = [str(name) for name in fault["loc"]]
    # pydantic puts the kind between the section and the key
    kind = names.pop(1) if names[0:1] == ["head"] and len(names) > 1 else "medusa"
    if fault["type"] == "union_tag_invalid":
        names.append("kind")
    key = ".".join(names)
    is_typed = any(f"{key}.".startswith(f"{each}.") for each in overridden)
    if fault["type"] == "extra_forbidden":
        is_typed = is_typed or any(each.startswith(f"{key}.") for each in overridden)
        message = _unknown_key(key, kind)
    elif fault["type"] == "union_tag_invalid":
        tag = str(fault["ctx"]["tag"])
        near = suggestion(tag, HEADS)
        hint = f"; did you mean {near!r}?" if near else ""
        message = f"expected one of {', '.join(HEADS)}, got {tag!r}{hint}"
    else:
        message = expected(fault["msg"])
        if not isinstance(fault["input"], dict):
            message += f", got {textwrap.shorten(repr(fault['input']), 80)}"
    where = "command line" if is_typed else str(path)
    return ": ".join(filter(None, (where, key, message)))


def _unknown_key(key: str, kind: str) -> str:
    """Suggests what a key may have meant that heads of this kind do not have."""
    keys = {kind: list(dict(recipe_keys(kind))) for kind in HEADS}
    owners = [each for each in keys if key in keys[each]]
    near = difflib.get_close_matches(key, keys[kind], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`draftheads keys` lists all"
    if owners:
        hint = f"it belongs to head.kind {' or '.join(owners)}"
    return f"unknown key; {hint}"
