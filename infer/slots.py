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
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.base import TreeDrafter
from draftheads.heads.cache import SlotCache
from draftheads.heads.drafting import Committed, Drafter, Observer
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.accept import Acceptance, Greedy, commit, most_probable
from draftheads.infer.paths import node_paths, row_paths, stacked
from draftheads.infer.rows import Row, Step, apply_constraints
from draftheads.infer.rules import joined_rule
from draftheads.infer.sources import NoDraft

FEW = 1 / 4
"""Rows that have finished stay in the caches while they are at most this share of the others: to
remove them copies the caches.
"""


class Runner:
    """How a step is taken: here as it is written. `infer.fixed` compiles or records it."""

    was_recorded = False
    """Whether steps were recorded in the memory of these caches, which others should then take."""

    def propose(self, slots: Slots) -> TokenTree | None:
        """The next tree; None if `advance` drafts it."""
        return slots.propose()

    def advance(self, slots: Slots, tree: TokenTree | None) -> list[list[int]]:
        """Verify the tree, commit what the rule accepts; returns the tokens of each row, padded."""
        return slots.verify(tree or slots.propose())

    def start_next(self, slots: Slots) -> None:
        """Called after each step, before anybody has read its tokens."""

    def end(self, slots: Slots) -> None:
        """Called before rows or caches change."""

    def is_timed(self) -> bool:
        """Whether the newest step took as long as the next one will."""
        return True

    def may_shrink(self, running: int, finished: int) -> bool:
        """Whether to copy the caches, for steps without the finished rows."""
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
        self._by_tree = {tree: self.drafter}  # the first has the caches of all

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
        target.recompute(texts, self.cache)
        out = target.verify(tree, self.cache, self.drafter.feature_layers)
        logits_BNV = out.logits_BNV
        self.rule.prepare(self.rows)
        if self.is_constrained:
            logits_BNV = apply_constraints(self.rows, logits_BNV, node_paths(tree))
        accepted = self.rule(logits_BNV, tree)
        chosen, in_place = accepted.read()
        # a constraint changes the tree, of which the drafter then knows no node
        if isinstance(self.drafter, Observer) and not self.is_constrained:
            self.drafter.observe(most_probable(out.logits_BNV).tolist())
        # finished rows may stay in the caches, and add nothing; a text ends its step where LongRoPE
        # computes it again
        counts = [
            0 if row.finish else min(count, target.room(len(row.text)))
            for row, count in zip(self.rows, chosen, strict=True)
        ]
        path_BC = accepted.path_BN[:, : max(chosen)]
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
        # one drafter for each tree, and one for none; all write to the caches of the first, so that
        # any may follow any other
        first = next(iter(self._by_tree.values()))
        if tree not in self._by_tree and tree.nodes == 1:
            self._by_tree[tree] = NoDraft(first)
        elif tree not in self._by_tree:
            drafter = self._drafters(tree)
            if isinstance(drafter, TreeDrafter):
                drafter.cache = first.cache
            self._by_tree[tree] = drafter
        if self._by_tree[tree] is not self.drafter:
            self.runner.end(self)
        self.tree = tree
        self.drafter = self._by_tree[tree]

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
            for mine, their in zip(self.caches, kept.caches, strict=True):
                their.take(mine, place)
            kept.length = min(kept.known(), len(row.text))
        for each in self.caches:
            each.table.empty(place)

    def drop_finished(self) -> None:
        """Remove finished rows from the caches, but for the last, if there are enough of them."""
        left = [place for place, row in enumerate(self.rows) if not row.finish]
        finished = len(self.rows) - len(left)
        if not (left and finished and self.runner.may_shrink(len(left), finished)):
            return
        self.runner.end(self)
        self.committed = self.committed.select(left)
        self.rows = [self.rows[place] for place in left]
        self._join_rules()
        self.cache.select(left)
        if self.drafter.cache is not None:
            self.drafter.cache.select(left)

    def rewind(self, length: int) -> int:
        """Cut the text of the only row back to `length` tokens, at least 1, or to fewer if the
        target is a hybrid; returns to how many. What read it last, ends.
        """
        self.runner.end(self)
        # one less: the state at the last kept token predicts the next one
        self.length = self.cache.rewind(length - 1) + 1
        self._use_first()
        self.drafter.rewind(self.length)
        return self.length

    def clear(self, *, drafter: bool) -> None:
        """Forget all texts, in the same memory. drafter: replace it, too."""
        self.runner.end(self)
        self.length = 0
        self._use_first()
        if drafter:
            self.drafter = self._drafters(self.tree)
            self._by_tree = {self.tree: self.drafter}
        for each in self.caches:
            each.table.free([0] * len(each.table.lengths))

    @property
    def caches(self) -> list[SlotCache]:
        """Keys and values: the target's, and those of the drafter if it has layers."""
        drafts = self.drafter.cache
        return [self.cache] if drafts is None else [self.cache, drafts.cache]

    def known(self) -> int:
        """Tokens of the only row that both caches have."""
        # the drafter has a pair less than tokens: the first token has no state before it
        return min(each.table.lengths[0] + pair for pair, each in enumerate(self.caches))

    def running(self) -> list[bool]:
        """Which rows are not finished."""
        return [row.finish is None for row in self.rows]

    @property
    def is_settled(self) -> bool:
        """Whether its steps are worth a compilation: those of one tree, of one row or of rows that
        began together.
        """
        is_first = self.drafter is next(iter(self._by_tree.values()))
        return is_first and (len(self.rows) == 1 or not self.is_open)

    @property
    def is_constrained(self) -> bool:
        """Whether a row is, so that no step can be compiled or recorded."""
        return any(row.constraint is not None for row in self.rows)

    def replace_failed(self) -> None:
        """Let finished rows have a token that can be embedded."""
        if any(row.finish == "failed" for row in self.rows):
            self.committed.tokens_BC.clamp_(min=0)

    def _use_first(self) -> None:
        self.tree, self.drafter = next(iter(self._by_tree.items()))

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


class Session:
    """A text whose keys and values, the target's and the drafter's, outlive a generation: the next
    one computes only what differs from it.

    reused: tokens of the newest prompt that were not computed again. Another engine starts anew. An
    interrupted generation leaves what its complete steps computed.
    """

    def __init__(self) -> None:
        self.reused = 0
        self.slots: Slots | None = None  # of one row

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.slots.length if self.slots is not None else 0

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be computed again. One is left to be computed, and
        all where the keys of a text change as it grows (LongRoPE).
        """
        if self.slots is None or self.slots.target.has_long_rope:
            return 0
        text = self.slots.rows[0].text[: self.length]
        return len(commonprefix([text, list(prompt[:-1])]))


class Reading:
    """Rows whose prompts are being read into slots, a part at a time.

    known: tokens of the only row that the slots have already. chunk: tokens of a part; default:
    PREFILL_CHUNK. steps: the first of each row, once all is read.
    """

    def __init__(
        self,
        slots: Slots,
        rows: Sequence[Row],
        rule: Acceptance,
        known: int = 0,
        chunk: int | None = None,
    ) -> None:
        self.slots = slots
        self.steps: list[Step] = []
        slots.start(rows, rule)
        # the last token that the slots have is read again: its state predicts the next one
        self._prompts = [row.text[max(known - 1, 0) :] for row in rows]
        self._parts = slots.target.prefill_chunks(
            self._prompts, slots.cache, slots.drafter.feature_layers, chunk
        )
        self._seconds = 0.0
        # what the drafter has not read yet: from which token on, and their features
        self._start = 0
        self._features: list[Tensor] = []
        drafts = slots.drafter.cache
        self._is_first = not known and (drafts is None or not drafts.memories)

    def finish(self) -> list[Step]:
        """Read all that is left; returns the first steps."""
        while not self.advance():
            pass
        return self.steps

    def advance(self) -> bool:
        """Read a part; returns whether it was the last."""
        slots = self.slots
        start = slots.clock()
        end, out = next(self._parts)
        if out.features_BND is not None:
            self._features.append(out.features_BND)
        drafts = slots.drafter.cache
        is_last = end >= max(map(len, self._prompts))
        if is_last:
            slots.rule.prepare(slots.rows)
            logits_BNV = out.logits_BNV[:, -1:]
            logits_BNV = apply_constraints(slots.rows, logits_BNV, [[()]] * len(slots.rows))
            slots.committed = self._unread(end, slots.rule.choose(logits_BNV[:, 0]))
        elif drafts is not None and len(slots.rows) == 1:
            # the drafter reads along; of several rows, some may have ended in an earlier part
            next_B = torch.tensor([self._prompts[0][end]], device=slots.target.device)
            drafts.commit(self._unread(end, next_B))
        self._seconds += slots.clock() - start
        if is_last:
            tokens = slots.committed.last_tokens_B()[:, None].tolist()
            self.steps = [
                row.step(ids, -1, 0, (0.0, self._seconds))
                for row, ids in zip(slots.rows, tokens, strict=True)
            ]
            slots.replace_failed()
        return is_last

    def _unread(self, end: int, next_B: Tensor) -> Committed:
        """The tokens that the drafter has not read, up to `end`, and the next ones. Features are
        shifted by one, so that each token has the state that predicted it.
        """
        parts = [prompt[self._start : end] for prompt in self._prompts]
        counts = [len(part) + 1 for part in parts]
        rows = [torch.tensor([*part, 0]) for part in parts]
        tokens_BC = pad_sequence(rows, batch_first=True).to(next_B.device)
        count_B = torch.tensor(counts, device=next_B.device)
        tokens_BC.scatter_(1, count_B[:, None] - 1, next_B[:, None])
        features_BCD = next_B.new_zeros(*tokens_BC.shape, 0, dtype=torch.float)
        if self._features:
            first = torch.zeros_like(self._features[0][:, :1])
            features_BCD = torch.cat([first, *self._features], dim=1)
        committed = Committed(tokens_BC, features_BCD, count_B, counts)
        # the drafter has the token before the first pair, unless nothing was read before
        committed = committed.since(0 if self._is_first else 1)
        self._start = end
        self._is_first = False
        self._features = []
        return committed
