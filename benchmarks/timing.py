"""Measure time and memory of whole processes, and format the results."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SYNCHECK = str(Path(sys.executable).parent / "syncheck")


def environment() -> dict[str, str]:
    """Return the environment of measured processes, which keep bytecode, as on a user's machine."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return found | {"OMP_NUM_THREADS": "1"}


def timed(command: Sequence[str]) -> float:
    """Return the wall time of a whole process in seconds. Raises RuntimeError if it fails."""
    start = time.perf_counter()
    _run(command)
    return time.perf_counter() - start


def read_printed_time(command: Sequence[str]) -> float:
    """Return the last printed number of a process: the seconds of its work, without start-up."""
    return float(_run(command).split()[-1])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout


def take_turns(
    works: Mapping[str, Any], rounds: int, warm: bool = True, measure: Callable[[Any], float] = timed
) -> dict[str, list[float]]:
    """Run every work `rounds` times in turn, and once before if `warm`; return the seconds by name.

    Because of the turns, other load on the machine affects all works equally. measure: runs a work, by default the
    command of a process, and returns seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + warm):
        for name, work in works.items():
            took = measure(work)
            if i or not warm:
                times[name].append(took)
    return times


def peak_anonymous(command: Sequence[str]) -> float:
    """Return the peak of anonymous memory of a process in MB: RssAnon of the kernel, read every 2 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()) as process:
        while process.poll() is None:
            # No lines if the process has ended since the poll.
            lines = [line for line in _status(process.pid) if line.startswith("RssAnon:")]
            peak = max([peak, *(int(line.split()[1]) for line in lines)])
            time.sleep(0.002)
    if process.returncode not in (0, 1) or not peak:
        raise RuntimeError(f"{command[:4]} ended with {process.returncode}")
    return peak * 1024 / 1e6


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def median(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return each command's median."""
    return {name: statistics.median(found) for name, found in times.items()}


def table(times: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a table of medians, minima and maxima."""
    rows = (f"| `{n}` | {statistics.median(t):.3f} | {min(t):.3f} | {max(t):.3f} |" for n, t in times.items())
    return ["| command | median wall s | min | max |", "|---|---|---|---|", *rows]


BAR_TABLE = ["| | measured | bar | |", "|---|---|---|---|"]


def bar(what: str, measured: float, most: float) -> tuple[str, bool]:
    """Return a line with a number and its maximum, and whether the limit is met."""
    return _line(what, measured, f"at most {most:g}", measured <= most)


def floor(what: str, measured: float, least: float) -> tuple[str, bool]:
    """Return a line with a number and its minimum, and whether the limit is met."""
    return _line(what, measured, f"at least {least:g}", measured >= least)


def _line(what: str, measured: float, needed: str, met: bool) -> tuple[str, bool]:
    return f"| {what} | {measured:.3f} | {needed} | {'met' if met else 'MISSED'} |", met


def section(*parts: str | Sequence[str] | Sequence[tuple[str, bool]]) -> tuple[str, bool]:
    """Join paragraphs, tables and limits to a section of RESULTS.md; return it and whether all limits are met."""
    blocks: list[str] = []
    met = True
    for part in parts:
        if isinstance(part, str):
            blocks.append(part)
        elif part and isinstance(part[0], tuple):
            blocks.append("\n".join([*BAR_TABLE, *(text for text, _ in part)]))
            met &= all(ok for _, ok in part)
        else:
            blocks.append("\n".join(str(line) for line in part))
    return "\n\n".join(blocks) + "\n", met
