"""config.json of a head in any layout. The types of all keys that this project reads are checked
once, when the file is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from draftheads.arguments import expected
from draftheads.heads.files import CONFIG, read_json

Size = Annotated[int, Field(gt=0, lt=1 << 20)]  # a product of three fits in int64
Count = Annotated[int, Field(gt=0, lt=1 << 31)]
Nodes = Annotated[int, Field(gt=0, lt=1 << 12)]
Slots = Annotated[int, Field(gt=1, le=64)]
Layer = Annotated[int, Field(ge=-1, lt=1 << 16)]
Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

LAYER_IDS = "target_layer_ids aux_hidden_state_layer_ids"

KEYS: list[tuple[Any, str]] = [
    (
        Size | None,
        """hidden_size num_attention_heads num_key_value_heads head_dim layers intermediate_size
        target_hidden_size""",
    ),
    (
        Count | None,
        """vocab_size truncated_vocab_size max_position_embeddings sliding_window
        original_max_position_embeddings swa_window_size""",
    ),
    (Nodes | None, "draft_nodes depth top_k num_target_layers"),
    (Slots | None, "block_size"),
    (
        Rank | None,
        """mask_token_id markov_rank conv_kernel_size conv_group_size selector_rank
        selector_top_k""",
    ),
    (
        Positive | None,
        """rms_norm_eps rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow
        attention_factor""",
    ),
    (
        bool | None,
        """truncate fc_norm norm_before_fc norm_before_residual norm_output norm_embeddings
        return_hidden_post_norm use_sliding_window sliding_window_non_causal use_swa
        query_zero_predicts_next sample_from_anchor is_causal causal enable_confidence_head
        confidence_head_with_markov has_own_lm_head has_embed_tokens""",
    ),
    (
        str | None,
        """model_type type rope_type speculators_model_type base_model_name_or_path kind name
        name_or_path revision lora fingerprint architecture""",
    ),
    (
        dict[str, Any] | None,
        """rope_scaling rope_parameters transformer_layer_config adapter full_attention
        sliding_attention eagle_config prefix_layer speculators_config verifier dflash_config
        dspark_config""",
    ),
    (list[str] | None, "architectures layer_types"),
    (list[Rank] | None, "eos_ids"),
    (list[Layer] | None, "eagle_aux_hidden_state_layer_ids layer_ids feature_layers"),
    (Annotated[list[Layer], Field(min_length=1)] | None, LAYER_IDS),
    (list[list[Rank]] | dict[str, Any] | None, "tree tree_order"),
    (dict[str, Any], "draftheads target training"),
]
"""Type -> keys that have this type wherever they occur in config.json; None: may be null."""
TYPES = {key: TypeAdapter[Any](kind) for kind, keys in KEYS for key in keys.split()}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head folder. Raises ValueError naming the faulty line or keys."""
    path = folder / CONFIG
    config = read_json(path)
    faults = list(_faults(config))
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults[:3])}; correct it, or get the head again")
    return config


def _faults(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if key in TYPES:
            try:
                TYPES[key].validate_python(value, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join([prefix + key, *map(str, first["loc"])])
                yield f"{where}: {expected(first['msg'])}, got {first['input']!r:.60}"
        if isinstance(value, dict) and key != "training":  # a recipe, which has keys of its own
            yield from _faults(value, f"{prefix}{key}.")
