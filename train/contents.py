"""What a store of features holds, and how: features of which rows, in which shard, in how many
bytes.

Legend: T tokens of a row, N tokens of a shard, D width of all layers together, L layers, H width of
one layer (D = L x H).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftheads.train.batches import Rows

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
