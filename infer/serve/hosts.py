"""The names by which a server may be called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit


class Hosts:
    """Host names that a server answers to. A page of another site cannot reach it by a name that
    was made to lead to its address (DNS rebinding). Addresses and `localhost` always pass: they
    lead to nothing else.

    names: "model.example.com", "*.example.com" for all below it, or "*" for all. Raises ValueError
    for other values.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            bare = name.removeprefix("*.")
            if name != "*" and host_of(bare) != bare.lower():
                raise ValueError(
                    f"--allowed-host: expected a name such as model.example.com, got {name!r}; "
                    "leave out https://, port and path"
                )
        self.names = {"localhost", *(name.lower() for name in names)}

    def allow(self, header: str) -> bool:
        """Whether a request with this Host header passes."""
        host = host_of(header) or ""  # which "*" alone matches
        return is_address(host) or any(fnmatchcase(host, name) for name in self.names)


def host_of(header: str) -> str | None:
    """The host of a Host header in lower case, without its port; None if it is malformed."""
    with suppress(ValueError):
        parts = urlsplit(f"//{header}")
        _ = parts.port  # raises if it is not a number
        if parts.netloc == header and "@" not in header:
            return (parts.hostname or "").rstrip(".") or None
    return None


def is_address(host: str) -> bool:
    """Whether this is an IP address."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
