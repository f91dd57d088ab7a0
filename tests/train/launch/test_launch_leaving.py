"""The exit of a program whose output pipe is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.programs import TRAIN
from support.started import alive

if TYPE_CHECKING:
    from support.programs import Programs


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("--spawn", 2)], ids=["one", "spawn"])
def test_closed_output_pipe(programs: Programs, launcher: tuple[str | int, ...]) -> None:
    """`run.py ... | head -1` prints one line and exits without an error message, with the shell's code for SIGPIPE."""
    pipe = ("bash", "-c", 'set -o pipefail; "$@" | head -1', "bash")
    process = programs.start(*pipe, *TRAIN, *launcher, "--width", 4, "--epochs", 10_000, "--progress", "plain")
    run = programs.finish(process)
    assert (run.returncode, run.stderr) == (141, "")
    assert run.stdout.count("\n") == 1
    assert "epoch     1/10000" in run.stdout
    assert not alive(process)
