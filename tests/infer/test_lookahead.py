"""The promise: what the target answers to guesses beside the text is drafted where the text comes
to it, alike in steps that are run, compiled and recorded, and changes no law.
"""

from __future__ import annotations

import random

import pytest
from tiny_heads import committed
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.tree import DynamicTree
from draftheads.infer.drafters.lookahead import Lookahead
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.paths import row_paths

NEW = 40
CYCLE = 97
LIMITS = DynamicTree(16, 6, 4)


def after(token: int) -> int:
    """The answer of a target that reads one token."""
    return (token * 7 + 3) % CYCLE


@pytest.mark.parametrize("length", [2, 3, 4])
def test_guesses_become_ngrams_of_the_target(length):
    """The answers at the ends of the branches complete what the target says after their starts."""
    drafter = Lookahead(LIMITS, length=length).drafter(tiny_target())
    draw = random.Random(0)
    for step in range(12):
        news = [draw.choices(range(CYCLE), k=1 if step % 5 else 3) for _ in range(2)]
        tree = drafter.propose(committed(news))
        assert tree.tokens_BN.shape[1] <= LIMITS.nodes
        assert tree.topology.height <= LIMITS.depth
        for text in drafter.texts:
            if step < length:
                text.grams.clear()  # of random guesses
        drafter.observe([[after(token) for token in row] for row in tree.tokens_BN.tolist()])
    for text in drafter.texts:
        grams = [(start, *rest) for start, known in text.grams.items() for rest in known]
        assert len(grams) >= 12 and {len(gram) for gram in grams} == {length}
        # only those of columns that joined the window when several tokens were committed are not
        right = [gram for gram in grams if gram[1:] == tuple(map(after, gram[:-1]))]
        assert len(right) > len(grams) / 2


def test_a_guessed_ngram_is_drafted_after_its_first_token():
    drafter = Lookahead(LIMITS, length=4).drafter(tiny_target())
    drafter.propose(committed([[5]]))
    [text] = drafter.texts
    text.grams[7].append((8, 9, 4))
    tree = drafter.propose(committed([[7]]))
    assert {(8,), (8, 9), (8, 9, 4)} <= set(row_paths(tree)[0])
    assert all(path in row_paths(tree)[0] for path in text.window())


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 9])
def test_few_nodes_are_never_exceeded(nodes):
    target, [prompt] = tiny_target(), some_prompts(9)
    for length in (2, 4):
        source = Lookahead(DynamicTree(nodes, 3, 4), length=length, shortest=1)
        steps = list(Speculator(target, source).generate(prompt, max_new_tokens=NEW))
        assert [token for step in steps for token in step.tokens] == greedy(target, prompt, NEW)
        assert max(step.drafted for step in steps) <= nodes


def test_it_has_the_ngrams_of_the_text_too():
    text = [[1, 2, 3, 4, 5, 6, 1, 2, 3]]
    plain = NGram(DynamicTree(8, 4, 4)).drafter(tiny_target()).propose(committed(text))
    drafter = Lookahead(DynamicTree(16, 4, 4)).drafter(tiny_target())
    assert set(row_paths(plain)[0]) <= set(row_paths(drafter.propose(committed(text)))[0])


def test_a_text_taken_back_guesses_anew():
    target, [prompt] = tiny_target(), some_prompts(9)
    drafter = Lookahead(LIMITS).drafter(target)
    first = drafter.propose(committed([prompt]))
    drafter.observe([[1] * first.tokens_BN.shape[1]])
    drafter.propose(committed([[1]]))
    drafter.rewind(len(prompt) - 1)
    drafter.propose(committed([prompt[-1:]]))
    assert drafter.texts[0].tokens == prompt
    assert not drafter.texts[0].grams[prompt[-1]]
