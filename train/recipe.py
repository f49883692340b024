"""A run's recipe: a YAML file checked by pydantic models, with `key.path=value` overrides.

What can be derived is not here: width and vocabulary come from the target, gradient accumulation
from `run.tokens_per_step`. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from annotated_types import Ge, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftheads.heads.card import flat

logger = logging.getLogger("draftheads")

Kind = Literal["medusa", "sequential", "eagle3", "eagle"]
Precision = Literal["fp32", "bf16"]
Measure = Literal["tokens_per_step", "tokens_per_second", "simulated", "loss"]
DECODED = ("tokens_per_step", "tokens_per_second")
"""Measures that only decoding knows."""

Layer = Annotated[int, Ge(0)]
Beta = Annotated[float, Ge(0), Lt(1)]


class Section(BaseModel):
    """Refuses unknown keys, numbers that are not finite and empty values."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            flag = name not in cls.model_fields or cls.model_fields[name].annotation is bool
            if value == "" or (isinstance(value, bool) and not flag):
                raise ValueError(f"{name} should be a number or a text, got {value!r}")
        home = os.path.expanduser  # no shell expands ~ within key=~/value
        return {key: home(x) if isinstance(x, str) else x for key, x in values.items()}


class MedusaChoices(Section):
    """Medusa heads (arXiv 2401.10774)."""

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes"})
    """Keys that may change when a run is resumed, as only decoding reads them."""

    kind: Literal["medusa"] = Field("medusa", description="each guess made from one state alone")
    depth: int = Field(4, ge=1, le=16, description="heads = tokens guessed ahead")
    layers: int = Field(1, ge=1, le=8, description="residual blocks per head")
    lm_head: Literal["own", "shared"] = Field("own", description="shared: the target's, frozen")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the target's distribution")
    decay: float = Field(0.8, gt=0, le=1, description="weight of depth k is decay^k")
    vocabulary: int | None = Field(None, ge=2, description="draft the N most frequent; null: all")
    nodes: int = Field(63, ge=1, description="draft nodes of the calibrated tree")


class LayerSizes(Section):
    """Sizes of a decoder layer; null: the target's."""

    heads: int | None = Field(None, ge=1, description="attention heads")
    kv_heads: int | None = Field(None, ge=1, description="key and value heads")
    head_dim: int | None = Field(None, ge=1, description="width of a head")
    intermediate_size: int | None = Field(None, ge=1, description="inner width of the MLP")
    rope_theta: float | None = Field(None, gt=0, description="base of RoPE")
    rope_scaling: dict[str, Any] | None = Field(None, description="as in a model's config")


class SequentialChoices(MedusaChoices, LayerSizes):
    """Medusa heads conditioned on the preceding draft tokens (as in Hydra, arXiv 2402.05109). The
    sizes are those of the prefix layer.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "top_k"})

    kind: Literal["sequential"] = Field(  # type: ignore[assignment]
        "sequential", description="Medusa heads that know the tokens drafted before"
    )
    conditioning: Literal["markov", "recurrent", "hydra"] = Field(
        "recurrent",
        description="markov: the token before changes the logits; recurrent: all tokens since the "
        "root change the hidden state; hydra: these enter the head itself",
    )
    rank: int | None = Field(
        None,
        ge=1,
        description="inner width; null: 64 for markov, the target's for others",
    )
    prefix: bool = Field(False, description="a decoder layer reads the whole text first (Hydra++)")
    top_k: int | None = Field(None, ge=1, description="expanded per level; null: a fixed tree")

    @model_validator(mode="after")
    def _fits_together(self) -> SequentialChoices:
        if self.conditioning == "hydra" and self.rank is not None:
            raise ValueError("rank should be null with conditioning: hydra; remove rank")
        sizes = [name for name in LayerSizes.model_fields if getattr(self, name) is not None]
        if sizes and not self.prefix:
            raise ValueError(f"{sizes[0]} is a size of the prefix layer; set prefix: true")
        if self.top_k is not None:
            check_candidates(self.nodes, self.depth, self.top_k)
        return self


class DecoderChoices(LayerSizes):
    """What both kinds of EAGLE share: decoder layers and the dynamic tree that they fill."""

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "depth", "top_k"})

    layers: int = Field(1, ge=1, le=8, description="decoder layers")
    sliding_window: int | None = Field(None, ge=1, description="tokens that these see; null: all")
    decay: float = Field(0.8, gt=0, le=1, description="weight of step k is decay^k, over their sum")
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

    kind: Literal["eagle3"] = Field("eagle3", description="reads three of the target's states")
    feature_layers: list[Layer] | None = Field(
        None, min_length=1, description="0 = embeddings; null: [2, n//2, n-3] of n layers"
    )
    vocabulary: int | None = Field(None, ge=2, description="draft the N most frequent; null: all")
    fc_norm: bool = Field(False, description="normalise each captured feature")
    norm_output: bool = Field(False, description="the next step reads the normalised output")
    norm_before_fc: bool = Field(False, description="normalise the captured features together")
    norm_before_residual: bool = Field(False, description="the residual is the normalised feature")
    steps: int = Field(7, ge=1, le=16, description="steps of training-time test")
    labels: Literal["soft", "hard"] = Field("soft", description="soft: the target's distribution")
    loss: Literal["ce", "tv", "lk", "hybrid"] = Field(
        "ce",
        description="ce: cross-entropy; tv: total variation = 1 - acceptance; lk: -log acceptance; "
        "hybrid: l * ce + (1 - l) * tv with l = exp(-3 * acceptance)",
    )
    noise: float = Field(0.0, ge=0, description="uniform noise on the features, as for eagle")

    @model_validator(mode="after")
    def _fits_together(self) -> Eagle3Choices:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one to false")
        if self.loss != "ce" and self.labels != "soft":
            raise ValueError(f"loss: {self.loss} compares distributions; set labels to soft")
        if self.vocabulary is not None and self.vocabulary < self.top_k:
            raise ValueError(
                f"vocabulary should be at least top_k = {self.top_k}, got {self.vocabulary}"
            )
        return self


class EagleChoices(DecoderChoices):
    """EAGLE-1 (arXiv 2401.15077)."""

    kind: Literal["eagle"] = Field("eagle", description="EAGLE-1: predicts the target's features")
    steps: int = Field(1, ge=1, le=16, description="steps that the head is unrolled in training")
    regression: float = Field(1.0, ge=0, description="weight of the SmoothL1 loss on features")
    classification: float = Field(0.1, ge=0, description="weight of the cross-entropy")
    labels: Literal["soft", "hard"] = Field("soft", description="soft: the target's distribution")
    noise: float = Field(0.2, ge=0, description="(u - 0.5) * noise * 512 / sequence_length")

    @model_validator(mode="after")
    def _something_to_learn(self) -> EagleChoices:
        if not self.regression and not self.classification:
            raise ValueError("regression and classification are both 0; raise one")
        return self


def check_candidates(nodes: int, depth: int, top_k: int) -> None:
    """Raise ValueError for a dynamic tree of more nodes than it has candidates."""
    most = top_k + (depth - 1) * top_k**2
    if nodes > most:
        raise ValueError(
            f"nodes should be at most {most}, the candidates of a tree of depth {depth} with "
            f"top_k {top_k}, got {nodes}"
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


class DataChoices(Section):
    """Where the target's answers are and how they are laid out in rows."""

    path: Path = Field(description="folder that `draftheads distill --out` wrote")
    sequence_length: int = Field(1024, ge=2, description="tokens per row")
    rows_per_batch: int = Field(8, ge=1, description="rows per process and forward; memory only")
    pack: bool = Field(True, description="several documents per row; false: one")
    cache_gb: float = Field(0.0, ge=0, description="GB of memory per process for seen features")
    heldout: float = Field(0.02, gt=0, le=0.5, description="share of documents for evaluation")


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


class AdapterChoices(Section):
    """A LoRA adapter on the target, kept near the untouched target by its divergence from it
    (arXiv 2401.10774, 2.2 and 2.3: two stages, or a weight that grows; self-distillation).
    """

    rank: int = Field(32, ge=1, description="of every change of a matrix")
    alpha: float = Field(16.0, gt=0, description="a change is multiplied by alpha / rank")
    layers: int | None = Field(None, ge=1, description="changes the last N layers; null: all")
    modules: list[str] | None = Field(
        None, min_length=1, description="matrices, e.g. [q_proj, v_proj]; null: all of a layer"
    )
    lr: float = Field(5e-4, gt=0, description="its peak learning rate; optim.lr is the heads'")
    start: float = Field(0.25, ge=0, lt=1, description="share of steps that train heads alone")
    heads_weight: float = Field(1.0, gt=0, description="of the heads' loss, beside the divergence")
    ramp: Literal["constant", "sine"] = Field("constant", description="of heads_weight, from 0")
    agreement: float = Field(
        0.98,
        ge=0,
        le=1,
        description="a best checkpoint's least share of unchanged first choices of the target",
    )

    def weight(self, done: float) -> float:
        """Weight of the heads' loss in what the adapter learns from, when the share `done` of the
        run is done; 0 while heads learn alone.
        """
        if done < self.start:
            return 0.0
        joint = (done - self.start) / (1 - self.start)
        return self.heads_weight * (math.sin(joint * math.pi / 2) if self.ramp == "sine" else 1.0)


class EvalChoices(Section):
    """Heads are evaluated while they train, by decoding held-out prompts with them."""

    every: int | None = Field(
        None,
        ge=0,
        description="steps between evaluations, each of which is saved; null: at every save; 0: no "
        "decoding, which frees memory: the target's lm_head and, of cached features, its layers",
    )
    prompts: int = Field(32, ge=1, description="beginnings of held-out documents to continue")
    new_tokens: int = Field(64, ge=2, description="per prompt")
    temperature: float = Field(0.0, ge=0, description="of decoding; 0: greedy")
    best: Measure | None = Field(
        None,
        description="of the best checkpoint; tokens_per_second: over plain decoding's; simulated: "
        "tokens per step from held-out ranks; null: tokens_per_step, or simulated if every is 0",
    )
    patience: int | None = Field(
        None, ge=1, description="evaluations without a better one that end the run; null: never"
    )
    report: bool = Field(True, description="write report.md and its curves when the run ends")

    @model_validator(mode="after")
    def _best_is_known(self) -> EvalChoices:
        if self.every == 0 and self.best in DECODED:
            raise ValueError(f"best: {self.best} needs decoding, and every: 0 turns it off")
        return self


class RunChoices(Section):
    """How long, how often, where to."""

    output: Path = Field(description="folder for step-* checkpoints; a run in it is resumed")
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
    max_skipped: int = Field(3, ge=1, description="non-finite steps in a row that end the run")
    gradient_checkpointing: bool = Field(False, description="less memory, slower")
    compile: bool = Field(False, description="torch.compile the heads' layers")

    @model_validator(mode="after")
    def _one_length(self) -> RunChoices:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of steps and epochs, the other null")
        return self


class Recipe(Section):
    """Everything that a run needs to know."""

    target: str = Field(description="folder or Hub id of the frozen causal LM")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, else the checkpoint's"
    )
    target_revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    target_placement: Literal["whole", "split", "sharded"] = Field(
        "whole",
        description="whole: on each process's device; split: over all GPUs of the one process; "
        "sharded: its layers divided over all processes",
    )
    target_bits: Literal[4, 8] | None = Field(None, description="quantise it by bitsandbytes")
    data: DataChoices
    features: FeatureChoices = Field(default_factory=FeatureChoices)
    head: HeadChoices = Field(default_factory=MedusaChoices)
    optim: OptimChoices = Field(default_factory=OptimChoices)
    adapter: AdapterChoices | None = Field(None, description="Medusa-2; null: a frozen target")
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
    def _fits_together(self) -> Recipe:
        sharded = self.target_placement == "sharded"
        if sharded and self.features.mode == "online" and self.data.cache_gb:
            raise ValueError(
                f"data.cache_gb should be 0 with target_placement=sharded, got "
                f"{self.data.cache_gb}; set features.mode=cached instead"
            )
        if self.adapter and not isinstance(self.head, MedusaChoices):
            raise ValueError(f"adapter needs head.kind medusa or sequential, got {self.head.kind}")
        if self.adapter and (self.target_bits or sharded):
            raise ValueError("adapter needs target_bits null and target_placement whole or split")
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: Kind = "medusa") -> Recipe:
    """Read a recipe; `overrides` are like "optim.lr=1e-3": a text where the key takes one, else
    YAML. `head.kind=...` leaves out the keys of the kind before. kind: of the head, where neither
    says `head.kind`.

    Raises FileNotFoundError for a missing file and ValueError for everything wrong in it; both
    are one line.
    """
    path = Path(path)
    if not path.is_file():
        files = map(str, [*path.parent.glob("*.yaml"), *Path("recipes").glob("*.yaml")])
        near = difflib.get_close_matches(str(path), files, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "give the path of a YAML recipe"
        raise FileNotFoundError(f"recipe {path}: no such file; {hint}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).replace(' in "<unicode string>"', "").split())
        raise ValueError(f"{path}: not YAML in UTF-8: {reason}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    values = {key: value for key, value in values.items() if value is not None}
    if "judge" in values or any(text.startswith("judge.") for text in overrides):
        logger.warning("the recipe section judge: is now called eval:; rename it")
        values = {"eval" if key == "judge" else key: value for key, value in values.items()}
        overrides = [re.sub(r"^judge\.", "eval.", text) for text in overrides]
    head = values.setdefault("head", {})
    if isinstance(head, dict) and head.get("kind") is None:
        head["kind"] = kind
    overridden = [_override(values, text) for text in overrides]
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:  # its message has several lines and a link
        raise ValueError(_explain(error.errors()[0], path, overridden)) from error


def recorded_recipe(values: dict[str, Any]) -> Recipe:
    """The recipe in a checkpoint. Earlier versions called the section `eval` `judge`, or had none
    and decoded nothing.
    """
    section = values.get("eval", values.get("judge", {"every": 0}))
    kept = {key: value for key, value in values.items() if key != "judge"}
    return Recipe.model_validate({**kept, "eval": section})


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Lines "key: old -> new" for choices that must stay when a run is resumed."""
    before, after = dict(flat(_trained(old))), dict(flat(_trained(new)))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _trained(recipe: Recipe) -> dict[str, Any]:
    """The choices that must stay when a run is resumed. Of the target its fingerprint must."""
    free: Any = {
        **dict.fromkeys(("target", "target_revision", "target_placement"), True),
        "data": {"rows_per_batch", "cache_gb", "path"},
        "features": {"path", "disk_gb"},
        "head": set(recipe.head.decoding_keys),
    }
    values = recipe.model_dump(mode="json", exclude=free)
    compared = ("prompts", "new_tokens", "temperature") if recipe.measure in DECODED else ()
    values["eval"] = {"best": recipe.measure, **{key: values["eval"][key] for key in compared}}
    values["run"] = {key: values["run"][key] for key in ("seed", "tokens_per_step", "precision")}
    return values


def recipe_keys(
    kind: str, model: type[BaseModel] = Recipe, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """All keys of recipes with a head of this kind, sections before what is in them."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        types = (field.annotation, *get_args(field.annotation))
        for section in (HEAD_MODELS[kind],) if name == "head" else types:
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from recipe_keys(kind, section, f"{prefix}{name}.")


def key_table() -> list[tuple[str, ...]]:
    """(key, what it takes, its default or "required", description) for the keys of all kinds."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in HEAD_MODELS:
        for key, field in recipe_keys(kind):
            default = field.get_default(call_default_factory=True)
            if isinstance(default, BaseModel) or not field.description:
                continue  # a section, whose keys follow
            shown = "required" if field.is_required() else json.dumps(default).strip('"')
            limits = re.findall(r"\w+=[^,)]+", str(field.metadata))
            takes = ", ".join([inspect.formatannotation(field.annotation), *limits])
            row = (key, takes.replace("typing.", ""), shown, field.description)
            rows.setdefault(row, []).append(kind)
    named = [
        (key if len(kinds) == len(HEAD_MODELS) else f"{key} ({', '.join(kinds)})", *rest)
        for (key, *rest), kinds in rows.items()
    ]
    sections = list(Recipe.model_fields)
    return sorted(named, key=lambda row: sections.index(re.split(r"[. ]", row[0])[0]))


def _override(values: dict[str, Any], text: str) -> str:
    """Set one override in `values`; returns its key."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ValueError(f"override {text!r}: expected key.path=value, e.g. optim.lr=1e-3")
    *sections, name = key.split(".")
    place = values
    for section in sections:
        if not isinstance(place.get(section), dict):
            place[section] = {}
        place = place[section]
    before = str(place.get(name))
    fields = [field for kind in HEAD_MODELS for each, field in recipe_keys(kind) if each == key]
    takes_text = any(re.search(r"\bstr\b|Path|\['", str(field.annotation)) for field in fields)
    is_text = takes_text and not re.match(r"[\[{'\"]|~?$|null$", value)
    try:
        place[name] = value if is_text else yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"override {text!r}: {value!r} is not a YAML value") from error
    if key == "head.kind" and before in HEAD_MODELS and value in HEAD_MODELS:
        others = HEAD_MODELS[before].model_fields.keys() - HEAD_MODELS[value].model_fields.keys()
        left_out = [other for other in place if other in others]
        for other in left_out:
            del place[other]
        if left_out:
            logger.warning("%s: left out, as only %s: %s", text, before, ", ".join(left_out))
    return key


def _explain(fault: ErrorDetails, path: Path, overridden: list[str]) -> str:
    """One line for a fault."""
    names = [str(name) for name in fault["loc"]]
    # pydantic puts the kind between the section and the key
    kind = names.pop(1) if names[0:1] == ["head"] and len(names) > 1 else "medusa"
    key = ".".join(names)
    where = "command line" if any(f"{key}.".startswith(f"{x}.") for x in overridden) else path
    said = fault["msg"].removeprefix("Value error, ")
    if fault["type"] != "extra_forbidden" and not isinstance(fault["input"], dict):
        said += f", got {textwrap.shorten(repr(fault['input']), 80)}"
    if fault["type"] == "extra_forbidden":
        said = "unknown key"
        keys = {kind: dict(recipe_keys(kind)) for kind in HEAD_MODELS}
        owners = [kind for kind in keys if key in keys[kind]]
        near = difflib.get_close_matches(key, keys[kind], n=1)
        if owners:
            said += f"; it belongs to head.kind {' or '.join(owners)}"
        else:
            said += f"; did you mean {near[0]!r}?" if near else "; `draftheads keys` lists all"
    return ": ".join(part for part in (str(where), key, said) if part)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars; a key that is given twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                line = node.start_mark.line + 1
                raise ValueError(f"key {name!r} is there twice in what begins at line {line}")
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as a text, 010 as eight, yes as true and 1:30 as ninety
_Loader.yaml_implicit_resolvers = {}
for _tag, _form in {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][\d_]*)|0x[\da-fA-F]+",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^({_form})$"), None)
