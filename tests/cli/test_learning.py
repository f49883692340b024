"""The promise: --learn keeps what was said where it says, takes it back and forgets it; what cannot
learn is refused in one line.
"""

from __future__ import annotations

import json
import stat
import time
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


@pytest.mark.mend("a folder of what was learned stayed locked after an error")
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
    assert code == 0 and said.startswith(f"deleting {place}\n") and not list(root.iterdir())
    assert run("forget", "--head", head, *here)[1].startswith("0 of the folders")


@pytest.mark.mend("`forget` deleted every folder with a hyphen in its name")
def test_forget_deletes_what_learning_made_and_nothing_else(run, chat, tmp_path):
    root = tmp_path / "learned"
    for name in ("my-thesis", "photos-2024", "medusa-1f2e3d4c"):
        (root / name / "texts").mkdir(parents=True)
        (root / name / "texts" / "1764100000000.jsonl").write_text("mine")
    (root / "my-thesis" / "target.json").write_text('{"name": "a model of mine"}')
    (root / "photos-2024" / "target.json").write_text("[")
    before = {path for path in root.rglob("*") if path.is_file()}
    assert chat()[0] == 0
    [place] = [path.parent for path in root.glob("*/heads")]
    (place / "notes.txt").write_text("mine")
    (place / "texts" / "notes.jsonl").write_text("mine")
    assert chat()[0] == 0, "files of somebody else are not read"
    code, said, _ = run("forget", "--learn-folder", root)
    assert code == 0 and said.startswith(f"deleting {place}\n")
    assert {path for path in root.rglob("*") if path.is_file()} == before | {place / "notes.txt"}
    assert run("forget", "--learn-folder", root)[1].startswith(
        f"0 of the folders in {root} were made by --learn"
    )


@pytest.mark.mend("`forget` said of a link only that a function cannot be called on it")
@pytest.mark.parametrize("name", ["texts", "heads"])
def test_forget_follows_no_link(run, chat, tmp_path, name):
    assert chat()[0] == 0
    [place] = (tmp_path / "learned").iterdir()
    elsewhere = (place / name).rename(tmp_path / "elsewhere")
    (place / name).symlink_to(elsewhere)
    before = set(tmp_path.rglob("*"))
    code, _, [line] = run("forget", "--learn-folder", tmp_path / "learned")
    assert code == 2 and "expected a folder that --learn made, got a symbolic link; delete" in line
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.mend("`forget --head` found nothing once the head's weights had changed")
def test_a_head_is_forgotten_although_it_was_trained_further(run, chat, head, tmp_path):
    root = tmp_path / "learned"
    assert chat()[0] == 0
    mine = set(root.iterdir())
    namesake = tmp_path / "other" / "medusa"
    save_head(make_head(MedusaHead, llama(), depth=3), namesake, target=llama())
    assert chat(name=str(namesake))[0] == 0
    [others] = set(root.iterdir()) - mine
    save_head(make_head(MedusaHead, llama(), depth=1), head, target=llama())
    code, said, _ = run("forget", "--head", head, "--learn-folder", root)
    assert code == 0 and said.startswith(f"deleting {mine.pop()}\n")
    assert list(root.iterdir()) == [others]


@pytest.mark.mend("texts outlived --learn-keep while their own head was not served")
def test_texts_are_deleted_in_time_whatever_is_started(run, chat, head, tmp_path, monkeypatch):
    root = tmp_path / "learned"
    assert chat("--learn-keep", 2)[0] == 0
    save_head(make_head(MedusaHead, llama(), depth=1), head, target=llama())
    [texts] = root.glob("*/texts/*")
    now = time.time()
    for day, is_there in ((1, True), (3, False)):
        monkeypatch.setattr(time, "time", lambda day=day: now + 86400 * day)
        failed(run("rollback", "--head", head, "--learn-folder", root), "has learned, found none")
        assert texts.exists() == is_there


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("ngram", [], "--learn: expected --head with one head, got 0"),
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


@pytest.mark.mend(
    "a target.json with values of other types ended every command about learning with a traceback"
)
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("heads/state.json", "served", "x"),
        ("target.json", "fingerprint", 3),
        ("target.json", "keep_days", None),
        ("target.json", "keep_days", -1),
    ],
)
def test_a_damaged_file_is_one_line_and_stops_no_other_command(
    run, chat, head, tmp_path, name, key, value
):
    root = tmp_path / "learned"
    assert chat()[0] == 0
    [place] = root.iterdir()
    file = place / name
    facts = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(facts | {key: value}))
    failed(chat(), f"{file}: expected the ", "got other content; delete")
    assert run("forget", "--learn-folder", root)[0] == 0
    assert chat("--learn-folder", tmp_path / "other")[0] == 0


def test_nothing_was_learned(run, head, tmp_path):
    failed(
        run("rollback", "--head", head, "--learn-folder", tmp_path / "none"),
        "expected a head that has learned, found none there",
    )
    assert run("forget", "--learn-folder", tmp_path / "none")[1].startswith("0 of the folders")
