"""Questions that a chat model asks itself, for those who have no prompts.

A chat model has learned whole conversations. Where its template opens the user's turn, it goes on
with a question like those that it has seen (Magpie, arXiv 2406.08464). These make better training
data than none: they are spread over what the model was made for. Left to itself, a model begins
many of them alike ("Can you", "I'm planning"), so half of them are begun for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2.exceptions import TemplateError

from draftheads.heads.terminal import progress_bar
from draftheads.infer.continuous import ContinuousBatch, Request, seeded
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer

LONGEST = 160
"""Tokens of a question; longer ones are left out."""
TOP_P = 0.95
"""Without the least likely tokens, of which a question would not recover."""
MARK = "DRAFTHEADS-QUESTION"
BEGINNINGS = (
    *("Write a", "Write a Python function", "Create a", "Implement", "Fix", "Design", "Convert"),
    *("What is", "What are", "Which", "Who", "Why", "How would", "How do", "How many", "If"),
    *("Explain", "Describe", "Compare", "List", "Give", "Suggest", "Provide", "Name", "Summarize"),
    *("Translate", "Rewrite", "Edit", "Classify", "Imagine", "You are", "Compose", "Calculate"),
)
"""First words of what people ask chat models."""


def opening(renderer: PromptRenderer, name: str) -> list[int]:
    """Token ids of the chat template up to where the user's text begins. Raises ValueError for a
    target without a chat template, or with one that has no such place.
    """
    try:
        text = renderer.text([{"role": "user", "content": MARK}], ask=False)
    except TemplateError as error:
        raise ValueError(
            f"{name}: expected a chat template that renders a question, got one that fails "
            f"({error}); mend it, or give prompts"
        ) from error
    before, mark, _ = text.partition(MARK)
    if not (getattr(renderer.tokenizer, "chat_template", None) and before and mark):
        raise ValueError(
            f"{name}: expected a chat template that opens the user's turn, got none; a model that "
            "was not made for chats asks no questions, give it prompts"
        )
    return renderer.encode(before)


def questions(engine: Speculator, count: int, rows: int, seed: int = 0) -> Iterator[str]:
    """As many different questions, sampled at temperature 1; fewer if the target repeats itself or
    rarely ends. rows: questions that are written together. Raises ValueError for none.
    """
    target = engine.target
    renderer = PromptRenderer(target, target.template_args)
    start = opening(renderer, target.title)
    found = dict[str, None]()
    asked = iter(range(2 * count))
    bar = progress_bar(total=count, desc="questions", unit="question")

    def take() -> Request | None:
        number = next(asked, None) if len(found) < count else None
        if number is None:
            return None
        turn, is_begun = divmod(number, 2)
        words = BEGINNINGS[turn % len(BEGINNINGS)] if is_begun else ""
        return Request([*start, *renderer.encode(words)], LONGEST, f"{seed}/{number}")

    batch = ContinuousBatch(engine, seeded(1.0, TOP_P, 0, LONGEST), rows)
    with bar:
        for request, ids, error in batch.run(take):
            text = renderer.answer_text([*request.prompt[len(start) :], *ids]).strip()
            has_ended = error is None and ids[-1] in renderer.eos_ids
            if has_ended and text and text not in found and len(found) < count:
                found[text] = None
                bar.update()
                yield text
    if not found:
        raise ValueError(
            f"{target.title}: expected questions of at most {LONGEST} tokens, got none of "
            f"{2 * count} that ended; give it prompts"
        )
