"""`resync` if a rank's process exits in the middle: the other ranks raise and exit too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from syncheck.errors import RankFailed
from syncheck.live import resync
from syncheck.live.repair import state

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3,
                        timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
if rank == 2:
    model.weight.data += 1
if rank == 1:
    state._make_row = lambda *_: os._exit(7)
try:
    resync(model)
except RankFailed as error:
    print(error, flush=True)
    os._exit(0)  # gloo's own threads may abort a process that ends in good order beside a peer that did not
"""


@pytest.mark.slow
def test_peers_of_an_exited_rank_raise(tmp_path: Path) -> None:
    """If rank 1 exits while bytes are due, ranks 0 and 2 raise RankFailed, and no process remains."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = [
        subprocess.Popen(
            [sys.executable, program, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0, 7, 0], said
    for out, _ in (said[0], said[2]):
        assert out.startswith("resync failed during the repair: rank ")
        assert "rank has exited" in out
        assert "Some tensors may be copied already; calling it again with source=0 is safe" in out
