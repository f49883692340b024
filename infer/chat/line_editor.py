"""Reads lines at a terminal, with history, completion of commands and input over several lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output


def history_path() -> Path:
    """The file that stores typed lines: $XDG_STATE_HOME/draftheads/chat-history."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "draftheads" / "chat-history"


def typed_lines(
    commands: Sequence[str],
    *,
    path: Path | None = None,
    keys: Input | None = None,
    screen: Output | None = None,
) -> Callable[[str], str]:
    """Returns a function that shows a prompt and reads a line at the terminal.

    Alt-Enter, or Enter after a backslash, starts another line; pasted lines stay together. Ctrl-C
    clears the line; on an empty one it raises KeyboardInterrupt, and Ctrl-D raises EOFError. keys,
    screen: input and output; default: the terminal's.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(path or history_path()),
        completer=WordCompleter(list(commands), sentence=True),
        key_bindings=_bindings(),
        prompt_continuation="  ",
        reserve_space_for_menu=4,
        input=keys,
        output=screen,
    )
    return session.prompt


def _history(path: Path) -> History:
    try:  # without a writable home there is no history, but the chat works
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif event.app.is_running and not event.app.is_done:  # a first one may have ended it
            event.app.exit(exception=KeyboardInterrupt)

    return keys
