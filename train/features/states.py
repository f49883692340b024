"""Hidden states that a serving engine computed, as the features of our rows.

Legend: B batch, T tokens, P tokens of a document or a piece of it, N learned ones, L captured
states, H hidden size, D = layers x H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from operator import eq
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import final_norm
from draftheads.train.batches import Rows
from draftheads.train.data.shards import Array

BEGINNING, BEGINNINGS = 16, 64
"""Tokens of a beginning whose states are kept, and the most beginnings."""
LEAST, KINDS = 16, 8
"""Learned tokens, and different ones, without which nothing is decided."""
FLAT = 0.05
"""Mean excess of logits below which states predict nothing."""
APART = 12.0
"""Standard deviations between the excess of right and of wrong states, to tell them apart."""
SAMPLED = 256
"""Tokens of the first documents, with which learned ones are compared."""
CHUNK = 64
"""Places whose logits are in memory at a time."""
SAME = 0.25
"""Relative distance of states of equal tokens that rounding may cause, also by other choices of
experts.
"""
BF16 = 0.02
"""Relative error of states that is rounding."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Ask = Callable[[int], list[Future[Tensor]]]


class StateLayout:
    """The layout by which captured states become features. captured: which states they are, by
    transformers' numbers, ascending: i enters layer i, and n, of n layers, leaves the last one,
    before the final norm. layers: the states of the features. Raises ValueError for states that
    were not captured.
    """

    def __init__(self, target: Target, captured: Sequence[int], layers: Sequence[int]) -> None:
        self.target = target
        self.captured = tuple(captured)
        self.layers = tuple(layers)
        known = range(target.layers + 1)
        if list(captured) != sorted(set(captured)) or not set(captured) <= set(known):
            raise ValueError(
                f"expected states from 0 to {target.layers} of {target.name}, ascending, got "
                f"{list(captured)}; set features.layers to those that were captured"
            )
        wanted = [layer % len(known) for layer in layers]
        missing = sorted(set(wanted) - set(captured))
        if missing:
            raise ValueError(
                f"expected states {sorted(set(wanted))}, which the head reads, got "
                f"{list(captured)}; capture {missing}, too, or correct features.layers"
            )
        self.places = [self.captured.index(layer) for layer in wanted]

    @torch.no_grad()
    def row(self, documents: Sequence[Tensor], prefixes: Sequence[int]) -> Tensor:
        """features_TD of a row by the alignment law, in the target's dtype on its device.

        documents: the states (P, L, H) of each, computed alone. prefixes: as of
        `Rows.prefixes_of`.
        """
        pairs = zip(documents, prefixes, strict=True)
        return torch.cat(
            [F.pad(self.features(each)[:-1], (0, 0, 1, 0))[prefix:] for each, prefix in pairs]
        )

    def features(self, states_PLH: Tensor) -> Tensor:
        """The states of the features (P, D), at the tokens after which they were computed."""
        states_PLH = states_PLH.to(self.target.device, self.target.dtype)
        chosen = [
            self.last(states_PLH[:, place])
            if self.captured[place] == self.target.layers
            else states_PLH[:, place]
            for place in self.places
        ]
        return torch.cat(chosen, dim=-1)

    def last(self, states_PH: Tensor) -> Tensor:
        """Captured last states after the final norm, in the target's dtype on its device."""
        states_PH = states_PH.to(self.target.device, self.target.dtype)
        normed_PH: Tensor = final_norm(self.target.model)(states_PH)
        return normed_PH.to(self.target.device)


class StateChecks:
    """True if states are those of a target, as far as its embeddings and lm_head tell.

    State 0 is the embeddings. Documents that begin alike have the same states there, in all layers.
    The last state predicts the learned tokens: their logits exceed those of others by about what
    they exceed them by for tokens that are sampled from it. Noise, shifted states and those of
    another model give a learned token the logit of any other. layout: of the states. rounding:
    relative error of state 0. Several threads may call it.
    """

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self.rounding = BF16
        self._turns = Lock()  # logits of many documents would not fit into memory
        self._begun: dict[int, tuple[list[int], Tensor]] = {}
        self._sampled: list[int] = []
        self._sums_4 = torch.zeros(4)

    def __call__(self, states_PLH: Tensor, tokens: Sequence[int], learned_P: Array) -> None:
        """Raises ValueError for states that are not those of these tokens. learned_P: bool."""
        target = self.layout.target
        captured = list(self.layout.captured)
        shape = (len(tokens), len(captured), target.hidden_size)
        if states_PLH.shape != shape or states_PLH.dtype not in FLOATS:
            raise ValueError(
                f"expected {shape[1]} states {captured} of width {shape[2]} for {shape[0]} tokens, "
                f"got shape {tuple(states_PLH.shape)} {states_PLH.dtype}; set features.layers to "
                "those that were captured"
            )
        if not states_PLH.isfinite().all():
            raise ValueError("expected finite states, got NaN or infinity")
        with self._turns, torch.no_grad():
            if captured[0] == 0:
                self._check_embeddings(states_PLH[:, 0], tokens)
            self._check_beginning(states_PLH, list(tokens[:BEGINNING]))
            if captured[-1] == target.layers:
                self._check_learned(states_PLH[:, -1:], tokens, learned_P)

    def _check_embeddings(self, got_PH: Tensor, tokens: Sequence[int]) -> None:
        target = self.layout.target
        own_PH = target.embed(torch.tensor(tokens, device=target.device)).float()
        error = distances(got_PH.to(own_PH), own_PH).mean()
        if not error < self.rounding:
            raise ValueError(
                f"expected the embeddings of {target.name} as state 0, got others (they differ by "
                f"{error:.0%}); use the same checkpoint, and capture {list(self.layout.captured)}"
            )

    def _check_beginning(self, states_PLH: Tensor, tokens: list[int]) -> None:
        first = tokens[0]
        got_PLH = states_PLH[: len(tokens)].float()
        if first not in self._begun:
            if len(self._begun) < BEGINNINGS:
                self._begun[first] = tokens, got_PLH.clone()
            return
        before, known_PLH = self._begun[first]
        same = len([*takewhile(bool, map(eq, tokens, before))])
        error_L = distances(got_PLH[:same], known_PLH[:same]).median(0).values
        if not (error_L < SAME).all():
            state = self.layout.captured[int(error_L.argmax())]
            raise ValueError(
                f"expected the states that the same first {same} tokens had before, got others "
                f"(state {state} differs by {error_L.max():.0%}); use one model for all documents"
            )

    def _check_learned(self, last_P1H: Tensor, tokens: Sequence[int], learned_P: Array) -> None:
        target = self.layout.target
        self._sampled += tokens[: SAMPLED - len(self._sampled)]
        others = torch.tensor(self._sampled, device=target.device)
        places = (np.flatnonzero(learned_P[1:]) + 1).tolist()
        for start in range(0, len(places), CHUNK):
            chosen = places[start : start + CHUNK]
            hidden_NH = self.layout.last(last_P1H[[place - 1 for place in chosen], 0])
            logits_NV = target.model.get_output_embeddings()(hidden_NH).float()
            ids_N = torch.tensor([tokens[place] for place in chosen], device=logits_NV.device)
            usual_N = logits_NV[:, others.to(logits_NV.device)].mean(-1)
            excess_NV = logits_NV - usual_N[:, None]
            chances_NV = logits_NV.softmax(-1)
            got_N = excess_NV.gather(-1, ids_N[:, None])[:, 0]
            expected_N = (chances_NV * excess_NV).sum(-1)
            variance_N = (chances_NV * excess_NV**2).sum(-1) - expected_N**2
            parts = got_N, expected_N, variance_N, torch.ones_like(got_N)
            self._sums_4 += torch.stack([part.sum() for part in parts]).cpu()
        got, expected, variance, learned = self._sums_4.tolist()
        if learned < LEAST or len(set(self._sampled)) < KINDS:
            return
        if FLAT * learned < expected < APART * math.sqrt(variance):
            return  # more tokens will tell
        self._sums_4.zero_()
        if not got > max(expected / 3, FLAT * learned):
            got, expected = got / learned, expected / learned
            raise ValueError(
                f"expected last states that predict the learned tokens, got others (lm_head of "
                f"{target.name} prefers them by {got:.3g}, where its own would by {expected:.3g}); "
                "use the same checkpoint, and data that it wrote"
            )


def distances(got: Tensor, known: Tensor) -> Tensor:
    """The distances (..) of states (.., H), relative to the known ones."""
    error: Tensor = (got - known).norm(dim=-1) / known.norm(dim=-1).clamp(min=1e-9)
    return error


class StateFeatures:
    """A `RowSource` of states that come from elsewhere while training goes on.

    ask: begins with a row, and gives the states (P, L, H) of each of its pieces. close: ends what
    goes on.
    """

    def __init__(
        self, layout: StateLayout, rows: Rows, ask: Ask, close: Callable[[], None]
    ) -> None:
        self.target = layout.target
        self.layers = layout.layers
        self.rows = rows
        self.close = close
        self._layout = layout
        self._ask = ask
        self._asked: dict[int, list[Future[Tensor]]] = {}

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource`."""
        self.ahead(numbers)
        features = [self.row(self.rows, number) for number in numbers]
        return pad_sequence(features, batch_first=True)

    def ahead(self, numbers: Sequence[int]) -> None:
        """Begin with these rows, which will be read."""
        for number in numbers:
            if number not in self._asked:
                self._asked[number] = self._ask(number)

    def row(self, rows: Rows, number: int) -> Tensor:
        """features_TD of one row. Raises what is raised where its states are made."""
        assert rows is self.rows
        self.ahead([number])
        states = [future.result() for future in self._asked.pop(number)]
        return self._layout.row(states, rows.prefixes_of(number))
