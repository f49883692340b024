"""The promise: n-grams remember earlier texts, within a bound, and change no answer."""

from __future__ import annotations

import random

import pytest
from tiny_heads import decode, random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.tree import DynamicTree
from draftheads.infer.drafters import ngram
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.ngram import KEY, REACH, NGram, NGramIndex

NEW = 33
LIMITS = DynamicTree(8, 4, 3)


def after(memory: NGramIndex, *end: int, above: int = 0) -> list[tuple[int, ...]]:
    return memory.continuations(end, above, LIMITS)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("others", [[], ["medusa"], ["eagle3"]])
def test_answers_are_the_targets_and_come_from_the_memory(name, others):
    """Of the right texts in some rows, and of misleading ones in another."""
    target, prompts = tiny_target(name), some_prompts(9, 14, 5)
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    memory = NGramIndex()
    for prompt, answer in zip(prompts[:2], expected, strict=False):
        memory.append([*prompt, *answer])
    memory.append([token for each in expected[2] for token in (each, 7)] + prompts[2] + [8, 9])
    source = NGram(shortest=2, memory=memory)
    if others:
        source = Merged([*(random_head(other, target) for other in others), source])
    tokens, statistics = decode(target, source, prompts, max_new_tokens=NEW)
    assert tokens == expected
    assert min(row.tokens_per_step for row in statistics[:2]) > 8 > statistics[2].tokens_per_step


def restated(texts: list[list[int]], end: list[int], above: int) -> list[tuple[int, ...]]:
    """What a memory proposes, by searching all texts."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for text in reversed(texts):
        for place in range(len(text) - 1, KEY - 1, -1):
            before, length = text[:place], 0
            while length < min(place, len(end), REACH) and before[-length - 1] == end[-length - 1]:
                length += 1
            found.setdefault(length, []).append(tuple(text[place : place + LIMITS.depth]))
    best = max(found, default=0)
    return found[best][: LIMITS.top_k] if best > above and best >= KEY else []


@pytest.fixture(params=[4096, 8], ids=["lists", "sorted"])
def unsorted(request, monkeypatch) -> None:
    monkeypatch.setattr(ngram, "UNSORTED", request.param)


@pytest.mark.usefixtures("unsorted")
def test_continuations_are_those_of_a_search_through_all_texts(monkeypatch):
    monkeypatch.setattr(ngram, "TRIES", 10**6)
    draw = random.Random(0)
    texts = [draw.choices(range(5), k=draw.randint(1, 60)) for _ in range(30)]
    texts += [text + tail for text in texts[:9] for tail in ([], [1], [1, 2, 3])]
    memory, stored = NGramIndex(50_000), list[list[int]]()
    seen = 0
    for text in texts:
        for above in (0, 2, 5):
            end = draw.choices(range(5), k=20)
            proposed = memory.continuations(end, above, LIMITS)
            assert proposed == restated(stored, end, above)
            seen += len(proposed)
        memory.append(text)
        if stored and text[: len(stored[-1])] == stored[-1]:
            stored.pop()
        stored.append(text)
    assert seen > 100


@pytest.mark.usefixtures("unsorted")
def test_a_text_that_agrees_as_far_is_copied_from_itself():
    """And a memory where it agrees with more."""
    memory = NGramIndex()
    memory.append([1, 2, 3, 4, 50, 51, 52])
    drafter = NGram(LIMITS, memory=memory).drafter(tiny_target())

    def drafts(text: list[int]) -> list[int]:
        row = ngram.NGramText(range(2, 4), LIMITS.top_k)
        row.append(text)
        return [copy[0] for copy in drafter.copies(row)]

    assert drafts([9, 3, 4, 60, 8, 3, 4]) == [60]
    assert drafts([9, 3, 4, 60, 2, 3, 4]) == [50]
    assert drafts([2, 3, 4, 60, 2, 3, 4]) == [60]
    assert drafts([2, 3, 4, 60, 1, 2, 3, 4]) == [50]
    assert drafts([7, 3, 5, 4]) == []


@pytest.mark.usefixtures("unsorted")
def test_copies_end_with_their_text():
    memory = NGramIndex()
    memory.append([1, 2, 3])
    memory.append([4, 5, 6, 7, 8, 9, 10])
    assert after(memory, 1, 2) == [(3,)]
    assert after(memory, 2, 3) == []
    assert after(memory, 3, 4) == []
    assert after(memory, 4, 5) == [(6, 7, 8, 9)]
    assert after(memory, 4, 5, above=2) == []
    assert after(NGramIndex(), 4, 5) == after(memory, 5) == []


@pytest.mark.usefixtures("unsorted")
def test_the_older_half_is_dropped():
    memory, texts = NGramIndex(100), [[*range(n, n + 29)] for n in range(0, 3000, 30)]
    for count, text in enumerate(texts):
        memory.append(text)
        found = [bool(after(memory, *each[-4:-1])) for each in texts[: count + 1]]
        assert found == sorted(found), "the newest texts are held"
        assert 2 <= sum(found) <= 3 or count == 0
        assert len(memory._tokens) <= 100 + 1


@pytest.mark.usefixtures("unsorted")
def test_of_a_text_that_is_too_long_the_end_is_held():
    memory = NGramIndex(100)
    memory.append(range(200))
    memory.append(range(300, 500))
    assert after(memory, 495, 496) == [(497, 498, 499)]
    assert after(memory, 452, 453) and not after(memory, 440, 441) and not after(memory, 120, 121)


@pytest.mark.usefixtures("unsorted")
def test_a_conversation_is_stored_once():
    """Whole at each turn, it would take the place of the other text."""
    memory, talk = NGramIndex(420), list(range(100))
    memory.append(range(500, 540))
    for turn in range(10, 101, 10):
        memory.append(talk[:turn])
        memory.append(talk[:turn])
    assert after(memory, 500, 501) and after(memory, 3, 4) == [(5, 6, 7, 8)]
    for place in range(8, 88, 10):
        assert after(memory, *talk[place - 4 : place]) == [tuple(talk[place : place + 4])]
