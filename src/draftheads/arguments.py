"""What a person types: paths, names, the variable of a key. These checks import nothing slow, so a
mistake is said at once, not after the seconds that torch takes to load.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def check_path(path: str) -> None:
    """Raise FileNotFoundError for the path of a folder without a model, ValueError for a head's."""
    if not path.strip():  # Path("") is the working directory
        raise FileNotFoundError(
            f"expected a target, got the empty name {path!r}; pass a model folder or a Hub id"
        )
    local = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    if path.endswith(".gguf"):
        if not local.is_file():
            raise FileNotFoundError(
                f"target {path}: expected a GGUF file, found none; pass the path of one on this "
                "machine"
            )
        return
    check_is_no_head(path, local)
    is_path = local.is_absolute() or path.startswith((".", "~"))
    is_path = is_path or "\\" in path or path.count("/") > 1
    if (is_path or local.exists()) and not (local / "config.json").is_file():
        raise FileNotFoundError(
            f"target {path}: expected a folder with config.json, found none; "
            "pass a model folder or a Hub id"
        )


def check_is_no_head(path: str, folder: Path) -> None:
    """Raise ValueError for a head or a training run where a target is expected."""
    places = [folder, folder / "best", *sorted(folder.glob("step-*"))[-1:]]
    configs = [place / "config.json" for place in places if (place / "config.json").is_file()]
    if configs and re.search(rb'"draftheads"\s*:\s*\{', configs[0].read_bytes()):
        raise ValueError(
            f"target {path}: expected a model, got a draft head; pass it as --head, and the model "
            "that it was trained for as --target"
        )


def head_folder(source: str | Path, what: str = "head") -> Path | None:
    """The folder of a head, a run or `what`; None for user/name or user/name@revision on the Hub.
    Raises FileNotFoundError for what is neither.
    """
    if not str(source).strip():  # Path("") is the working directory
        raise FileNotFoundError(
            f"expected a {what}, got the empty name {str(source)!r}; pass a folder or a Hub id"
        )
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(str(source).partition("@")[0]):
        raise FileNotFoundError(f"{what} {source}: no such folder, and not a Hub id (user/name)")
    return None


def expected(message: str) -> str:
    """A message of pydantic's about a value, beginning with what was expected."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    return re.sub("^Input should be ", "expected ", message)


def suggestion(name: str, known: Iterable[str]) -> str:
    """What a person may have meant: the known names that go on like this one, else the nearest one;
    "" for none.
    """
    names = sorted(known)
    longer = [each for each in names if name and each.startswith(name)]
    return " or ".join(longer[:4] or difflib.get_close_matches(name, names, n=1))


def nearest(path: Path) -> Path:
    """The path, or where it does not exist yet, the folder above that does."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def takes_files(folder: Path) -> bool:
    """Whether a file can be made in a folder that is there: root has the permission everywhere."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder that cannot be written."""
    if not takes_files(nearest(folder)):
        raise ValueError(
            f"--out: expected a folder that can be written, got {folder}; give another one"
        )


def check_new(path: Path) -> None:
    """Raise FileExistsError for a path that is taken, ValueError for one that cannot be written."""
    if path.exists():
        raise FileExistsError(f"{path} already exists; choose another name, or remove it")
    check_folder(path)


def secret(variable: str) -> str:
    """The key in an environment variable. Raises ValueError if there is none."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]+", key):  # the name is not shown: it may be the key itself
        raise ValueError(
            "--api-key-env: expected the name of an environment variable with a key of printable "
            "ASCII characters, found none; export it, and give the variable's name"
        )
    return key
