"""Run a command on Linux under conditions of macOS: `python tools/like_macos.py pytest tests/readers`.

The command and its children have no /proc, except for cpuinfo. In Python processes of the tests, `os` has neither
O_DIRECT, O_TMPFILE nor posix_fadvise, and multiprocessing starts processes with the method spawn
(tests/quick_start/sitecustomize.py). Other differences of macOS are not simulated: its file systems and system calls,
`sys.platform`, and the wheels for it. Needs root and the program unshare.
"""

from __future__ import annotations

import os
import subprocess
import sys

# A new file system hides /proc in a mount namespace. torch itself, which the tests compare with, reads its cpuinfo.
HIDE_PROC = """
info=$(cat /proc/cpuinfo) && mount -t tmpfs none /proc && printf "%s\\n" "$info" > /proc/cpuinfo && exec "$@"
"""


def main() -> int:
    """Run the command, and return its exit code."""
    if len(sys.argv) < 2:
        sys.stderr.write("like_macos.py: a command is missing; for example: pytest tests/readers\n")
        return 2
    command = ["unshare", "--mount", "sh", "-c", HIDE_PROC, "sh", *sys.argv[1:]]
    return subprocess.run(command, env=os.environ | {"SYNCHECK_LIKE_MACOS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
