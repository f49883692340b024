"""Training draft heads, from Python.

    from draftheads.train import fit, load_recipe

    recipe = load_recipe("recipe.yaml", ["run.output=out/qwen"])
    outcome = fit(recipe, on_evaluation=lambda step, figures: print(step, figures))

`distill` makes the answers that heads learn from, `read_prompts` reads prompts for it.

Names are imported when they are used: `draftheads.train.entry` must be able to catch signals before
torch is loaded.
"""

from typing import TYPE_CHECKING

from draftheads.extras import lazy

__all__ = [
    "DistillOptions",
    "LocalAnswerer",
    "Outcome",
    "Recipe",
    "distill",
    "fit",
    "load_recipe",
    "read_prompts",
]

if TYPE_CHECKING:
    from draftheads.train.data.distill import DistillOptions, LocalAnswerer, distill
    from draftheads.train.data.prompts import read_prompts
    from draftheads.train.medusa import fit
    from draftheads.train.metrics import Outcome
    from draftheads.train.recipe import Recipe, load_recipe
else:
    __getattr__, __dir__ = lazy(__name__, __file__)
