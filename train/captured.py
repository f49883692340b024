"""Hidden states that others computed, a serving engine or a program that wrote files, as the
features of our rows.

Legend: T tokens, P tokens of a document, L captured states, H hidden size, D = layers x H.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.heads.target import Target


class Captured:
    """How captured states become features.

    captured: which states they are, by transformers' numbers, ascending: i enters layer i, and n,
    of n layers, leaves the last one, before the final norm. layers: the states of the features.
    Raises ValueError for states that were not captured.
    """

    def __init__(self, target: Target, captured: Sequence[int], layers: Sequence[int]) -> None:
        self.target, self.captured = target, tuple(captured)
        known = range(target.layers + 1)
        if list(captured) != sorted(set(captured)) or not set(captured) <= set(known):
            raise ValueError(
                f"expected states from 0 to {target.layers} of {target.name}, ascending, got "
                f"{list(captured)}"
            )
        wanted = [layer % len(known) for layer in layers]
        missing = sorted(set(wanted) - set(captured))
        if missing:
            raise ValueError(
                f"expected states {sorted(set(wanted))}, which the head reads, got "
                f"{list(captured)}; capture {missing}, too"
            )
        self.places = [self.captured.index(layer) for layer in wanted]

    @torch.no_grad()
    def row(self, documents: Sequence[Tensor]) -> Tensor:
        """features_TD of a row by the alignment law, in the target's dtype on its device.

        documents: the states (P, L, H) of each, computed alone.
        """
        return torch.cat([F.pad(self.features(each)[:-1], (0, 0, 1, 0)) for each in documents])

    def features(self, states_PLH: Tensor) -> Tensor:
        """The states of the features (P, D), at the tokens after which they were computed."""
        states_PLH = states_PLH.to(self.target.device, self.target.dtype)
        chosen = [
            self.target.final_norm(states_PLH[:, place])
            if self.captured[place] == self.target.layers
            else states_PLH[:, place]
            for place in self.places
        ]
        return torch.cat(chosen, dim=-1)
