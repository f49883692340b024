"""Files that come with the package: recipes, launch settings, the demo target and its prompts. They
are found by name: `demo-sequential`, `demo-target`, `demo-prompts`.
"""

from pathlib import Path

from draftheads.arguments import suggestion

FOLDER = Path(__file__).parent
LAUNCH = "accelerate-"
"""Prefix of the files that are not recipes, but settings of `accelerate launch`."""


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
