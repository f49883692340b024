"""Constrained answers: tokens per step and time with and without drafts, those that the grammar
forces among them, and what masks cost. All rows of a table write the same tokens.

    python scripts/benchmarks/grammars.py --target recipes/demo-target --head ngram
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.grammar import Grammar
from draftheads.infer.paths import TokenPath
from draftheads.infer.pipeline.loading import Place, load_parts
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.rows import Statistics


def obj(**properties: Any) -> dict[str, Any]:
    fixed = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **fixed}


TEXT: dict[str, Any] = {"type": "string", "maxLength": 40}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10_000}
PERSON = obj(first_name=TEXT, last_name=TEXT, age=NUMBER, occupation=TEXT)
CALL = obj(
    name={"enum": ["get_current_weather", "get_weather_forecast"]},
    arguments=obj(location=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, number_of_days=NUMBER),
)
PEOPLE = obj(people={"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3})
CASES: dict[str, tuple[str, Any, str]] = {
    "person": ("json_schema", PERSON, "Describe Ada Lovelace as JSON."),
    "call": ("json_schema", CALL, "What will the weather be in Paris for three days? Use a tool."),
    "people": ("json_schema", PEOPLE, "List three famous scientists as JSON."),
    "object": ("json_schema", {"type": "object"}, "Describe a cat as a JSON object."),
    "date": ("regex", r"On \d{4}-\d{2}-\d{2}, [a-zA-Z ]{10,60}\.", "When was the moon landing?"),
    "csv": (
        "grammar",
        'root ::= "name,age,city\\n" row{3}\n'
        'row ::= word "," [0-9]{2} "," word "\\n"\nword ::= [a-zA-Z ]{3,12}',
        "Write a table of three people.",
    ),
}


class Timed(Grammar):
    """It notes what its masks and its drafts take."""

    masks: list[float] = []
    cuts: list[float] = []

    def after(self, *arguments: Any) -> Any:
        start = perf_counter()
        logits_V = super().after(*arguments)
        self.masks.append(perf_counter() - start)
        return logits_V

    def drafts(self, *arguments: Any) -> Any:
        start = perf_counter()
        paths = super().drafts(*arguments)
        self.cuts.append(perf_counter() - start)
        return paths


class Unforced(Timed):
    """Masks alone: drafts are verified as they are, and none are added."""

    def drafts(self, answer: list[int], paths: list[TokenPath]) -> list[TokenPath]:
        return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="recipes/demo-target")
    parser.add_argument("--head", default="ngram")
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    place = Place(dtype="float32", threads=asked.threads)
    target, drafts = load_parts(asked.head, asked.target, place)
    engines = {"none": Speculator(target), asked.head: Speculator(target, drafts)}
    ways = [(name, kind) for name in engines for kind in (Unforced, Timed)]
    print("| grammar | drafts | forced | tokens | steps | tau | ms | times plain |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios: dict[Any, list[float]] = {way: [] for way in ways}
    for case, (grammar, text, question) in CASES.items():
        prompt = encode_prompt(target, [{"role": "user", "content": question}])
        constraints = {kind: kind(target, grammar, text) for kind in (Unforced, Timed)}
        seconds: dict[Any, list[float]] = {way: [] for way in ways}
        answers: dict[Any, list[int]] = {}
        statistics: dict[Any, Statistics] = {}
        for repetition in range(asked.repetitions + 1):
            for way in ways:
                name, kind = way
                start = perf_counter()
                steps = list(
                    engines[name].generate(
                        prompt, max_new_tokens=asked.new, constraint=constraints[kind]
                    )
                )
                if repetition:
                    seconds[way].append(perf_counter() - start)
                answers[way] = [token for step in steps for token in step.tokens]
                statistics[way] = Statistics.of(steps)
        same = all(answer == answers[ways[0]] for answer in answers.values())
        plain = median(seconds[ways[0]])
        for way in ways:
            took = median(seconds[way])
            ratios[way].append(plain / took)
            count = statistics[way]
            print(
                f"| {case} | {way[0]} | {'yes' if way[1] is Timed else 'no'} | {len(answers[way])} "
                f"| {count.steps} | {count.tokens_per_step:.2f} | {took * 1000:.0f} "
                f"| {plain / took:.2f} |"
            )
        print(f"{case}: {'equal' if same else 'DIFFERENT'}: {_short(target, answers[ways[0]])}")
    for way, values in ratios.items():
        print(f"{way[0]}, forced {way[1] is Timed}: median {median(values):.2f} times plain")
    for name, values in (("mask of a node", Timed.masks), ("drafts of a step", Timed.cuts)):
        values = sorted(values)
        print(
            f"{name}: median {values[len(values) // 2] * 1e6:.0f} us, 99 % below "
            f"{values[int(len(values) * 0.99)] * 1e6:.0f} us ({len(values)}, V {target.vocab_size})"
        )


def _short(target: Target, answer: list[int]) -> str:
    return repr(target.tokenizer.decode(answer))[:160]


if __name__ == "__main__":
    main()
