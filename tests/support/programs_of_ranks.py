"""Start programs of several processes, as torchrun does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from support.checkpoints import Done
from support.started import CLONE, Processes, free_port

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

LIMIT = 90  # seconds
SYNCHECK = (sys.executable, "-m", "syncheck")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# torchrun does not report the exit codes of its processes, so each process writes its exit code into a file. SIGTERM is
# ignored, because torchrun sends it after the first failure, which would change the remaining exit codes.
RECORD_EXIT_CODE = """trap '' TERM; "$@"; code=$?; echo $code > "code.$RANK"; exit $code"""


class Jobs(Processes):
    """Programs of several processes."""

    variables: ClassVar = {"PYTHONPATH": CLONE}
    without = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")

    def ranks(self, *arguments: Any, ranks: int = 2) -> list[subprocess.Popen[str]]:
        """Start `syncheck` as several ranks without torchrun, with the variables of torchrun."""
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(*SYNCHECK, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", **common)
            for rank in range(ranks)
        ]

    def torchrun(self, *arguments: Any, ranks: int = 2) -> Done:
        """Run `torchrun ... -m syncheck ...`; each rank writes its exit code into the file code.RANK."""
        launcher = [*TORCHRUN, "--nproc-per-node", ranks, "--master-port", free_port(), "--no-python"]
        return finish(self.start(*launcher, "bash", "-c", RECORD_EXIT_CODE, "bash", *SYNCHECK, *arguments))

    def codes(self, folder: Path | None = None) -> dict[int, int]:
        """Return the exit codes of the ranks under torchrun, by rank."""
        return {int(file.suffix[1:]): int(file.read_text()) for file in (folder or self.folder).glob("code.*")}


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for the end of a program and return its output."""
    out, err = process.communicate(timeout=LIMIT)
    return Done(process.returncode, out, err)


def finish_all(processes: list[subprocess.Popen[str]]) -> list[Done]:
    """Wait for the end of programs, and return their outputs."""
    return [finish(process) for process in processes]
