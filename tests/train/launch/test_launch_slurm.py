"""srun, sbatch, salloc and a job array on a SLURM cluster of two nodes."""

from __future__ import annotations

import getpass
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.cluster import NODES, Cluster
from support.listings import find_texts
from support.programs import LONG, RUN, SHORT, TRAIN, assert_trained, command, environment, wait_until_trains
from support.scenarios import differing
from support.started import ROOT, wait_for
from test_stopping_programs import start_long, stopped_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.programs import Programs, Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with two idle nodes."""
    started = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture
def slurm(cluster: Cluster, programs: Programs) -> Callable[..., Run]:
    """Return a function that runs a SLURM program and removes SLURM's own lines from stderr."""

    def run(*command: Any, **options: Any) -> Run:
        completed = programs.run(*command, timeout=90, **options, **cluster.environment)
        lines = completed.stderr.splitlines(keepends=True)
        completed.stderr = "".join(
            line for line in lines if not line.startswith(("srun:", "salloc:", "sbatch:", "slurmstepd"))
        )
        return completed

    return run


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a writable clone for submitting jobs."""
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "train").symlink_to(ROOT / "train")
    return folder


def test_srun(slurm: Callable[..., Run], tmp_path: Path) -> None:
    """Two srun tasks on two nodes train with DDP without launch options."""
    run = slurm("srun", "--nodes", 2, "--ntasks", 2, *TRAIN, *SHORT)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[1] == "saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth"
    assert_trained(tmp_path / "ckpts", 2)


def test_context_of_a_task(slurm: Callable[..., Run]) -> None:
    """Ranks, local ranks and nodes match the step if the nodes have different numbers of tasks."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from train.launch.environment import make_rank_context;"
        "c = make_rank_context(os.environ, 'ddp', grouped=True);"
        "sys.stdout.write(f'{c.rank} {c.world_size} {c.local_rank} {c.local_world_size} {c.node} {c.init_method}\\n')"
    )
    run = slurm("srun", "--nodes", 2, "--ntasks", 3, "--distribution", "block", sys.executable, "-c", code)
    assert (run.returncode, run.stderr) == (0, "")
    lines = sorted(run.stdout.splitlines())
    assert [line.rpartition(" ")[0] for line in lines] == ["0 3 0 2 0", "1 3 1 2 0", "2 3 0 1 1"]
    (address,) = {line.split()[-1] for line in lines}
    assert address.startswith(tuple(f"tcp://{node}:2" for node in NODES))


def test_one_task_is_single(slurm: Callable[..., Run], tmp_path: Path) -> None:
    """srun with one task trains with --method single, as without a launcher."""
    run = slurm("srun", "--ntasks", 1, *TRAIN, *SHORT)
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "ckpts" / "single_rank0.pth").exists()


def test_torchrun_inside_srun(slurm: Callable[..., Run], tmp_path: Path) -> None:
    """torchrun inside one srun task trains its two ranks with DDP."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run = slurm("srun", "--ntasks", 1, sys.executable, *torchrun, RUN, *SHORT)
    assert (run.returncode, run.stderr) == (0, "")
    assert_trained(tmp_path / "ckpts", 2)


def test_error_is_printed_once(slurm: Callable[..., Run]) -> None:
    """An error common to all tasks is printed once, even if srun ends the step at the first failed task."""
    line = "run.py: error: --method single is one process, the launcher started 2\n"
    for option in ("--kill-on-bad-exit=0", "--kill-on-bad-exit=1"):
        run = slurm("srun", option, "--ntasks", 2, *TRAIN, "--method", "single")
        # srun returns the highest exit code; on a busy machine srun may end a task before the task exits by itself.
        assert run.returncode in (2, 128 + signal.SIGTERM)
        assert run.stderr == line


def find_tasks(cluster: Cluster, rank: int) -> list[int]:
    """Return the process ids of the trainers started by srun on this cluster as this rank."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if str(RUN) in command(int(path.name))]
    # Tests on another worker have a cluster of their own.
    expected = (f"\0SLURM_PROCID={rank}\0", f"\0SLURM_CONF={cluster.environment['SLURM_CONF']}\0")
    return [pid for pid in pids if all(entry in environment(pid) for entry in expected)]


@pytest.mark.parametrize("kill_on_bad_exit", [0, 1])
def test_killed_task(slurm: Callable[..., Run], cluster: Cluster, programs: Programs, kill_on_bad_exit: int) -> None:
    """If a task is killed, the other task exits within 30 s and names the lost rank, unless srun ends it first."""
    options = (f"--kill-on-bad-exit={kill_on_bad_exit}", "--nodes", 2, "--ntasks", 2)
    step = programs.start("srun", "--unbuffered", *options, *TRAIN, *LONG, **cluster.environment)
    wait_until_trains(step)
    (victim,) = find_tasks(cluster, 1)
    os.kill(victim, signal.SIGKILL)
    run = programs.finish(step, timeout=30)
    assert run.returncode == 128 + signal.SIGKILL
    assert not find_tasks(cluster, 0)
    messages = find_texts(run.stderr.splitlines(), start="run.py: ")
    if not kill_on_bad_exit or messages:  # srun may end the other task before the message
        (line,) = messages
        assert re.fullmatch(r"run.py: error: rank 0 lost rank 1\b.*", line), line
    wait_for(lambda: slurm("squeue", "--noheader").stdout == "")  # no job holds the nodes


def test_shells_without_srun(slurm: Callable[..., Run], clone: Path) -> None:
    """Without srun, a batch script and salloc train one process, as without a launcher."""
    command = " ".join(map(str, ("python", "train/run.py", *SHORT)))
    job = slurm("sbatch", "--wait", "--ntasks", 2, "--output", "job.out", "--wrap", command, cwd=clone)
    assert (job.returncode, (clone / "job.out").read_text().split(":")[0]) == (0, "single")
    run = slurm("salloc", "--ntasks", 2, *TRAIN, *SHORT)
    assert (run.returncode, run.stderr, run.stdout.split(":")[0]) == (0, "", "single")


def test_sbatch(slurm: Callable[..., Run], clone: Path) -> None:
    """slurm.sbatch trains two tasks with options of run.py, and saves to a folder of the job."""
    run = slurm("sbatch", "--parsable", "--wait", "train/scripts/slurm.sbatch", *SHORT, cwd=clone)
    job = run.stdout.strip()
    output = (clone / f"train-{job}.out").read_text()
    assert (run.returncode, output.count("saved 2 files")) == (0, 1), output
    assert_trained(clone / "ckpts" / f"job_{job}", 2)


def test_job_array(slurm: Callable[..., Run], clone: Path) -> None:
    """Each task of a job array trains with its own seed and saves to its own folder."""
    run = slurm("sbatch", "--parsable", "--wait", "--array=0-1", "train/scripts/slurm.sbatch", *SHORT, cwd=clone)
    assert run.returncode == 0, [file.read_text() for file in clone.glob("*.out")]
    folders = [clone / "ckpts" / f"job_{run.stdout.strip()}_seed_{seed}" for seed in (0, 1)]
    for folder in folders:
        assert_trained(folder, 2)
    assert len(differing(*(folder / "ddp_rank0.pth" for folder in folders))) > 10


def test_job_array_of_ranks(slurm: Callable[..., Run], clone: Path) -> None:
    """With slurm_array.sbatch, the tasks of a job array are the ranks of one run."""
    run = slurm("sbatch", "--parsable", "--wait", "train/scripts/slurm_array.sbatch", *SHORT, cwd=clone)
    assert run.returncode == 0, [file.read_text() for file in clone.glob("*.out")]
    assert_trained(clone / "ckpts" / f"array_{run.stdout.strip()}", 2)
    assert not (clone / "ckpts" / f"array_{run.stdout.strip()}" / "rendezvous").exists()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_scancel(slurm: Callable[..., Run], cluster: Cluster, programs: Programs, tmp_path: Path, name: str) -> None:
    """scancel, with its default signal or with --signal=USR1, makes both tasks save and stop after the same step."""
    process = start_long(programs, "srun", "--ntasks", 2, *TRAIN, **cluster.environment)
    cancel = ("scancel", *(() if name == "TERM" else ("--signal=USR1",)), "--user", getpass.getuser())
    assert slurm(*cancel).returncode == 0
    run = programs.finish(process, timeout=45)
    stopped_at(tmp_path / "ckpts" / ".resume" / "ddp", run.stderr, f"SIG{name}")
