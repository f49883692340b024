"""Training draft heads: recipes, the loop, training data.

Names are imported when they are used: `draftheads.train.entry` must be able to catch signals before
torch is loaded.
"""

from importlib import import_module
from typing import Any

from draftheads.extras import extras

PUBLIC = {
    "DistillOptions": "data.distill",
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
