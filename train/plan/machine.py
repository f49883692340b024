"""What this machine has, and how much of it this process holds: memory in bytes, of the GPU where
there is one, else of the process.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def device_memory(device: str) -> tuple[int, int]:
    """(bytes that it has, bytes that are free now)."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total, free
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path) and (text := Path(path).read_text().strip()).isdigit():
            total, free = min(total, int(text)), min(free, int(text))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # free pages leave out what the page cache would give back
        values = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = min(total, int(values["MemAvailable"].split()[0]) * 1024)
    return total, free


def peak() -> int:
    """Highest memory in bytes: what torch allocated on a GPU, else what this process held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if os.path.exists("/proc/self/status"):
        return _status("VmHWM")
    import resource  # where there is no /proc, there is one number for all phases

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Let `peak` begin anew, where the system can do that."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): VmHWM begins anew


def resident() -> int:
    """Bytes of memory that this process holds now; 0 on a GPU, which has none of Python."""
    if torch.cuda.is_available():
        return 0
    return _status("VmRSS") if os.path.exists("/proc/self/status") else peak()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
