"""How a program ends when nobody reads what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from programs import TRAIN
from started import alive

if TYPE_CHECKING:
    from programs import Programs


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("--spawn", 2)], ids=["one", "spawn"])
def test_a_pipe_that_is_closed(programs: Programs, launcher: tuple[str | int, ...]) -> None:
    """`run.py ... | head -1` prints its line and ends in silence, with the code that shells give to SIGPIPE."""
    pipe = ("bash", "-c", 'set -o pipefail; "$@" | head -1', "bash")
    process = programs.start(*pipe, *TRAIN, *launcher, "--width", 4, "--epochs", 10_000, "--progress", "plain")
    run = programs.finish(process)
    assert (run.returncode, run.stderr) == (141, "")
    assert run.stdout.count("\n") == 1
    assert "epoch     1/10000" in run.stdout
    assert not alive(process)
