"""Options of a server that answers instead of a target in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftheads.train.data.served import ServedTarget

Server = Annotated[
    str | None,
    typer.Option("--server", help="OpenAI-compatible server of the target, http://HOST:PORT"),
]
ServerModel = Annotated[
    str | None, typer.Option("--server-model", help="its name for the target, if it has several")
]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="environment variable that holds its key")
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, help="requests to the server at a time")
]


def connect(
    target: str,
    server: str | None,
    model: str | None,
    api_key_env: str | None,
    concurrency: int,
    revision: str | None = None,
) -> ServedTarget:
    """The target, its answers from a server. Raises ValueError or OSError without one."""
    if not server:
        raise ValueError("--server: expected http://HOST:PORT, got none; name the server's address")
    import transformers

    from draftheads.train.data.remote import ServerOptions
    from draftheads.train.data.served import ServedTarget

    transformers.logging.set_verbosity_error()
    options = ServerOptions(
        url=server, model=model, api_key_env=api_key_env, concurrency=concurrency
    )
    return ServedTarget(target, options, revision)
