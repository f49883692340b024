"""The promise: every drafter is lossless, and proposes exactly what its definition says."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest
import torch
from tiny_chat import byte_tokenizer
from tiny_heads import committed, decode, random_head
from tiny_targets import (
    CONTEXT,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)

from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.merged import Merged, agreed
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.paths import stacked
from draftheads.infer.sources import DrafterSource

NEW = 31  # one token from the prefill and six steps of a chain of 4
LENGTHS = (19, 11, 5)
CHAIN = StaticTree.from_widths((1, 1, 1, 1))
TARGETS = ("llama", "mistral-window", "gemma2-window", "gpt2", "opt", "gpt-neox")
SHORT = NGram(DynamicTree(6, 4, 3), longest=2, shortest=1)

Paths = set[tuple[int, ...]]


def other_model() -> Target:
    """A model with the vocabulary of the tiny targets."""
    return tiny_target("qwen2")


def all_paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The token path of each draft node, without padding."""
    tokens, parents_BN = tree.tokens_BN[row].tolist(), tree.topology.parents_BN
    paths: list[tuple[int, ...]] = [()]
    parents = parents_BN[row % len(parents_BN)].tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        if parent >= 0:
            paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("tree", [CHAIN, StaticTree.from_widths((2, 2, 1, 1))])
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_drafts_for_itself_is_always_right(name, tree):
    """So its cache holds what the rows have committed, and each node sees its ancestors alone."""
    target, prompts = tiny_target(name), some_prompts(*LENGTHS)
    _, statistics = decode(target, DraftModel(target, tree), prompts, max_new_tokens=NEW)
    assert [row.tokens_per_step for row in statistics] == [5.0] * 3


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_each_node_of_a_draft_model_continues_its_own_path(name):
    """Also after a step in which rows have accepted different numbers of tokens."""
    target, texts = tiny_target(name), some_prompts(*LENGTHS)
    drafter = DraftModel(target, StaticTree.from_widths((2, 2, 2))).drafter(target)
    drafter.propose(committed(texts))
    news = [[7, 3, 9], [4], [5, 6]]
    tree = drafter.propose(committed(news))
    for row, (text, new) in enumerate(zip(texts, news, strict=True)):
        level, expected = [()], set()
        for _ in range(3):
            ids = torch.tensor([[*text, *new, *path] for path in level])
            best = target.model(ids).logits[:, -1].topk(2).indices.tolist()
            level = [(*path, token) for path, top in zip(level, best, strict=True) for token in top]
            expected |= set(level)
        assert set(all_paths(tree, row)) == expected


def test_a_draft_model_past_its_context_drafts_nothing():
    model = random_model("llama")
    model.config.max_position_embeddings = 30
    (prompt,) = some_prompts(9)
    steps = list(
        Speculator(tiny_target(), DraftModel(Target(model), CHAIN)).generate(
            prompt, max_new_tokens=60
        )
    )
    written = list(accumulate(len(step.tokens) for step in steps))
    assert [t for step in steps for t in step.tokens] == greedy(tiny_target(), prompt, 60)
    for before, step in zip(written, steps[1:], strict=False):
        drafted = 9 + before + 4 <= 30
        assert len(step.tokens) == (min(5, 60 - before) if drafted else 1)


def restated(text: list[int], source: NGram) -> Paths:
    """What an n-gram drafter proposes after a text, by searching all of it."""
    limits = source.tree
    for length in range(source.longest, source.shortest - 1, -1):
        places = [p for p in range(length, len(text)) if text[p - length : p] == text[-length:]]
        if places:
            break
    copies = []
    for place in places[::-1][: limits.top_k]:
        longer = list(text)
        for step in range(limits.depth):
            longer.append(longer[place + step])  # it may copy what it has just copied
        copies.append(tuple(longer[len(text) :]))
    prefixes = [copy[:n] for copy in copies for n in range(1, limits.depth + 1)]
    shared, first = Counter(prefixes), {path: n for n, path in reversed([*enumerate(prefixes)])}
    best = sorted(shared, key=lambda path: (-shared[path], len(path), first[path]))
    return set(best[: limits.draft_nodes])


@pytest.mark.parametrize("source", [NGram(), SHORT, NGram(DynamicTree(9, 5, 3), 4, 2)])
def test_ngrams_are_those_of_a_search_through_the_whole_text(source):
    draw = random.Random(0)
    texts: list[list[int]] = [[] for _ in range(3)]
    drafter, sizes = source.drafter(tiny_target()), set()
    for step in range(40):
        news = [draw.choices(range(k), k=draw.randint(1, 5) if step else 9) for k in (3, 5, 9)]
        tree = drafter.propose(committed(news))
        for row, (text, new) in enumerate(zip(texts, news, strict=True)):
            text += new
            paths, expected = all_paths(tree, row), restated(text, source)
            assert tree.tokens_BN[row, 0] == text[-1]
            assert set(paths) - {(text[-1],)} == expected - {(text[-1],)}, "but for padding"
            sizes.add(len(expected))
    assert len(sizes) > 1


def test_a_row_without_a_repeat_and_a_finished_row_draft_nothing():
    drafter = NGram().drafter(tiny_target())
    assert drafter.propose(committed([[1, 2, 3], [4, 5, 6]])).tokens_BN.tolist() == [[3], [6]]
    tree = drafter.propose(committed([[1, 2], []]))
    assert tree.tokens_BN[0].tolist() == [2] + [3, 1, 2] * 5
    assert tree.drafted() == [15, 0], "the rest is padding"
    tree = drafter.propose(committed([[], []]))
    assert tree.tokens_BN.tolist() == [[2], [6]]


class Fixed:
    """A source of drafters that propose one given tree, and note the features they see."""

    cache = None

    def __init__(self, proposed: TokenTree, layers: tuple[int, ...] = ()) -> None:
        self.proposed, self.feature_layers = proposed, layers
        nodes = proposed.tokens_BN.shape[1] - 1
        self.tree, self.seen = DynamicTree(nodes, nodes, nodes), []

    def check_tree(self, tree):
        pass

    def drafter(self, target, tree=None):
        return self

    def propose(self, committed):
        self.seen.append(committed.features_BCD)
        return self.proposed


def random_tree(draw: random.Random, rows: int = 2) -> TokenTree:
    """A tree for each row, of few tokens, so that trees overlap; siblings are distinct."""
    trees = []
    for _ in range(rows):
        paths: list[tuple[int, ...]] = [()]
        while len(paths) < 9:
            path = (*draw.choice(paths), draw.randrange(1, 4))
            if path not in paths:
                paths.append(path)
        trees.append(paths[1:])
    return stacked([0] * rows, trees, torch.device("cpu"))


def in_turns(parts: list[list[tuple[int, ...]]], nodes: int) -> Paths:
    """The union that part after part gives its next path to, the shortest first."""
    queues = [sorted(paths, key=len) for paths in parts]  # stable
    union: Paths = set()
    for turn in range(max(map(len, queues))):
        for queue in queues:
            if turn < len(queue) and len(union) < nodes:
                union.add(queue[turn])
    return union


@pytest.mark.parametrize("nodes", [None, 1, 7, 12, 24])
@pytest.mark.parametrize("seed", range(5))
def test_merged_trees_are_the_union_of_their_paths(seed, nodes):
    draw = random.Random(seed)
    parts = [Fixed(random_tree(draw)) for _ in range(3)]
    merged = Merged(parts)
    limits = DynamicTree(nodes, 8, 8) if nodes else None
    tree = merged.drafter(tiny_target(), limits).propose(committed([[5, 0], [0]]))
    for row in range(2):
        paths = all_paths(tree, row)
        expected = in_turns([all_paths(part.proposed, row) for part in parts], nodes or 8)
        assert set(paths) == expected
        union = {path for part in parts for path in all_paths(part.proposed, row)}
        assert nodes != 24 or expected == union
        assert len(paths) == len(expected), "padding is no path"


def test_parts_that_were_right_have_more_of_the_nodes():
    """Of six nodes each of two chains has three, until the second one is right."""

    def chain(first: int) -> TokenTree:
        tokens = range(first, first + 6)
        paths = [tuple(tokens[:depth]) for depth in range(1, 7)]
        return stacked([5], [paths], torch.device("cpu"))

    parts = [Fixed(chain(10)), Fixed(chain(20))]
    drafter = Merged(parts).drafter(tiny_target(), DynamicTree(6, 6, 6))
    for written, own in (
        ([5], 3),
        ([20, 21, 22, 5], 4),
        ([20, 21, 22, 5], 5),
        ([10, 11, 12, 13, 5], 2),
    ):
        tokens_N = drafter.propose(committed([written])).tokens_BN[0]
        assert int((tokens_N >= 20).sum()) == own
    assert agreed([], [20]) == 0


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "block"])
def test_heads_do_not_draft_while_another_part_is_right(kind):
    """They read on meanwhile: their next draft is what it would have been."""
    target = tiny_target()
    head = random_head(kind, target)
    repeated = Fixed(stacked([5], [[(6,), (6, 7)]], torch.device("cpu")))
    drafter = Merged([head, repeated]).drafter(target)
    alone = head.drafter(target, head.tree)
    draw = torch.Generator().manual_seed(0)
    asked = []
    for written in ([1, 2, 5], [6, 7, 5], [6, 5], [9, 5], [8, 5], [9, 9, 5]):
        width = len(head.feature_layers) * target.hidden_size
        news = committed([written], torch.randn(1, len(written), width, generator=draw))
        paths = all_paths(drafter.propose(news), 0)
        own = all_paths(alone.propose(news), 0)
        asked.append(len(paths) > 2)
        assert set(paths[: len(own)]) <= {*own, (6,), (6, 7)}
        assert not asked[-1] or set(own[:2]) <= set(paths)
    assert asked[:3] == [False] * 3
    assert asked[-1]


def test_draft_models_do_not_draft_while_an_earlier_part_is_right():
    target = tiny_target()
    repeated = Fixed(stacked([5], [[(6,), (6, 7)]], torch.device("cpu")))
    drafter = Merged([repeated, DraftModel(other_model(), CHAIN)]).drafter(target)
    asked = []
    texts = [[1, 2, 5], [6, 7, 5], [6, 5], [9, 5], [8, 5], [9, 9, 5]]
    for written in texts:
        paths = all_paths(drafter.propose(committed([written])), 0)
        asked.append(set(paths) != {(6,), (6, 7)})
    assert asked[:3] == [False] * 3
    assert asked[-1]
    assert drafter.parts[1].slots.table.longest == sum(map(len, texts)), "it has read all of them"


def test_what_a_draft_model_skipped_is_read_before_its_next_draft():
    """Also of rows that have ended, and of a text that was taken back meanwhile."""
    target, source = tiny_target(), DraftModel(other_model(), CHAIN)
    drafter, alone = (source.drafter(target) for _ in range(2))
    for skipped in ([[1, 2, 3], [4], [5, 6]], [[7, 8], [], [9]], [[1], [], [2, 3, 4]]):
        drafter.skip(committed(skipped))
        alone.propose(committed(skipped))
    both = [each.propose(committed([[3], [], [5, 5]])) for each in (drafter, alone)]
    for row in (0, 2):
        assert all_paths(both[0], row) == all_paths(both[1], row)
    one, other = (source.drafter(target) for _ in range(2))
    one.propose(committed([[1, 2, 3]]))
    for length in (5, 4, 2):
        one.skip(committed([[4, 5, 6]]))
        one.rewind(length)
    text = [1, 2, 7]
    other.propose(committed([text[:-1]]))
    expected = other.propose(committed([text[-1:]]))
    assert all_paths(one.propose(committed([[7]])), 0) == all_paths(expected, 0)


def test_each_part_of_a_merged_drafter_sees_its_own_features():
    draw, width = random.Random(0), 4
    parts = [Fixed(random_tree(draw, 1), layers) for layers in ((), (0, 2), (1,))]
    parts[0].proposed = stacked([0], [[]], torch.device("cpu"))
    drafter = Merged(parts).drafter(tiny_target())
    features_BCD = torch.randn(1, 2, 3 * width)
    drafter.propose(committed([[5, 0]], features_BCD))
    assert drafter.feature_layers == (0, 2, 1)
    expected = features_BCD.split([0, 2 * width, width], dim=2)
    for part, own in zip(parts, expected, strict=True):
        assert torch.equal(part.seen[0], own)


def with_tokenizer() -> Target:
    model = random_model("llama")
    model.resize_token_embeddings(259, mean_resizing=False)
    return Target(model, byte_tokenizer(), name="bytes")


@pytest.mark.mend("a method of DrafterSource that is not there returns None in silence")
@pytest.mark.parametrize("left_out", ["tree", "check_tree", "drafter"])
def test_a_source_without_one_of_its_parts_is_not_made(left_out):
    """An inherited method that only declares would return None in silence."""
    parts = {"tree": CHAIN, "check_tree": print, "drafter": print}
    del parts[left_out]
    with pytest.raises(TypeError, match=f"abstract method '?{left_out}"):
        type("Source", (DrafterSource,), parts)()


@pytest.mark.mend("IndexError for a draft model with fewer padded rows than its target")
def test_a_draft_model_may_have_fewer_rows_of_padding():
    """Ids past its own, which a target writes if it was padded further, are unknown to it."""
    model = with_tokenizer().model
    model.resize_token_embeddings(272, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[265:] = 2 * model.get_output_embeddings().weight[:7]
    target, prompts = Target(model, byte_tokenizer(), name="padded"), [[3, 270, 4], [5, 6, 7, 8]]
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    assert max(map(max, expected)) >= 259
    assert decode(target, DraftModel(with_tokenizer()), prompts, max_new_tokens=NEW)[0] == expected


def test_texts_that_fill_the_context_are_drafted_for_to_the_end():
    target, prompts = tiny_target(), some_prompts(CONTEXT - 40, CONTEXT - 50)
    for drafts in (SHORT, DraftModel(other_model())):
        tokens, _ = decode(target, drafts, prompts)
        assert tokens == [greedy(target, prompt, CONTEXT - len(prompt)) for prompt in prompts]
