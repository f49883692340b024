"""The decoding loop: rows that are decoded together, with their caches.

    reading = engine.read(rows, rule)      # prompts -> keys, values and the first tokens
    reading.finish()
    while not all(row.finish for row in rows):
        steps = reading.slots.step()       # propose, verify, accept, keep

Between steps, rows `join` from slots in which their prompts were read, and `leave`.

Legend: B batch, N tree nodes, C committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from draftheads.heads.base import TreeDrafter
from draftheads.heads.cache import SlotCache
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.accept import Acceptance, Greedy, commit
from draftheads.infer.paths import node_paths, row_paths, stacked
from draftheads.infer.rows import Row, Step, apply_constraints
from draftheads.infer.rules import joined_rule
from draftheads.infer.sources import NoDraft

FEW = 1 / 4
"""Rows that have finished stay in the caches while they are at most this share of the others: to
remove them copies the caches.
"""


class Runner:
    """Takes a step: here as it is written. `infer.fixed` compiles or records it."""

    @property
    def was_recorded(self) -> bool:
        """True if steps were recorded in the memory of the caches, which other texts should take
        then.
        """
        return False

    def propose(self, slots: Slots) -> TokenTree | None:
        """The next tree; None if `advance` drafts it."""
        return slots.propose()

    def advance(self, slots: Slots, tree: TokenTree | None) -> list[list[int]]:
        """Verify the tree, commit what the rule accepts; returns the tokens of each row, padded."""
        return slots.verify(tree or slots.propose())

    def start_next(self, slots: Slots) -> None:
        """Called at the end of each step, before its tokens are returned."""

    def end(self, slots: Slots) -> None:
        """Called before rows or caches change."""

    def is_timed(self) -> bool:
        """True if the newest step took as long as the next one will."""
        return True

    def may_shrink(self, running: int, finished: int) -> bool:
        """True if the caches should be copied, for steps without the finished rows."""
        return finished > FEW * running


class Slots:
    """Rows that are decoded together, of any lengths, and their caches: the target's and the
    drafter's.

    rows: finished ones stay until they are removed. length: tokens of the only row that both caches
    have, and may be cut back to. drafters: makes a drafter for a tree. key: what the caches are
    for.
    """

    def __init__(
        self,
        target: Target,
        cache: SlotCache,
        tree: Tree,
        drafters: Callable[[Tree], Drafter],
        runner: Runner,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self.cache = cache
        self.tree = tree  # that is drafted
        self.runner = runner
        self.clock = clock
        self.key: Hashable = None
        self.rows: list[Row] = []
        self.rule: Acceptance = Greedy()  # of all rows
        self.committed: Committed  # once prompts are read
        self.length = 0
        self.is_open = False  # whether rows come and go
        self.drafter = drafters(tree)
        self._drafters = drafters
        self._whole = tree, self.drafter  # whose caches those of all other trees write to
        self._smaller: dict[Tree, Drafter] = {}

    def step(self) -> dict[Row, Step]:
        """One forward pass of the target. Returns the steps of the rows that were running."""
        length = len(self.rows[0].text)
        start = self.clock()
        tree = self.runner.propose(self)
        proposed = self.clock()
        tokens = self.runner.advance(self, tree)
        seconds = proposed - start, self.clock() - proposed
        self.length = length
        counts = self.committed.counts
        drafted = tree.drafted() if tree else [self.tree.nodes - 1] * len(counts)
        steps = {
            row: row.step(ids[:count], count - 1, nodes, seconds)
            for row, ids, count, nodes in zip(self.rows, tokens, counts, drafted, strict=True)
            if not row.finish
        }
        self.replace_failed()
        self.runner.start_next(self)
        return steps

    def propose(self) -> TokenTree:
        """A tree, of what the constraints of the rows let be drafted."""
        tree = self.drafter.propose(self.committed)
        if not self.is_constrained:
            return tree
        drafts = [
            row.constraint.drafts(row.answer, paths) if row.constraint else paths
            for row, paths in zip(self.rows, row_paths(tree), strict=True)
        ]
        roots_B = tree.tokens_BN[:, 0]
        return stacked(roots_B.tolist(), drafts, roots_B.device)

    def verify(self, tree: TokenTree) -> list[list[int]]:
        """Verify a tree, and keep what the rule accepts; returns the tokens of each row, padded."""
        target = self.target
        texts = {place: row.text for place, row in enumerate(self.rows) if not row.finish}
        target.longrope.recompute(target, texts, self.cache)
        out = target.verify(tree, self.cache, self.drafter.feature_layers)
        logits_BNV = out.logits_BNV
        self.rule.prepare(self.rows)
        if self.is_constrained:
            logits_BNV = apply_constraints(self.rows, logits_BNV, node_paths(tree))
        accepted = self.rule(logits_BNV, tree)
        lengths, in_place = accepted.read()
        # finished rows may stay in the caches, and add nothing; a text ends its step where LongRoPE
        # computes it again
        counts = [
            0 if row.finish else target.longrope.step_end(len(row.text), count)
            for row, count in zip(self.rows, lengths, strict=True)
        ]
        path_BC = accepted.path_BN[:, : max(lengths)]
        self.cache.keep(path_BC, counts, in_place=in_place)
        count_B = torch.tensor(counts, device=path_BC.device)
        tokens_BC, features_BCD = commit(tree, out, accepted, path_BC)
        self.committed = Committed(tokens_BC, features_BCD, count_B, counts)
        tokens: list[list[int]] = tokens_BC.tolist()
        return tokens

    def start(self, rows: Sequence[Row], rule: Acceptance) -> None:
        """Begin with rows whose prompts will be read."""
        for row in rows:
            row.rule = rule
        self.rows = list(rows)
        self.rule = rule

    def use(self, tree: Tree) -> None:
        """Draft this tree from now on: the first one, or a smaller one. For heads alone."""
        if tree == self.tree:
            return
        self.runner.end(self)
        self.tree = tree
        first_tree, first = self._whole
        if tree == first_tree:
            self.drafter = first
            return
        # one drafter for each tree, and one for none; all write to the same caches, so that any may
        # follow any other
        if tree not in self._smaller:
            drafter = NoDraft(first) if tree.nodes == 1 else self._drafters(tree)
            if isinstance(drafter, TreeDrafter):
                drafter.cache = first.cache
            self._smaller[tree] = drafter
        self.drafter = self._smaller[tree]

    def join(self, other: Slots) -> None:
        """Add the rows of other slots, which are empty then: in the places of finished ones, as far
        as there are such.
        """
        free = [place for place, row in enumerate(self.rows) if row.finish]
        more = range(len(self.rows), len(self.rows) + len(other.rows))
        places = [*free, *more][: len(other.rows)]
        other._settle()
        if self.rows:
            self._settle()
        else:
            self.committed = other.committed.select([])
        self.cache.join(other.cache, places)
        drafts = self.drafter.cache
        new = other.drafter.cache
        if drafts is not None and new is not None:
            drafts.join(new, places)
        self.committed = self.committed.join(other.committed, places)
        self.rows += other.rows[: len(self.committed.counts) - len(self.rows)]
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row
        self._join_rules()

    def leave(self, row: Row, kept: Slots | None) -> None:
        """End a row, whose place is empty then. kept: the slots in which its prompt was read take
        its text.
        """
        place = self.rows.index(row)
        row.finish = row.finish or "left"
        row.rule = Greedy()  # which needs no numbers of its own
        row.constraint = None  # nor can it be asked for more
        self.runner.end(self)
        self._join_rules()
        if kept is not None:
            kept.take(self, row, len(row.text))
        for each in self.caches:
            each.table.empty(place)

    def take(self, other: Slots, row: Row, most: int) -> None:
        """Copy the first `most` tokens of a row of other slots, as far as both caches have them."""
        drafts = self.drafter.cache
        if drafts is not None and not drafts.memories:
            drafts.start(1, most)
        place = other.rows.index(row)
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.take(theirs, place, most)
        self.rows = [row]
        self.length = min(self.known(), most)

    def drop_finished(self) -> None:
        """Remove finished rows from the caches, but for the last, if there are enough of them."""
        running = [place for place, row in enumerate(self.rows) if not row.finish]
        finished = len(self.rows) - len(running)
        if not (running and finished and self.runner.may_shrink(len(running), finished)):
            return
        self.runner.end(self)
        self.committed = self.committed.select(running)
        self.rows = [self.rows[place] for place in running]
        self._join_rules()
        self.cache.select(running)
        if self.drafter.cache is not None:
            self.drafter.cache.select(running)

    def rewind(self, length: int) -> int:
        """Cut the text of the only row back to `length` tokens, at least 1, or to fewer if the
        target is a hybrid. Returns the tokens that are left. Generations that used the slots end.
        """
        self.runner.end(self)
        # one less: the state at the last kept token predicts the next one
        self.length = self.cache.rewind(length - 1) + 1
        self.tree, self.drafter = self._whole
        self.drafter.rewind(self.length)
        return self.length

    def clear(self, *, drafter: bool) -> None:
        """Forget all texts, in the same memory. drafter: replace it, too."""
        self.runner.end(self)
        self.length = 0
        self.tree, self.drafter = self._whole
        if drafter:
            self.drafter = self._drafters(self.tree)
            self._whole = self.tree, self.drafter
        for each in self.caches:
            each.table.rewind([0] * len(each.table.lengths))

    @property
    def caches(self) -> list[SlotCache]:
        """Keys and values: the target's, and those of the drafter if it has layers."""
        drafts = self.drafter.cache
        return [self.cache] if drafts is None else [self.cache, drafts.cache]

    def known(self) -> int:
        """Tokens of the only row that both caches have."""
        tokens = self.cache.table.lengths[0]
        drafts = self.drafter.cache
        # the first token has no state before it, so the drafter has one pair less than tokens
        return tokens if drafts is None else min(tokens, drafts.table.lengths[0] + 1)

    def running(self) -> list[bool]:
        """Which rows are not finished."""
        return [row.finish is None for row in self.rows]

    @property
    def is_settled(self) -> bool:
        """True if a compilation would serve many steps: the tree is the whole one, and there is one
        row, or the rows began together.
        """
        is_whole = self.drafter is self._whole[1]
        return is_whole and (len(self.rows) == 1 or not self.is_open)

    @property
    def is_constrained(self) -> bool:
        """True if a row is, so that no step can be compiled or recorded."""
        return any(row.constraint is not None for row in self.rows)

    def replace_failed(self) -> None:
        """Let finished rows have a token that can be embedded."""
        if any(row.finish == "failed" for row in self.rows):
            self.committed.tokens_BC.clamp_(min=0)

    def _join_rules(self) -> None:
        rules = [row.rule for row in self.rows]
        self.rule = joined_rule(rules, self.cache.table.lengths_B.device)

    def _settle(self) -> None:
        """Let the drafter take all that was committed but the newest token of each row: rows that
        join then have as many new tokens, one.
        """
        self.runner.end(self)
        earlier, self.committed = self.committed.divide()
        if self.drafter.cache is not None and any(earlier.counts):
            self.drafter.cache.commit(earlier)
