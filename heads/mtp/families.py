"""The names under which model families publish their multi-token prediction layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

DECODER = r"(?:model\.)?(?:language_model\.)?"


@dataclass(frozen=True)
class Family:
    """The place of an MTP layer in the checkpoints of a family.

    names: pairs, in order, of our and their whole parts of names; {n} is the number of the layer.
    types: model types whose checkpoints engines expect in this form. count: the key of config.json
    that counts the layers.
    """

    names: tuple[tuple[str, str], ...]
    count: str
    types: tuple[str, ...] = ()
    follows: bool = False  # numbers continue those of the model's layers

    def ours(self, name: str, first: int) -> tuple[int, str] | None:
        """The number of the layer that a tensor belongs to, from 0, and our name for it."""
        for mine, theirs in self.names:
            pattern = re.escape(theirs.removeprefix("model.")).replace(r"\{n\}", r"(\d+)")
            if match := re.match(rf"{DECODER}{pattern}(?=\.)", name):
                number = int(match[1]) if match.groups() else 0
                number -= first if self.follows else 0
                return (number, mine + name[match.end() :]) if number >= 0 else None
        return None

    def theirs(self, name: str, first: int) -> str:
        """The checkpoint's name for one of our tensors."""
        for mine, theirs in self.names:
            if name.startswith(f"{mine}."):
                number = first if self.follows else 0
                return theirs.replace("{n}", str(number)) + name.removeprefix(mine)
        raise AssertionError(name)


NEXTN = "num_nextn_predict_layers"
QWEN = (
    ("eh_proj", "mtp.fc"),
    ("enorm", "mtp.pre_fc_norm_embedding"),
    ("hnorm", "mtp.pre_fc_norm_hidden"),
    ("post_norm", "mtp.norm"),
    ("mtp_block", "mtp.layers.{n}"),
)
FAMILIES = [
    # transformers' MtpModel
    Family(
        (
            ("enorm", "mtp.layers.{n}.enorm"),
            ("hnorm", "mtp.layers.{n}.hnorm"),
            ("eh_proj", "mtp.layers.{n}.eh_proj"),
            ("post_norm", "mtp.layers.{n}.post_norm"),
            ("mtp_block", "mtp.layers.{n}.mtp_block"),
        ),
        "num_mtp_layers",
    ),
    # Qwen3-Next, EXAONE, Mellum
    Family(QWEN, NEXTN, ("qwen3_next",)),
    # Qwen3.5
    Family(QWEN, "mtp_num_hidden_layers", ("qwen3_5_text", "qwen3_5_moe_text")),
    # DeepSeek, GLM, Step
    Family(
        (
            ("enorm", "model.layers.{n}.enorm"),
            ("hnorm", "model.layers.{n}.hnorm"),
            ("eh_proj", "model.layers.{n}.eh_proj"),
            ("post_norm", "model.layers.{n}.shared_head.norm"),
            ("lm_head", "model.layers.{n}.shared_head.head"),
            ("embed_tokens", "model.layers.{n}.embed_tokens"),
            ("mtp_block", "model.layers.{n}"),
        ),
        NEXTN,
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        follows=True,
    ),
]


def family_of(model_type: str) -> Family | None:
    """The family of models of this type; None if engines expect none."""
    return next((family for family in FAMILIES if model_type in family.types), None)
