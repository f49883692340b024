"""The frozen target's features of rows: computed at each step, kept in memory, or read from files.

    manifest.json                   what was stored, of which rows, and how
    shard-000000.safetensors        `features` (N, D): consecutive rows, concatenated; a checksum
                                    of each row in the metadata

A shard is renamed into place when it is complete, and its bytes do not depend on who writes it. In
memory and in files every row is computed alone, so that a resumed run reads the same bits. Files
are read, not mapped, and each row is compared with its checksum when it is read first.

Legend: B batch, T tokens of a row, N tokens of a shard, L layers, H hidden size, D = L x H.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from draftheads.arguments import nearest
from draftheads.heads.batch import Batch
from draftheads.heads.files import read_json, remedy, replacing, sweep, write_json
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.heads.tensors import dtype_name
from draftheads.train.batches import Rows, heldout_rows
from draftheads.train.data.shards import read_at
from draftheads.train.faults import is_of_machine
from draftheads.train.features.served import served_features
from draftheads.train.features.states import StateFeatures
from draftheads.train.launch import agreeing, main_process_log
from draftheads.train.recipe import Recipe

FORMAT = 2
MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 28
"""Maximum size of a shard of full rows; a larger row is a shard by itself."""
HEADER_BYTES, CHECK_BYTES = 1024, 9
"""Upper bounds of a shard's header plus the manifest, and of a row's checksum in it."""
CHECKS = "crc32"


class FeatureSource(Protocol):
    """The features of rows."""

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """features_BTD of rows, which `batch` holds, too, in the target's dtype on its device;
        those of padding are arbitrary.
        """
        ...

    def ahead(self, numbers: Sequence[int]) -> None:
        """Begin with these rows, which will be asked for; nothing, where none is waited for."""
        return

    def close(self) -> None:
        """End what goes on beside training; nothing, where nothing does."""
        return


class SharedFaults:
    """Features whose errors wait until all processes can end together: a process that ended alone
    would take the steps since the last checkpoint with it. Zeros stand in for what is missing.

    fault: the first error of this process. is_broken: whether `check` has raised one.
    """

    def __init__(self, source: FeatureSource, target: Target, layers: int) -> None:
        self._source = source
        self._target = target
        self._width = layers * target.hidden_size
        self.fault: Exception | None = None
        self.is_broken = False

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource`."""
        with self._kept():
            return self._source(numbers, batch)
        shape = (*batch.tokens_BT.shape, self._width)
        return torch.zeros(shape, dtype=self._target.dtype, device=self._target.device)

    def ahead(self, numbers: Sequence[int]) -> None:
        """Begin with these rows, which will be asked for."""
        with self._kept():
            self._source.ahead(numbers)

    def close(self) -> None:
        """End what goes on beside training."""
        self._source.close()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Note an error of the block as the fault, where it is the first."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.fault = self.fault or error
        except Exception as error:  # of a library, about what it was given
            if is_of_machine(error):
                raise
            fault = ValueError(f"features: cannot be read ({type(error).__name__}: {error})")
            fault.__cause__ = error
            self.fault = self.fault or fault

    def check(self, accelerator: Accelerator) -> None:
        """A collective: raise, on all processes, the error of any."""
        try:
            with agreeing(accelerator):
                if self.fault:
                    raise self.fault
        except (ValueError, OSError):
            self.is_broken = True
            raise


class OnlineFeatures(FeatureSource):
    """Computes features of every batch. adapted: with the target's adapter enabled."""

    def __init__(self, target: Target, layers: Sequence[int], *, adapted: bool = False) -> None:
        self.target = target
        self.layers = tuple(layers)
        self.adapted = adapted

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource`."""
        if self.adapted:
            return self.target.features(batch, self.layers)
        with self.target.disable_adapter():
            return self.target.features(batch, self.layers)

    def row(self, rows: Rows, number: int) -> Tensor:
        """features_TD of one row, alone."""
        return self([number], rows.batch([number]).to(self.target.device))[0]


RowSource = OnlineFeatures | StateFeatures
"""Sources of single rows, too."""


class MemoryFeatures:
    """Keeps features in main memory for further epochs, up to `gb`.

    Nothing is ever dropped: rows are read once per epoch, so that a cache which drops the row that
    was read longest ago would drop each just before it is read again.
    """

    def __init__(self, online: RowSource, rows: Rows, gb: float) -> None:
        self.online = online
        self.rows = rows
        self._room = int(gb * 1e9)
        self._features: dict[int, Tensor] = {}

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource`."""
        device = batch.tokens_BT.device
        return pad_sequence([self._row(n).to(device) for n in numbers], batch_first=True)

    def ahead(self, numbers: Sequence[int]) -> None:
        """Begin with those that are not in memory."""
        self.online.ahead([number for number in numbers if number not in self._features])

    def close(self) -> None:
        """End what computes them."""
        self.online.close()

    def _row(self, number: int) -> Tensor:
        if number in self._features:
            return self._features[number]
        features_TD = self.online.row(self.rows, number)
        if features_TD.nbytes <= self._room:
            self._room -= features_TD.nbytes
            self._features[number] = features_TD.cpu()
        return features_TD


class StoredFeatures(FeatureSource):
    """Features of the first `count` rows in files, as the target computes them. bits: its own."""

    def __init__(
        self, folder: Path, online: RowSource, rows: Rows, count: int, bits: int | None
    ) -> None:
        self.folder = folder
        self.online = online
        self.rows = rows
        target = online.target
        self.width = len(online.layers) * target.hidden_size
        self.token_bytes = self.width * target.dtype.itemsize
        size = max(1, (SHARD_BYTES - HEADER_BYTES) // (rows.length * self.token_bytes))
        self.shards = [range(at, min(at + size, count)) for at in range(0, count, size)]
        """Row numbers of each shard."""
        self.shard_tokens = [sum(rows.sizes[row] for row in shard) for shard in self.shards]
        self.shard_bytes = [
            tokens * self.token_bytes + HEADER_BYTES + CHECK_BYTES * len(shard)
            for shard, tokens in zip(self.shards, self.shard_tokens, strict=True)
        ]
        """Upper bounds."""
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "target": target.fingerprint(),
            "target_dtype": dtype_name(target.dtype),
            "target_bits": bits,
            "layers": list(online.layers),
            "hidden": target.hidden_size,
            "sequence_length": rows.length,
            "rows": count,
            "tokens": sum(rows.sizes[:count]),
            "rows_sha256": _digest(rows, count),
            "rows_per_shard": size,
        }
        self._open = cache(self._read)
        self._checked: set[int] = set()

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """A `FeatureSource` that does not run the target."""
        features = [self._row(number) for number in numbers]
        return pad_sequence(features, batch_first=True).to(batch.tokens_BT.device)

    def _row(self, number: int) -> Tensor:
        shard = number // len(self.shards[0])
        rows = self.shards[shard]
        path = self._path(shard)
        offset, checks = self._open(shard)
        offset += self.token_bytes * sum(self.rows.sizes[rows.start : number])
        with pa.OSFile(str(path)) as file:
            content = read_at(file, path, self.token_bytes * self.rows.sizes[number], offset)
        if number not in self._checked:
            if self._check(number, content) != checks[number - rows.start]:
                raise ValueError(
                    f"{path}: expected row {number} as it was written, got other numbers; delete "
                    "this file, then run again to write it"
                )
            self._checked.add(number)
        dtype = self.online.target.dtype
        return torch.frombuffer(bytearray(content), dtype=dtype).view(-1, self.width)

    def _check(self, number: int, content: Any) -> str:
        name = f"{self.manifest['rows_sha256']} {self.manifest['layers']} {number}"
        return f"{zlib.crc32(content, zlib.crc32(name.encode())):08x}"

    def close(self) -> None:
        """End what computed them."""
        self.online.close()

    def missing(self) -> list[int]:
        """Shards that are missing or damaged. Raises ValueError if the folder stores other
        features.
        """
        path = self.folder / MANIFEST
        if path.is_file():
            old: dict[str, Any] = {}
            with suppress(ValueError):  # damaged: nothing matches
                old = read_json(path)
            for key, now in self.manifest.items():
                if key == "target" and same_weights(old.get(key), now):
                    continue
                if old.get(key) != now:
                    raise ValueError(
                        f"{path}: expected features with {key} {now!r}, got {old.get(key)!r}; use "
                        "another features.path, or delete this folder to compute them again"
                    )
        missing = []
        for shard in range(len(self.shards)):
            try:
                self._open(shard)
            except ValueError:
                missing.append(shard)
        return missing

    def write(self, missing: Sequence[int], accelerator: Accelerator) -> None:
        """Compute and write this process's share of these shards.

        All processes run equally many forwards, as a forward may be a collective. Raises OSError if
        the disk is full; complete shards stay usable.
        """
        rank, world = accelerator.process_index, accelerator.num_processes
        rounds = range(0, len(missing), world)
        for first in tqdm(rounds, unit="shard", desc="features", disable=rank > 0 or None):
            group = missing[first : first + world]
            mine = self.shards[group[rank]] if rank < len(group) else range(0)
            self.online.ahead(mine)
            features = [self.online.row(self.rows, number).cpu() for number in mine]
            most = max(len(self.shards[shard]) for shard in group)
            for _ in range(most - len(mine)):  # forwards that others wait for
                self.online.row(self.rows, 0)
            if features:
                checks = [
                    self._check(number, features_TD.contiguous().view(torch.uint8).numpy())
                    for number, features_TD in zip(mine, features, strict=True)
                ]
                tensors = {"features": torch.cat(features)}
                metadata = {CHECKS: " ".join(checks)}
                _write(self._path(group[rank]), save(tensors, metadata))

    def _read(self, shard: int) -> tuple[int, list[str]]:
        """Where the features of a shard begin in its file, and the checksums of its rows."""
        path = self._path(shard)
        tokens = self.shard_tokens[shard]
        wanted = (tokens, self.width), self.online.target.dtype
        try:
            with safe_open(path, framework="pt") as file:
                features_ND: Tensor = file.get_tensor("features")
                checks: list[str] = (file.metadata() or {}).get(CHECKS, "").split()
            found = tuple(features_ND.shape), features_ND.dtype
            if found != wanted or len(checks) != len(self.shards[shard]):
                raise ValueError(f"expected {wanted}, got {found} with {len(checks)} checksums")
            offset = path.stat().st_size - self.token_bytes * tokens
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path}: missing or damaged ({error}); run again to write it, on a disk that all "
                "processes share"
            ) from error
        return offset, checks

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:06d}.safetensors"


def make_features(
    recipe: Recipe,
    target: Target,
    rows: tuple[Rows, Rows],
    layers: Sequence[int],
    accelerator: Accelerator,
) -> tuple[FeatureSource, FeatureSource]:
    """The sources for (training rows, held-out rows); the latter with the target's adapter, if any.

    features.mode "cached" first writes the missing shards, see `write_missing`.
    """
    train, heldout = rows
    online: RowSource = OnlineFeatures(target, layers)
    evaluated: RowSource = OnlineFeatures(target, layers, adapted=target.adapter is not None)
    if recipe.features.server:
        log = main_process_log(accelerator)
        online, evaluated = served_features(recipe, target, rows, layers, log)
    elif recipe.features.layers:
        raise ValueError(
            "features.layers: expected features.server, got none; leave it out, as "
            "head.feature_layers says what a head reads"
        )
    if recipe.features.mode != "cached":
        if recipe.data.cache_gb:
            return MemoryFeatures(online, train, recipe.data.cache_gb), evaluated
        return online, evaluated
    folder = recipe.features.path or Path(f"{recipe.data.path}-features")
    bits = recipe.target_bits
    stores = [StoredFeatures(folder / "train", online, train, len(train), bits)]
    if not target.adapter:  # which changes those of held-out rows
        count = heldout_rows(heldout)
        stores.append(StoredFeatures(folder / "heldout", evaluated, heldout, count, bits))
    try:
        write_missing(stores, accelerator)
    except BaseException:
        online.close()
        raise
    return stores[0], evaluated if target.adapter else stores[1]


def write_missing(stores: Sequence[StoredFeatures], accelerator: Accelerator) -> None:
    """Write missing and damaged shards, on all processes together.

    Raises ValueError, before writing anything, if the disk is too small, or if the folder stores
    other features, and OSError if the disk fills up nevertheless.
    """
    folder = stores[0].folder.parent
    pairs = [(store, store.missing()) for store in stores]
    to_write = sum(store.shard_bytes[shard] for store, shards in pairs for shard in shards)
    free = shutil.disk_usage(nearest(folder)).free
    if to_write > free:
        raise ValueError(
            f"{folder}: expected room for {to_write / 1e9:.3g} GB of features, got "
            f"{free / 1e9:.3g} GB free on that disk; use another features.path, or set "
            "features.mode=online"
        )
    with agreeing(accelerator):  # after it, all have seen the same shards missing
        if to_write:
            main_process_log(accelerator)(f"{folder}: writing {to_write / 1e9:.3g} GB of features")
            for store in stores:
                store.folder.mkdir(parents=True, exist_ok=True)
                sweep(store.folder, "shard-*")
                if accelerator.is_main_process:
                    write_json(store.folder / MANIFEST, store.manifest)
    with agreeing(accelerator):
        for store, shards in pairs:
            store.write(shards, accelerator)


def _write(path: Path, data: bytes) -> None:
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path}: {error.strerror} while {len(data) / 1e9:.3g} GB were written; "
            f"{remedy(error)}, then run again to resume, or set features.mode=online",
        ) from error


def _digest(rows: Rows, count: int) -> str:
    """Hash of the tokens and document boundaries of the first `count` rows."""
    digest = hashlib.sha256()
    for pieces in map(rows.pieces, range(count)):
        digest.update(json.dumps([stop - start for start, stop in pieces]).encode())
        for start, stop in pieces:
            digest.update(rows.documents.tokens(start, stop).tobytes())
    return digest.hexdigest()[:16]
