"""The promise: what is drawn while an answer grows ends as if it had come at once."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from draftheads.infer.chat import screen as chat_screen
from draftheads.infer.chat.screen import MarkdownScreen, MarkdownText

ANSWER = """\
# Title

Some *words* of a paragraph that is wrapped on a narrow terminal
with a line break, List<String> and [a link](http://example.com/and/more).

- one
- two `code`
  - nested

3. third

| a | b |
|---|---|
| wide cell | 1 |

```python
def f(x):
    return x  # a comment

print(f(1))
```
Setext
---
> quote

---
last words
#nohashtag
"""


def terminal(width: int = 40, height: int = 12) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=width, height=height
    )


def screen(console: Console) -> list[str]:
    """The lines that a terminal shows. It cannot reach lines above its height."""
    lines, row = [""], 0
    for code in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", console.file.getvalue()):
        if code == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code == "\x1b[1A":
            row -= 1
            assert row > len(lines) - 1 - console.height, "the scrollback cannot be redrawn"
        elif code == "\x1b[2K":
            lines[row] = ""
        elif code[0] not in "\x1b\r":
            lines[row] += code
    return [line.rstrip() for line in lines[: row + 1]]


def streamed(text: str, steps: list[int], monkeypatch) -> list[str]:
    monkeypatch.setattr(chat_screen, "PAUSE", -1e9)  # draw each time
    console = terminal()
    with MarkdownScreen(console, lambda: "the status") as lines:
        for end in steps:
            lines.show(text[:end], [False] * end)
            assert "the status" in console.file.getvalue()
    return screen(console)


@pytest.mark.parametrize("stride", [1, 7, 50])
def test_a_streamed_answer_ends_as_if_it_had_come_at_once(stride, monkeypatch):
    whole = streamed(ANSWER, [len(ANSWER)], monkeypatch)
    assert streamed(ANSWER, [*range(0, len(ANSWER), stride), len(ANSWER)], monkeypatch) == whole
    assert "the status" not in whole


def test_markdown_loses_no_text():
    console = terminal(60)
    console.print(MarkdownText(ANSWER, [False] * len(ANSWER)))
    shown = screen(console)
    for text in ("with a line break, List<String> and a link", " • one", " 3 third", "last words"):
        assert any(line.startswith(text) for line in shown), text
    assert "\n\n\n" not in "\n".join(shown).strip(), "one empty line after a block"
    assert "http://example.com/and/more" in "".join(shown), "no link hides where it leads"


def test_an_open_block_of_many_lines_shows_its_end(monkeypatch):
    text = "```\n" + "".join(f"line {n}\n" for n in range(30))
    monkeypatch.setattr(chat_screen, "PAUSE", -1e9)
    console = terminal()
    with MarkdownScreen(console, lambda: "") as lines:
        lines.show(text, [False] * len(text))
        before = screen(console)
    assert "line 29" in "".join(before) and "line 10" not in "".join(before)
    assert sum("line" in line for line in screen(console)) == 30


@pytest.mark.parametrize(
    ("marked", "green"),
    [
        ("plain {words} here", ["words"]),
        ("a **{b}old** {word}", ["b", "word"]),
        ("- {one}\n- two\n- {three}", ["one", "three"]),
        ("{same} same {same}", ["same", "same"]),
        ("`{code}` and\n\n```\nx = {1}\n```\n", ["code", "1"]),
        ("1. a\n2. {b}", ["b"]),
        ("| a | {b} |\n|---|---|\n| {c} | d |", ["b", "c"]),
        ("![alt](http://example.com/some/long/address.png) {word}", ["word"]),
        ("snake\\_{case}", ["case"]),
        ("so{me}\n\n# {Head}", ["me", "Head"]),
    ],
)
def test_accepted_characters_are_green_inside_rendered_markdown(marked, green):
    source, accepted = "", []
    for part in re.split(r"(\{.*?\})", marked):
        text = part.strip("{}")
        source += text
        accepted += [part.startswith("{")] * len(text)
    console = terminal(60)
    console.print(MarkdownText(source, accepted))
    found = re.findall(r"\x1b\[(?:\d+;)*32(?:;\d+)*m([^\x1b]*)", console.file.getvalue())
    assert [text for text in found if text.strip()] == green


def test_drawing_takes_a_tenth_of_the_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(chat_screen, "perf_counter", lambda: clock[0])
    drawn = []

    def status():
        clock[0] += 1.0
        drawn.append(clock[0])
        return "x"

    with MarkdownScreen(terminal(), status) as lines:
        while clock[0] < 200:
            lines.show("", [])
            clock[0] += 0.25
    assert 18 <= len(drawn) <= 20
