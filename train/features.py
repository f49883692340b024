"""Where features of rows come from: the frozen target at every step, memory, or files.

Legend: B batch, T tokens, D feature width.

Only `OnlineFeatures` lets rows share a forward. The others compute one row at a time, so that
features do not depend on which rows share a batch: a continued run gets the same bits, and so does
another one that reads the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from draftheads.heads.base import Batch
from draftheads.heads.staging import sweep
from draftheads.heads.target import Target
from draftheads.train.batches import Rows
from draftheads.train.contents import Contents, decode
from draftheads.train.heldout import observed
from draftheads.train.launch import speaker
from draftheads.train.recipe import Recipe
from draftheads.train.shards import DiskBudget, Shards


class FeatureSource(Protocol):
    """The target's features of rows, by row number."""

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """features_BTD of these rows in the target's dtype; `batch` is the same rows, on the
        device where they are wanted. Padding has features that mean nothing.
        """
        ...


class OnlineFeatures:
    """Of the untouched target, computed for every batch."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """As of `FeatureSource`; one forward."""
        with self.target.untouched():
            return self.target.features(batch, self.layers)


class AdaptedFeatures:
    """Of the target with its adapter, which changes in every step."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """As of `FeatureSource`; one forward."""
        return self.target.features(batch, self.layers)


@dataclass(frozen=True)
class RowForward:
    """The untouched target's features of one row, computed by itself."""

    target: Target
    rows: Rows
    layers: tuple[int, ...]

    def __call__(self, number: int) -> Tensor:
        """features_TD on the target's device."""
        batch = self.rows.batch([number]).to(self.target.device)
        with self.target.untouched():
            return self.target.features(batch, self.layers)[0]


class RememberedFeatures:
    """Computed once and kept in main memory, as far as `gb` reach, for further epochs."""

    def __init__(self, compute: RowForward, gb: float) -> None:
        self.compute = compute
        self._room = int(gb * 1e9)
        self._known: dict[int, Tensor] = {}

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """As of `FeatureSource`; one forward per row not seen before."""
        lines = [self._row(number).to(batch.tokens_BT.device) for number in numbers]
        return pad_sequence(lines, batch_first=True)

    def _row(self, number: int) -> Tensor:
        known = self._known.get(number)
        if known is not None:
            return known
        features_TD = self.compute(number)
        size = features_TD.numel() * features_TD.element_size()
        if size <= self._room:
            self._room -= size
            self._known[number] = features_TD.cpu()
        return features_TD


class StoredFeatures:
    """Read from shards, in the dtype given; the target is not needed."""

    def __init__(self, shards: Shards, dtype: torch.dtype) -> None:
        self.shards, self.dtype = shards, dtype

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """As of `FeatureSource`; one copy out of the page cache."""
        lines = [self.shards.read(number) for number in numbers]
        width = batch.tokens_BT.shape[1]
        stored = {name: _stack([line[name] for line in lines], width) for name in lines[0]}
        device = batch.tokens_BT.device
        return decode({name: part.to(device) for name, part in stored.items()}, self.dtype)


def make_features(
    recipe: Recipe,
    target: Target,
    rows: tuple[Rows, Rows],
    layers: Sequence[int],
    accelerator: Accelerator,
) -> tuple[FeatureSource, FeatureSource]:
    """The sources that a recipe asks for, of the rows to train on and of those held out. Where an
    adapter learns, the latter are the adapted target's.

    With features.mode "cached", what is not on disk yet is written first, by all processes
    together. Raises ValueError where the disk or its budget does not hold that, or the files are
    of something else, and OSError where the disk becomes full all the same.
    """
    train, heldout = rows
    adapted = AdaptedFeatures(target, layers) if target.adapter else None
    if recipe.features.mode == "cached":
        place = Place(
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.wait_for_everyone,
            speaker(accelerator),
        )
        counts = {"train": (train, len(train))}
        if not adapted:
            counts["heldout"] = heldout, observed(heldout)
        folder = recipe.features.path or Path(f"{recipe.data.path}-features")
        stores = [
            Shards(folder / name, _contents(recipe, target, part, layers))
            for name, part in counts.items()
        ]
        write_missing(stores, target, DiskBudget(folder, int(recipe.features.disk_gb * 1e9)), place)
        return StoredFeatures(stores[0], target.dtype), adapted or StoredFeatures(
            stores[1], target.dtype
        )
    online = OnlineFeatures(target, layers)
    if recipe.data.cache_gb:
        compute = RowForward(target, train, tuple(layers))
        return RememberedFeatures(compute, recipe.data.cache_gb), adapted or online
    return online, adapted or online


@dataclass(frozen=True)
class Place:
    """One process among `world`. barrier: returns when all of them have called it. say: prints a
    line, once for all.
    """

    rank: int
    world: int
    barrier: Callable[[], object]
    say: Callable[[str], None]


def write_missing(
    stores: Sequence[Shards], target: Target, budget: DiskBudget, place: Place
) -> None:
    """Write this process's share of the shards that are missing or damaged; returns when all
    processes have. Nothing is written where what is missing does not fit the disk or the budget.
    """
    missing = [store.missing(place.say) for store in stores]
    for store in stores:  # on every machine
        sweep(store.folder, "shard-*")
    if any(missing):
        _announce(stores, missing, budget, place.say)
    if place.rank == 0:
        for store, shards in zip(stores, missing, strict=True):
            store.prepare(shards)
    place.barrier()  # nobody writes before all have seen the same shards missing
    for store, shards in zip(stores, missing, strict=True):
        _write_share(store, shards, target, budget, place)
    place.barrier()


def _announce(
    stores: Sequence[Shards],
    missing: Sequence[Sequence[int]],
    budget: DiskBudget,
    say: Callable[[str], None],
) -> None:
    contents = [store.contents for store in stores]
    needed = sum(part.bytes_of(range(part.shards)) for part in contents)
    lacking = sum(part.bytes_of(shards) for part, shards in zip(contents, missing, strict=True))
    first = contents[0]
    what = (
        f"{sum(part.ends[-1] for part in contents):,} tokens x {len(first.layers)} layers x "
        f"{first.hidden} numbers in {first.dtype}"
    )
    budget.check(needed, lacking, what)
    say(f"{budget.folder}: writing {lacking / 1e9:.3g} of {needed / 1e9:.3g} GB, {what}")


def _write_share(
    store: Shards, missing: Sequence[int], target: Target, budget: DiskBudget, place: Place
) -> None:
    contents = store.contents
    compute = RowForward(target, contents.rows, contents.layers)
    shares = [[s for s in missing if s % place.world == rank] for rank in range(place.world)]
    forwards = [sum(len(contents.rows_of(shard)) for shard in share) for share in shares]
    with tqdm(
        total=forwards[place.rank], unit="row", desc="features", disable=place.rank > 0 or None
    ) as bar:
        for shard in shares[place.rank]:
            rows = []
            for number in contents.rows_of(shard):
                rows.append(compute(number).cpu())
                bar.update()
            store.write(shard, rows, budget)
    for _ in range(max(forwards) - forwards[place.rank]):
        compute(0)  # a forward may be a collective: all processes run equally many


def _contents(
    recipe: Recipe, target: Target, part: tuple[Rows, int], layers: Sequence[int]
) -> Contents:
    facts = {
        "target": target.fingerprint(),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_bits": recipe.target_bits,
    }
    return Contents(*part, tuple(layers), target.hidden_size, recipe.features.dtype, facts)


def _stack(lines: Sequence[Tensor], width: int) -> Tensor:
    """(B, width, ...) of lines (T, ...), zeros behind them; by bytes, as torch cannot pad fp8."""
    stacked = torch.zeros((len(lines), width, *lines[0].shape[1:]), dtype=lines[0].dtype)
    for place, line in zip(stacked.view(torch.uint8), lines, strict=True):
        place[: len(line)] = line.view(torch.uint8)
    return stacked
