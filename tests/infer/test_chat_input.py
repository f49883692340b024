"""The promise: lines are edited as in other chats, and remembered for their owner alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from draftheads.infer.chat.line_editor import history_path, typed_lines

ALT_ENTER, UP, CTRL_C, CTRL_D = "\x1b\r", "\x1b[A", "\x03", "\x04"


def read(path: Path, typed: str) -> str:
    with create_pipe_input() as keys:
        keys.send_text(typed)
        return typed_lines(["/reset", "/regen"], path=path, keys=keys, screen=DummyOutput())("> ")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("Hi\r", "Hi"),
        (f"a{ALT_ENTER}b\r", "a\nb"),
        ("a\\\rb\r", "a\nb"),
        ("\x1b[200~a\nb\r\nc\x1b[201~\r", "a\nb\nc"),
        (f"oops{CTRL_C}Hi\r", "Hi"),
    ],
)
def test_keys(tmp_path, typed, line):
    assert read(tmp_path / "history", typed) == line


@pytest.mark.parametrize(("key", "raised"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_keys_that_leave(tmp_path, key, raised):
    with pytest.raises(raised):
        read(tmp_path / "history", key)


def test_lines_are_remembered_for_their_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    assert path == tmp_path / "draftheads" / "chat-history"
    path.parent.mkdir()
    path.touch(0o644)
    read(path, f"first{ALT_ENTER}second\r")
    assert read(path, f"{UP}{UP}\r") == "first\nsecond"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_home_that_cannot_be_written_to_costs_the_history_alone(tmp_path):
    (tmp_path / "file").write_text("")
    assert read(tmp_path / "file" / "history", "Hi\r") == "Hi"
