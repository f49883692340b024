"""Questions that a chat model asks itself, for those who have no prompts.

A chat model has learned whole conversations. Where its template opens the user's turn, it goes on
with a question like those that it has seen (Magpie, arXiv 2406.08464). They are spread over what
the model was made for; for answers to people's prompts, people's prompts teach more.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2.exceptions import TemplateError

from draftheads.heads.terminal import progress_bar
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer

LONGEST = 160
"""Tokens of a question; longer ones are left out."""
TOP_P = 0.95
"""Without the least likely tokens, of which a question would not recover."""
MARK = "DRAFTHEADS-QUESTION"


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
    """Returns so many different questions, sampled at temperature 1; fewer if the target repeats
    itself or rarely ends. rows: questions that are written together. Raises ValueError for none.
    """
    target = engine.target
    renderer = PromptRenderer(target, target.template_args)
    start = opening(renderer, target.title)
    found = dict[str, None]()
    asked = iter(range(2 * count))
    bar = progress_bar(total=count, desc="questions", unit="question")

    def take() -> Request | None:
        number = next(asked, None) if len(found) < count else None
        return None if number is None else Request(start, LONGEST, f"{seed}/{number}")

    with bar:
        for _, ids, error in answer_all(engine, checked(1.0, TOP_P, 0), rows, take):
            text = renderer.answer_text(ids).strip()
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
