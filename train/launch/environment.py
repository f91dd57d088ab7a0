"""Find out the rank and GPU of this process: from torchrun's variables, from options, or from SLURM's variables.

Every launcher ends in a RankContext, which also has the collectives of the trainer, and the rest of the trainer does
not depend on the launcher.
torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
SLURM: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from train.errors import RankError, UserError, refuse
from train.launch.launch_options import NO_OPTIONS, LaunchOptions
from train.mesh import Mesh

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankContext:
    """Rank, device and rendezvous address of this process, the same for every launcher.

    rank: 0..world_size-1 over all nodes. local_rank: 0..local_world_size-1 within this node. node: index of this
    machine. devices: all GPUs available to this process, `device` first; empty on the CPU. backend: of the process
    group; None without a group, and then a collective returns its input. init_method: tcp://host:port or file:///path.
    mesh: coordinates of this rank in the method's mesh; by default every rank has its own samples. launcher: its name.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    backend: str | None = None
    local_world_size: int = 1
    node: int = 0
    devices: tuple[torch.device, ...] = ()
    init_method: str = ""
    mesh: Mesh = field(default_factory=Mesh)
    launcher: str | None = None

    def __post_init__(self) -> None:
        if not self.mesh.names:
            object.__setattr__(self, "mesh", Mesh(self.rank, ("data",), (self.world_size,)))

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints."""
        return self.rank == 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.backend is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Gather small picklable values: a list in rank order, on every rank."""
        if self.backend is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every None has been replaced

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Run a block without collectives, and raise UserError on every rank if any rank raised it.

        If a rank raised it alone, the other ranks would wait in their next collective. Exceptions of other types are
        not exchanged.
        """
        failure = None
        try:
            yield
        except UserError as error:
            failure = str(error)
        failures = self.gather(failure)
        if all(text == failures[0] for text in failures):
            if failures[0] is not None:
                raise UserError(failures[0])
        else:
            rank = next(i for i, text in enumerate(failures) if text is not None)
            raise UserError(f"rank {rank}: {failures[rank]}")


TORCHRUN = "torchrun --nproc-per-node 2 train/run.py"
TORCHRUN_ADVICE = f"start with '{TORCHRUN}'"
SLURM_ADVICE = "start with 'srun --ntasks 2 python train/run.py'"
# Options of ours whose counterparts under torchrun and torch.distributed.launch are options of the launcher.
LAUNCHER_OPTIONS = {"--ip": "--master-addr", "--port": "--master-port"}
ADDRESS_OPTIONS = "--init-method file:///PATH, or --ip ADDRESS --port PORT"
HIGHEST_PORT = 65_535
# Ports for SLURM jobs, below Linux's range for outgoing connections, which starts at 32768.
FIRST_PORT, PORTS = 20_000, 12_000
# Consecutive ports for concurrent steps of a job.
STEPS_PER_JOB = 16


@dataclass(frozen=True)
class RankInfo:
    """Rank and rendezvous address of this process, as its launcher gives them.

    local_rank, local_world_size: None if the launcher does not know which processes share a machine.
    init_method: empty if no address is given. own_gpus: whether the process sees only its own GPUs, and two
    processes of a machine may both use number 0.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node: int
    init_method: str
    own_gpus: bool = False


def find_launcher(environment: Mapping[str, str], options: LaunchOptions) -> str:
    """Name the launcher of this process: torchrun, spawn, by_hand, slurm or alone.

    The order matters: if srun starts torchrun, SLURM's variables are set too.
    """
    signs = (
        ("torchrun", environment.keys() & {"RANK", "WORLD_SIZE"}),
        ("spawn", options.given("local_world_size")),
        ("by_hand", options.given("rank", "world_size", "init_method")),
        # --ip and --port may correct its address.
        ("slurm", _is_slurm_task(environment)),
        ("by_hand", options.given("ip", "port", "local_rank")),
    )
    for launcher, sign in signs:
        if sign:
            return launcher
    return "alone"


def is_group_requested(environment: Mapping[str, str], args: argparse.Namespace | None = None) -> bool:
    """Return whether the launcher or the options ask for a process group; then the default method is ddp."""
    options = LaunchOptions.from_args(args)
    launcher = find_launcher(environment, options)
    if launcher == "slurm" and options.spawn is None:
        # A batch script may run every command as a single task.
        return has_slurm_peers(environment)
    return launcher != "alone" or options.spawn is not None


def prints_for_all_ranks(environment: Mapping[str, str], args: argparse.Namespace | None = None) -> bool:
    """Return whether this process prints what all ranks have in common: rank 0, or every rank with its own shell."""
    launcher = find_launcher(environment, LaunchOptions.from_args(args))
    variable = {"torchrun": "RANK", "slurm": "SLURM_PROCID"}.get(launcher, "")
    return environment.get(variable, "0") == "0"


def make_rank_context(
    environment: Mapping[str, str], method: str, *, grouped: bool, options: LaunchOptions = NO_OPTIONS
) -> RankContext:
    """Describe this process.

    grouped: whether `method` needs a process group, and therefore a launcher. Raises UserError if the launcher does not
    fit the method, RankError for an invalid variable or option of this rank.
    """
    launcher = find_launcher(environment, options)
    if launcher == "alone":
        if grouped:
            raise UserError(f"--method {method} needs a launcher: {TORCHRUN_ADVICE}, or add --spawn 2")
        return _make_single_context(method, options, launcher)
    read = {"torchrun": read_torchrun, "slurm": read_slurm}.get(launcher, read_options)
    info = read(environment, options)
    if not grouped:
        if info.world_size > 1:
            raise UserError(f"--method {method} is one process, the launcher started {info.world_size}")
        return _make_single_context(method, options, launcher)
    if not info.init_method:
        raise RankError(f"RANK is set but MASTER_ADDR is not: {TORCHRUN_ADVICE}, or unset RANK")
    devices = choose_devices(options.gpus, info)
    local_rank = info.local_rank
    if local_rank is None:  # not given by hand
        local_rank = info.rank
        if devices:  # the same rank as for the choice of the GPU
            local_rank %= max(count_gpus(), 1)
    return RankContext(
        rank=info.rank,
        world_size=info.world_size,
        local_rank=local_rank,
        device=(*devices, CPU)[0],
        backend=choose_backend(options.backend, devices),
        local_world_size=info.local_world_size or 1,
        node=info.node,
        devices=devices,
        init_method=info.init_method,
        launcher=launcher,
    )


def _make_single_context(method: str, options: LaunchOptions, launcher: str) -> RankContext:
    if options.backend is not None:
        raise UserError(f"--backend {options.backend}: --method {method} has no process group")
    devices = choose_devices(options.gpus, None)
    if method == "single" and options.gpus is not None and len(devices) > 1:
        advice = f"use --method dp, or --spawn {len(devices)} for a process per GPU"
        raise UserError(f"--gpus {options.gpus}: --method single uses one GPU; {advice}")
    return RankContext(device=(*devices, CPU)[0], devices=devices, launcher=launcher)


def read_torchrun(environment: Mapping[str, str], options: LaunchOptions) -> RankInfo:
    """Read the variables of torchrun, torch.distributed.launch, or a user who sets them by hand."""
    for option in options.given("spawn", "rank", "world_size", "init_method", "ip", "port"):
        advice = "drop it, or unset the variables"
        if option in LAUNCHER_OPTIONS:
            advice += f"; did you mean {LAUNCHER_OPTIONS[option]} of the launcher, before train/run.py?"
        raise UserError(f"{option} under a launcher that has set RANK or WORLD_SIZE: {advice}")
    rank, world_size = _read_rank(environment, "RANK", "WORLD_SIZE", TORCHRUN_ADVICE)
    # Without local variables, all ranks are on one machine.
    local_rank, local_world_size = rank, world_size
    if environment.keys() & {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        local_rank, local_world_size = _read_rank(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", TORCHRUN_ADVICE)
    # torch.distributed.launch passes the option too.
    _check_local_rank(options, "LOCAL_RANK", local_rank)
    address, node = "", 0
    if "MASTER_ADDR" in environment:
        port = _read_number(environment, "MASTER_PORT", TORCHRUN_ADVICE)
        address = tcp_address(environment["MASTER_ADDR"], port)
    if "GROUP_RANK" in environment:
        node = _read_number(environment, "GROUP_RANK", TORCHRUN_ADVICE)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        init_method=address,
    )


def _check_local_rank(options: LaunchOptions, variable: str, local_rank: int) -> None:
    """Raise RankError if --local-rank contradicts the launcher's variable."""
    if options.local_rank not in (None, local_rank):
        raise RankError(f"--local-rank {options.local_rank} with {variable}={local_rank}: drop the option")


def read_options(environment: Mapping[str, str], options: LaunchOptions) -> RankInfo:  # noqa: ARG001  # as for launchers
    """Read --rank, --world-size and the address, from a user or from --spawn."""
    for missing in options.missing("rank", "world_size"):
        option = options.given("rank", "world_size", "init_method", "ip", "port", "local_rank")[0]
        raise UserError(f"{option} without {missing}: give each process --rank R --world-size N and {ADDRESS_OPTIONS}")
    rank, world_size = options.rank, options.world_size
    assert rank is not None
    assert world_size is not None
    refuse((world_size < 1, f"--world-size {world_size}: must be at least 1"))
    local_rank = options.local_rank or 0
    refuse(
        (not 0 <= rank < world_size, f"--rank {rank}: must be 0 to {world_size - 1} with --world-size {world_size}"),
        (not 0 <= local_rank <= rank, f"--local-rank {local_rank}: must be 0 to {rank} with --rank {rank}"),
        error=RankError,
    )
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=options.local_rank,
        local_world_size=options.local_world_size,
        node=0,
        init_method=read_address(options),
    )


def read_address(options: LaunchOptions) -> str:
    """Read the rendezvous address from the options. Raises UserError for a missing or ambiguous address."""
    if options.init_method is None:
        if options.ip is None or options.port is None:
            raise UserError(f"--rank {options.rank} without a rendezvous address: add {ADDRESS_OPTIONS}")
        return tcp_address(options.ip, options.port)
    for option in options.given("ip", "port"):
        raise UserError(f"--init-method and {option} both give the address: drop either option")
    return check_url(options.init_method)


def check_url(url: str) -> str:
    """Return the URL of --init-method in torch's spelling. Raises UserError."""
    try:
        parts = urlsplit(url)
        has_path = parts.path not in ("", "/")
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not has_path:
            return tcp_address(parts.hostname, parts.port)
    except ValueError as error:  # a port out of range, half an IPv6 address
        raise UserError(f"--init-method {url}: {error}") from error
    # With two slashes, the first folder of the path would be the host.
    if has_path and url == f"file://{parts.path}":
        return url
    raise UserError(f"--init-method {url}: must be file:///PATH, with three slashes, or tcp://ADDRESS:PORT")


def read_slurm(environment: Mapping[str, str], options: LaunchOptions) -> RankInfo:
    """Read the variables of a task of srun; --ip and --port, then MASTER_ADDR and MASTER_PORT, give the address."""
    rank, world_size = _read_rank(environment, "SLURM_PROCID", _slurm_size(environment), SLURM_ADVICE)
    node = _read_number(environment, "SLURM_NODEID", SLURM_ADVICE)
    local_rank = _read_number(environment, "SLURM_LOCALID", SLURM_ADVICE)
    _check_local_rank(options, "SLURM_LOCALID", local_rank)
    host = options.ip or environment.get("MASTER_ADDR") or find_first_slurm_host(environment, world_size)
    port = options.port
    if port is None:
        port = choose_slurm_port(environment)
    address = tcp_address(host, port)
    local_world_size = count_slurm_tasks(environment, node) or world_size
    # --gpus-per-task and --ntasks-per-gpu hide the GPUs of other tasks, --gpus-per-node and --gres do not. With two
    # tasks per GPU, both see the shared GPU only.
    per_task = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    own_gpus = per_task or environment.get("SLURM_NTASKS_PER_GPU") == "1"
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        init_method=address,
        own_gpus=own_gpus,
    )


def has_slurm_peers(environment: Mapping[str, str]) -> bool:
    """Return whether srun started several tasks. Raises RankError for an invalid variable."""
    return _is_slurm_task(environment) and _read_number(environment, _slurm_size(environment), SLURM_ADVICE) > 1


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    # The shell of a batch script has SLURM_PROCID=0 too, but only srun sets SLURM_STEP_ID.
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def _slurm_size(environment: Mapping[str, str]) -> str:
    # Inside an allocation of 4 tasks, `srun -n 2` starts a step of 2.
    if "SLURM_STEP_NUM_TASKS" in environment:
        return "SLURM_STEP_NUM_TASKS"
    return "SLURM_NTASKS"


def count_slurm_tasks(environment: Mapping[str, str], node: int) -> int | None:
    """Count the tasks of the step on a node: 2(x3),1 means three nodes with 2 tasks and one with 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        counts += [int(tasks)] * int(nodes or 1)
    if node >= len(counts):
        return None
    return counts[node]


def choose_slurm_port(environment: Mapping[str, str]) -> int:
    """Choose a port from 20000 to 31999: the same for all tasks of a step, and rarely the port of another step."""
    if "MASTER_PORT" in environment:
        return _read_number(environment, "MASTER_PORT", "unset it, or give a number")
    # Each task of a job array has a job id of its own.
    job = _read_number(environment, "SLURM_JOB_ID", SLURM_ADVICE)
    step = _read_number(environment, "SLURM_STEP_ID", SLURM_ADVICE)
    return FIRST_PORT + (job * STEPS_PER_JOB + step % STEPS_PER_JOB) % PORTS


def find_first_slurm_host(environment: Mapping[str, str], world_size: int) -> str:
    """Return the first node of the step, which runs rank 0; SLURM writes lists as node[01-03,07]."""
    if world_size == 1:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise RankError(f"the environment variable SLURM_STEP_NODELIST is not set: {SLURM_ADVICE}")
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


def tcp_address(host: str, port: int) -> str:
    """Format an address, IPv6 in brackets. Raises UserError for an invalid port."""
    if not 1 <= port <= HIGHEST_PORT:
        raise UserError(f"port {port}: must be 1 to {HIGHEST_PORT}; see --port and MASTER_PORT")
    if ":" in host:
        host = f"[{host}]"
    return f"tcp://{host}:{port}"


def _read_number(environment: Mapping[str, str], name: str, advice: str) -> int:
    text = environment.get(name)
    if text is None:
        raise RankError(f"the environment variable {name} is not set: {advice}")
    if not is_number(text):
        raise RankError(f"the environment variable {name} is {text!r}, not a number: {advice}")
    return int(text)


def is_number(text: str) -> bool:
    """Return whether a text consists of the digits 0 to 9."""
    return text.isascii() and text.isdigit()


def _read_rank(environment: Mapping[str, str], rank_name: str, size_name: str, advice: str) -> tuple[int, int]:
    rank, size = _read_number(environment, rank_name, advice), _read_number(environment, size_name, advice)
    if rank >= size:
        raise RankError(f"{rank_name}={rank} with {size_name}={size}: must be below; {advice}")
    return rank, size


def choose_devices(gpus: str | None, info: RankInfo | None) -> tuple[torch.device, ...]:
    """List the GPUs of this process; empty means the CPU.

    gpus: the text of --gpus. info: None for a process without a group, which may use all GPUs. Ranks that share a
    machine get a GPU each, because NCCL refuses two ranks on the same GPU. Raises UserError, or RankError if the
    problem concerns this machine only.
    """
    devices = tuple(torch.device("cuda", number) for number in list_gpus(gpus))
    if info is None or not devices:
        return devices
    if info.own_gpus:
        return devices[:1]
    count = len(devices)
    local_rank = info.local_rank
    if local_rank is None:
        # Started by hand, so it is unknown which ranks share this machine: distribute all ranks evenly.
        local_rank = info.rank % count
    # Known, except if started by hand.
    ranks = info.local_world_size or 0
    if ranks > count:
        problem = f"--gpus {gpus}: {_gpus(count)} for {ranks} ranks on this machine; each needs one"
        refuse((gpus is not None, problem))
        return ()
    if local_rank >= count:
        raise RankError(f"--local-rank {local_rank}: this machine has {_gpus(count)} for its ranks")
    return (devices[local_rank],)


def list_gpus(gpus: str | None) -> list[int]:
    """List the numbers of the GPUs that --gpus selects. Raises UserError, or RankError for a missing GPU."""
    if gpus == "none":
        return []
    if gpus is None:
        return list(range(count_gpus()))
    return parse_gpus(gpus)


def describe_idle_gpus(gpus: str | None, devices: tuple[torch.device, ...], ranks: int) -> str:
    """Return a warning if ranks use the CPU because this machine has too few GPUs, else an empty string.

    ranks: on this machine.
    """
    if gpus is not None or devices or not count_gpus():
        return ""
    return f"{_gpus(count_gpus())} for {ranks} ranks on this machine: all use the CPU; --gpus none hides this line"


def count_gpus() -> int:
    """Count the visible GPUs; CUDA_VISIBLE_DEVICES may hide some."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def parse_gpus(gpus: str) -> list[int]:
    """Parse the numbers in --gpus. Raises UserError, or RankError for a GPU missing on this machine."""
    texts = [text.strip() for text in gpus.split(",")]
    if not all(is_number(text) for text in texts):
        raise UserError(f"--gpus {gpus}: must be comma-separated numbers like 0,1, or none for the CPU")
    numbers = [int(text) for text in texts]
    for number, count in Counter(numbers).items():
        refuse((count > 1, f"--gpus {gpus}: GPU {number} is repeated"))
    if max(numbers) >= count_gpus():
        existing = _gpus(count_gpus())
        if count_gpus() > 1:
            existing += f", 0 to {count_gpus() - 1}"
        raise RankError(f"--gpus {gpus}: this machine has {existing}; or give --gpus none")
    return numbers


def choose_backend(backend: str | None, devices: tuple[torch.device, ...]) -> str:
    """Choose NCCL for GPUs and gloo for CPUs, unless --backend is given. Raises UserError."""
    if devices:
        return backend or "nccl"
    problem = "--backend nccl needs a GPU for each rank, but the ranks use the CPU: give --backend gloo"
    refuse((backend == "nccl", problem))
    return "gloo"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number or 'no'} GPUs"
