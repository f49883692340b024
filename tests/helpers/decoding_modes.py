"""The ways in which rows are decoded and steps are run: one adapter each, so that a table of cases
need not know what is behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import torch
from asked import Asked
from plain_decoding import row_seed, until_the_end
from recorder import recorded

from draftheads.infer.accept import Acceptance
from draftheads.infer.constraint import Constraint
from draftheads.infer.continuous import Request, answer_all
from draftheads.infer.draws import Draws
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import maker
from draftheads.infer.fixed import steps as fixed_steps
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.generate import speculative
from draftheads.infer.reading import Session
from draftheads.infer.serve.scheduler import Scheduler

SLOTS = 3
"""Rows that are decoded at a time where rows come and go."""


@dataclass(frozen=True)
class Question:
    """A prompt, the most new tokens, and the number from which the row's seed comes."""

    prompt: Sequence[int]
    new: int
    number: int


@dataclass(frozen=True)
class Manner:
    """How answers are chosen, and where they end. make: a new rule."""

    make: Callable[[], Acceptance]
    constraint: Constraint | None = None
    stop: Collection[str] = ()

    def seeded(self, question: Question) -> Acceptance:
        """The rule of one row."""
        rule = self.make()
        rule.seed(question.number)
        return rule

    def options(self) -> dict[str, Any]:
        """What `generate` and `generate_batch` have in common."""
        return {"constraint": self.constraint, "stop": self.stop}


Answers = list[list[int]]


def written(engine: Speculator, prompts: Sequence[Sequence[int]], **options: Any) -> Answers:
    """The new tokens of each row of a batch. options: of `generate_batch`."""
    answers: Answers = [[] for _ in prompts]
    for steps in engine.generate_batch(prompts, **options):
        for answer, step in zip(answers, steps, strict=True):
            answer += step.tokens if step else []
    return answers


Mode = Callable[[Speculator, Sequence[Question], Manner], Answers]


def generate(
    engine: Speculator,
    questions: Sequence[Question],
    manner: Manner,
    session: Callable[[Question], Session | None] = lambda question: None,
) -> Answers:
    """One row after the other."""
    answers = []
    for question in questions:
        steps = engine.generate(
            question.prompt,
            max_new_tokens=question.new,
            sampling=manner.seeded(question),
            session=session(question),
            **manner.options(),
        )
        answers.append([token for step in steps for token in step.tokens])
    return answers


def generate_batch(engine: Speculator, questions: Sequence[Question], manner: Manner) -> Answers:
    """All rows together."""
    return written(
        engine,
        [question.prompt for question in questions],
        max_new_tokens=[question.new for question in questions],
        sampling=manner.make(),
        seeds=[row_seed(question.number) for question in questions],
        **manner.options(),
    )


def kept_session(engine: Speculator, questions: Sequence[Question], manner: Manner) -> Answers:
    """One row after the other in one session, which before each has begun another text, of which
    all but the end is the same.
    """
    session = Session()

    def used(question: Question) -> Session:
        other = [*question.prompt[:-2], 5]
        begun = engine.generate(other, max_new_tokens=question.new, session=session)
        list(islice(begun, 3))
        begun.close()
        return session

    return generate(engine, questions, manner, used)


def continuous(engine: Speculator, questions: Sequence[Question], manner: Manner) -> Answers:
    """Rows that take the places of others, as distilling does."""
    asked = [Request(each.prompt, each.new, row_seed(each.number)) for each in questions]
    waiting = iter(asked)
    found = {}
    outcomes = answer_all(engine, manner.make(), SLOTS, lambda: next(waiting, None))
    for request, answer, error in outcomes:
        if error is not None:
            raise error
        found[request] = answer
    return [found[request] for request in asked]


def served(engine: Speculator, questions: Sequence[Question], manner: Manner) -> Answers:
    """Requests of a server, each with its own rule."""
    scheduler = Scheduler(engine, slots=SLOTS)
    try:
        asked = [
            Asked(
                list(each.prompt),
                manner.seeded(each),
                each.new,
                constraint=manner.constraint,
                stop=tuple(manner.stop),
            )
            for each in questions
        ]
        scheduler.submit(*(each.job for each in asked))
        return [each.answer() for each in asked]
    finally:
        scheduler.close()
        scheduler.join(20)


def inside_transformers(
    engine: Speculator, questions: Sequence[Question], manner: Manner
) -> Answers:
    """Padded rows of transformers' own `generate`, each as far as its end. A rule without a seed
    takes one from torch for each row.
    """
    target = engine.target
    rule = manner.make()
    options: dict[str, Any] = dict(rule.as_generate() or {})
    decoding = speculative(
        engine.drafts,
        tree=engine.tree,
        tokenizer=target.tokenizer,
        compile=engine.compile,
        acceptance=None if rule.lossless else rule,
    )
    if not rule.lossless:
        options = {}
    if manner.constraint is not None:
        allowed = manner.constraint.allowed
        options["prefix_allowed_tokens_fn"] = lambda _, text_T: allowed(int(text_T[-1]))
    if manner.stop:
        options |= {"stop_strings": list(manner.stop), "tokenizer": target.tokenizer}
    longest = max(len(each.prompt) for each in questions)
    padding = [longest - len(each.prompt) for each in questions]
    ids_BT = [[0] * more + [*each.prompt] for more, each in zip(padding, questions, strict=True)]
    mask_BT = [[0] * more + [1] * (longest - more) for more in padding]
    torch.manual_seed(questions[0].number)
    out_BT = target.model.generate(
        torch.tensor(ids_BT),
        attention_mask=torch.tensor(mask_BT),
        max_new_tokens=max(each.new for each in questions),
        custom_generate=decoding,
        **options,
    )
    return [
        until_the_end(row, each.new, target.eos_ids, target.tokenizer, manner.stop)
        for each, row in zip(questions, out_BT[:, longest:].tolist(), strict=True)
    ]


MODES: dict[str, Mode] = {
    "generate": generate,
    "batch": generate_batch,
    "session": kept_session,
    "continuous": continuous,
    "served": served,
    "transformers": inside_transformers,
}


def row_seeds(mode: str, questions: Sequence[Question]) -> list[str]:
    """The seed from which each row draws in a mode."""
    if mode != "transformers":
        return [row_seed(each.number) for each in questions]
    with torch.random.fork_rng():
        torch.manual_seed(questions[0].number)
        return [str(Draws().new_seed()) for _ in questions]


@contextmanager
def eager() -> Iterator[bool]:
    """As they are on a CPU. Yields whether engines are to compile."""
    yield False


@contextmanager
def replayed() -> Iterator[bool]:
    """Recorded and replayed, as on a GPU."""
    with (
        mock.patch.dict(RECORDERS, {"cpu": recorded}),
        mock.patch.object(fixed_steps, "BUCKET", 16),
    ):
        yield False


@contextmanager
def fixed() -> Iterator[bool]:
    """Of fixed shapes, as for a compiler, which runs them as they are."""
    with mock.patch.object(maker, "compiled", lambda: fixed_steps.advance):
        yield True


@contextmanager
def traced() -> Iterator[bool]:
    """Traced by the compiler; no code is generated."""
    torch._dynamo.reset()
    with mock.patch.object(fixed_steps, "BACKEND", "eager"):
        yield True


STEPS: dict[str, Callable[[], AbstractContextManager[bool]]] = {
    "eager": eager,
    "replayed": replayed,
    "fixed": fixed,
    "traced": traced,
}
