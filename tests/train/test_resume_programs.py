"""Programs that are killed and restarted with --resume, like a requeued job script."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts
from support.programs import RUN, TRAIN, Programs, children, errors, imports_torch
from support.resumed import differences
from support.scenarios import load
from support.started import wait_for

from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.programs import Run

# 40 steps an epoch: enough after step 14 for the ranks to be killed before the end.
LONG = (
    *("--width", 4, "--epochs", 3, "--batch-size", 16, "--limit-train", 640, "--save-per-rank"),
    *("--checkpoint-every", 7, "--resume", "--timeout", 30),
)


def training_processes(pid: int) -> list[int]:
    """Return the child processes that train, recognized by torch's libraries, or the process itself without any."""
    return [child for child in children(pid) if imports_torch(child)] or [pid]


def command(launcher: str, port: int) -> list[Any]:
    """Return the command line that starts two ranks, or one process."""
    launchers: dict[str, list[Any]] = {
        "none": [*TRAIN],
        "--spawn": [*TRAIN, "--spawn", 2],
        "torchrun": [TRAIN[0], "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", port, RUN],
    }
    return launchers[launcher]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Run]]:
    """Return the folder and output of an uninterrupted run, by method."""
    runs = {}
    for method, launcher in (("single", "none"), ("ddp", "--spawn")):
        programs = Programs(tmp_path_factory.mktemp(method))
        try:
            runs[method] = (programs.folder / "ckpts", programs.run(*command(launcher, 0), *LONG))
        finally:
            programs.kill()
        assert runs[method][1].returncode == 0, runs[method][1].stderr
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "--spawn", "torchrun"])
def test_killed_and_requeued(
    programs: Programs, tmp_path: Path, free_port: int, uninterrupted: dict[str, tuple[Path, Run]], launcher: str
) -> None:
    """After SIGKILL of all ranks, the same command resumes and ends bitwise equal to an uninterrupted run."""
    method, size = ("single", 1) if launcher == "none" else ("ddp", 2)
    out = tmp_path / "ckpts"
    folder = states_folder(out, method)
    process = programs.start(*command(launcher, free_port), *LONG)
    wait_for(lambda: all(state_path(folder, 14, rank).exists() for rank in range(size)), timeout=60, pause=0.005)
    for pid in training_processes(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed = programs.finish(process)
    assert killed.returncode != 0
    assert "no state in ckpts/.resume" in killed.stderr
    assert not list(out.glob("*.pth"))
    again = programs.run(*command(launcher, free_port + 1), *LONG)
    assert again.returncode == 0, again.stderr
    (note,) = find_texts(again.stderr.splitlines(), "resumed")
    assert note.startswith(f"run.py: resumed {method} at step ")
    reference, complete = uninterrupted[method]
    for rank in range(size):
        name = f"{method}_rank{rank}.pth"
        assert differences(load(out / name), load(reference / name)) == []
    assert epoch_lines(again)[-2:] == epoch_lines(complete)[-2:]


def epoch_lines(run: Run) -> list[str]:
    """Return the line of each epoch without its speed."""
    return [line.rpartition("  ")[0] for line in run.stdout.splitlines() if ": epoch " in line]


@pytest.mark.slow
def test_refused_resumes_are_short(script: Callable[..., Run], tmp_path: Path) -> None:
    """A changed learning rate is refused in one line; if all states are damaged, a line names each."""
    few = ("--width", 4, "--max-steps", 3, "--checkpoint-every", 3, "--progress", "none", "--resume")
    assert script(*few).returncode == 0
    refused = script(*few, "--lr", 0.2)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("run.py: error: --resume: --lr: 0.1 when ckpts/.resume/single/step_3 was saved")
    (tmp_path / "ckpts/.resume/single/step_3/rank_0.pth").write_bytes(b"PK")
    refused = script(*few)
    assert (refused.returncode, refused.stdout) == (2, "")
    skipped, error = errors([refused])
    assert skipped.startswith("--resume: skipping step 3: ckpts/.resume/single/step_3/rank_0.pth: damaged")
    assert error.startswith("error: --resume: no state in ckpts/.resume/single is usable")
