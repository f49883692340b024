"""Answers of a JSON schema, a regular expression or a grammar, compiled by llguidance.

Legend: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftheads.extras import extras
from draftheads.heads.target.model import Target
from draftheads.infer.constraint import Constraint
from draftheads.infer.paths import TokenPath

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as `json.dumps` writes it: a model cannot go on with blanks for ever, and most of what
stands between values is forced. A schema's own "x-guidance" may say otherwise.
"""
FORCED = 16
"""Forced tokens that are drafted after a node, at most."""

_tokenizers: WeakKeyDictionary[Target, Any] = WeakKeyDictionary()  # in llguidance's form


class Grammar(Constraint):
    """A language of answers: tokens that it forbids have no probability, before temperature, top-k
    and top-p, and an answer ends where it is complete. Drafts that it forbids are not verified, and
    the tokens that it forces are drafted, also without other drafts.

    kind: "json_schema" (an object, or its text), "regex" (of whole answers, in Rust's syntax) or
    "grammar" (Lark's syntax, or GBNF). Raises ValueError for what cannot be compiled, and for a
    target without end tokens, or whose tokenizer is none of the library `tokenizers`.
    """

    def __init__(self, target: Target, kind: str, text: Any) -> None:
        self.kind = kind
        with extras():
            from llguidance import LLMatcher, grammar_from
            from llguidance.hf import from_tokenizer
        try:
            if kind == "json_schema":
                schema = json.loads(text) if isinstance(text, str) else text
                text = json.dumps({"x-guidance": SPACING, **schema})
            if target not in _tokenizers:  # takes a fraction of a second
                _tokenizers[target] = from_tokenizer(
                    target.tokenizer, target.vocab_size, [*target.eos_ids]
                )
            self._state = LLMatcher(_tokenizers[target], grammar_from(kind, text), log_level=0)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._fault(error) from error
        self._check(any(self._state.compute_bitmask()))
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
