"""The metadata of a head that may leave this machine, with `convert` and `publish`: known keys, and
of their texts words and names on the Hub. Of local paths the last part leaves, of URLs nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from draftheads.heads.formats.card import is_hub_id
from draftheads.heads.kinds import HEADS
from draftheads.recipes import packaged

PLACE = re.compile(r"[a-zA-Z][\w+.-]*://|(?<![\w.])(?:~?/|\.\.?/|[A-Za-z]:\\)")
"""The beginning of a URL or of a local path."""
FACTS = """
format kind feature_layers target adapter tree tree_order tuned training
name revision lora fingerprint architecture layers quantisation dtype eos_ids
steps tokens seconds loss predicted_tokens_per_step heldout_top1 decoding recipe data
rank alpha modules parameters drift
versions hardware merged_adapter continued has_moved tokens_per_step
documents learned_tokens digest sampling prompts seed
temperature top_p top_k max_new_tokens reasoning template_args
source count sha256

target_dtype target_revision target_adapter target_placement target_bits
features head optim eval run
path sequence_length rows_per_batch pack cache_gb heldout mode
lr betas weight_decay warmup schedule clip start heads_weight agreement
every new_tokens best patience
output epochs minutes save_every keep precision trackers log_every max_skipped
gradient_checkpointing
"""
"""Keys that leave, those of recipes last, besides those of the recipes' section `head`."""
WHOLE = {
    "tree",
    "tuned",
    "decoding",
    "drift",
    "versions",
    "template_args",
    "rope_scaling",
}
"""Of them, those below which all keys leave."""
NAMES = {"name", "target", "source", "lora", "target_adapter", "from"}
PATHS = {"path", "output"}
"""Keys of what may be on the Hub; keys of local paths."""


def public_keys() -> set[str]:
    """All keys that leave; kinds may be registered at any time."""
    fields = [kind.Choices.model_fields.items() for kind in HEADS.values()]
    names = {field.alias or name for each in fields for name, field in each}
    return {*FACTS.split(), *names}


def public_facts(value: Any, key: str = "", whole: bool = False) -> Any:
    """The part of a head's metadata that may leave. key: the one that a value is under. whole: all
    keys leave.
    """
    if isinstance(value, dict):
        keys = public_keys()
        return {
            name: public_facts(each, name, whole or name in WHOLE)
            for name, each in value.items()
            if (not PLACE.search(name) if whole else name in keys)
        }
    if isinstance(value, list):
        return [public_facts(each, key, whole) for each in value]
    if not isinstance(value, str):
        return value
    if key in PATHS or (key in NAMES and is_local(value)):
        return "" if "://" in value else re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return "" if PLACE.search(value) else value


def public_config(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that keeps `public_facts`: the last part of a target's path may be
    the name of another model.
    """
    public: dict[str, Any] = public_facts(facts)
    if is_local(facts["target"].get("name")):
        public["target"]["name"] = ""
    return public


def is_local(name: str | None) -> bool:
    """True if a target or data set is on this machine, by its name."""
    if not name or is_hub_id(name.partition("@")[0]):  # a LoRA has its commit
        return False
    return "/" in name or "\\" in name or Path(name).exists() or bool(packaged(name, ""))


def texts_of(facts: dict[str, Any]) -> set[str]:
    """The texts in a head's metadata, and the keys that are URLs."""
    written = re.findall(r'("(?:[^"\\]|\\.)+")(:?)', json.dumps(facts))
    return {json.loads(text) for text, colon in written if not colon or "://" in text}


def without_private(text: str, facts: dict[str, Any]) -> str:
    """A text without what may not leave of a head's metadata, wherever it is whole words."""
    private = texts_of(facts) - texts_of(public_facts(facts))
    for each in sorted(private, key=len, reverse=True):  # paths before their parents
        text = re.sub(rf"(?<!\w){re.escape(each)}(?!\w)", "", text)
    return text
