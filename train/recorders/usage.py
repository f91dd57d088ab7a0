"""What a process uses of its machine."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Give the most memory held so far, in bytes: of the GPU by tensors, or of this process in the machine's RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux hands the peak that getrusage() tells on to a started process; VmHWM begins anew with its program.
    with suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gpu_utilization(device: torch.device) -> float | None:
    """Give the percent of the last moments (up to a second) in which the GPU was busy; None where nobody knows.

    torch asks NVIDIA's library by the package nvidia-ml-py, which need not be there.
    """
    if device.type != "cuda":
        return None
    with suppress(Exception):  # of many kinds, one for each thing that may be missing
        return float(torch.cuda.utilization(device))
    return None
