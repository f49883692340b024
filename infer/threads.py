"""How many threads decoding uses, and the clock that times it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from draftheads.heads.target.model import Target


def fair_clock(device: torch.device) -> Callable[[], float]:
    """The clock of all that is compared, in seconds: of a single thread, those of the CPU, in which
    other processes hardly count; else those of the wall.
    """
    import torch

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def set_threads(threads: int | None) -> None:
    """Limit torch to `threads` CPU threads."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def choose_threads(threads: int | None, target: Target, rows: int = 1) -> None:
    """Use the number of CPU threads that the user has set (`--threads`, OMP_NUM_THREADS). Otherwise
    a single one, if more speed up forwards of `rows` tokens by less than 15 %: they would only take
    cores from other processes. Targets whose forward takes 0.2 s or longer keep all threads.
    """
    import torch

    set_threads(threads)
    available = torch.get_num_threads()
    is_chosen = threads or available == 1 or "OMP_NUM_THREADS" in os.environ
    if is_chosen or target.is_skeleton or target.device.type != "cpu":
        return
    tokens_B1 = torch.zeros(rows, 1, dtype=torch.long)

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        began = time.perf_counter()
        target.model(tokens_B1, use_cache=False)
        return time.perf_counter() - began

    with torch.inference_mode():
        if seconds(available) >= 0.2:
            return
        alone, together = zip(*((seconds(1), seconds(available)) for _ in range(7)), strict=True)
    torch.set_num_threads(1 if median(alone) < 1.15 * median(together) else available)
