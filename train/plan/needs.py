"""What a run needs of a machine: memory, disk and time, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the highest point. base: Python and its libraries (CPU alone). cache:
    features kept, or mapped from files, which give way to others (`mapped`). activations: all that
    comes and goes. limit: of the device, which serves `sharing` processes.
    """

    base: int
    target: int
    weights: int
    gradients: int
    optimizer: int
    data: int
    cache: int
    mapped: bool
    activations: int
    limit: int
    sharing: int

    @property
    def total(self) -> int:
        """Of one process."""
        trained = self.weights + self.gradients + self.optimizer
        return self.base + self.target + trained + self.data + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device has as much, for all processes that it serves."""
        return self.needed <= self.limit

    @property
    def needed(self) -> int:
        """Of all processes on this device."""
        return (self.total - (self.cache if self.mapped else 0)) * self.sharing


@dataclass(frozen=True)
class Disk:
    """Bytes. checkpoint: one; checkpoints: how many at most, the one being written included.
    features: files of cached features, of which the recipe allows `allowed`. data: what was
    distilled. free: in the output folder.
    """

    checkpoint: int
    checkpoints: int
    features: int
    allowed: int
    data: int
    free: int

    @property
    def total(self) -> int:
        """What the run will write."""
        return self.checkpoint * self.checkpoints + self.features

    @property
    def fits(self) -> bool:
        """Whether there is as much."""
        return self.total <= self.free and self.features <= self.allowed


@dataclass(frozen=True)
class Duration:
    """Seconds. step: mean over the run; alone, joint: over the steps in which heads learn alone, or
    with an adapter, None where there are none; first_pass, later: as `step`, if the target computed
    features in all of them, and if they were kept. save: with the held-out documents. total: None
    for unknown steps.
    """

    step: float
    alone: float | None
    joint: float | None
    first_pass: float
    later: float
    load: float
    save: float
    total: float | None
