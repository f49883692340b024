"""How heads are judged while they train: the recipe's section `judge`, and what follows from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from draftheads.train.choices import Section

Measure = Literal["tokens_per_step", "tokens_per_second", "simulated", "loss"]
DECODED = ("tokens_per_step", "tokens_per_second")
"""Measures that only decoding knows."""


class JudgeChoices(Section):
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
    def _best_is_known(self) -> JudgeChoices:
        if self.every == 0 and self.best in DECODED:
            raise ValueError(
                f"best simulated or loss, as every=0 decodes nothing, got {self.best}; "
                "change one of them"
            )
        return self


def decodes(recipe: dict[str, Any]) -> bool:
    """Whether a run with this dumped recipe decodes with its heads.

    Not on a sharded target: there all processes must run equally many forwards.
    """
    judge = recipe.get("judge")  # none: begun before heads were judged by decoding
    if judge is None:
        return False
    return bool(judge["every"] != 0 and recipe["target_placement"] != "sharded")


def measure_of(recipe: dict[str, Any]) -> Measure:
    """What a run with this dumped recipe compares its checkpoints by."""
    chosen: Measure | None = recipe.get("judge", {}).get("best")
    return chosen or ("tokens_per_step" if decodes(recipe) else "simulated")


def comparison(recipe: dict[str, Any]) -> dict[str, Any]:
    """The choices of a dumped recipe that must stay for its checkpoints to be comparable."""
    measure = measure_of(recipe)
    keys = ("prompts", "new_tokens", "temperature") if measure in DECODED else ()
    return {"best": measure, **{key: recipe["judge"][key] for key in keys}}
