"""The promise: `tune` writes the tree that it found where every command finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_chat import llama
from tiny_heads import make_head
from typed_commands import questions

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.tree import tree_from_json

QUICK = ["--max-new-tokens", 8, "--nodes", 6, "--threads", 1]


@pytest.fixture
def folder(tmp_path, target) -> Path:
    tiny = llama()
    return save_head(make_head(MedusaHead, tiny, depth=2, nodes=6), tmp_path / "head", target=tiny)


@pytest.mark.slow
def test_the_tree_that_is_found_is_written(run, target, folder, tmp_path):
    """--dry-run leaves the folder as it is; without it, bench and chat decode with the tree."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    figures = tmp_path / "new" / "tune.json"
    command = ["tune", "--target", target, "--head", folder, "--prompts", questions(tmp_path, 12)]
    code, out, _ = run(*command, *QUICK, "--dry-run", "--json", figures)
    assert code == 0 and "present" in out and "written" not in out
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert json.loads(figures.read_text())["trials"][0]["predicted"] > 0
    code, out, _ = run(*command, *QUICK, "--json", figures)
    assert code == 0 and f"written to {folder}" in out
    best = json.loads(figures.read_text())["best"]
    recorded = json.loads((folder / "config.json").read_text())["draftheads"]
    assert recorded["tuned"]["measured_tokens_per_second"] == best["measured"]
    assert recorded["tree"] == best["tree"]["paths"]
    assert len(recorded["tuned"]["trained_tree"]) == 8
    if recorded["tree"]:
        assert load_head(folder, target=llama()).tree == tree_from_json(recorded["tree"])
