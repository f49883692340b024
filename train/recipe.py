"""A recipe's `head` section: one model per kind of head, told apart by `head.kind`.

Keys that only decoding reads may change between the launches of one run; each model names them.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Kind = Literal["medusa", "sequential", "eagle3", "eagle"]
Size = Annotated[int, Field(ge=1)]
Layer = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Refuses keys that it does not know, numbers that are not finite and values that are empty."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """~ is the home folder in all names, as no shell expands it within key=~/value."""
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if field and isinstance(value, bool) and field.annotation is not bool:
                raise ValueError(f"a number or a text as {name}, got {str(value).lower()}")
            if value == "":
                raise ValueError(f"a value for {name}, got nothing")
        home = os.path.expanduser
        return {key: home(x) if isinstance(x, str) else x for key, x in values.items()}


class MedusaChoices(Section):
    """Medusa heads (arXiv 2401.10774)."""

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes"})

    kind: Literal["medusa"] = Field("medusa", description="each guess made from one state alone")
    depth: int = Field(4, ge=1, le=16, description="heads = tokens guessed ahead")
    layers: int = Field(1, ge=1, le=8, description="residual blocks per head")
    lm_head: Literal["own", "shared"] = Field("own", description="shared: the target's, frozen")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the target's distribution")
    decay: float = Field(0.8, gt=0, le=1, description="weight of depth k is decay^k")
    vocabulary: int | None = Field(
        None, ge=2, description="keep only the N tokens that the target writes most; null: all"
    )
    nodes: int = Field(63, ge=1, description="draft nodes of the calibrated tree")


class LayerSizes(Section):
    """Sizes of a decoder layer."""

    heads: Size | None = Field(None, description="attention heads; null: the target's")
    kv_heads: Size | None = Field(None, description="key and value heads; null: the target's")
    head_dim: Size | None = Field(None, description="width of a head; null: the target's")
    intermediate_size: Size | None = Field(
        None, description="inner width of the MLP; null: the target's"
    )
    rope_theta: float | None = Field(None, gt=0, description="base of RoPE; null: the target's")
    rope_scaling: dict[str, Any] | None = Field(
        None, description="as in a model's config, e.g. {rope_type: llama3, factor: 8.0, ...}"
    )


class SequentialChoices(MedusaChoices, LayerSizes):
    """Medusa heads that know the token before (Hydra, arXiv 2402.05109). The sizes are those of the
    prefix layer.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "top_k"})

    kind: Literal["sequential"] = Field(  # type: ignore[assignment]
        "sequential", description="Medusa heads that know the tokens drafted before"
    )
    conditioning: Literal["markov", "state", "recurrent", "hydra"] = Field(
        "recurrent",
        description="markov: the token before changes the logits; state: it changes the hidden "
        "state; recurrent: so do all tokens since the root; hydra: these enter the head itself",
    )
    rank: Size | None = Field(
        None, description="inner width, not of hydra; null: 64 for markov, else the target's width"
    )
    prefix: bool = Field(False, description="a decoder layer reads the whole text first (Hydra++)")
    top_k: Size | None = Field(
        None,
        description="nodes expanded per level of a dynamic tree; null: a fixed, calibrated tree",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> SequentialChoices:
        if self.conditioning == "hydra" and self.rank is not None:
            raise ValueError("rank: null with conditioning: hydra, which has none; remove rank")
        sizes = [name for name in LayerSizes.model_fields if getattr(self, name) is not None]
        if sizes and not self.prefix:
            raise ValueError(
                f"prefix: true with {sizes[0]}, a size of the prefix layer; set prefix or remove it"
            )
        if self.top_k is not None:
            check_candidates(self.nodes, self.depth, self.top_k)
        return self


class DecoderChoices(LayerSizes):
    """What both kinds of EAGLE share: decoder layers that draft from their own output, and the
    dynamic tree that they fill.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "depth", "top_k"})

    layers: int = Field(1, ge=1, le=8, description="decoder layers")
    sliding_window: Size | None = Field(
        None, description="newest tokens that the draft layers see; null: all"
    )
    decay: float = Field(
        0.8, gt=0, le=1, description="weight of unrolled step k is decay^k, over their sum"
    )
    nodes: int = Field(59, ge=1, description="draft nodes of the dynamic tree")
    depth: int = Field(8, ge=1, le=32, description="tokens drafted ahead = depth of the tree")
    top_k: int = Field(10, ge=1, description="nodes expanded per level, and children per node")

    @model_validator(mode="after")
    def _enough_candidates(self) -> DecoderChoices:
        check_candidates(self.nodes, self.depth, self.top_k)
        return self


class Eagle3Choices(DecoderChoices):
    """EAGLE-3 (arXiv 2503.01840), with the switches of EAGLE-3.1 (arXiv 2605.09992) and the
    losses of arXiv 2602.23881.
    """

    kind: Literal["eagle3"] = Field(
        "eagle3", description="a decoder layer that reads the target's states, then its own output"
    )
    feature_layers: list[Layer] | None = Field(
        None,
        min_length=1,
        description="indices into hidden_states, 0 = embeddings; null: [2, n//2, n-3] of n layers",
    )
    vocabulary: int | None = Field(
        None, ge=2, description="draft only the N tokens that the target writes most; null: all"
    )
    fc_norm: bool = Field(False, description="normalise each captured feature")
    norm_output: bool = Field(False, description="the next step reads the normalised output")
    norm_before_fc: bool = Field(False, description="normalise the captured features together")
    norm_before_residual: bool = Field(False, description="the residual is the normalised feature")
    steps: int = Field(7, ge=1, le=16, description="steps of training-time test")
    labels: Literal["soft", "hard"] = Field(
        "soft", description="soft: the target's distribution; hard: the token that came"
    )
    loss: Literal["ce", "tv", "lk", "hybrid"] = Field(
        "ce",
        description="ce: cross-entropy; tv: total variation = 1 - acceptance; lk: -log acceptance; "
        "hybrid: l * ce + (1 - l) * tv with l = exp(-3 * acceptance)",
    )
    noise: float = Field(0.0, ge=0, description="uniform noise on the features, as for eagle")

    @model_validator(mode="after")
    def _fits_together(self) -> Eagle3Choices:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "at most one of fc_norm and norm_before_fc, got both; set one to false"
            )
        if self.loss != "ce" and self.labels != "soft":
            raise ValueError(
                f"labels: soft with loss: {self.loss}, which compares distributions, got labels: "
                f"{self.labels}; set labels to soft or loss to ce"
            )
        if self.vocabulary is not None and self.vocabulary < self.top_k:
            raise ValueError(
                f"vocabulary of at least top_k = {self.top_k} tokens, got {self.vocabulary}"
            )
        return self


class EagleChoices(DecoderChoices):
    """EAGLE-1 (arXiv 2401.15077)."""

    kind: Literal["eagle"] = Field(
        "eagle", description="EAGLE-1: a decoder layer that predicts the target's features"
    )
    steps: int = Field(1, ge=1, le=16, description="steps that the head is unrolled in training")
    regression: float = Field(1.0, ge=0, description="weight of the SmoothL1 loss on features")
    classification: float = Field(0.1, ge=0, description="weight of the cross-entropy")
    labels: Literal["soft", "hard"] = Field(
        "soft",
        description="of the cross-entropy: the target's distribution, or the token that came",
    )
    noise: float = Field(
        0.2,
        ge=0,
        description="uniform noise on the features: (u - 0.5) * noise * 512 / sequence_length",
    )

    @model_validator(mode="after")
    def _something_to_learn(self) -> EagleChoices:
        if not self.regression and not self.classification:
            raise ValueError("regression or classification above 0, got 0 for both; raise one")
        return self


def check_candidates(nodes: int, depth: int, top_k: int) -> None:
    """Raise ValueError for a dynamic tree of more nodes than it has candidates."""
    most = top_k + (depth - 1) * top_k**2
    if nodes > most:
        raise ValueError(
            f"nodes of at most {most}, as many as a tree of depth {depth} with top_k {top_k} has "
            f"candidates (top_k + (depth - 1) * top_k^2), got {nodes}"
        )


HeadChoices = Annotated[
    MedusaChoices | SequentialChoices | Eagle3Choices | EagleChoices, Field(discriminator="kind")
]

HEAD_MODELS: dict[str, type[MedusaChoices] | type[DecoderChoices]] = {
    "medusa": MedusaChoices,
    "sequential": SequentialChoices,
    "eagle3": Eagle3Choices,
    "eagle": EagleChoices,
}
"""The model of each kind's `head` section."""


# How heads are judged while they train: the recipe's section `eval`, and what follows from it.


Measure = Literal["tokens_per_step", "tokens_per_second", "simulated", "loss"]
DECODED = ("tokens_per_step", "tokens_per_second")
"""Measures that only decoding knows."""


class EvalChoices(Section):
    """Heads are judged by decoding with them while they train."""

    every: int | None = Field(
        None,
        ge=0,
        description="steps between judgements, each of which is saved; null: at every save; 0: no "
        "decoding, which frees memory: the target's lm_head and, of cached features, its layers",
    )
    prompts: int = Field(
        32, ge=1, description="beginnings of held-out documents to continue; few make tau uncertain"
    )
    new_tokens: int = Field(64, ge=2, description="per prompt")
    temperature: float = Field(0.0, ge=0, description="of decoding; 0: greedy")
    best: Measure | None = Field(
        None,
        description="what `best` and patience go by; tokens_per_step: of decoding; "
        "tokens_per_second: of decoding, over plain decoding's; simulated: tokens per step from "
        "held-out ranks; loss: of the last training step; null: tokens_per_step, or, where nothing "
        "is decoded, simulated",
    )
    patience: int | None = Field(
        None, ge=1, description="judgements without a better one that end the run; null: never"
    )
    report: bool = Field(True, description="write report.md and its curves when the run ends")

    @model_validator(mode="after")
    def _best_is_known(self) -> EvalChoices:
        if self.every == 0 and self.best in DECODED:
            raise ValueError(
                f"best simulated or loss, as every=0 decodes nothing, got {self.best}; "
                "change one of them"
            )
        return self


# A recipe's section `adapter`: the target learns a little, together with its heads (Medusa-2).


class AdapterChoices(Section):
    """A LoRA adapter on the target, kept near the untouched target by its divergence from it
    (arXiv 2401.10774, 2.2 and 2.3: two stages, or a weight that grows; self-distillation).
    """

    rank: int = Field(32, ge=1, description="of every change of a matrix")
    alpha: float = Field(16.0, gt=0, description="a change is multiplied by alpha / rank")
    layers: int | None = Field(
        None, ge=1, description="how many layers it changes, counted from the last; null: all"
    )
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="matrices it changes, e.g. [q_proj, v_proj]; null: all of those layers",
    )
    lr: float = Field(5e-4, gt=0, description="its peak learning rate; optim.lr is the heads'")
    start: float = Field(0.25, ge=0, lt=1, description="share of steps that train heads alone")
    heads_weight: float = Field(
        1.0, gt=0, description="of the heads' loss, beside the divergence, in what it learns from"
    )
    ramp: Literal["constant", "sine"] = Field(
        "constant", description="sine: that weight grows from 0 as sin does up to pi/2"
    )
    agreement: float = Field(
        0.98,
        ge=0,
        le=1,
        description="share of held-out tokens at which the target's first choice must stay what it "
        "was, for a checkpoint to become the best",
    )

    def weight(self, done: float) -> float:
        """Of the heads' loss in what the adapter learns from, when `done` of the run is done; 0
        while heads learn alone.
        """
        if done < self.start:
            return 0.0
        joint = (done - self.start) / (1 - self.start)
        return self.heads_weight * (math.sin(joint * math.pi / 2) if self.ramp == "sine" else 1.0)


# A run's choices: a YAML file checked by pydantic models, with `key.path=value` overrides after
# it.
#
# What can be derived is not here: width and vocabulary come from the target, gradient accumulation
# from `run.tokens_per_step`. Relative paths are relative to the working directory.


Precision = Literal["fp32", "bf16"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Beta = Annotated[float, Field(ge=0, lt=1)]

EXPECTED = {
    "path_type": "expected a name (in quotes, if it looks like a number)",
    "string_type": "expected a text (in quotes, if it looks like a number)",
    "model_type": "expected keys with values",
    "model_attributes_type": "expected keys with values",
    "union_tag_invalid": f"expected one of {', '.join(HEAD_MODELS)}",
}
"""Instead of pydantic's words, where these are of Python."""
WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
WORDS[type(None)] = "null"
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
LIMITS["min_length"] = "entries: at least"
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 2, 80, 80

logger = logging.getLogger("draftheads")


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
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of AdamW's two moments")
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
    # epochs are shuffled by seed * 1,000,003 + epoch, an int64
    seed: int = Field(0, ge=0, lt=2**43, description="of the data order and of everything drawn")
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
    eval: EvalChoices = Field(default_factory=EvalChoices)
    run: RunChoices

    @property
    def decodes(self) -> bool:
        """Whether the run decodes with its heads. Not on a sharded target: there all processes must
        run equally many forwards.
        """
        return self.eval.every != 0 and self.target_placement != "sharded"

    @property
    def measure(self) -> Measure:
        """What the run compares its checkpoints by."""
        return self.eval.best or ("tokens_per_step" if self.decodes else "simulated")

    @model_validator(mode="after")
    def _can_divide(self) -> Recipe:
        if self.target_placement != "sharded" or self.features.mode != "online":
            return self
        if self.data.cache_gb:  # what one process remembers, the others would wait for
            raise ValueError(
                f"data.cache_gb=0 with target_placement=sharded, got {self.data.cache_gb}, as all "
                "processes must run equally many forwards; set features.mode=cached instead"
            )
        return self

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
    """Read a recipe; `overrides` are like "optim.lr=1e-3": the text as it is where the key takes a
    name or one of several words, else YAML. `head.kind=...` leaves out the keys of the kind before.
    kind: of the head, where neither says `head.kind`.

    Raises FileNotFoundError for a missing file and ValueError for everything wrong in it; both
    are one line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"recipe {path}: no such file; {_near_files(path)}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of several lines, without path
        reason = " ".join(str(error).replace(' in "<unicode string>"', "").split())
        raise ValueError(f"{path}: not YAML in UTF-8: {reason}; repair it") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    values = {"head": {}} | {key: value for key, value in values.items() if value is not None}
    if "judge" in values or any(text.startswith("judge.") for text in overrides):
        logger.warning("warning: judge: is now eval:")
    if "judge" in values:
        values["eval"] = values.pop("judge")
    renamed = [re.sub(r"^judge(?=[.=])", "eval", text) for text in overrides]
    overridden = [_override(values, text, kind) for text in renamed]
    if isinstance(values["head"], dict) and values["head"].get("kind") is None:
        values["head"] = {**values["head"], "kind": kind}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:  # its message has several lines and a link
        raise ValueError(_explain(error.errors()[0], values, path, overridden)) from error


def recipe_keys(kind: str) -> Iterator[tuple[str, FieldInfo]]:
    """All keys of recipes with a head of this kind, sections before what is in them."""
    return _keys(Recipe, HEAD_MODELS[kind], "")


def key_table() -> list[tuple[str, ...]]:
    """(key, what it takes, its default or "required", description) for the keys of all kinds."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in HEAD_MODELS:
        for key, field in recipe_keys(kind):
            default = field.get_default(call_default_factory=True)
            if isinstance(default, BaseModel) or (field.is_required() and not field.description):
                continue  # a section, whose keys follow
            shown = "required" if field.is_required() else json.dumps(default).strip('"')
            row = (key, _takes(field.annotation, field.metadata), shown, field.description or "")
            rows.setdefault(row, []).append(kind)
    named = [
        (key if len(kinds) == len(HEAD_MODELS) else f"{key} ({', '.join(kinds)})", *rest)
        for (key, *rest), kinds in rows.items()
    ]
    sections = list(Recipe.model_fields)
    return sorted(named, key=lambda row: sections.index(re.split(r"[. ]", row[0])[0]))


def recorded_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe as checkpoints hold it, also those of earlier versions, in which the section `eval`
    was called `judge`, or was not there, as nothing was decoded.
    """
    section = values.get("eval", values.get("judge", {"every": 0}))
    kept = {key: value for key, value in values.items() if key != "judge"}
    return Recipe.model_validate({**kept, "eval": section})


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Lines "key: old -> new" for choices that must stay when a run is resumed."""
    before, after = dict(_flat(_trained(old))), dict(_flat(_trained(new)))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _trained(recipe: Recipe) -> dict[str, Any]:
    """The choices that must stay when a run is resumed."""
    values = recipe.model_dump(
        mode="json",
        exclude={
            "target": True,  # its fingerprint must stay
            "target_revision": True,
            "target_placement": True,
            "data": {"rows_per_batch", "cache_gb", "path"},
            "features": {"path", "disk_gb"},
            "head": set(recipe.head.decoding_keys),
        },
    )
    compared = ("prompts", "new_tokens", "temperature") if recipe.measure in DECODED else ()
    values["eval"] = {"best": recipe.measure} | {key: values["eval"][key] for key in compared}
    values["run"] = {key: values["run"][key] for key in ("seed", "tokens_per_step", "precision")}
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.2 instead of 1.1, which reads 1e-3 as a text, 010 as eight and 1:30 as ninety; a key
    that is given twice is refused.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            line = node.start_mark.line + 1
            raise ValueError(f"key {twice[0]!r} is there twice in what begins at line {line}")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag.endswith((":null", ":merge"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form in {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][\d_]*)|0x[\da-fA-F]+",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^({_form})$"), None)


def _override(values: dict[str, Any], text: str, default: Kind) -> str:
    """Set one override in `values`; returns its key."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ValueError(
            f"override {text!r}: expected key.path=value without spaces, e.g. optim.lr=1e-3"
        )
    *sections, name = key.split(".")
    place = values
    for section in sections:
        inner = place.get(section)
        if not isinstance(inner, dict):
            inner = place[section] = {}
        place = inner
    try:
        given = _value(key, value) if value else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of several lines
        raise ValueError(f"override {text!r}: {value!r} is not a YAML value") from error
    if key == "head.kind":
        _leave_out_others(place, str(place.get("kind") or default), str(given))
    place[name] = given
    return key


def _value(key: str, text: str) -> Any:
    """An override's value: where the key takes names or words a text, but for null and what is in
    quotes; else YAML.
    """
    fields = [field for kind in HEAD_MODELS for name, field in recipe_keys(kind) if name == key]
    types = {one for field in fields for one in _types(field.annotation)}
    null = "|~|null|Null|NULL" if type(None) in types else "|~"
    if types & {str, Path} and not re.fullmatch(rf"(['\"]).*\1{null}", text):
        return text
    return yaml.load(text, _Loader)


def _types(annotation: Any) -> set[Any]:
    """What a field takes: the members of a union, str for a choice of words."""
    if get_origin(annotation) is Literal:
        return {type(word) for word in get_args(annotation)}
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return {kind for member in get_args(annotation) for kind in _types(member)}
    return {annotation}


def _takes(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """A field's type in words; limits: those of annotated_types."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _takes(inner[0], [limit for one in inner[1:] for limit in one.metadata])
    if origin is Literal:
        words = " or ".join(map(str, inner))
    elif origin in (Union, UnionType):
        words = " or ".join(map(_takes, inner))
    elif origin in (list, tuple):
        words = f"{origin.__name__} of {', '.join(map(_takes, inner))}"
    else:
        words = WORDS.get(origin or annotation, "keys with values")
    bounds = [f"{LIMITS[name]} {x}" for limit in limits for name, x in asdict(limit).items()]
    return ", ".join([words, *bounds])


def _leave_out_others(head: dict[str, Any], before: str, kind: str) -> None:
    """Drop the keys of a head section that only the previous kind has, and say so."""
    if kind not in HEAD_MODELS or before not in HEAD_MODELS:
        return
    others = HEAD_MODELS[before].model_fields.keys() - HEAD_MODELS[kind].model_fields.keys()
    left_out = [name for name in head if name in others]
    for name in left_out:
        del head[name]
    if left_out:
        logger.warning("head.kind=%s: left out, as only %s: %s", kind, before, ", ".join(left_out))


def _explain(
    fault: ErrorDetails, values: dict[str, Any], path: Path, overridden: Sequence[str]
) -> str:
    """One line for a fault in `values`, the recipe with its overrides."""
    names = [str(part) for part in fault["loc"]]
    said = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if not names:  # a fault between sections
        return f"{path}: expected {said}"
    if names[0] == "head":
        del names[1:2]  # the kind, which pydantic puts between the section and the key
    kind = fault["type"]
    key = "head.kind" if kind == "union_tag_invalid" else ".".join(names)
    key, where = _origin(key, fault, overridden) or (key, str(path))
    if kind == "extra_forbidden":
        return f"{where}: unknown key {key!r}; {_did_you_mean(key, values)}"
    if kind == "missing" and not names[-1].isdigit():  # one of a pair is not a key
        return f"{where}: key {key!r} is missing; add it, or pass {key}=..."
    if kind == "value_error":
        return f"{where}: {key}: expected {said}"
    got = fault["input"]["kind"] if kind == "union_tag_invalid" else fault["input"]
    return f"{where}: {key}: {EXPECTED.get(kind, said)}, got {SHORT.repr(got)}"


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
    kind = values["head"].get("kind") if isinstance(values["head"], dict) else None
    known = {name: [key for key, _ in recipe_keys(name)] for name in HEAD_MODELS}
    if owners := [name for name, keys in known.items() if key in keys]:
        return f"it belongs to head.kind {' or '.join(owners)}, and this is {kind}"
    near = difflib.get_close_matches(key, known.get(str(kind), known["medusa"]), n=1)
    return f"did you mean {near[0]!r}?" if near else "`draftheads keys` lists all"


def _keys(
    model: type[BaseModel], head: type[Section], prefix: str
) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a model and its sections; `head`: the one chosen of its alternatives."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        sections = {head} if prefix + name == "head" else _types(field.annotation)
        for section in sections:
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from _keys(section, head, f"{prefix}{name}.")


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
