"""The promise: a head of a hybrid target is converted for the engines that draft with such targets,
as read in their sources; for others, `convert` says so in one line and a card has no command.
"""

from __future__ import annotations

import pytest
from deep_targets import READ
from hybrid_targets import hybrid_model
from tiny_heads import random_head

from draftheads.heads.formats.card import ENGINES, render_card
from draftheads.heads.formats.hub import open_head, save_head
from draftheads.heads.formats.table import loss
from draftheads.heads.target.model import Target
from draftheads.scripts.convert import converted

PLACES = ("vllm", "sglang", "gguf", "mlx")
BLOCK = {"mask": 7, "conditioning": "markov", "lm_head": "shared", "embeddings": "shared"}
SERVED: dict[str, dict[str, str]] = {
    "qwen3.5": {"eagle3": "TTTT", "block": "TTTT"},
    "qwen3.5-moe": {"eagle3": "TTTT", "block": "TTTT"},
    "qwen3-next": {"eagle3": "TTTF", "block": "TTTF"},
    "nemotron-h": {"eagle3": "TFTT", "block": "TTTT"},
    "lfm2": {"eagle3": "FFTT", "block": "FTTT"},
    "lfm2-moe": {"eagle3": "FFTT", "block": "FTTT"},
    "falcon-h1": {"eagle3": "FFFF", "block": "FFFF"},
    "granite4": {"eagle3": "FFFF", "block": "FFFF"},
    "jamba": {"eagle3": "FFFF", "block": "FFFF"},
    "olmo-hybrid": {"eagle3": "FFFF", "block": "FFFF"},
}
"""Name of a hybrid -> kind -> of each of the places, T where it drafts."""
SAID = "a hybrid target whose (layers the engine does not show|states the engine cannot take back)"


@pytest.fixture(params=SERVED)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_engines_that_cannot_draft_with_a_hybrid_get_no_head_and_no_command(tmp_path, name, kind):
    target = Target(hybrid_model(name), name=f"us/{name}")
    features = {"feature_layers": [1, 2, 3]} if kind == "eagle3" else {"feature_layers": [1, 2]}
    head = random_head(kind, target, **{**READ, **(BLOCK if kind == "block" else {}), **features})
    ours = save_head(head, tmp_path / "ours", target=target)
    stored, card = open_head(ours).read()[1], render_card(open_head(ours).config)
    for place, served in zip(PLACES, SERVED[name][kind], strict=True):
        if served == "T":
            assert loss(place, stored) is None
            continue
        with pytest.raises(ValueError, match=f"{place} does not support .*: it has {SAID}"):
            converted(ours, tmp_path / "theirs", place, target)
        assert not (tmp_path / "theirs").exists()
        if place != "mlx":  # which a card names only where the folder is for it
            assert f"{ENGINES[place]} does not support this head: it has a hybrid target" in card
