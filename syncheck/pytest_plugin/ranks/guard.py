"""Ends the ranks when the pytest that started them is gone, however it went and whatever they are doing.

Run as a script of its own, by path and without site-packages: a rank itself may be stopped, or hold the interpreter's
lock in C code, and could not notice. It reads `+PID` and `-PID` on stdin, and acts when that is closed.
"""

from __future__ import annotations

import os
import signal
import sys


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on; none where there is no /proc."""
    found: list[int] = []
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
            except OSError:  # the thread has just ended
                continue
            found += children
            pending += children
    return found


def end(pid: int) -> None:
    """Kill a process, its group, and what it started and left the group."""
    # Found while it lives: it adopts what its children leave behind.
    for kill, number in [(os.killpg, pid), *((os.kill, child) for child in descendants(pid))]:
        try:
            kill(number, signal.SIGKILL)
        except OSError:  # gone already; on macOS, a group of zombies may not be signalled
            continue


def main() -> None:
    """Watch until stdin is closed, then end what is being watched."""
    watched: set[int] = set()
    for line in sys.stdin:
        (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    for pid in watched:
        end(pid)


if __name__ == "__main__":
    main()
