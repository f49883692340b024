"""Conversations whose answers the target wrote earlier, as a folder that training reads.

The folder is like one of `draftheads distill`, and its manifest says that the answers were
imported: that this target wrote them is the user's word, nothing here has checked it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftheads.train.data.answers import FORMAT, MANIFEST, Counts, Journal, Record, write_manifest
from draftheads.train.data.spans import Spans
from draftheads.train.data.textside import TextSide
from draftheads.train.data.turns import Messages

BATCH = 64


def import_answers(
    side: TextSide,
    conversations: Sequence[Messages],
    out: Path,
    *,
    template_args: dict[str, Any] | None = None,
    source: str = "",
) -> Counts:
    """Write the conversations of `read_conversations` to `out`, a folder for training.

    A conversation that the chat template cannot show is skipped, with its reason. Raises ValueError
    where none can be shown, and for a folder that is there already.
    """
    if (out / MANIFEST).is_file():
        raise ValueError(
            f"{out}: expected a new folder, found one with a {MANIFEST}; choose another"
        )
    spans = Spans(side.tokenizer, side.eos_ids, template_args)
    lines: list[Record] = []
    methods: Counter[str] = Counter()
    for messages in conversations:
        found, names = _records(spans, messages)
        lines += [{"id": place, **record} for place, record in enumerate(found, start=len(lines))]
        methods.update(names)
    counts = Counts()
    for line in lines:
        counts.add(line)
    if not counts.done:
        reason = counts.reasons.most_common(1)[0][0] if counts.reasons else "there are none"
        raise ValueError(f"{source}: expected conversations to learn from, got none; {reason}")
    manifest = _manifest(side, lines, template_args or {}, source)
    manifest["imported"] = {"verified": False, "found_by": dict(methods)}
    manifest["counts"] = counts.numbers()
    _write(out, lines, manifest)
    return counts


def _records(spans: Spans, messages: Messages) -> tuple[list[Record], list[str]]:
    """Lines without their ids, and how the answers in them were found."""
    try:
        documents = spans.documents(messages)
    except ValueError as error:  # the next conversation may be fine
        return [{"skipped": str(error)}], []
    records = [
        {
            "tokens": document.tokens,
            "learn": [list(span) for span in document.learn],
            "turns": len(document.learn),
            "finish": "eos" if document.ended else "length",
        }
        for document in documents
    ]
    return records, [document.method for document in documents]


def _manifest(
    side: TextSide, lines: Sequence[Record], template_args: dict[str, Any], source: str
) -> dict[str, Any]:
    packages = ("draftheads", "transformers", "tokenizers")
    return {
        "format": FORMAT,
        "target": {
            "name": side.name,
            "revision": side.revision,
            "fingerprint": None,
            "dtype": None,
        },
        "sampling": {"template_args": template_args},
        "seed": None,
        "batch_size": BATCH,
        "prompts": {
            "source": source,
            "count": len(lines),
            "sha256": hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        },
        "complete": True,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def _write(out: Path, lines: Sequence[Record], manifest: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out, 0, 1) as journal:
        journal.cut(0)  # of a run that was killed before its manifest
        journal.append(lines)
    write_manifest(out, manifest)  # last: it says that all is there
