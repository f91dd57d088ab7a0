"""torchrun, torch.distributed.launch, and their environment variables set by hand."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import find_all, list_fields, list_files, list_names
from support.programs import LONG, RUN, SHORT, assert_trained, children, command, errors, find_ranks, wait_until_trains
from support.started import alive, wait_for

if TYPE_CHECKING:
    from support.programs import Programs

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.mark.slow
def test_standalone(programs: Programs, tmp_path: Path) -> None:
    """`torchrun --standalone` trains ddp on two processes with the store of its agent."""
    run = programs.run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, RUN, *SHORT)
    assert (run.returncode, run.stderr) == (0, "")
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_one_process_is_a_group(programs: Programs, tmp_path: Path) -> None:
    """Under torchrun, ddp and single train on one process; with ddp, the last line recommends --spawn 2."""
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", 1, RUN)
    for method in ("ddp", "single"):
        run = programs.run(*launcher, "--method", method, *SHORT)
        assert (run.returncode, run.stderr) == (0, "")
        assert ("--spawn 2" in run.stdout.splitlines()[-1]) is (method == "ddp")
        assert list_names((tmp_path / "ckpts").glob(f"{method}*")) == [f"{method}_rank0.pth"]


@pytest.mark.slow
def test_default_number_of_processes(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """`torchrun train/run.py --save-per-rank` trains two replicas, which differ in BatchNorm's statistics."""
    run = programs.run(*TORCHRUN, "--master-port", free_port, RUN, *SHORT, timeout=100)
    assert run.returncode == 0
    (line,) = errors([run])
    assert "--spawn 1" in line
    assert_trained(tmp_path / "ckpts", 2)
    assert "no replica" not in run.stdout
    compared = programs.run(sys.executable, "-m", "syncheck", "compare", *sorted((tmp_path / "ckpts").glob("*.pth")))
    assert (compared.returncode, "SYN201" in compared.stdout) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_torchrun(programs: Programs, tmp_path: Path, number: signal.Signals) -> None:
    """If torchrun is terminated or killed, the ranks started by --spawn save a state and end."""
    saves = ("--save-per-rank", "--checkpoint-every", 100_000)
    process = programs.start(*TORCHRUN, "--standalone", RUN, *LONG, *saves, "--timeout", 60)
    wait_until_trains(process)
    (first,) = children(process.pid)
    ranks = find_ranks(first)
    assert len(ranks) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    wait_for(lambda: not any(command(pid) for pid in (first, *ranks)), timeout=30)
    assert len(list((tmp_path / "ckpts" / ".resume" / "ddp").glob("step_*/rank_*.pth"))) == 2
    assert not alive(process)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.launch") is None, reason="this torch has no torch.distributed.launch"
)
def test_the_older_launcher(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """`python -m torch.distributed.launch`, which adds --local-rank, trains ddp if this torch has it."""
    launcher = ("-m", "torch.distributed.launch", "--nproc-per-node", 2, "--master-port", free_port)
    run = programs.run(sys.executable, *launcher, RUN, *SHORT)
    assert run.returncode == 0
    assert "Traceback" not in run.stderr
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_restarted_ranks_meet_in_the_same_store(programs: Programs, tmp_path: Path) -> None:
    """After a restart by torchrun, the ranks train again, although the store has keys of the first attempt."""
    wrapper = tmp_path / "once.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        f"sys.argv = [{str(RUN)!r}, *sys.argv[1:]]\n"
        f"sys.path.insert(0, {str(RUN.parent.parent)!r})\n"
        "from train.run import main\n"
        "code = main().code\n"
        "os._exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else code)\n"
    )
    run = programs.run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, wrapper, *SHORT)
    assert run.returncode == 0
    assert run.stdout.count("saved 2 files") == 2
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_two_agents_restart_after_a_killed_rank(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """If a rank is killed, two torchrun agents restart their ranks and train, even if their restart counts differ."""
    programs.forks = False  # the rank is found by its first variables
    agents = [
        programs.start(
            *(*TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1, "--max-restarts", 2),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--rdzv-id", "test"),
            *("--rdzv-conf", f"is_host={1 - node}", "--local-addr", "127.0.0.1"),
            *(RUN, *LONG, "--epochs", 40, "--save-per-rank"),
        )
        for node in range(2)
    ]
    # Only rank 0 prints, and either agent may start rank 0.
    (with_zero,), _, _ = select.select(list_fields(agents, "stdout"), [], [], 60)
    assert with_zero.readline().startswith("ddp: epoch  1/40")
    (agent,) = find_all(agents, stdout=with_zero)
    (zero,) = [pid for pid in children(agent.pid) if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(zero, signal.SIGKILL)
    runs = programs.finish_all(agents, timeout=90)
    assert list_fields(runs, "returncode") == [0, 0], list_fields(runs, "stderr")
    assert sum(run.stdout.count("saved 2 files") for run in runs) == 1
    assert list_files(tmp_path / "ckpts") == ["ddp_rank0.pth", "ddp_rank1.pth"]
