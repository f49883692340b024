"""The promise: `convert --to mlx` writes what mlx-vlm's drafters read right; what they would pass
over without a word, or could not verify exactly, is an error. A real engine: tests/engines.
"""

from __future__ import annotations

from typing import Any

import pytest
from converted_heads import forget, same
from converted_heads import saved as saved_block
from deep_targets import saved, target
from emulators import EngineError
from emulators_block import mlx_block
from emulators_eagle import mlx_eagle3
from safetensors.torch import load_file
from tiny_targets import tiny_target
from trained_heads import FEW, SCALED

from draftheads.heads.formats.hub import load_head
from draftheads.scripts.convert import converted


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"rope_theta": 5e5},
        {"head_dim": 16},
        {"layers": 2},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
    ids=["plain", "theta", "sizes", "layers", "norms"],
)
def test_an_export_is_complete_and_comes_back(tmp_path, choices):
    ours = saved(tmp_path, **choices)
    theirs = converted(ours, tmp_path / "theirs", "mlx", target())
    read, head = load_head(ours), mlx_eagle3(theirs)
    assert head.dropped == head.uninitialised == set()
    assert head.facts["aux"] == read.feature_layers
    assert head.facts["rope"] == (read.rope.theta, read.rope.scaling)
    assert head.facts["switches"] == {
        name: getattr(read.design, name) for name in head.facts["switches"]
    }
    back = converted(theirs, tmp_path / "back", "draftheads", target())
    assert same(*(load_file(folder / "model.safetensors") for folder in (back, ours)))
    forget(theirs)
    assert same(load_head(theirs, target=target()).state_dict(), read.state_dict())


REFUSED: dict[str, dict[str, Any]] = {
    "norms of queries and keys": {"qk_norm": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "sliding_window": {"sliding_window": 5},
    "a scaling of RoPE": {"rope_scaling": SCALED},
    "a reduced vocabulary": {"vocabulary": FEW},
    "other than three features": {"feature_layers": [1, 3]},
    "the same feature twice": {"feature_layers": [1, 3, 3]},
    "features in another order than the target's layers": {"feature_layers": [4, 1, 2]},
    "embeddings as a feature": {"feature_layers": [0, 1, 2]},
    "the last state as a feature": {"feature_layers": [1, 3, 5]},
}


@pytest.mark.parametrize("trait", REFUSED)
def test_what_would_be_lost_is_an_error_and_nothing_is_written(tmp_path, trait):
    ours = saved(tmp_path, **REFUSED[trait])
    with pytest.raises(ValueError, match=f"mlx does not support .*: it has {trait}; nothing"):
        converted(ours, tmp_path / "theirs", "mlx", target())
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_gather_features_in_order_get_no_others(tmp_path, engine):
    """vLLM and SGLang append a feature when they have computed its layer."""
    ours = saved(tmp_path, feature_layers=[4, 1, 2])
    with pytest.raises(ValueError, match="it has features in another order than the target's"):
        converted(ours, tmp_path / "theirs", engine)


def test_without_the_section_that_convert_adds_dspark_is_not_found(tmp_path):
    with pytest.raises(EngineError, match="DSpark requires a dflash_config object"):
        mlx_block(saved_block("block-markov", tmp_path / "ours"))


@pytest.mark.parametrize("name", ["block-markov", "block-dflash", "block-dflash-markov"])
def test_a_block_has_as_many_slots_as_in_training(tmp_path, name):
    ours = saved_block(name, tmp_path / "ours")
    theirs = converted(ours, tmp_path / "theirs", "mlx", tiny_target())
    assert mlx_block(theirs).facts["slots"] == load_head(ours).design.block_size
