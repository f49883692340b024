"""config.json of a head, whoever wrote it: the types of all keys that this project reads are
checked once, when the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

CONFIG = "config.json"
Size = Annotated[int, Field(gt=0, lt=1 << 20)]  # a product of three fits into an int64
Count = Annotated[int, Field(gt=0, lt=1 << 31)]
Nodes = Annotated[int, Field(gt=0, lt=1 << 12)]
Layer = Annotated[int, Field(ge=-1, lt=1 << 16)]
Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


KEYS: list[tuple[Any, str]] = [
    (Size, "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size"),
    (Size, "target_hidden_size layers"),
    (Count, "vocab_size truncated_vocab_size max_position_embeddings sliding_window"),
    (Count, "original_max_position_embeddings"),
    (Nodes, "draft_nodes depth top_k"),
    (Positive, "rms_norm_eps rope_theta factor low_freq_factor high_freq_factor beta_fast"),
    (Positive, "beta_slow attention_factor"),
    (Finite, "mscale mscale_all_dim logit_scale"),
    (bool, "truncate fc_norm norm_before_fc norm_before_residual norm_output"),
    (str, "model_type type rope_type speculators_model_type base_model_name_or_path kind name"),
    (str, "name_or_path revision fingerprint architecture"),
    (dict[str, Any], "rope_scaling rope_parameters transformer_layer_config eagle_config verifier"),
    (dict[str, Any], "prefix_layer speculators_config adapter"),
    (list[str], "architectures layer_types"),
    (list[Layer], "eagle_aux_hidden_state_layer_ids layer_ids feature_layers"),
    (list[list[Rank]] | dict[str, Any], "tree"),
]
"""Type -> keys that have it wherever they are in config.json; null stands for absent."""
NOT_NULL: list[tuple[Any, str]] = [
    (bool, "norm_embeddings"),
    (str, "hidden_act"),
    (int, "format"),
    (dict[str, Any], "draftheads target training"),
    (list[dict[str, Any]], "measured"),
]
TYPES = {key: TypeAdapter[Any](kind | None) for kind, keys in KEYS for key in keys.split()}
TYPES |= {key: TypeAdapter[Any](kind) for kind, keys in NOT_NULL for key in keys.split()}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head folder. Raises ValueError, with line or key, for a damaged one."""
    path = folder / CONFIG
    config = read_json(path)
    faults = list(_faults(config))
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults[:3])}; correct it, or get the head again")
    return config


def _faults(config: dict[str, Any], place: str = "") -> Iterator[str]:
    for key, value in config.items():
        if key in TYPES:
            try:
                TYPES[key].validate_python(value, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join([place + key, *map(str, first["loc"])])
                yield f"{where}: {first['msg']}, got {first['input']!r:.60}"
        if isinstance(value, dict) and key != "training":  # whose keys are those of any recipe
            yield from _faults(value, f"{place}{key}.")


def read_json(path: Path) -> dict[str, Any]:
    """A file with one JSON object. Raises ValueError for any other content."""
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
    """The values of keys that no tensor shape tells. Raises ValueError, naming those missing."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"expected {', '.join(missing)} in {CONFIG}, got none")
    return [config[key] for key in keys]
