"""The promise: what heads would learn from is shown, and conversations with answers become such
data.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tiny_chat import END, byte_tokenizer, llama, options, prompts

from draftheads.scripts.data import data_preview, import_answers
from draftheads.scripts.options import PromptSet
from draftheads.scripts.printing import Pen, show_answers
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.distill import distill
from draftheads.train.data.text_side import TextSide

TALK = [("Hello.", "Hi there."), ("Bye?", "Good bye.")]


@pytest.fixture
def side(tmp_path: Path) -> str:
    folder = tmp_path / "target"
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def talks(tmp_path: Path) -> str:
    path = tmp_path / "talks.jsonl"
    turns = [
        turn
        for asked, said in TALK
        for turn in ({"from": "human", "value": asked}, {"from": "gpt", "value": said})
    ]
    lines = [{"conversations": turns}, {"conversations": turns[2:]}, {"conversations": turns[:1]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_imported_answers_are_shown_and_summed_up(
    side: str, talks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    import_answers(talks, side, out)
    assert "2 documents of" in capsys.readouterr().out
    data_preview(out, count=1)  # the tokenizer is found through the manifest
    shown = capsys.readouterr().out
    assert "[[Hi there.<|im_end|>]]\n<|im_start|>user\nBye?<|im_end|>" in shown
    assert "[[Good bye.<|im_end|>]]" in shown
    assert shown.count("[[") == 2, "one document of two"
    assert f"answered by {side} (imported, not checked)" in shown
    assert "2 documents of" in shown and "0 prompts skipped" in shown
    assert "to learn in 3 answers, 10.0 on average; 0 cut by length" in shown
    assert "\x1b" not in shown


def test_imported_folder_is_training_data_that_says_where_it_is_from(
    side: str, talks: str, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    import_answers(talks, side, out)
    manifest = read_manifest(out)
    assert manifest.imported == {"verified": False}
    assert manifest.as_written()["target"] == {
        "name": side,
        "revision": None,
        "fingerprint": None,
        "dtype": None,
    }
    spans = [(answer, *span) for answer in read_answers(out) for span in answer.learn]
    written = [token for answer, start, stop in spans for token in answer.tokens[start:stop]]
    said = "".join(f"{said}<|im_end|>" for _, said in [*TALK, TALK[1]])
    assert byte_tokenizer().decode(written) == said
    with pytest.raises(ValueError, match="expected a new folder"):
        import_answers(talks, side, out)
    import_answers(talks, side, tmp_path / "one", PromptSet(limit=1))
    assert len(list(read_answers(tmp_path / "one"))) == 1


def test_turns_that_cannot_be_shown_end_a_conversation(
    talks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picky = byte_tokenizer(
        "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}"
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    )
    picky.save_pretrained(tmp_path / "picky")
    import_answers(talks, str(tmp_path / "picky"), tmp_path / "data")
    said = capsys.readouterr().out
    assert "2 documents of" in said and "0 prompts skipped" in said
    assert "1 stopped: chat template refuses the messages: too long" in said


def test_distilled_folder_of_another_place_needs_its_target(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = llama()
    target.name = str(tmp_path / "gone")
    distill(target, prompts(6, turns=2), options(tmp_path / "data"))
    capsys.readouterr()
    with pytest.raises(OSError, match="^target .*gone: "):
        data_preview(tmp_path / "data")
    data_preview(tmp_path / "data", target=side, count=2)
    shown = capsys.readouterr().out
    assert "<|im_start|>user\n" in shown
    assert "6 documents of" in shown and "0 prompts skipped" in shown


def test_colours_on_a_terminal(side: str, talks: str, tmp_path: Path) -> None:
    import_answers(talks, side, tmp_path / "data")
    target = TextSide.load(side)
    assert target.eos_ids == (END,)
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    pen = Pen(target, is_plain=False)
    show_answers(tmp_path / "data", pen, 1, out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32mHi there.\x1b[0m\x1b[1;7;32m<|im_end|>" in shown
    assert "[[" not in shown


def test_control_characters_do_not_reach_the_terminal(side: str) -> None:
    tokens = TextSide.load(side).tokenizer("a\x1b[2Jb")["input_ids"]
    pen = Pen(TextSide.load(side), is_plain=True)
    assert "\x1b" not in pen.document(tokens, [(1, len(tokens))]).plain


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
)
@pytest.mark.parametrize("text", ["", "[]", "null", '{"eos_token', "[" * 100_000, "\udcff"])
def test_a_damaged_tokenizer_is_one_line(side: str, name: str, text: str) -> None:
    """A damaged generation_config.json was passed over, with the end tokens that it names."""
    (Path(side) / name).write_bytes(text.encode(errors="surrogateescape"))
    said = rf"^target {re.escape(side)}: .*; (download it again|fix the file, or download it again)"
    with pytest.raises((ValueError, OSError), match=said) as failure:
        TextSide.load(side)
    assert "\n" not in str(failure.value)


def test_the_end_tokens_are_the_generation_configs_where_there_is_one(side: str) -> None:
    (Path(side) / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert TextSide.load(side).eos_ids == (3, 5)
