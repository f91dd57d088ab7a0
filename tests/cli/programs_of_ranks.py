"""Programs of several processes that tests start, as torchrun does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from checkpoints import Done
from started import ROOT, Processes, free_port

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

LIMIT = 90  # seconds
SYNCHECK = (sys.executable, "-m", "syncheck")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# What a process that torchrun starts ends with is told by nobody; here it is written into a file. Nor does it end when
# torchrun wants it to, because another one has ended: what it ends with is its own.
NOTED = """trap '' TERM; "$@"; code=$?; echo $code > "code.$RANK"; exit $code"""


class Jobs(Processes):
    """Programs of several processes."""

    variables: ClassVar = {"PYTHONPATH": str(ROOT)}
    without = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")

    def ranks(self, *arguments: Any, ranks: int = 2) -> list[subprocess.Popen[str]]:
        """Start `syncheck` as so many ranks, with the variables that torchrun would set, and without torchrun."""
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(*SYNCHECK, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", **common)
            for rank in range(ranks)
        ]

    def torchrun(self, *arguments: Any, ranks: int = 2) -> Done:
        """Run `torchrun ... -m syncheck ...`; each rank notes in code.RANK how it ended."""
        launcher = [*TORCHRUN, "--nproc-per-node", ranks, "--master-port", free_port(), "--no-python"]
        return finished(self.start(*launcher, "bash", "-c", NOTED, "bash", *SYNCHECK, *arguments))

    def codes(self, folder: Path | None = None) -> dict[int, int]:
        """Return what the ranks that torchrun started ended with, by rank."""
        return {int(file.suffix[1:]): int(file.read_text()) for file in (folder or self.folder).glob("code.*")}


def finished(process: subprocess.Popen[str]) -> Done:
    """Wait for a program, and for its output."""
    out, err = process.communicate(timeout=LIMIT)
    return Done(process.returncode, out, err)
