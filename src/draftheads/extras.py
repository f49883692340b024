"""Packages that an install may lack, and the extra of ours that brings them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


@contextmanager
def extras() -> Iterator[None]:
    """Raise ModuleNotFoundError, with a line that says what to install, for a failed import."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("draftheads"):  # a fault of ours
            raise
        raise ModuleNotFoundError(explanation(error), name=error.name) from error


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are imported when they are used.

    file: of the package; what it imports for type checkers says where each name is.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    below = [node for node in imports if str(node.module).startswith(f"{package}.")]
    modules = {alias.name: str(node.module) for node in below for alias in node.names}

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with extras():
            return getattr(import_module(modules[name]), name)

    return attribute, lambda: sorted(modules)


def explanation(error: ImportError) -> str:
    """The line for an import that failed."""
    text = " ".join(str(error).split())
    advice = installation(error)
    if "pip install" in text or not advice:
        return text
    return f"expected an installed package, got: {text}; {advice}"


def installation(error: ImportError) -> str:
    """The command that installs what could not be imported: an extra of ours, or the package. Empty
    for an error that names neither: libraries raise ImportError without a module, too.
    """
    from importlib import metadata  # slow

    module = (error.name or "").partition(".")[0]
    names = {module} if module else set(re.findall(r"\w+", str(error))) - {"draftheads"}
    try:
        requirements = metadata.requires("draftheads") or []
    except metadata.PackageNotFoundError:  # a clone on PYTHONPATH
        requirements = []
    for requirement in requirements:
        name = re.match(r"[\w-]+", requirement)
        extra = re.search("extra == ['\"](.+?)['\"]", requirement)
        if extra and name and name[0].replace("-", "_").lower() in {each.lower() for each in names}:
            return f"pip install 'draftheads[{extra[1]}]'"
    return f"pip install {module}" if module else ""
