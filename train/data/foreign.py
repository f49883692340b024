"""Other toolkits' training data, read as they are: documents, and hidden states of the target.

speculators, by `prepare-data` and `generate-offline-data`:
    state.json, data-*.arrow                  columns input_ids and loss_mask, a row per document
    hidden_states/hs_<row>.safetensors        token_ids (T), hidden_states (T, L, H)
SpecForge, by `prepare_hidden_states.py`, for EAGLE-3:
    rows_<a>-<b>/data_<i>.ckpt or .ckpt.gz    input_ids, loss_mask, aux_hidden_state (1, T, D),
                                              hidden_state (1, T, H), pickled by torch.save
No file says whose answers and states these are. States are in ascending order of their layers. The
last one leaves the last layer: with speculators before the final norm, with SpecForge after it.

Legend: T tokens of a document, L captured states, H hidden size, D = (L - 1) x H.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftheads.train.data.shards import Array, Record, Shard, content_hash, to_batch

STATE = "state.json"
"""Of a data set that `datasets` has saved."""
NUMBER = re.compile(r"data_(\d+)\.ckpt(\.gz)?")
ROWS = 1 << 14
"""Documents of a shard."""
FAULTS = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(SafetensorError, UnpicklingError, zlib.error),
)
"""What reading raises for a file that is damaged, or something else."""


@dataclass
class ForeignFolder(ABC):
    """A folder of another toolkit.

    toolkit, command: its name, and what writes states; place: where in the folder. is_normed:
    whether the last state is after the final norm. files: of the documents.
    """

    toolkit: ClassVar[str]
    command: ClassVar[str]
    place: ClassVar[str]
    is_normed: ClassVar[bool]

    path: Path
    files: Sequence[Path]

    @abstractmethod
    def documents(self, file: Path) -> Iterator[tuple[Array, Array]]:
        """Token ids and loss mask of each document of a file. Raises one of FAULTS."""

    @abstractmethod
    def name(self, document: int) -> str:
        """The file of a document's states, in the folder of the states."""

    @abstractmethod
    def read(self, file: Path, hidden: int) -> tuple[Tensor, Tensor]:
        """Token ids (T) and states (T, L, H) of a document. Raises one of FAULTS."""

    def shards(self) -> list[Shard]:
        """The documents, in memory. Raises ValueError naming a file that is damaged."""
        rows: list[Record] = []
        for file in self.files:
            try:
                rows += [record(*document) for document in self.documents(file)]
            except FAULTS as error:
                raise damaged(file, error) from error
        return [Shard(to_batch(rows[at : at + ROWS])) for at in range(0, len(rows), ROWS)]

    def __str__(self) -> str:
        return f"{self.toolkit} folder {self.path}"


class SpeculatorsFolder(ForeignFolder):
    """A data set of `speculators prepare-data`."""

    toolkit = "speculators"
    command = "speculators generate-offline-data"
    place = "hidden_states"
    is_normed = False

    def documents(self, file: Path) -> Iterator[tuple[Array, Array]]:
        """The rows of a file."""
        for batch in pa.ipc.open_stream(pa.memory_map(str(file))):
            for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
                yield np.asarray(ids.values), np.asarray(mask.values)

    def name(self, document: int) -> str:
        """By its row in the data set."""
        return f"hs_{document}.safetensors"

    def read(self, file: Path, hidden: int) -> tuple[Tensor, Tensor]:
        """Mapped into memory."""
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor("token_ids"), tensors.get_tensor("hidden_states")


class SpecForgeFolder(ForeignFolder):
    """Files of SpecForge. torch refuses a pickle of more than tensors before any of it runs."""

    toolkit = "SpecForge"
    command = "scripts/prepare_hidden_states.py"
    place = ""
    is_normed = True

    def documents(self, file: Path) -> Iterator[tuple[Array, Array]]:
        """One: only its ids and mask are read, unless the file is compressed."""
        content = _load(file)
        yield content["input_ids"].flatten().numpy(), content["loss_mask"].flatten().numpy()

    def name(self, document: int) -> str:
        """The document's own file."""
        return str(self.files[document].relative_to(self.path))

    def read(self, file: Path, hidden: int) -> tuple[Tensor, Tensor]:
        """The last state follows the others."""
        content = _load(file)
        states_TD = torch.cat([content["aux_hidden_state"], content["hidden_state"]], dim=-1)[0]
        return content["input_ids"].flatten(), states_TD.reshape(len(states_TD), -1, hidden)


def open_foreign(path: str | Path) -> ForeignFolder | None:
    """The folder of another toolkit; None if it is none. Raises ValueError for a damaged one."""
    path = Path(path)
    state = path / STATE
    if state.is_file():
        try:
            entries = json.loads(state.read_bytes())["_data_files"]
            files = [path / entry["filename"] for entry in entries]
        except FAULTS as error:
            raise damaged(state, error) from error
        return SpeculatorsFolder(path, files)
    numbers = {}
    for file in sorted(path.glob("rows_*/data_*")):
        if match := NUMBER.fullmatch(file.name):
            numbers[int(match[1])] = file
    if numbers:
        return SpecForgeFolder(path, [numbers[number] for number in sorted(numbers)])
    return None


def record(ids_T: Array, mask_T: Array) -> Record:
    """A document as a row of a shard. Raises ValueError for what cannot be ids and loss mask."""
    if len(ids_T) != len(mask_T) or not np.isin(mask_T, (0, 1)).all():
        raise ValueError(f"a loss mask that is not {len(ids_T)} zeros and ones")
    tokens = ids_T.astype(np.int32)
    if tokens.min(initial=0) < 0 or not np.array_equal(tokens, ids_T):
        raise ValueError(f"token ids from {ids_T.min()} to {ids_T.max()}")
    edges = np.flatnonzero(np.diff(mask_T.astype(np.int8), prepend=0, append=0))
    learn = edges.reshape(-1, 2).tolist()
    return {"tokens": tokens, "learn": learn, "follows": False, "hash": content_hash(tokens)}


def damaged(file: Path, error: Exception, remedy: str = "") -> ValueError:
    """One line about a file."""
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    if isinstance(error, UnpicklingError):  # whose advice is to run the code
        reason = "more than tensors, which was not loaded"
    return ValueError(
        f"{file}: expected a whole file of its toolkit, got {reason}; copy it again{remedy}"
    )


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".gz":
        whole = BytesIO(gzip.decompress(file.read_bytes()))
        content: dict[str, Tensor] = torch.load(whole, weights_only=True)
    else:
        content = torch.load(file, weights_only=True, mmap=True)
    return content
