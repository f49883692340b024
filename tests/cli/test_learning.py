"""The promise: --learn keeps what was said where it says, takes it back and forgets it; what cannot
learn is refused in one line.
"""

from __future__ import annotations

import stat
from io import StringIO
from pathlib import Path

import pytest
from tiny_chat import llama
from tiny_heads import make_head
from typed_commands import failed

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.infer.background import Point
from draftheads.train.learn.versions import Versions


@pytest.fixture
def head(tmp_path) -> Path:
    save_head(make_head(MedusaHead, llama(), depth=2), tmp_path / "medusa", target=llama())
    return tmp_path / "medusa"


@pytest.fixture
def chat(run, target, head, tmp_path, monkeypatch):
    """Ask two questions of a chat that learns."""

    def asked(*options: object, name: str = str(head)) -> tuple[int, str, list[str]]:
        monkeypatch.setattr("sys.stdin", StringIO("hello\nand then\n"))
        words = ["chat", "--head", name, "--target", target, "--max-new-tokens", 8, "--learn"]
        return run(*words, "--learn-folder", tmp_path / "learned", *options)

    return asked


def test_what_is_kept_is_forgotten(run, chat, head, tmp_path):
    root = tmp_path / "learned"
    here = ("--learn-folder", root)
    assert chat()[0] == 0
    [place] = root.iterdir()
    [texts] = (place / "texts").iterdir()
    assert stat.S_IMODE(texts.stat().st_mode) == 0o600
    assert len(texts.read_text().splitlines()) == 2
    failed(run("rollback", "--head", head, *here), "nothing to go back to")
    versions = Versions(place / "heads")
    for number in (1, 2):
        versions.adopt(lambda folder: None, Point(0.0, number, 2.0, 9, adopted=True))
    code, said, wrong = run("rollback", "--head", head, *here)
    assert not wrong
    assert code == 0 and "served as version 1 from now on" in said
    code, said, _ = run("rollback", "--head", f"{head}+ngram", *here)
    assert code == 0 and "the head that learning started from" in said
    code, said, _ = run("forget", *here)
    assert code == 0 and said.startswith("deleted ") and not list(root.iterdir())
    assert run("forget", "--head", head, *here)[1].startswith("deleted 0 MB")


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("ngram", [], "--learn: expected --head with one head, got 0"),
        ("early-exit:1", [], "expected --head with one head, got 0"),
        ("HEAD", ["--compile"], "--learn: expected no --compile"),
        ("HEAD", ["--learn-keep", 0], "--learn-keep"),
        ("HEAD", ["--learn-mb", 1], "--learn-mb"),
    ],
)
def test_what_cannot_learn(chat, head, name, options, line):
    failed(chat(*options, name=name.replace("HEAD", str(head))), line)


def test_another_precision_has_a_place_of_its_own(run, chat, head, tmp_path):
    assert chat()[0] == 0
    failed(chat("--bits", 8), "(quantisation: none)", "choose another --learn-folder")
    assert chat("--bits", 8, "--learn-folder", tmp_path / "int8")[0] == 0


def test_a_damaged_state_is_one_line(chat, tmp_path):
    assert chat()[0] == 0
    [place] = (tmp_path / "learned").iterdir()
    (place / "heads" / "state.json").write_text("{")
    failed(chat(), "expected the state of learning, got other content; delete")


def test_nothing_was_learned(run, head, tmp_path):
    failed(
        run("rollback", "--head", head, "--learn-folder", tmp_path / "none"),
        "expected a head that has learned, found none there",
    )
    assert run("forget", "--learn-folder", tmp_path / "none")[1].startswith("deleted 0 MB")
