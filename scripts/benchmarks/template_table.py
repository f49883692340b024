"""What would be learned under every chat template of a folder, as a table.

    python scripts/benchmarks/template_table.py TEMPLATES TOKENIZER

Of a conversation of three turns, for each template: how the answers were found, and the learned
parts as text. The tokenizer learns the special tokens that the template names, so that templates
of other models can be read with it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.train.data.imports import Document, Spans

TALK = (("Hello there.", "Hi."), ("And 2 + 2?", " It is four.\n"), ("Bye.", "Good *bye*!"))
SPECIAL = re.compile(r"<\|?[A-Za-z][\w▁|:-]*\|?>|<｜[^｜<>]+｜>|</s>|\[/?[A-Z_]+\]")
TEXTUAL = re.compile(r"</?(think|tool|function|parameter|result|arg|name|desc|param|type|b)\w*>")


@dataclass(frozen=True)
class Row:
    """What one template does with the conversation. error: why nothing is learned, or ""."""

    template: str
    documents: list[Document]
    learned: list[str]
    error: str = ""

    @property
    def method(self) -> str:
        """How the answers were found."""
        return self.documents[0].method if self.documents else "refused"


def conversation(system: str | None = None) -> list[dict[str, Any]]:
    """Three questions, each with its answer."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in TALK:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def row(
    path: Path, tokenizer: Any, messages: list[dict[str, Any]], template_args: dict[str, Any]
) -> Row:
    """Read one template; the tokenizer is changed."""
    template = path.read_text(encoding="utf-8")
    found = {match.group() for match in SPECIAL.finditer(template)}
    names = sorted(name for name in found if not TEXTUAL.fullmatch(name))
    tokenizer.chat_template = template
    tokenizer.bos_token = tokenizer.bos_token or "<s>"
    tokenizer.add_special_tokens(
        {"extra_special_tokens": names}, replace_extra_special_tokens=False
    )
    name = f"{path.parent.name}/{path.stem}"
    try:
        documents = Spans(tokenizer, template_args=template_args).documents(messages)
    except ValueError as error:  # it is what the table shows
        return Row(name, [], [], str(error))
    learned = [
        tokenizer.decode(document.tokens[start:stop], clean_up_tokenization_spaces=False)
        for document in documents
        for start, stop in document.learn
    ]
    return Row(name, documents, learned)


def main(templates: str, tokenizer: str) -> None:
    """Print the table."""
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(tokenizer)
    rows = []
    for path in sorted(Path(templates).rglob("*.jinja")):
        rows.append(row(path, reader, conversation(), {}))
        one = rows[-1]
        shown = one.error or " ".join(map(repr, one.learned))
        print(f"{one.template:58} {one.method:10} {len(one.documents)}  {shown}")
    print(dict(Counter(one.method for one in rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
