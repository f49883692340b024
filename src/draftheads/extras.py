"""Packages that an install may lack, and the extra of ours that brings them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message is one line and says what installs it."""


@contextmanager
def extras() -> Iterator[None]:
    """Raise MissingPackageError if the block imports what is not installed."""
    try:
        yield
    except MissingPackageError:
        raise
    except ImportError as error:
        if (error.name or "").startswith("draftheads"):  # a fault of ours
            raise
        raise MissingPackageError(explanation(error), name=error.name) from error


def explanation(error: ImportError) -> str:
    """The line for an import that failed."""
    text = " ".join(str(error).split())
    advice = installation(error)
    if isinstance(error, MissingPackageError) or not advice:
        return text
    return f"expected an installed package, got: {text}; {advice}"


def installation(error: ImportError) -> str:
    """The command that installs what could not be imported: an extra of ours, or the package. Empty
    for an error that names neither: libraries raise ImportError without a module, too.
    """
    from importlib import metadata  # slow

    module = (error.name or "").partition(".")[0]
    names = {module} if module else set(re.findall(r"\w+", str(error)))
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
