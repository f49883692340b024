"""Train small draft heads on a frozen causal LM, and decode losslessly with them.

    import draftheads

    model = draftheads.load("out/qwen")  # a head folder, a run, a Hub id
    print(model.generate("Why is the sky blue?", max_new_tokens=200))

`draftheads.heads`: the target, its heads and their files. `draftheads.infer`: decoding, drafters,
measurements. `draftheads.train`: training data, recipes, the loop. All three are imported when they
are used: `import draftheads` loads nothing, torch least of all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

PARTS = ("heads", "infer", "train")
__version__: str
__all__ = ["__version__", "heads", "infer", "load", "train"]

if TYPE_CHECKING:
    from draftheads import heads, infer, train
    from draftheads.infer import load
else:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata  # takes longer than all else here

            try:
                return metadata.version("draftheads")
            except metadata.PackageNotFoundError:
                return "not installed"  # a clone on PYTHONPATH
        if name == "load":
            return import_module(f"{__name__}.infer").load
        if name not in PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
