"""Samples the utilization of each GPU of this machine during a run, with nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUERY = ("--query-gpu=timestamp,index,utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500")


@contextmanager
def sample_utilization(path: Path) -> Iterator[None]:
    """Write a line for each GPU to the file, twice per second; the file stays empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    with path.open("wb") as file:
        sampler = program and subprocess.Popen([program, *QUERY], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            if sampler:
                sampler.kill()
                sampler.wait()


def compute_utilization(path: Path, began: float, ended: float) -> tuple[float, ...]:
    """Return the mean utilization of each GPU in percent between two Unix times; empty if there are no samples."""
    samples: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        date, index, percent = (*line.split(", "), "", "")[:3]
        # The last line may be incomplete, and a GPU without this sensor has [N/A].
        if percent.strip().isdigit():
            time = datetime.strptime(date, "%Y/%m/%d %H:%M:%S.%f").astimezone().timestamp()
            if began <= time <= ended:
                samples.setdefault(int(index), []).append(float(percent))
    return tuple(statistics.mean(samples[index]) for index in sorted(samples))
