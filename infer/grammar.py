"""Answers of a JSON schema, a regular expression or a grammar, compiled by llguidance.

Legend: V vocabulary.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftheads.extras import extras
from draftheads.heads.target.model import Target
from draftheads.heads.terminal import printable
from draftheads.infer.constraint import Constraint, ConstraintError
from draftheads.infer.paths import TokenPath
from draftheads.infer.prompt import OPEN, PromptRenderer, Reasoning

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as `json.dumps` writes it: a model cannot go on with blanks for ever, and most of what
stands between values is forced. A schema's own "x-guidance" may say otherwise.
"""
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
"""In patterns, which schemas have in JavaScript's syntax and llguidance in Rust's."""
FORCED = 16
"""Forced tokens that are drafted after a node, at most."""
BLANKS = r"blanks: /[ \n]{1,2}/"
"""That may stand around reasoning."""

logger = logging.getLogger("draftheads")

_known: WeakKeyDictionary[Target, tuple[Any, PromptRenderer]] = WeakKeyDictionary()
"""Tokenizers in llguidance's form, and renderers that know where reasoning stands."""


def one_of(ids: Mapping[str, int]) -> str:
    """An expression for the tokens that stand for a text of their own."""
    return "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)"


def lark(text: str, ids: Mapping[str, int]) -> str:
    """A text in Lark's syntax. ids: of the tokens that stand for a text of their own."""
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
        for part in re.split(f"({one_of(ids)})", text)
        if part
    )


def lead(reasoning: Reasoning, is_opened: bool, tokenizer: Any, ends: Iterable[int]) -> str:
    """The rule before `@answer`, in Lark's syntax: reasoning that the prompt has opened, or that
    the target may open, and the header of an answer. ends: tokens that end an answer, but no
    reasoning.
    """
    ids = tokenizer.get_added_vocab()
    openings = [mark for mark, text in reasoning.marks.items() if text == OPEN]
    opening = reasoning.opening or (tokenizer.decode(openings[0]) if openings else OPEN)
    thought = f"thought[suffix={json.dumps(reasoning.closing)}]: /(?s:.*)/"
    if reasoning.closing in ids:  # any other token may be in it
        closing = ids[reasoning.closing]
        others = ",".join(map(str, {closing, *ends}))
        thought = f"thought: <[^{others}]>* <[{closing}]>"
    block = f"thought blanks? {lark(reasoning.after, ids)}"
    if not is_opened:
        block = f"(blanks? {lark(opening, ids)} {block})?"
    header = f"({lark(reasoning.header, ids)})?" if reasoning.header else ""
    return "\n".join([f"start: {block} {header} @answer", thought, BLANKS])


class Grammar(Constraint):
    """A language of answers: tokens that it forbids have no probability, before temperature, top-k
    and top-p, and an answer ends where it is complete. Drafts that it forbids are not verified, and
    the tokens that it forces are drafted, also without other drafts.

    It begins after reasoning: that which the prompt has opened, or which the target opens itself.

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
            import llguidance.hf
        try:
            if target not in _known:  # takes a fraction of a second
                tokenizer = llguidance.hf.from_tokenizer(
                    target.tokenizer, target.vocab_size, [*target.eos_ids]
                )
                _known[target] = tokenizer, PromptRenderer(target, target.template_args)
            self._tokenizer, self._renderer = _known[target]
            self._answer = _union([_part(*each) for each in grammars])
            self._states = {"": self._compiled(self._answer)}
        except (ValueError, TypeError, RecursionError) as error:
            raise self._fault(error) from error
        self._start = self._state = self._states[""]
        self._check(any(self._state.compute_bitmask()))
        unheld = "; ".join(self._state.get_grammar_warnings())
        if unheld:
            logger.warning("%s: not held: %.300s", self.kind, printable(" ".join(unheld.split())))
        self._read = 0  # tokens of the answer
        self._ahead = 0  # of a path after it

    def _compiled(self, grammars: Sequence[dict[str, Any]]) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, json.dumps({"grammars": grammars}), log_level=0)

    def row(self, number: int, prompt: Sequence[int]) -> Grammar:
        """The same at the beginning of an answer."""
        row = copy(self)
        before = self._before(prompt)
        if before not in self._states:
            answer, *others = self._answer
            grammars = [{"lark_grammar": before}, {**answer, "name": "answer"}, *others]
            self._states[before] = self._compiled(grammars)
        row._start = self._states[before]
        row._state = row._start.deep_copy()
        row._check(any(row._state.compute_bitmask()))
        return row

    def _before(self, prompt: Sequence[int]) -> str:
        """The `lead` of an answer, if there is one."""
        renderer = self._renderer
        begins = renderer.reasoning_of(prompt)
        if begins == "none":
            return ""
        reasoning = renderer.reasoning or Reasoning({})
        return lead(reasoning, begins == "opened", renderer.tokenizer, renderer.eos_ids)

    def after(self, answer: list[int], path: TokenPath, logits_V: Tensor) -> Tensor:
        """The logits, minus infinity for what is forbidden. Raises ConstraintError for a grammar
        that becomes too complex.
        """
        self._move(answer, path)
        bias = bytearray(self._state.compute_logit_bias())
        forbidden_V = torch.frombuffer(bias, dtype=torch.uint8) == 0
        self._check(not forbidden_V.all())
        return logits_V.masked_fill(forbidden_V.to(logits_V.device), -torch.inf)

    def drafts(self, answer: list[int], paths: Sequence[TokenPath]) -> Sequence[TokenPath]:
        """Keeps allowed drafts, and adds what is forced after each node."""
        kept: dict[TokenPath, None] = {(): None}
        for path in [(), *paths]:
            if path[:-1] in kept and self._move(answer, path):
                forced = self._state.compute_ff_tokens()[:FORCED]
                for end in range(len(forced) + 1):
                    kept[(*path, *forced[:end])] = None
        return [*kept][1:]

    def _move(self, answer: list[int], path: TokenPath) -> bool:
        """Stand after an answer and a path; whether the path is allowed."""
        if self._state.get_error():  # at another path, and for good
            self._state = self._start.deep_copy()
            self._read = self._ahead = 0
        self._state.rollback(self._ahead)
        self._state.consume_tokens(answer[self._read :])
        self._read = len(answer)
        self._ahead = self._state.try_consume_tokens([*path])
        return bool(self._ahead == len(path))

    def _check(self, is_possible: bool) -> None:
        error = self._state.get_error()
        if error or not is_possible:
            raise self._fault(error)

    def _fault(self, error: object) -> ConstraintError:
        # llguidance adds its state or a trace
        text = str(error).partition("<state>")[0].partition("<backtrace>")[0]
        reason = " ".join(text.split()).replace("NoExtensionBias", "no text is of it")
        return ConstraintError(
            f"{self.kind}: expected one that llguidance can follow, got: {reason:.200}; change it"
        )


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
