"""A process that kills the ranks when the outer pytest process has ended for any reason.

Run as a script, by path and without site-packages. A rank cannot do this itself, because it may be stopped or hold the
GIL in C code. The guard reads `+PID` and `-PID` from stdin, and kills the listed processes when stdin is closed.
"""

from __future__ import annotations

import os
import signal
import sys


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process; an empty list without /proc."""
    result: list[int] = []
    # /proc lists the children of each thread, so that processes are visited level by level.
    pending = [pid]
    while pending:
        tasks = f"/proc/{pending.pop()}/task"
        try:
            files = [f"{tasks}/{task}/children" for task in os.listdir(tasks)]
        except OSError:
            continue
        for name in files:
            try:
                with open(name, encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
            except OSError:  # the thread has ended meanwhile
                continue
            result += children
            pending += children
    return result


def end(pid: int) -> None:
    """Kill a process, its process group, and its descendants in other groups."""
    # List the descendants while the process lives, because it adopts orphans (PR_SET_CHILD_SUBREAPER).
    for kill, number in [(os.killpg, pid), *((os.kill, child) for child in descendants(pid))]:
        try:
            kill(number, signal.SIGKILL)
        except OSError:  # already ended; on macOS also a group of zombies
            continue


def main() -> None:
    """Read process ids until stdin is closed, then kill these processes."""
    watched: set[int] = set()
    for line in sys.stdin:
        (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    for pid in watched:
        end(pid)


if __name__ == "__main__":
    main()
