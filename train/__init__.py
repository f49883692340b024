"""Training draft heads, from Python.

    from draftheads.train import fit, load_recipe

    recipe = load_recipe("recipe.yaml", ["run.output=out/qwen"])
    outcome = fit(recipe, on_evaluation=lambda step, figures: print(step, figures))

`distill` makes the answers that heads learn from, `read_prompts` reads prompts for it.

Names are imported when they are used: `draftheads.train.entry` must be able to catch signals before
torch is loaded.
"""

from importlib import import_module
from typing import Any

from draftheads.extras import extras

PUBLIC = {
    "DistillOptions": "data.distill",
    "LocalAnswerer": "data.distill",
    "Outcome": "loop",
    "Recipe": "recipe",
    "distill": "data.distill",
    "fit": "loop",
    "load_recipe": "recipe",
    "read_prompts": "data.prompts",
}
__all__ = list(PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras():
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
