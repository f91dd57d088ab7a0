"""Whole processes, timed in turns."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def timed(command: Sequence[str]) -> float:
    """Return the wall time of a whole process in seconds. Raises RuntimeError when it does not end as it should."""
    # As on a user's machine: compiled modules are kept, as pip keeps torch's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    took = time.perf_counter() - start
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return took


def take_turns(commands: Mapping[str, Sequence[str]], rounds: int, warm: bool = True) -> dict[str, list[float]]:
    """Run every command `rounds` times in turn, and once before if `warm`; return the wall times by name.

    In turns, whatever else the machine does falls on all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    for i in range(rounds + warm):
        for name, command in commands.items():
            took = timed(command)
            if i or not warm:
                times[name].append(took)
    return times


def table(times: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a table of medians, least and greatest."""
    rows = (f"| `{n}` | {statistics.median(t):.3f} | {min(t):.3f} | {max(t):.3f} |" for n, t in times.items())
    return ["| command | median wall s | min | max |", "|---|---|---|---|", *rows]


def bar(what: str, measured: float, most: float) -> tuple[str, bool]:
    """Return a line that sets a number against a bar, and whether it is met."""
    return f"| {what} | {measured:.3f} | {most} | {'met' if measured <= most else 'MISSED'} |", measured <= most
