"""Small random schemas, regular expressions and grammars, each with a check of its own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Check = Callable[[str], bool]
Value = Callable[[Any], bool]
WORDS = ("name", "age", "city", "kind", "size", "ok")


def drawn(seed: int) -> tuple[str, Any, Check]:
    """Kind and text, as `Grammar` takes them, and whether a text is of it."""
    draws = random.Random(seed)
    if seed % 3 == 0:
        pattern = regex(draws, 3)
        return "regex", pattern, lambda text: re.fullmatch(pattern, text) is not None
    if seed % 3 == 1:
        return grammar(draws)
    described, is_right = schema(draws, 2)
    if described.get("type") != "object":
        described, is_right = object_of(draws, {"value": (described, is_right)})
    return "json_schema", described, lambda text: is_right(json.loads(text))


def regex(draws: random.Random, depth: int) -> str:
    if depth == 0:
        return draws.choice(["a", "[0-9]", "the ", "x{2,4}", "(yes|no)", r"\.", "[A-Z][a-z]{0,3}"])
    parts = [regex(draws, depth - 1) for _ in range(draws.randint(1, 3))]
    if draws.random() < 0.4:
        return f"({'|'.join(parts)})"
    return f"({''.join(parts)}){draws.choice(['', '', '?', '{1,2}'])}"


def grammar(draws: random.Random) -> tuple[str, str, Check]:
    if draws.random() < 0.5:  # nested brackets around a word
        word = draws.choice(WORDS)
        opening, closing = draws.choice(["()", "[]", "<>"])
        text = f'start: "{opening}" start "{closing}" | "{word}"'

        def is_nested(answer: str) -> bool:
            depth = answer.count(opening)
            return answer == opening * depth + word + closing * depth

        return "grammar", text, is_nested
    operators = "".join(draws.sample("+-*", 2))
    most = draws.randint(1, 4)
    text = (
        f'root ::= number ([{operators}] number){{0,{most}}} " = ?"\nnumber ::= [1-9] [0-9]{{0,2}}'
    )

    def is_sum(answer: str) -> bool:
        sum_, end = answer[:-4], answer[-4:]
        numbers = re.split(f"[{re.escape(operators)}]", sum_)
        right = all(re.fullmatch("[1-9][0-9]{0,2}", each) for each in numbers)
        return end == " = ?" and right and len(numbers) <= most + 1

    return "grammar", text, is_sum


def schema(draws: random.Random, depth: int) -> tuple[dict[str, Any], Value]:
    kinds = ["integer", "boolean", "string", "enum", "pattern", "null"]
    kind = draws.choice(kinds + ["object", "array", "any"] * 2 * (depth > 0))
    if kind == "integer":
        low = draws.randint(-20, 20)
        high = low + draws.choice([1, 9, 300])
        return {"type": kind, "minimum": low, "maximum": high}, lambda value: low <= value <= high
    if kind == "string":
        most = draws.randint(1, 12)
        return {"type": kind, "maxLength": most}, lambda value: len(value) <= most
    if kind == "enum":
        values = draws.sample([*WORDS, 3, None, "two words", True], 3)
        return {"enum": values}, lambda value: value in values
    if kind == "pattern":
        pattern = draws.choice(["^[a-c]{2,5}$", r"^\d{2}-\d{2}$", "^(up|down)$"])
        described = {"type": "string", "pattern": pattern}
        return described, lambda value: re.fullmatch(pattern[1:-1], value) is not None
    if kind == "array":
        inner, is_right = schema(draws, depth - 1)
        most = draws.randint(1, 3)
        described = {"type": kind, "items": inner, "maxItems": most}
        return described, lambda value: len(value) <= most and all(map(is_right, value))
    if kind == "any":
        return (
            {"anyOf": [{"const": "none"}, {"type": "boolean"}]},
            lambda value: (
                value
                in (
                    "none",
                    True,
                    False,
                )
            ),
        )
    if kind == "object":
        names = draws.sample(WORDS, draws.randint(1, 3))
        return object_of(draws, {name: schema(draws, depth - 1) for name in names})
    return {"type": kind}, lambda value: isinstance(value, bool) or value is None


def object_of(
    draws: random.Random, parts: dict[str, tuple[dict[str, Any], Value]]
) -> tuple[dict[str, Any], Value]:
    required = [name for name in parts if draws.random() < 0.8]
    described = {
        "type": "object",
        "properties": {name: inner for name, (inner, _) in parts.items()},
        "required": required,
        "additionalProperties": False,
    }

    def is_right(value: Any) -> bool:
        known = set(required) <= value.keys() <= parts.keys()
        return known and all(parts[name][1](each) for name, each in value.items())

    return described, is_right
