"""The promise: the Python code of the README, of the documents and of every model card works as it
stands; what it prints is the text that the target wrote, on targets whose tokens are not pieces of
text, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reciting import CHARACTERS, saved_target, sentencepiece_tokenizer
from tiny_heads import random_head

from draftheads.heads import Target, save_head
from draftheads.heads.formats.card import HERE

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
NEW_TOKENS = 100


@pytest.fixture(params=["own", "stories260K"])
def head(request, tmp_path) -> tuple[Path, Target]:
    """A head folder and its target, beside it."""
    if request.param == "own":
        target = saved_target(tmp_path / "target")
    else:
        target = Target.load(request.getfixturevalue("stories"))
    save_head(random_head("medusa", target, depth=2), tmp_path / "head", target=target)
    return tmp_path / "head", target


def python_blocks(text: str) -> list[str]:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block.replace(", temperature=0.7", "") for block in blocks]  # to know its text


def written(target: Target) -> tuple[str, str]:
    """The example's prompt as it is decoded, and the text that `generate` writes after it."""
    inputs = target.tokenizer("Once upon a time", return_tensors="pt")
    out = target.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    [prompt], [whole] = (
        target.tokenizer.batch_decode(ids, skip_special_tokens=True)
        for ids in (inputs["input_ids"], out)
    )
    return prompt, whole[len(prompt) :]


def test_the_readmes_example_prints_what_the_target_wrote(head, capsys):
    folder, target = head
    [example] = python_blocks(README.read_text())
    assert "out/qwen" in example
    exec(example.replace("out/qwen", str(folder)), {})
    assert capsys.readouterr().out == written(target)[1]


ELSEWHERE = ("openvino_genai", "openai")
"""Packages of blocks that need a server or an engine; tests of these run them."""
WITH_CODE = [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Block after block, in one process; names of the Hub stand for a tiny target and its heads."""
    target = saved_target(tmp_path / "target", layers=2)
    save_head(random_head("medusa", target, depth=3), tmp_path / "head", target=target)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if any(f"import {package}" in block or f"from {package}" in block for package in ELSEWHERE):
            continue
        for name in ("out/qwen", "USER/NAME"):
            block = block.replace(f'"{name}"', f'"{tmp_path / "head"}"')
        exec(block.replace('"Qwen/Qwen3-0.6B"', f'"{tmp_path / "target"}"'), names)


def test_the_cards_examples_print_what_the_target_wrote(head, capsys):
    folder, target = head
    prompt, text = written(target)
    card = (folder / "README.md").read_text().replace(HERE, str(folder))
    ours, *transformers = python_blocks(card.replace("TARGET_FOLDER", str(target.name)))
    exec(ours, {})
    assert capsys.readouterr().out == text
    exec("\n".join(transformers), {})
    assert capsys.readouterr().out == f"{prompt}{text}\n" * 2


def test_what_the_examples_write_tells_right_from_wrong():
    """Decoded step by step, the text of the reciting target loses spaces and characters."""
    tokenizer = sentencepiece_tokenizer()
    ids = list(range(2, len(tokenizer)))
    whole = tokenizer.decode(ids)
    assert whole == f"Once upon a time there was ,Lily{CHARACTERS}"
    assert "".join(tokenizer.decode([token]) for token in ids) != whole
