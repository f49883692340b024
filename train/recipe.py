"""A run's choices: a YAML file checked by pydantic models, with `key.path=value` overrides after
it.

What can be derived is not here: width and vocabulary come from the target, gradient accumulation
from `run.tokens_per_step`. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from draftheads.train.adapter_choices import AdapterChoices
from draftheads.train.choices import HEAD_MODELS, HeadChoices, Kind, MedusaChoices, Section
from draftheads.train.judge_choices import JudgeChoices, comparison

Precision = Literal["fp32", "bf16"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class DataChoices(Section):
    """Where the target's answers are and how they are laid out in rows."""

    path: Path = Field(description="folder that `draftheads distill --out` wrote")
    sequence_length: int = Field(
        1024, ge=2, description="tokens per row; at most the target's context"
    )
    rows_per_batch: int = Field(8, ge=1, description="rows per process and forward; memory only")
    pack: bool = Field(True, description="several documents per row; false: one")
    cache_gb: float = Field(
        0.0, ge=0, description="GB of memory per process for features of rows seen before"
    )
    heldout: float = Field(
        0.02, gt=0, le=0.5, description="share of documents kept for calibration and evaluation"
    )


class FeatureChoices(Section):
    """Where the target's features come from: its forward in every step, or files written once."""

    mode: Literal["online", "cached"] = Field("online", description="cached: from features.path")
    path: Path | None = Field(None, description="folder of the files; null: beside data.path")
    dtype: Literal["bf16", "fp8", "fp32"] = Field("bf16", description="of stored features")
    disk_gb: float = Field(100.0, gt=0, description="GB of disk that the files may fill")


class OptimChoices(Section):
    """AdamW and its learning rate. Weight decay spares biases."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, description="per step and unit of learning rate")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of steps with a rising lr")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="after the warm-up")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")


class RunChoices(Section):
    """How long, how often, where to."""

    output: Path = Field(description="folder for step-* checkpoints; a run in it is continued")
    steps: int | None = Field(None, ge=1, description="optimizer steps; or give epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the rows; or give steps")
    tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="rows x sequence_length per optimizer step, over all processes; null: a "
        "hundredth of what all epochs read, at most 65536",
    )
    save_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints kept; the best one always is")
    seed: int = Field(0, ge=0, description="of the data order and of everything drawn")
    precision: Precision = Field("fp32", description="of the heads' matmuls; weights are fp32")
    trackers: list[str] = Field(default_factory=list, description='e.g. ["tensorboard"]')
    log_every: int = Field(10, ge=1, description="steps between lines in metrics.jsonl")
    max_skipped: int = Field(
        3, ge=1, description="steps in a row without a finite loss and gradient that end the run"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute what layers made instead of keeping it: less memory, slower"
    )
    compile: bool = Field(False, description="torch.compile the heads' layers")

    @model_validator(mode="after")
    def _one_length(self) -> RunChoices:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("exactly one of steps and epochs; set one and leave the other null")
        return self


class Recipe(Section):
    """Everything that a run needs to know."""

    target: str = Field(description="folder or Hub id of the frozen causal LM")
    target_dtype: Dtype = Field("auto", description="auto: float32 on CPU, else the checkpoint's")
    target_revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    target_placement: Literal["whole", "split", "sharded"] = Field(
        "whole",
        description="whole: on each process's device; split: over all GPUs of the one process; "
        "sharded: its layers divided over all processes",
    )
    target_bits: Literal[4, 8] | None = Field(
        None, description="quantise it through bitsandbytes; null: as target_dtype says"
    )
    data: DataChoices
    features: FeatureChoices = Field(default_factory=FeatureChoices)
    head: HeadChoices = Field(default_factory=MedusaChoices)
    optim: OptimChoices = Field(default_factory=OptimChoices)
    adapter: AdapterChoices | None = Field(
        None, description="changes the target, too (Medusa-2); null: it stays as it is"
    )
    judge: JudgeChoices = Field(default_factory=JudgeChoices)
    run: RunChoices

    @model_validator(mode="after")
    def _can_adapt(self) -> Recipe:
        if self.adapter is None:
            return self
        if not isinstance(self.head, MedusaChoices):
            raise ValueError(
                f"adapter with head.kind medusa or sequential, got {self.head.kind}; EAGLE heads "
                "learn on a frozen target: set adapter to null"
            )
        if self.target_bits or self.target_placement == "sharded":
            raise ValueError(
                "adapter with target_bits null and target_placement whole or split, as it is kept "
                f"near the target itself, got {self.target_bits} and {self.target_placement}"
            )
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: Kind = "medusa") -> Recipe:
    """Read a recipe; `overrides` are like "optim.lr=1e-3", their values parsed as YAML. kind: of
    the head, where neither says `head.kind`.

    Raises FileNotFoundError for a missing file and ValueError for everything wrong in it; both
    are one line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"recipe {path}: no such file; {_near_files(path)}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:  # its message has several lines
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    overridden = [_override(values, text) for text in overrides]
    head = {} if values.get("head") is None else values["head"]
    if isinstance(head, dict):
        values["head"] = head if head.get("kind") is not None else {**head, "kind": kind}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:  # its message has several lines and a link
        raise ValueError(_explain(error.errors()[0], values, path, overridden)) from error


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines "key: old -> new" for choices that change what is trained (see `trained_choices`)."""
    before, after = dict(_flat(trained_choices(old))), dict(_flat(trained_choices(new)))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def trained_choices(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a dumped recipe that must stay when a run is continued."""
    decoding = HEAD_MODELS[recipe["head"]["kind"]].decoding_keys
    free = {"data": {"rows_per_batch", "cache_gb", "path"}, "features": {"path", "disk_gb"}}
    kept = {
        section: {key: value for key, value in recipe[section].items() if key not in names}
        for section, names in {**free, "head": decoding}.items()
    }
    run = {key: recipe["run"][key] for key in ("seed", "tokens_per_step", "precision")}
    places = {"target", "target_revision", "target_placement"}  # its fingerprint must stay
    whole = {key: value for key, value in recipe.items() if key not in places}
    return {**whole, **kept, "judge": comparison(recipe), "run": run}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; this loader reads it as the number that it is."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _override(values: dict[str, Any], text: str) -> str:
    """Set one override in `values`; returns its key."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(
            f"override {text!r}: expected key.path=value without spaces, e.g. optim.lr=1e-3"
        )
    *sections, name = key.strip().split(".")
    place = values
    for section in sections:
        inner = place.get(section)
        if not isinstance(inner, dict):
            inner = place[section] = {}
        place = inner
    try:
        place[name] = yaml.load(value, _Loader)
    except yaml.YAMLError as error:  # its message has several lines
        raise ValueError(f"override {text!r}: {value!r} is not a YAML value") from error
    return key.strip()


def _explain(
    fault: ErrorDetails, values: dict[str, Any], path: Path, overridden: Sequence[str]
) -> str:
    """One line for a fault in `values`, the recipe with its overrides."""
    names = [str(part) for part in fault["loc"]]
    if not names:  # a fault between sections
        return f"{path}: expected {fault['msg'].removeprefix('Value error, ')}"
    if names[0] == "head":
        del names[1:2]  # the kind, which pydantic puts between the section and the key
    key = ".".join(names)
    if fault["type"] == "union_tag_invalid":
        key = "head.kind"
    key, where = _origin(key, fault, overridden) or (key, str(path))
    if fault["type"] == "union_tag_invalid":
        kinds = ", ".join(HEAD_MODELS)
        return f"{where}: {key}: expected one of {kinds}, got {fault['input']['kind']!r}"
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key {key!r}; {_did_you_mean(key, values)}"
    if fault["type"] == "missing":
        return f"{where}: key {key!r} is missing; add it, or pass {key}=..."
    expected = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if fault["type"] == "value_error":
        return f"{where}: {key}: expected {expected}"
    return f"{where}: {key}: {expected}, got {fault['input']!r}"


def _origin(key: str, fault: ErrorDetails, overridden: Sequence[str]) -> tuple[str, str] | None:
    """The faulty key and "command line", where an override brought the fault about."""
    for given in overridden:
        # of a fault between several keys, the message says which
        said = fault["type"] != "value_error" or re.search(
            rf"\b{re.escape(given.rpartition('.')[2])}\b", fault["msg"]
        )
        if given == key or (given.startswith(f"{key}.") and said):
            return given, "command line"
        if key.startswith(f"{given}."):
            return key, "command line"
    return None


def _did_you_mean(key: str, values: dict[str, Any]) -> str:
    kind = str(values["head"].get("kind")) if isinstance(values["head"], dict) else ""
    keys = sorted(_known_keys(Recipe, HEAD_MODELS.get(kind, MedusaChoices)))
    owners = [name for name, model in HEAD_MODELS.items() if key in _known_keys(Recipe, model)]
    if owners:
        return f"it belongs to head.kind {' or '.join(owners)}, and this is {kind}"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    if not near:  # right word in the wrong section, or a section that does not exist
        words = {known.rpartition(".")[2]: known for known in keys}
        near = [
            words[word] for word in difflib.get_close_matches(key.rpartition(".")[2], words, n=1)
        ]
    if near:
        return f"did you mean {near[0]!r}?"
    section = key.rpartition(".")[0]
    inside = [known for known in keys if known.rpartition(".")[0] == section]
    return f"known keys: {', '.join(inside or keys)}"


def _known_keys(model: type[BaseModel], head: type[Section], prefix: str = "") -> Iterator[str]:
    """The keys of a model and of the sections in it; `head`: the one chosen of its alternatives."""
    for name, field in model.model_fields.items():
        yield prefix + name
        options = get_args(field.annotation) or (field.annotation,)
        for section in (head,) if prefix + name == "head" else options:
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from _known_keys(section, head, f"{prefix}{name}.")


def _near_files(path: Path) -> str:
    files = [*path.parent.glob("[!.]*.yaml"), *Path("recipes").glob("*.yaml")]
    texts = {str(file): file.read_text(errors="replace") for file in files}
    found = [name for name, text in texts.items() if "\ntarget:" in f"\n{text}"]
    near = difflib.get_close_matches(str(path), found, n=2, cutoff=0.5)
    names = near or sorted(found)[:5]
    return f"did you mean {' or '.join(names)}?" if names else "give the path of a YAML recipe"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
