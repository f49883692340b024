"""Prompts are read into slots, in parts, but for what a session holds of them.

Legend: B batch, C committed tokens, D feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.drafting import Committed
from draftheads.infer.accept import Acceptance
from draftheads.infer.rows import Row, Step, apply_constraints
from draftheads.infer.slots import Slots


class Session:
    """A text whose keys and values, the target's and the drafter's, outlive a generation: the next
    one computes only what differs from it.

    asked: tokens of the newest prompt. reused: those that were not computed again. Another engine
    starts anew. An interrupted generation leaves what its complete steps computed.
    """

    def __init__(self) -> None:
        self.asked = self.reused = 0
        self.slots: Slots | None = None  # of one row

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.slots.length if self.slots is not None else 0

    def shared(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens of a prompt need not be computed again. One is left to be
        computed, and all where the keys of a text change as it grows (LongRoPE).
        """
        slots = self.slots
        if slots is None or not slots.length or slots.target.has_long_rope:
            return 0
        text = slots.rows[0].text[: slots.length]
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
        elif len(slots.rows) == 1:
            # the drafter reads along; of several rows, some may have ended in an earlier part
            if drafts is not None:
                next_B = torch.tensor([self._prompts[0][end]], device=slots.target.device)
                drafts.commit(self._unread(end, next_B))
            slots.length = slots.known()
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
