"""The names by which a server may be called."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address

HEADER = re.compile(r"\[?([0-9a-f:.]+(?=\])|[\w.-]+?)\]?\.?(:\d+)?")
"""A Host header in lower case: a name or an address, and its port."""


def names_server(header: str, names: Collection[str]) -> bool:
    """True if a request with this Host header may pass. A page of another site cannot reach a
    server by a name that was made to lead to its address (DNS rebinding). Addresses always pass,
    because they lead to nothing else.

    names: in lower case; "model.example.com", "*.example.com" for all below it, or "*" for all.
    """
    parts = HEADER.fullmatch(header.lower())
    host = parts[1] if parts else ""  # which "*" alone matches
    with suppress(ValueError):
        return bool(ip_address(host))
    return any(fnmatchcase(host, name) for name in names)
