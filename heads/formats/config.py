"""config.json of a head, whoever wrote it: the types of all keys that this project looks at are
checked once, when the file is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

CONFIG = "config.json"
Size = Annotated[int, Field(gt=0, lt=1 << 20)]
"""A width or a number of things; such that a product of three fits into an int64."""
Count = Annotated[int, Field(gt=0, lt=1 << 31)]
Layer = Annotated[int, Field(ge=-1, lt=1 << 16)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Keys(BaseModel):
    """A JSON object; keys that are not looked at may be anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Rope(_Keys):
    """`rope_scaling` and `rope_parameters`."""

    type: str | None = None
    rope_type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Finite | None = None
    mscale_all_dim: Finite | None = None
    original_max_position_embeddings: Count | None = None
    truncate: bool | None = None


class _Layer(_Keys):
    hidden_size: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    rms_norm_eps: Positive | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    sliding_window: Count | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    vocab_size: Count | None = None


class _Eagle(_Keys):
    """What EAGLE-3 says at the top level or in `eagle_config`."""

    eagle_aux_hidden_state_layer_ids: list[Layer] | None = None
    layer_ids: list[Layer] | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


class _Target(_Keys):
    """The target that a head of ours records, or a verifier of speculators."""

    name: str | None = None
    name_or_path: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    architecture: str | None = None
    layers: Size | None = None


class _Verifier(_Keys):
    verifier: _Target | None = None


class _Drift(_Keys):
    tokens: int
    agreement: Finite
    kl: Finite


class _Adapter(_Keys):
    fingerprint: str
    rank: Size
    alpha: Finite
    drift: _Drift | None = None


class _Tree(_Keys):
    model_config = ConfigDict(extra="forbid", strict=True)
    draft_nodes: Annotated[int, Field(gt=0, lt=1 << 12)] = 1
    depth: Annotated[int, Field(gt=0, lt=1 << 12)] = 1
    top_k: Annotated[int, Field(gt=0, lt=1 << 12)] = 1


class _Measured(_Keys):
    nodes: int
    tokens_per_step: float
    speedup: float
    speedup_ci95: Annotated[list[float], Field(min_length=2, max_length=2)]
    lossless: bool | None


class _Prompt(_Keys):
    source: str | None = None


class _Data(_Keys):
    """The training data, or the recipe's section of it."""

    path: str | None = None
    prompts: _Prompt | None = None


class _Recipe(_Keys):
    data: _Data = _Data()


class _Training(_Keys):
    recipe: _Recipe = _Recipe()
    data: _Data = _Data()
    predicted_tokens_per_step: Finite | None = None
    heldout_top1: list[float] = []


class _Fact(_Keys):
    """What we say of a head."""

    format: int = 1
    kind: str | None = None
    target: _Target = _Target()
    feature_layers: list[Layer] | None = None
    adapter: _Adapter | None = None
    tree: list[list[Annotated[int, Field(lt=1 << 31)]]] | _Tree | None = None
    training: _Training = _Training()
    measured: list[_Measured] = []


class _Head(_Layer, _Eagle):
    architectures: list[str] | None = None
    model_type: str | None = None
    transformer_layer_config: _Layer | None = None
    speculators_model_type: str | None = None
    speculators_config: _Verifier | None = None
    base_model_name_or_path: str | None = None
    eagle_config: _Eagle | None = None
    prefix_layer: _Layer | None = None
    norm_embeddings: bool = True
    target_hidden_size: Size | None = None
    truncated_vocab_size: Count | None = None
    logit_scale: Finite | None = None
    draftheads: _Fact = _Fact()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head folder. Raises ValueError where it is none, with line or key."""
    path = folder / CONFIG
    config = read_json(path)
    try:
        _Head.model_validate(config)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}, got {repr(each['input'])[:60]}"
            for each in error.errors(include_url=False)
        ]
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(
            f"{path}: {'; '.join(faults[:3])}{more}; mend the file, or get the head again"
        ) from error
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A file with one JSON object. Raises ValueError where it is none."""
    try:
        value = json.loads(path.read_text("utf-8-sig"))
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # of text or numbers; none names the file
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {str(value)[:60]!r}")
    return value


def needed(config: dict[str, Any], *keys: str) -> list[Any]:
    """The values of keys that no tensor tells. Raises ValueError, naming those that are missing."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        said = ", ".join(missing)
        raise ValueError(f"expected {said} in {CONFIG}, which no tensor tells, got none")
    return [config[key] for key in keys]
