"""Answers of a JSON schema, a regular expression or a grammar, compiled by llguidance.

Legend: V vocabulary.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftheads.extras import extras
from draftheads.heads.target.model import Target
from draftheads.heads.terminal import printable
from draftheads.infer.constraint import Constraint
from draftheads.infer.paths import TokenPath

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as `json.dumps` writes it: a model cannot go on with blanks for ever, and most of what
stands between values is forced. A schema's own "x-guidance" may say otherwise.
"""
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
"""In patterns, which schemas have in JavaScript's syntax and llguidance in Rust's."""
FORCED = 16
"""Forced tokens that are drafted after a node, at most."""

logger = logging.getLogger("draftheads")

_tokenizers: WeakKeyDictionary[Target, Any] = WeakKeyDictionary()  # in llguidance's form


class Grammar(Constraint):
    """A language of answers: tokens that it forbids have no probability, before temperature, top-k
    and top-p, and an answer ends where it is complete. Drafts that it forbids are not verified, and
    the tokens that it forces are drafted, also without other drafts.

    kind: "json_schema" (an object, or its text), "regex" (of whole answers, in Rust's syntax),
    "grammar" (Lark's syntax, or GBNF), "choice" (a list of texts) or "any" (a list of kinds
    and texts, of which an answer follows one). What a schema says and llguidance cannot hold is
    logged. Raises ValueError for what cannot be compiled, and for a target without end tokens, or
    whose tokenizer is none of the library `tokenizers`.
    """

    def __init__(self, target: Target, kind: str, text: Any) -> None:
        grammars = text if kind == "any" else [(kind, text)]
        self.kind = " or ".join(kind for kind, _ in grammars)
        with extras():
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        try:
            parts = [_part(*each) for each in grammars]
            if target not in _tokenizers:  # takes a fraction of a second
                _tokenizers[target] = from_tokenizer(
                    target.tokenizer, target.vocab_size, [*target.eos_ids]
                )
            grammar = json.dumps({"grammars": _union(parts)})
            self._state = LLMatcher(_tokenizers[target], grammar, log_level=0)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._fault(error) from error
        self._check(any(self._state.compute_bitmask()))
        unheld = "; ".join(self._state.get_grammar_warnings())
        if unheld:
            logger.warning("%s: not held: %.300s", self.kind, printable(" ".join(unheld.split())))
        self._read = 0  # tokens of the answer
        self._ahead = 0  # of a path after it

    def row(self, number: int) -> Grammar:
        """The same at its beginning."""
        row = copy(self)
        row._state = self._state.deep_copy()
        return row

    def after(self, answer: list[int], path: TokenPath, logits_V: Tensor) -> Tensor:
        """The logits, minus infinity for what is forbidden. Raises ValueError for a grammar that
        becomes too complex.
        """
        self._move(answer, path)
        bias = bytearray(self._state.compute_logit_bias())
        forbidden_V = torch.frombuffer(bias, dtype=torch.uint8) == 0
        self._check(not forbidden_V.all())
        return logits_V.masked_fill(forbidden_V.to(logits_V.device), -torch.inf)

    def drafts(self, answer: list[int], paths: Sequence[TokenPath]) -> Sequence[TokenPath]:
        """Those that are allowed, and what is forced after each node."""
        kept: dict[TokenPath, None] = {(): None}
        for path in [(), *paths]:
            if path[:-1] in kept and self._move(answer, path):
                forced = self._state.compute_ff_tokens()[:FORCED]
                for end in range(len(forced) + 1):
                    kept[(*path, *forced[:end])] = None
        return [*kept][1:]

    def _move(self, answer: list[int], path: TokenPath) -> bool:
        """Stand after an answer and a path; whether the path is allowed."""
        self._state.rollback(self._ahead)
        self._state.consume_tokens(answer[self._read :])
        self._read = len(answer)
        self._ahead = self._state.try_consume_tokens([*path])
        return bool(self._ahead == len(path))

    def _check(self, is_possible: bool) -> None:
        error = self._state.get_error()
        if error or not is_possible:
            raise self._fault(error)

    def _fault(self, error: object) -> ValueError:
        # llguidance adds its state or a trace
        text = str(error).partition("<state>")[0].partition("<backtrace>")[0]
        reason = " ".join(text.split()).replace("NoExtensionBias", "no text is of it")
        return ValueError(f"{self.kind}: expected one that can be compiled, got: {reason:.200}")


def _part(kind: str, text: Any) -> dict[str, Any]:
    """A grammar as llguidance lists them."""
    from llguidance import grammar_from

    if kind == "json_schema":
        return {"json_schema": with_options(json.loads(text) if isinstance(text, str) else text)}
    if kind == "regex":
        [part] = json.loads(grammar_from(kind, text))["grammars"]
        return {"lark_grammar": part["lark_grammar"]}
    return {"lark_grammar": grammar_from(kind, text)}


def _union(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their languages together."""
    if len(parts) == 1:
        return [*parts]
    names = [f"part_{number}" for number in range(len(parts))]
    first = {"lark_grammar": "start: " + " | ".join(f"@{name}" for name in names)}
    return [first, *({**part, "name": name} for name, part in zip(names, parts, strict=True))]


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with what llguidance reads besides: JSON is spaced, and keywords that it does not
    know hold nothing, nor do patterns with LOOK_AROUND.
    """

    def compilable(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(compilable, value)]
        if not isinstance(value, dict):
            return value
        pattern = value.get("pattern")
        if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
            logger.warning("json_schema: not held: pattern %.300s", printable(repr(pattern)))
            value = {key: value[key] for key in value if key != "pattern"}
        return {key: compilable(each) for key, each in value.items()}

    compiled: dict[str, Any] = compilable({"x-guidance": {**SPACING, "lenient": True}, **schema})
    return compiled
