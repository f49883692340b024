"""The promise: where nothing more can be written, a command ends with one line that names the file,
and leaves nothing half written.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from tiny_chat import llama
from tiny_heads import random_head
from typed_commands import failed, questions

from draftheads.heads.formats.hub import save_head


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to make a file larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.mend("convert on a full disk ended in a traceback")
@pytest.mark.parametrize("to", ["vllm", "draftheads"])
def test_a_conversion_that_does_not_fit_is_one_line(run, tmp_path, to):
    head = save_head(random_head("medusa", llama()), tmp_path / "head", target=llama())
    with files_of_at_most(1000):
        answer = run("convert", head, tmp_path / "out", "--to", to)
    failed(answer, f"File too large: '{tmp_path / 'out'}'")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.mend("distill on a full disk named no file")
def test_answers_that_do_not_fit_name_their_file(run, target, tmp_path):
    words = ["--target", target, "--prompts", questions(tmp_path), "--max-new-tokens", 40]
    out: Path = tmp_path / "answers"
    with files_of_at_most(2000):
        answer = run("distill", *words, "--out", out)
    failed(answer, f"{out / 'answers-00000-of-00001.jsonl'}: File too large; raise the limit")
    assert run("distill", *words, "--out", out)[0] == 0, "what was answered is there"


def test_a_recipe_that_does_not_fit_names_its_file(run, target, tmp_path):
    with files_of_at_most(100):
        answer = run("init", "--target", target, "--out", tmp_path / "mine.yaml")
    failed(answer, f"File too large: '{tmp_path / 'mine.yaml'}'")
    assert not list(tmp_path.iterdir())


@pytest.mark.mend("of an answer to learn from, a full disk kept a part without a word")
def test_an_answer_that_does_not_fit_is_not_kept_in_part(run, target, tmp_path, monkeypatch):
    head = save_head(random_head("medusa", llama()), tmp_path / "head", target=llama())
    root = tmp_path / "learned"
    words = ["chat", "--head", head, "--target", target, "--learn", "--learn-folder", root]
    monkeypatch.setattr("sys.stdin", StringIO("hello\nand then\n"))
    with files_of_at_most(300):
        code, said, _ = run(*words, "--max-new-tokens", 8)
    [texts] = root.glob("*/texts/*")
    assert code == 0
    assert f"Learning has failed and ends: OSError: [Errno 27] File too large: '{texts}'" in said


@pytest.mark.mend("output on a full disk named nothing")
def test_output_that_does_not_fit_is_named(run, monkeypatch):
    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    failed(run("recipes", "demo-medusa"), "No space left on device: 'standard output'")
