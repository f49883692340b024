"""What a store of features holds, and how: features of which rows, in which shard, in how many
bytes.

Legend: T tokens of a row, N tokens of a shard, D width of all layers together, L layers, H width of
one layer (D = L x H).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from draftheads.heads.batch import Batch
from draftheads.heads.files import own_name, sweep
from draftheads.heads.target import Target
from draftheads.train.batches import Rows, heldout_rows
from draftheads.train.data.answers import MANIFEST, write_manifest
from draftheads.train.launch import main_process_log
from draftheads.train.recipe import Recipe

FORMAT = 1
SHARD_BYTES = 1 << 28
"""Size of a shard of full rows, at most; a row that is larger is a shard by itself."""
HEADER_BYTES = 1024
"""More than a shard's header and the manifest need together."""
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
_NAMES = {"bf16": "BF16", "fp8": "F8_E4M3", "fp32": "F32"}  # in a safetensors header

Tensors = dict[str, Tensor]


def encode(features_TD: Tensor, dtype: str, layers: int) -> Tensors:
    """Features as they are stored, on the CPU.

    fp8 is float8_e4m3fn with one scale per token and layer, so that a loud token or layer costs
    the others nothing. A number errs by at most 1/16 of itself, or by 1/458,752 of the largest of
    its token and layer where that is more; measured, the root mean square of the error is 2.6 %
    of the features' own. bf16 errs by at most 1/256 of a number: 0.17 %.
    """
    if dtype != "fp8":
        return {"features": features_TD.to("cpu", DTYPES[dtype])}
    parts_TLH = features_TD.float().view(len(features_TD), layers, -1)
    scales_TL = parts_TLH.abs().amax(-1) / torch.finfo(DTYPES["fp8"]).max
    scales_TL = torch.where(scales_TL > 0, scales_TL, 1.0)
    stored_TLH = (parts_TLH / scales_TL[..., None]).to(DTYPES["fp8"])
    return {"features": stored_TLH.flatten(-2).cpu(), "scales": scales_TL.cpu()}


def decode(stored: Tensors, dtype: torch.dtype) -> Tensor:
    """Features (..., T, D) in `dtype`, from what `encode` made, on any device."""
    if "scales" not in stored:
        return stored["features"].to(dtype)
    scales_TL = stored["scales"]
    parts_TLH = stored["features"].float().view(*scales_TL.shape, -1)
    return (parts_TLH * scales_TL[..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Contents:
    """What a store holds: the features of the first `count` of `rows`.

    layers: of the target, as of `Target.features`. hidden: width of one. dtype: a key of `DTYPES`.
    target: what makes its features what they are, as JSON.
    """

    rows: Rows
    count: int
    layers: tuple[int, ...]
    hidden: int
    dtype: str
    target: dict[str, Any]

    @cached_property
    def ends(self) -> list[int]:
        """Tokens up to the end of each row."""
        return list(accumulate(self.rows.sizes[: self.count]))

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        scale = 4 if self.dtype == "fp8" else 0
        number: int = DTYPES[self.dtype].itemsize
        return len(self.layers) * (self.hidden * number + scale)

    @property
    def rows_per_shard(self) -> int:
        """A function of the manifest alone."""
        return max(1, (SHARD_BYTES - HEADER_BYTES) // (self.rows.length * self.token_bytes))

    @property
    def shards(self) -> int:
        """How many."""
        return -(-self.count // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """The numbers of a shard's rows."""
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.count))

    def tokens_of(self, shard: int) -> int:
        """How many tokens a shard's rows have."""
        return sum(self.rows.sizes[row] for row in self.rows_of(shard))

    def span(self, row: int) -> slice:
        """Where a row's tokens stand in its shard."""
        first = row - row % self.rows_per_shard
        before = self.ends[first - 1] if first else 0
        return slice(self.ends[row] - self.rows.sizes[row] - before, self.ends[row] - before)

    def bytes_of(self, shards: Sequence[int]) -> int:
        """What these shards take on disk, at most."""
        tokens = sum(self.tokens_of(shard) for shard in shards)
        return tokens * self.token_bytes + len(shards) * HEADER_BYTES

    def layout(self, shard: int) -> dict[str, tuple[str, list[int]]]:
        """Name -> (dtype, shape) of a shard's tensors, in the words of safetensors."""
        tokens = self.tokens_of(shard)
        width = len(self.layers) * self.hidden
        found = {"features": (_NAMES[self.dtype], [tokens, width])}
        if self.dtype == "fp8":
            found["scales"] = ("F32", [tokens, len(self.layers)])
        return found

    def manifest(self) -> dict[str, Any]:
        """What must be the same for a store to be read; what tells most comes first."""
        return {
            "format": FORMAT,
            **self.target,
            "layers": list(self.layers),
            "hidden": self.hidden,
            "dtype": self.dtype,
            "sequence_length": self.rows.length,
            "rows": self.count,
            "tokens": self.ends[-1],
            "rows_sha256": self._rows_sha256,
            "rows_per_shard": self.rows_per_shard,
        }

    @cached_property
    def _rows_sha256(self) -> str:
        """What a row number means: these tokens, in these documents."""
        digest = hashlib.sha256()
        for row in self.rows.rows[: self.count]:
            digest.update(json.dumps([stop - start for start, stop in row]).encode())
            for start, stop in row:
                digest.update(self.rows.documents.tokens_N[start:stop].numpy().tobytes())
        return digest.hexdigest()[:16]


# Features on disk: written once, in shards of many rows, and read by any number of processes.
#
# Legend: T tokens of a row, N tokens of a shard, D width of all layers together, L layers.
#
#     manifest.json                 which features of which rows these are, and how they are stored
#     shard-000000.safetensors      `features` (N, D): consecutive rows end to end
#                                   `scales` (N, L) float32, where features are stored as fp8
#
# A shard is written under a temporary name and renamed, so that it is there whole or not at all;
# what a killed process left behind is redone by the next one. Processes share the work by shard
# number and nothing else, and a shard's bytes do not depend on who writes it.


OPEN_SHARDS = 512
"""Shards that a reader keeps mapped."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class DiskBudget:
    """What the files below `folder` may fill together, in bytes."""

    folder: Path
    limit: int

    def check(self, needed: int, missing: int, what: str) -> None:
        """Refuse to begin what would not fit. needed: bytes of all shards, of which `missing` are
        to be written; what: is stored, for the message.
        """
        place = next(at for at in (self.folder, *self.folder.absolute().parents) if at.exists())
        free = shutil.disk_usage(place).free
        if needed > self.limit or missing > free:
            raise ValueError(
                f"{self.folder}: expected features of at most {_gb(self.limit)} "
                f"(features.disk_gb), {_gb(missing)} of them to be written with {_gb(free)} free "
                f"on that disk, got {_gb(needed)} for {what}; set features.dtype=fp8 (half of "
                "bf16), let the head read fewer layers, raise features.disk_gb, use another "
                "features.path, or set features.mode=online"
            )

    def admit(self, size: int) -> None:
        """Refuse one more file of `size` bytes where the budget would not hold."""
        used = 0
        for path in self.folder.rglob("*"):
            try:
                used += path.stat().st_size
            except FileNotFoundError:  # another process has renamed its file
                continue
        if used + size > self.limit:
            raise ValueError(
                f"{self.folder}: expected at most {_gb(self.limit)} (features.disk_gb), got "
                f"{_gb(used)} and a file of {_gb(size)} to come; remove what is not features "
                "from this folder, or raise features.disk_gb, and run again to go on"
            )


class Shards:
    """The files of a store; `contents` says what must be in them."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder, self.contents = folder, contents
        self._open: OrderedDict[int, Tensors] = OrderedDict()

    def missing(self, log: Log) -> list[int]:
        """Shards that are to be written; those that are damaged are named through `log`.

        Raises ValueError when the folder holds the features of something else.
        """
        if (self.folder / MANIFEST).is_file():
            self._refuse_other()
        found = {shard: self._fault(shard) for shard in range(self.contents.shards)}
        for shard, fault in found.items():
            if fault and fault != "missing":
                log(f"{self._path(shard)}: {fault}; it will be written again")
        return [shard for shard, fault in found.items() if fault]

    def prepare(self, missing: Sequence[int]) -> None:
        """Make folder and manifest, where there are none, and remove damaged shards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / MANIFEST).is_file():
            write_manifest(self.folder, self.contents.manifest())
        for shard in missing:
            self._path(shard).unlink(missing_ok=True)

    def write(self, shard: int, rows: Sequence[Tensor], budget: DiskBudget) -> None:
        """Write a shard of its rows' features_TD.

        Raises ValueError where the budget, and OSError where the disk is full; shards written
        before stay usable, and no part of this one is left.
        """
        encoded = [encode(row, self.contents.dtype, len(self.contents.layers)) for row in rows]
        data = save({name: torch.cat([row[name] for row in encoded]) for name in encoded[0]})
        budget.admit(len(data))
        path = self._path(shard)
        part = own_name(path)
        path.parent.mkdir(parents=True, exist_ok=True)  # of a disk that is not shared: see `read`
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,  # one process's disk may be full, and it alone can say so
                f"{path}: expected room for {_gb(len(data))}, got {error.strerror}; free some, "
                "then run again to go on, or set features.mode=online",
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def read(self, row: int) -> Tensors:
        """A row as it is stored, mapped into memory, not copied."""
        shard, span = row // self.contents.rows_per_shard, self.contents.span(row)
        if shard not in self._open:
            if fault := self._fault(shard):
                raise ValueError(
                    f"{self._path(shard)}: expected features, got a shard that is {fault}; "
                    "run again to have it written, on a disk that all processes share"
                )
            with safe_open(self._path(shard), framework="pt") as file:
                self._open[shard] = {
                    name: file.get_tensor(name) for name in self.contents.layout(shard)
                }
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return {name: tensor[span] for name, tensor in self._open[shard].items()}

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:06d}.safetensors"

    def _fault(self, shard: int) -> str | None:
        """Why a shard cannot be read, of its header and size."""
        try:
            with safe_open(self._path(shard), framework="pt") as file:
                names = file.keys()
                slices = {name: file.get_slice(name) for name in names}
        except FileNotFoundError:
            return "missing"
        except SafetensorError as error:  # also where the size is not what the header says
            return f"damaged ({error})"
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
        expected = self.contents.layout(shard)
        return None if found == expected else f"of another shape ({found}, expected {expected})"

    def _refuse_other(self) -> None:
        try:
            old: dict[str, Any] = dict(json.loads((self.folder / MANIFEST).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{self.folder / MANIFEST}: expected what these features are of, got a file that "
                "is damaged; use another features.path, or delete this folder"
            ) from error
        for key, now in self.contents.manifest().items():
            if old.get(key) != now:
                raise ValueError(
                    f"{self.folder}: expected features with {key} {now!r}, got {old.get(key)!r}; "
                    "use another features.path, or delete this folder"
                )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


# Where features of rows come from: the frozen target at every step, memory, or files.
#
# Legend: B batch, T tokens, D feature width.
#
# Only `OnlineFeatures` lets rows share a forward. The others compute one row at a time, so that
# features do not depend on which rows share a batch: a continued run gets the same bits, and so
# does another one that reads the same files.


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
        with self.target.disable_adapter():
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
        with self.target.disable_adapter():
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
            main_process_log(accelerator),
        )
        counts = {"train": (train, len(train))}
        if not adapted:
            counts["heldout"] = heldout, heldout_rows(heldout)
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
    log: Callable[[str], None]


def write_missing(
    stores: Sequence[Shards], target: Target, budget: DiskBudget, place: Place
) -> None:
    """Write this process's share of the shards that are missing or damaged; returns when all
    processes have. Nothing is written where what is missing does not fit the disk or the budget.
    """
    missing = [store.missing(place.log) for store in stores]
    for store in stores:  # on every machine
        sweep(store.folder, "shard-*")
    if any(missing):
        _announce(stores, missing, budget, place.log)
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
    log: Callable[[str], None],
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
    log(f"{budget.folder}: writing {lacking / 1e9:.3g} of {needed / 1e9:.3g} GB, {what}")


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
