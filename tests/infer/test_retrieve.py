"""The promise: one's own files are copied from, whatever else is in their folder."""

from __future__ import annotations

import pytest
import torch
from tiny_chat import llama

from draftheads.heads.drafting import Committed
from draftheads.infer.drafters import retrieve
from draftheads.infer.drafters.named import named_drafts
from draftheads.infer.drafters.retrieve import read_files


def test_what_stands_in_a_file_is_drafted(tmp_path):
    target = llama()
    text = "the cat sat on the mat, and then it went away to sleep."
    ids = target.tokenizer(text, add_special_tokens=False).input_ids
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "old.md").write_text(f"Notes. {text} More.")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    source = named_drafts(f"retrieve:{tmp_path}").load(target)
    place = len(ids) // 2
    tokens_BC = torch.tensor([ids[:place]])
    count_B = torch.tensor([place])
    tree = source.drafter(target).propose(Committed(tokens_BC, tokens_BC, count_B, [place]))
    assert tree.tokens_BN[0, 1:].tolist()[:6] == ids[place : place + 6]


def test_hidden_and_binary_files_are_passed_over(tmp_path):
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary"):
        with pytest.raises(ValueError, match="expected a text or a folder of texts, found none"):
            read_files(path, llama())
    hidden = read_files(tmp_path / ".hidden", llama())
    assert len(hidden._tokens) > 1, "which was named itself"


def test_of_many_files_the_first_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieve, "MOST", 20)
    for name in "abc":
        (tmp_path / name).write_text(f"{name} " * 30)
    with pytest.warns(UserWarning, match="expected at most 20 tokens, got more"):
        index = read_files(tmp_path, llama())
    assert len(index._tokens) == 20 + 1


def test_of_a_file_without_end_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieve, "MOST_CHARACTERS", 40)
    (tmp_path / "log").write_text("a b " * 1000)
    assert 1 < len(read_files(tmp_path, llama())._tokens) < 100
