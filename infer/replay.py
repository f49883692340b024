"""What `generate` would have shown to stopping criteria and a streamer, shown to them afterwards.

Legend: B batch, T tokens.

The rows of a batch accept different numbers of tokens per step; `generate` adds one token to every
row at a time, asks the criteria and pads the rows that have ended. So tokens wait here until every
running row has its next one, and then go out column by column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from draftheads.infer.engine import Step


class Replay:
    """The sequences of one `generate`, prompts included, as far as they are known.

    pad: what rows that have ended are filled with; None where `generate` does not fill them, which
    is where no EOS can end one. limit: the most new tokens.
    """

    def __init__(
        self,
        prompts_BT: Tensor,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        pad: int | None,
        limit: int,
    ) -> None:
        self._criteria, self._streamer, self._pad = criteria, streamer, pad
        self._all_BT = torch.cat([prompts_BT, prompts_BT.new_zeros(len(prompts_BT), limit)], dim=1)
        self._length = prompts_BT.shape[1]
        self._waiting: list[deque[int]] = [deque() for _ in prompts_BT]
        self._running = [True] * len(prompts_BT)
        self._tokens, self._steps = [0] * len(prompts_BT), [0] * len(prompts_BT)

    @property
    def sequences_BT(self) -> Tensor:
        """Prompts and new tokens, as `generate` returns them."""
        return self._all_BT[:, : self._length]

    @property
    def tokens_per_step(self) -> tuple[float, ...]:
        """Of each row, the acceptance length tau; neither the prefill nor its token counts."""
        pairs = zip(self._tokens, self._steps, strict=True)
        return tuple((tokens - 1) / steps if steps else 0.0 for tokens, steps in pairs)

    def take(self, steps: Sequence[Step | None]) -> bool:
        """Add one step of the engine; returns whether any row goes on."""
        for row, step in enumerate(steps):
            if step is not None:
                self._waiting[row].extend(step.tokens)
                self._steps[row] += self._running[row] and step.accepted >= 0
        while any(self._running) and all(map(self._is_ready, range(len(self._waiting)))):
            self._show_column()
        return any(self._running)

    def _is_ready(self, row: int) -> bool:
        return bool(self._waiting[row]) or self._is_padded(row)

    def _is_padded(self, row: int) -> bool:
        return self._pad is not None and not self._running[row]

    def _show_column(self) -> None:
        rows = range(len(self._waiting))
        column = [self._pad if self._is_padded(b) else self._waiting[b].popleft() for b in rows]
        column_B = torch.tensor(column)
        self._all_BT[:, self._length] = column_B.to(self._all_BT)
        self._length += 1
        self._tokens = [n + on for n, on in zip(self._tokens, self._running, strict=True)]
        ended = self._criteria(self.sequences_BT, None).tolist()
        self._running = [on and not end for on, end in zip(self._running, ended, strict=True)]
        if self._streamer is not None:
            self._streamer.put(column_B)
