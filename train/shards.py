"""Features on disk: written once, in shards of many rows, and read by any number of processes.

Legend: T tokens of a row, N tokens of a shard, D width of all layers together, L layers.

    manifest.json                 which features of which rows these are, and how they are stored
    shard-000000.safetensors      `features` (N, D): consecutive rows end to end
                                  `scales` (N, L) float32, where features are stored as fp8

A shard is written under a temporary name and renamed, so that it is there whole or not at all; what
a killed process left behind is redone by the next one. Processes share the work by shard number
and nothing else, and a shard's bytes do not depend on who writes it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftheads.heads.staging import own_name
from draftheads.train.contents import Contents, Tensors, encode
from draftheads.train.data.answers import MANIFEST, write_manifest

OPEN_SHARDS = 512
"""Shards that a reader keeps mapped."""

Say = Callable[[str], None]


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

    def missing(self, say: Say) -> list[int]:
        """Shards that are to be written; those that are damaged are named through `say`.

        Raises ValueError when the folder holds the features of something else.
        """
        if (self.folder / MANIFEST).is_file():
            self._refuse_other()
        found = {shard: self._fault(shard) for shard in range(self.contents.shards)}
        for shard, fault in found.items():
            if fault and fault != "missing":
                say(f"{self._path(shard)}: {fault}; it will be written again")
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
