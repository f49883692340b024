"""Files that come with the package: recipes, launch settings, the demo target and its prompts. They
are found by name: `demo-sequential`, `demo-target`, `demo-prompts`.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
LAUNCH = "accelerate-"
"""Prefix of the files that are not recipes, but settings of `accelerate launch`."""


def packaged(name: str, suffix: str) -> Path | None:
    """The packaged file (suffix ".yaml", ".jsonl", ...) or folder (suffix "") of this name."""
    path = FOLDER / f"{name}{suffix}"
    return path if "/" not in name and path.exists() else None


def recipe_names() -> list[str]:
    """Names of all recipes, in order."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [name for name in names if not name.startswith(LAUNCH)]
