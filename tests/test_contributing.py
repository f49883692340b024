"""The promise: the code of CONTRIBUTING.md works as it stands, and does what the text says; the
project's address is in one place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_heads import decode, random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads import StaticTree
from draftheads.heads.formats import table
from draftheads.heads.formats.config import read_config
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.formats.stored import read_files
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.infer.sources import DrafterSource

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = ("docs", ".github", "heads", "infer", "train", "recipes", "scripts", "tests")
TEXTS = {".md", ".py", ".yml", ".yaml", ".jinja", ".html", ".js", ".sh"}
LENGTHS = (5, 9, 3)  # of prompts
NEW_TOKENS = 24


def run_block(name: str) -> dict[str, Any]:
    """The names that a marked block of CONTRIBUTING.md defines."""
    [source] = re.findall(rf"```python {name}\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, f"CONTRIBUTING.md ({name})", "exec", dont_inherit=True), names)
    return names


def text_of(drafts: Any, rule: Acceptance | None, batch: int) -> list[list[int]]:
    """What the tiny target writes after some prompts."""
    prompts = some_prompts(*LENGTHS[:batch])
    target = tiny_target("llama")
    return decode(target, drafts, prompts, sampling=rule, max_new_tokens=NEW_TOKENS)[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_new_rule_writes_the_same_text_with_drafts(batch):
    rule = run_block("rule")["GreedyWithout"]
    usual = text_of(None, None, batch)
    banned = usual[0][0]
    plain = text_of(None, rule((banned,)), batch)
    head = random_head("medusa", tiny_target("llama"))
    assert text_of(head, rule((banned,)), batch) == plain
    assert text_of(head, rule(), batch) == usual
    assert plain != usual and all(banned not in row for row in plain)


@pytest.fixture
def tables(monkeypatch):
    """Tables of layouts that a test may add rows to."""
    for name in ("READERS", "WRITERS", "UNSUPPORTED"):
        monkeypatch.setattr(table, name, type(getattr(table, name))(getattr(table, name)))


def test_the_new_format_gives_the_same_head_back(tables, tmp_path):
    run_block("format")
    target = tiny_target("llama")
    head = random_head("medusa", target)
    save_head(head, tmp_path / "ours", target=target)
    ours = read_files(tmp_path / "ours", read_config(tmp_path / "ours"))
    (tmp_path / "theirs").mkdir()
    theirs = table.written(ours, "acme", target)
    assert all(name.startswith("acme.") for name in theirs.tensors)
    theirs.save(tmp_path / "theirs")
    back = load_head(tmp_path / "theirs", target=target).state_dict()
    assert back.keys() == head.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in head.state_dict().items())


def test_the_new_format_refuses_what_it_does_not_support(tables, tmp_path):
    run_block("format")
    target = tiny_target("llama")
    save_head(
        random_head("medusa", target, vocabulary=list(range(9))), tmp_path / "ours", target=target
    )
    ours = read_files(tmp_path / "ours", read_config(tmp_path / "ours"))
    with pytest.raises(ValueError, match="acme does not support .* truncated_vocab_size"):
        table.written(ours, "acme", target)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_new_drafter_changes_no_text(batch):
    repeat = run_block("drafter")["Repeat"]()
    assert isinstance(repeat, DrafterSource)
    prompts = some_prompts(*LENGTHS[:batch])
    plain = [greedy(tiny_target("llama"), prompt, NEW_TOKENS) for prompt in prompts]
    assert text_of(repeat, None, batch) == plain
    with pytest.raises(ValueError, match="expected limits of a tree"):
        Speculator(tiny_target("llama"), repeat, tree=StaticTree.from_widths((1,)))


def test_the_address_of_the_project_is_in_one_place():
    """pyproject.toml has it, once there is one; any other file would be a second place."""
    pattern = re.compile(r"(github|gitlab|codeberg|bitbucket)\.\w+[/:][\w.-]+/draftheads", re.I)
    paths = [*ROOT.glob("*.md"), *(path for each in FOLDERS for path in (ROOT / each).rglob("*"))]
    texts = [path for path in paths if path.suffix in TEXTS and path.is_file()]
    assert ROOT / "README.md" in texts
    assert [path.name for path in texts if pattern.search(path.read_text())] == []
