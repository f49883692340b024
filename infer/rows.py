"""The rows of a batch: their texts, steps, rules and caches, and how they join and leave.

Legend: B batch, N tree nodes, C committed tokens of a step, D feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.cache import SlotCache
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.accept import Acceptance, Accepted, Greedy
from draftheads.infer.constraint import Constraint
from draftheads.infer.draws import Draws, Place
from draftheads.infer.fixed.recorded import Recordings
from draftheads.infer.fixed.steps import FixedSteps
from draftheads.infer.paths import TokenPath, node_paths, row_paths, stacked
from draftheads.infer.text import StopStrings

NOT_FINITE = "the target's logits are not finite; load it with dtype float32"
"""Why a row has failed."""
CacheKey = tuple[object, torch.device, torch.dtype]
"""What caches and compiled steps are for: an engine, and the device and dtype of its target."""


@dataclass(frozen=True)
class Step:
    """The output of one target forward for one row."""

    tokens: list[int]  # new token ids, cut at EOS, stop string and max_new_tokens
    accepted: int  # draft tokens accepted before that cut; -1 for the prefill, which verifies none
    finish: str | None  # "eos", "stop", "length" or "failed" on the last step
    draft_seconds: float  # by `fair_clock`, shared by all rows of a batch
    verify_seconds: float
    drafted: int = 0  # draft tokens that were verified

    @property
    def from_drafts(self) -> int:
        """Draft tokens among its tokens."""
        return max(min(self.accepted, len(self.tokens)), 0)

    @property
    def visible(self) -> list[int]:
        """Its tokens without the end of an answer, which is no text."""
        return self.tokens[:-1] if self.finish == "eos" else self.tokens


@dataclass
class Statistics:
    """Sums over steps, excluding the prefill and its token."""

    steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # [d]: steps with more than d drafts accepted

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Statistics:
        """Sum these steps."""
        total = cls()
        for step in steps:
            total.add(step)
        return total

    def add(self, step: Step) -> None:
        """Add one step of one row."""
        if step.accepted < 0:
            return
        self.steps += 1
        self.tokens += len(step.tokens)
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.accepted += [0] * (step.accepted - len(self.accepted))
        for depth in range(step.accepted):
            self.accepted[depth] += 1

    @property
    def tokens_per_step(self) -> float:
        """Acceptance length tau, including the target's bonus token."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
        return [count / self.steps for count in self.accepted]


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any kind, which a truth value is not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


class Row:
    """The text of one row, prompt included, and the reason it finished.

    limit: new tokens at most; None: the rest of the context. seed: of its own random numbers; "":
    one of the rule's. Raises ValueError for ids outside the vocabulary, and for texts that exceed
    the context.
    """

    rule: Acceptance
    """By which it is decoded; set by its `Decoding`."""
    constraint: Constraint | None = None
    """Of this answer alone, as long as it goes on."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        limit: int | None,
        stop: Collection[str] = (),
        seed: str = "",
    ) -> None:
        known = target.model.get_input_embeddings().weight.shape[0]
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy's, torch's
        invalid: list[Any] = [prompt]
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
            invalid = [t for t in prompt if not is_whole(t) or not 0 <= t < known]
        if invalid:
            raise ValueError(
                f"prompt: expected token ids from 0 to {known - 1}, got {invalid[0]!r:.80}; use a "
                "list of those of the target's own tokenizer"
            )
        context = target.context
        room = context - len(prompt)
        if not 0 < room < context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, expected 1 to {context - 1} (context of "
                f"{target.name}: {context}, answer included); pass a prompt that fits"
            )
        limit = room if limit is None else limit
        if not is_whole(limit) or not 1 <= limit <= room:
            raise ValueError(
                f"max_new_tokens: expected 1 to {room}, got {limit!r}; prompt and new tokens must "
                f"not exceed the context of {target.name} ({context})"
            )
        self.text = list(map(int, prompt))
        self.seed = seed
        self.finish: str | None = None
        self.prompt = len(prompt)
        self.end = self.prompt + limit
        self.ends = frozenset(target.eos_ids)  # tokens that end it
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop else None

    @property
    def new_tokens(self) -> int:
        """How many."""
        return len(self.text) - self.prompt

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.text[self.prompt :]

    def step(
        self, tokens: list[int], accepted: int, drafted: int, seconds: tuple[float, float]
    ) -> Step:
        """Append tokens up to the end of the output. seconds: of drafting, of verifying."""
        for place, token in enumerate(tokens, start=1):
            self.text.append(token)
            if token < 0:
                self.finish = "failed"
            elif token in self.ends:
                self.finish = "eos"
            elif self._stop is not None and self._stop.completed_by(token):
                self.finish = "stop"
            elif len(self.text) == self.end:
                self.finish = "length"
            if self.finish:
                self.constraint = None
                tokens = tokens[:place]
                break
        return Step(tokens, accepted, self.finish, *seconds, drafted)


def apply_constraints(
    rows: Sequence[Row], logits_BNV: Tensor, paths: Sequence[Sequence[TokenPath]]
) -> Tensor:
    """The logits that each row's constraint makes of the target's, at every node that can be
    reached along its own path. paths: to the nodes of each row.
    """
    logits_BNV = logits_BNV.float()
    for row, logits_NV, nodes in zip(rows, logits_BNV, paths, strict=True):
        if row.constraint is None:
            continue
        numbers: dict[TokenPath, int] = {}  # of the nodes that are reached
        for node, path in enumerate(nodes):
            parent = numbers.get(path[:-1])
            is_reached = parent is not None and logits_NV[parent, path[-1]] > -torch.inf
            if is_reached or not path:
                numbers[path] = node
                logits_NV[node] = row.constraint.after(row.answer, path, logits_NV[node])
    return logits_BNV


class Unread:
    """The part of the prompts that the drafter has not read. known: tokens at its beginning that
    the drafter has all the same, because they come before the first new pair.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], known: int) -> None:
        self.prompts = prompts
        self.known = known
        self.start = 0
        self.features: list[Tensor] = []  # of the passes since then

    def take(self, end: int, next_B: Tensor) -> Committed:
        """The tokens up to `end` and the next ones. Features are shifted by one, so that each token
        has the state that predicted it.
        """
        parts = [prompt[self.start : end] for prompt in self.prompts]
        counts = [len(part) + 1 for part in parts]
        rows = [torch.tensor([*part, 0]) for part in parts]
        tokens_BC = pad_sequence(rows, batch_first=True).to(next_B.device)
        count_B = torch.tensor(counts, device=next_B.device)
        tokens_BC.scatter_(1, count_B[:, None] - 1, next_B[:, None])
        features_BCD = next_B.new_zeros(*tokens_BC.shape, 0, dtype=torch.float)
        if self.features:
            first = torch.zeros_like(self.features[0][:, :1])
            features_BCD = torch.cat([first, *self.features], dim=1)
        committed = Committed(tokens_BC, features_BCD, count_B, counts).since(self.known)
        self.start = end
        self.known = 1
        self.features = []
        return committed


@dataclass(frozen=True)
class RowRules(Acceptance):
    """A rule for each row of a batch, which chooses as it does for that row alone. device: of the
    logits.
    """

    rules: tuple[Acceptance, ...]
    device: torch.device

    @cached_property
    def _parts(self) -> list[tuple[Acceptance, list[int], Tensor]]:
        """The distinct rules, and the rows of each, there and on the device."""
        parts: list[tuple[Acceptance, list[int]]] = []
        for row, rule in enumerate(self.rules):
            for other, rows in parts:
                if rule == other:
                    rows.append(row)
                    break
            else:
                parts.append((rule, [row]))
        return [(rule, rows, torch.tensor(rows, device=self.device)) for rule, rows in parts]

    @cached_property
    def _order(self) -> Tensor:
        """Where each row is among those of the parts."""
        return torch.cat([rows_R for _, _, rows_R in self._parts]).argsort()

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """The path of each row by its own rule."""
        parts = [rule(logits_BNV[rows_R], tree.select(rows_R)) for rule, _, rows_R in self._parts]
        return Accepted(*(torch.cat(each)[self._order] for each in zip(*parts, strict=True)))

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens (B, ...) by the rules of logits (B, ..., V)."""
        return torch.cat([rule.choose(logits[rows_R]) for rule, _, rows_R in self._parts])[
            self._order
        ]

    def prepare(self, rows: Sequence[Place]) -> None:
        """Prepare each rule for its rows."""
        for rule, places, _ in self._parts:
            rule.prepare([rows[place] for place in places])

    def constants(self) -> tuple[Any, ...]:
        """Those of each rule, and its rows."""
        return tuple((*rule.constants(), *rows) for rule, rows, _ in self._parts)

    def all_draws(self) -> list[Draws]:
        """Those of the distinct rules."""
        return [rule.draws for rule, _, _ in self._parts]


@dataclass(frozen=True)
class Caches:
    """The caches of one generation. text: the growing list of its only row's tokens."""

    key: CacheKey
    generation: int  # its number in the session
    text: list[int]
    cache: SlotCache
    drafter: Drafter
    recordings: Recordings
    pending: dict[int, tuple[Drafter, int]] = field(default_factory=dict, compare=False)
    """Drafters by their id, which is theirs as long as they are here, and the nodes in their cache
    after a tree.
    """

    def is_free(self, key: CacheKey, rows: int) -> bool:
        """Whether other texts of so many rows may be decoded by what was recorded here."""
        is_same = self.key == key and len(self.cache.table.lengths) == rows
        return is_same and bool(self.recordings.made) and self.cache.states is None

    @property
    def slots(self) -> list[SlotCache]:
        """Keys and values: the target's, and those of the drafter if it has layers."""
        drafts = self.drafter.cache
        return [self.cache] if drafts is None else [self.cache, drafts.cache]

    def clear(self) -> None:
        """Forget all texts."""
        for cache in self.slots:
            cache.table.free([0] * len(cache.table.lengths))


class Session:
    """Keys and values of a text, the target's and the drafter's, which outlive a generation: the
    next one computes only what differs from it.

    reused: tokens of the newest prompt that were not computed again. length: tokens that both have,
    and may be cut back to. generations: how many have begun with it; the newest one alone may go
    on. Another engine starts anew. An interrupted generation leaves what its complete steps
    computed.
    """

    def __init__(self) -> None:
        self.reused = self.length = self.generations = 0
        self.caches: Caches | None = None

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be computed again. One is left to be computed."""
        text = self.caches.text[: self.length] if self.caches is not None else []
        return len(commonprefix([text, list(prompt[:-1])]))

    def begin(self, key: CacheKey, text: list[int]) -> Caches | None:
        """Begin a generation. Returns the caches of the session's text, cut back to what it shares
        with this one; None if that is nothing.
        """
        caches = self.caches
        self.generations += 1
        self.reused = self.shared(text) if caches is not None and caches.key == key else 0
        self.length = self.reused
        if caches is None or not self.reused:
            return None
        # one less: the state at the last shared token predicts the first new one
        self.reused = self.length = caches.cache.rewind(self.reused - 1) + 1
        caches.drafter.rewind(self.reused)
        return replace(caches, generation=self.generations, text=text)


class Decoding:
    """Rows that are decoded together: their caches, and what was committed last. Rows have any
    lengths; they may join, and finished ones be dropped, between steps.

    rows: those in the caches. first: their steps of the prefill.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        accept: Acceptance,
        session: Session,
        caches: Caches,
        committed: Committed,
        tree: Tree,
    ) -> None:
        self.rows = list(rows)
        for row in rows:
            row.rule = accept
        self.accept = accept  # the rule of all rows
        self.session = session
        self.caches = caches
        self.cache = caches.cache
        self.drafter = caches.drafter
        self.tree = tree  # that it drafts
        self.drafters: dict[Tree, Drafter] = {}  # that were used, by tree
        self.committed = committed
        self.fixed: FixedSteps | None = None  # while steps have fixed shapes
        self.first: list[Step] = []

    def note_pending(self) -> None:
        """Note how much the drafter's newest tree has in its cache."""
        drafts = self.drafter.cache
        pending = 0 if drafts is None else drafts.cache.table.pending
        self.caches.pending[id(self.drafter)] = self.drafter, pending

    def running(self) -> list[bool]:
        """Which rows are not finished."""
        return [row.finish is None for row in self.rows]

    def prepare(self) -> None:
        """Prepare the rule for the next choice."""
        self.accept.prepare(self.rows)

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

    def choose(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """The path that the rule keeps of a tree."""
        self.prepare()
        if self.is_constrained:
            logits_BNV = apply_constraints(self.rows, logits_BNV, node_paths(tree))
        return self.accept(logits_BNV, tree)

    @property
    def is_constrained(self) -> bool:
        """Whether a row is, so that no step can be compiled or recorded."""
        return any(row.constraint is not None for row in self.rows)

    def join(self, other: Decoding) -> None:
        """Add the rows of another decoding, which ends: in the places of finished ones, as far as
        there are such.
        """
        free = [place for place, row in enumerate(self.rows) if row.finish]
        more = range(len(self.rows), len(self.rows) + len(other.rows))
        places = [*free, *more][: len(other.rows)]
        for each in (self, other):
            each._settle()
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

    def leave(self, row: Row, other: Decoding | None) -> None:
        """End a row. other: the decoding that it came with takes it, for its session."""
        place = self.rows.index(row)
        row.finish = row.finish or "left"
        row.rule = Greedy()  # which needs no numbers of its own
        row.constraint = None  # nor can it be asked for more
        self.end_fixed()
        self._join_rules()
        if other is not None:
            # the drafter has a pair less than tokens: the first token has no state before it
            slots = self.caches.slots
            lengths = [each.table.lengths[place] + pair for pair, each in enumerate(slots)]
            for mine, their in zip(slots, other.caches.slots, strict=True):
                their.take(mine, place)
            other.session.length = min(*lengths, len(row.text))
        for each in self.caches.slots:
            each.table.empty(place)

    def drop_finished(self) -> None:
        """Remove finished rows from the caches, but for the last."""
        left = [place for place, row in enumerate(self.rows) if not row.finish]
        if not 0 < len(left) < len(self.rows):
            return
        if self.fixed is not None:  # other rows are compiled or recorded anew
            if self.fixed.is_compiled or 2 * len(left) >= len(self.rows):
                return
            self.end_fixed()
        self.committed = self.committed.select(left)
        self.rows = [self.rows[place] for place in left]
        self._join_rules()
        self.cache.select(left)
        if self.drafter.cache is not None:
            self.drafter.cache.select(left)

    def replace_failed(self) -> None:
        """Let finished rows have a token that can be embedded."""
        if any(row.finish == "failed" for row in self.rows):
            self.committed.tokens_BC.clamp_(min=0)

    def end_fixed(self) -> None:
        """Continue with steps of any shapes, as caches or rows change."""
        if self.fixed is not None:
            self.committed = self.fixed.end(self.committed)
            self.fixed = None

    def _join_rules(self) -> None:
        first, *others = [row.rule for row in self.rows]
        is_one = all(rule == first for rule in others)
        self.accept = (
            first if is_one else RowRules((first, *others), self.cache.table.lengths_B.device)
        )

    def _settle(self) -> None:
        """Let the drafter take all that was committed but the newest token of each row: rows that
        join then have as many new tokens, one.
        """
        self.end_fixed()
        earlier, self.committed = self.committed.divide()
        if self.drafter.cache is not None and any(earlier.counts):
            self.drafter.cache.commit(earlier)
