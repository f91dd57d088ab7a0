"""SLURM: the tasks of one srun, alone or inside sbatch and salloc; a job array is several such jobs.

https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from train.errors import RankError
from train.launch.place import Place, number, rank_of, tcp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.launch.options import LaunchOptions

ADVICE = "start with 'srun --ntasks 2 python train/run.py'"
# Below 32768, where Linux begins to give ports to any program that connects somewhere.
FIRST_PORT, PORTS = 20_000, 12_000
STEPS = 16  # consecutive ports of one job, so that its steps can run side by side


def recognizes(environment: Mapping[str, str], options: LaunchOptions) -> bool:  # noqa: ARG001  # the shared shape
    """Tell a task of srun from the shell of a batch script, which has SLURM_PROCID=0 as well, but no peers.

    Only srun makes steps. (Seen in SLURM 22.05: the batch shell and the shell of salloc have no SLURM_STEP_ID.)
    """
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def several(environment: Mapping[str, str], options: LaunchOptions) -> bool:  # noqa: ARG001  # the shared shape
    """Tell whether srun started more than one task: one alone is what a batch script runs everything as."""
    return number(environment, _tasks(environment), ADVICE) > 1


def place(environment: Mapping[str, str], options: LaunchOptions) -> Place:
    """Translate SLURM's variables; --ip and --port, then MASTER_ADDR and MASTER_PORT, come before them."""
    rank, world_size = rank_of(environment, "SLURM_PROCID", _tasks(environment), ADVICE)
    node = number(environment, "SLURM_NODEID", ADVICE)
    local_rank = number(environment, "SLURM_LOCALID", ADVICE)
    if options.local_rank is not None and options.local_rank != local_rank:
        raise RankError(f"--local-rank {options.local_rank} with SLURM_LOCALID={local_rank}: drop the option")
    host = options.ip or environment.get("MASTER_ADDR") or first_host(environment, world_size)
    where = tcp(host, master_port(environment) if options.port is None else options.port)
    local_world_size = tasks_on(node, environment) or world_size
    return Place(rank, world_size, local_rank, local_world_size, node, where, own_gpus=_gpus_are_bound(environment))


def _tasks(environment: Mapping[str, str]) -> str:
    # The step's own number: inside an allocation of 4 tasks, `srun -n 2` starts 2.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"


def tasks_on(node: int, environment: Mapping[str, str]) -> int | None:
    """Count the tasks on the step's node of that index: 2(x3),1 means three nodes with 2 and one with 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        counts += [int(tasks)] * int(nodes or 1)
    return counts[node] if node < len(counts) else None


def master_port(environment: Mapping[str, str]) -> int:
    """Choose a port, 20000 to 31999, that all tasks of a step agree on and that other steps rarely have."""
    if "MASTER_PORT" in environment:
        return number(environment, "MASTER_PORT", "unset it, or give a number")
    # Each task of a job array has a job id of its own.
    job, step = number(environment, "SLURM_JOB_ID", ADVICE), number(environment, "SLURM_STEP_ID", ADVICE)
    return FIRST_PORT + (job * STEPS + step % STEPS) % PORTS


def first_host(environment: Mapping[str, str], world_size: int) -> str:
    """Name the first node of the step, where rank 0 runs: SLURM writes lists as node[01-03,07]."""
    if world_size == 1:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise RankError(f"the environment variable SLURM_STEP_NODELIST is not set: {ADVICE}")
    if not re.search(r"[\[,]", nodes):
        return nodes
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise RankError(f"'{' '.join(command)}' failed ({error}): set MASTER_ADDR to the node of rank 0") from error


def _gpus_are_bound(environment: Mapping[str, str]) -> bool:
    # --gpus-per-task and --ntasks-per-gpu hide the GPUs of the other tasks; --gpus-per-node and --gres show all.
    per_task = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    return per_task or environment.get("SLURM_NTASKS_PER_GPU") == "1"  # of two tasks on one GPU each would be alone
