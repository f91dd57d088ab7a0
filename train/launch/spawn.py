"""--spawn N: start N ranks on this machine with torch's spawn, wait for them, and report one exit status.

Each rank gets the options for starting it by hand, with a rendezvous file in a temporary folder, or the address of
--ip and --port.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch.multiprocessing.spawn import spawn

from train.errors import refuse
from train.launch.environment import has_slurm_peers, list_gpus
from train.launch.launch_options import LaunchOptions
from train.launch.signals import (
    GRACE,
    SIGNALS,
    ExitStatus,
    StopRequest,
    block_signals,
    exit_process,
    exit_with_parent,
    grace_expired,
    open_closed_streams,
    print_line,
    signals_to_socket,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from multiprocessing.process import BaseProcess
    from socket import socket

    Work = Callable[[argparse.Namespace], ExitStatus]

# Seconds for the remaining ranks to end by themselves after a rank has failed.
LINGER = 10.0
# Seconds between SIGTERM and SIGKILL.
KILL = 3.0
RENDEZVOUS_OPTIONS = ("rank", "world_size", "init_method", "ip", "port")
TORCHRUN_PREFIX, TORCHRUN_ID = "TORCHELASTIC_", "TORCHELASTIC_RUN_ID"
# Variables of torchrun without the prefix.
TORCHRUN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


def replace_torchrun(environment: MutableMapping[str, str], args: argparse.Namespace, *, saves: bool) -> None:
    """Allow --spawn under a torchrun with one process, and imply it if the files of several ranks are wanted.

    torchrun does not reveal whether one process is its default or --nproc-per-node 1, so only the trainer's own options
    count as a choice. Changes both arguments. saves: whether each rank writes a file. Raises UserError for invalid
    --gpus.
    """
    if not is_single_torchrun(environment, args):
        return
    if args.spawn is None:
        ranks = count_implied_ranks(args)
        needs_replica = saves and args.method is None
        if ranks < 2 or not needs_replica:
            return
        args.spawn = ranks
        print_line(f"torchrun started one process, but a replica needs a second rank: {ranks} ranks are started; "
                   "--spawn 1 keeps one")  # fmt: skip
    args.local_rank, args.under_torchrun = None, True
    for name in list(environment):
        if name.startswith(TORCHRUN_PREFIX) or name in TORCHRUN_VARIABLES:
            del environment[name]
    threading.Thread(target=_stop_with_launcher, args=(os.getppid(),), daemon=True).start()


def is_single_torchrun(environment: Mapping[str, str], args: argparse.Namespace) -> bool:
    """Return whether torchrun has started one process, and neither SLURM nor an option starts other ranks."""
    if environment.get("WORLD_SIZE") != "1" or TORCHRUN_ID not in environment:
        return False
    # torch.distributed.launch adds --local-rank 0.
    has_rank = args.local_rank not in (None, 0) or LaunchOptions.from_args(args).given(*RENDEZVOUS_OPTIONS)
    return not (has_slurm_peers(environment) or has_rank)


def count_implied_ranks(args: argparse.Namespace) -> int:
    """Return one rank per GPU, or two if there are fewer. Raises UserError for invalid --gpus."""
    gpus = len(list_gpus(args.gpus))
    # An explicit single GPU, or NCCL with a single GPU, keeps one rank.
    if args.gpus not in (None, "none") or args.backend == "nccl":
        return gpus
    return max(2, gpus)


def _stop_with_launcher(launcher: int) -> None:
    """Send SIGTERM to this process when torchrun has ended; it may have been killed."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def check_options(environment: Mapping[str, str], options: LaunchOptions) -> None:
    """Raise UserError for an invalid number, or if another launcher has started this process."""
    number = options.spawn or 0
    wrong = options.given("local_rank", "rank", "world_size", "init_method")
    address = options.given("ip", "port")
    refuse(
        (number < 1, f"--spawn {number}: must be at least 1"),
        (wrong, f"--spawn and {' '.join(wrong[:1])}: --spawn sets it for each rank; drop one of the options"),
        (
            len(address) == 1,
            f"--spawn and {' '.join(address[:1])}: an address needs both --ip and --port; add the other or drop it",
        ),
        (
            not environment.keys().isdisjoint({"RANK", "WORLD_SIZE"}),
            "--spawn under a launcher that has set RANK or WORLD_SIZE: drop it, or unset the variables",
        ),
        (
            has_slurm_peers(environment),
            "--spawn under srun, which has started several tasks: drop it, or use srun --ntasks 1",
        ),
    )


def make_rank_args(args: argparse.Namespace, rank: int, folder: Path) -> argparse.Namespace:
    """Return the arguments of one rank."""
    number = args.spawn
    url = None
    if args.ip is None:
        url = (folder / "rendezvous").as_uri()
    local = {"init_method": url, "local_rank": rank, "local_world_size": number}
    return argparse.Namespace(**vars(args) | {"spawn": None, "rank": rank, "world_size": number} | local)


def run_ranks(work: Work, args: argparse.Namespace) -> ExitStatus:
    """Run `work` in `args.spawn` processes and return the status of the run.

    work: sent to each process by pickle, like a function of a module. No process and no file is left, even if a signal
    ends this process.
    """
    # A handler must not raise: a second Ctrl-C would interrupt the cleanup after the first.
    with signals_to_socket(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) as signals:
        folder = Path(tempfile.mkdtemp(prefix="train-"))
        processes: Sequence[BaseProcess] = []
        try:
            # A terminal sends Ctrl-C to every process; this one passes it on.
            with block_signals(signal.SIGINT):
                context = spawn(_run_rank, (work, args, folder), args.spawn, join=False)  # type: ignore[no-untyped-call]
            processes = context.processes
            number = wait_for_ranks(processes, signals)
            codes = [process.exitcode for process in processes]
            statuses = read_statuses(len(processes), folder)
            if number:
                return status_after_signal(number, codes, statuses)
            return choose_status(codes, statuses)
        finally:
            end_ranks(processes)
            shutil.rmtree(folder, ignore_errors=True)
            if processes and sys.stdout.isatty():
                # An interrupted progress bar has hidden the cursor.
                sys.stdout.write("\x1b[?25h")
                sys.stdout.flush()


def _run_rank(rank: int, work: Work, args: argparse.Namespace, folder: Path) -> None:
    """Run one rank, and leave its status in a file for the parent."""
    open_closed_streams()
    exit_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    if getattr(args, "under_torchrun", False):
        # torchrun signals the process group of the parent, and the parent passes signals on.
        os.setpgrp()
    SIGNALS.listen(prints=False)
    try:
        status = work(make_rank_args(args, rank, folder))
        partial = folder / f"partial.{rank}"
        partial.write_text(json.dumps(asdict(status)))
        partial.rename(folder / f"status.{rank}")
    except BaseException:  # noqa: BLE001  # torch's own report could blame the wrong rank
        if folder.exists():  # otherwise the parent was killed, and this rank is about to end
            sys.stderr.write(traceback.format_exc())
        exit_process(1)
    exit_process(status.code)


def wait_for_ranks(processes: Sequence[BaseProcess], signals: socket) -> int:
    """Wait until all ranks have ended, or LINGER seconds after a rank has failed; return the number of a signal, or 0.

    The first signal is passed on, and the ranks get time to reach an agreed step; a second one ends the wait.
    """
    request, deadline = StopRequest(), math.inf
    running = list(processes)
    while running and time.monotonic() < deadline:
        events = wait_until(deadline, [signals, *(process.sentinel for process in running)])
        if signals in events:
            received = signals.recv(1)[0]
            is_first = request.since is None
            if request.receive(received) or received == signal.SIGHUP:
                break
            if is_first:
                _send_signal(running, received)
            deadline = min(deadline, request.deadline(GRACE + KILL))
        running = [process for process in running if process.exitcode is None]
        if math.isinf(deadline) and any(process.exitcode for process in processes):
            deadline = time.monotonic() + LINGER
    return request.number


def _send_signal(processes: Sequence[BaseProcess], number: int) -> None:
    """Pass a signal on; Ctrl-C as SIGTERM, because the ranks block SIGINT."""
    if number == signal.SIGINT:
        number = signal.SIGTERM
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def read_statuses(ranks: int, folder: Path) -> list[ExitStatus | None]:
    """Read the status of each rank; None if a rank has left no file."""
    statuses: list[ExitStatus | None] = []
    for rank in range(ranks):
        path = folder / f"status.{rank}"
        status = None
        if path.exists():
            status = ExitStatus(**json.loads(path.read_text()))
        statuses.append(status)
    return statuses


def status_after_signal(number: int, codes: Sequence[int | None], statuses: Sequence[ExitStatus | None]) -> ExitStatus:
    """Choose the status after a signal: the status of the ranks if they reached an agreed step."""
    if set(codes) == {0}:
        return ExitStatus()  # the training was complete
    name = signal.Signals(number).name
    cause = choose_cause(statuses)
    if cause.code > 128:
        # The ranks received SIGTERM instead of SIGINT.
        passed_on = signal.Signals(cause.code - 128).name
        return ExitStatus(128 + number, cause.message.replace(passed_on, name, 1), shared=True)
    if 128 + signal.SIGTERM in codes:  # the ranks received the signal, but did not agree on a step
        return grace_expired(number)
    return ExitStatus(128 + number, f"ended by {name}")


def choose_status(codes: Sequence[int | None], statuses: Sequence[ExitStatus | None]) -> ExitStatus:
    """Choose the status with the cause: first of a killed rank, then of an error, last of a lost peer.

    codes: of the ranks; negative for a signal, None for a rank that still runs.
    """
    ended = {rank: code for rank, code in enumerate(codes) if code}
    for rank, code in ended.items():
        if code < 0:
            text = f"rank {rank} was ended by signal {-code}"
            with suppress(ValueError):  # real-time signals have no names
                text += f" ({signal.Signals(-code).name})"
            return ExitStatus(1, text)
    for rank, code in ended.items():
        if statuses[rank] is None:
            return ExitStatus(1, f"rank {rank} ended with code {code}; see its message above")
    cause = choose_cause(statuses)
    if cause.code != 1 or None not in codes:
        return cause
    silent = f"rank {codes.index(None)} "
    if silent in cause.message:
        return cause
    return ExitStatus(1, f"{silent}did not respond: {cause.message}")


def choose_cause(statuses: Sequence[ExitStatus | None]) -> ExitStatus:
    """Choose the status of a failed rank: an error of the user (2) before a lost peer (1), a shared error first."""
    reported = [status for status in statuses if status is not None]
    # Among equal statuses, max returns the first rank's.
    return max(reported, key=operator.attrgetter("code", "shared"), default=ExitStatus())


def end_ranks(processes: Sequence[BaseProcess]) -> None:
    """End the remaining ranks: SIGTERM, and SIGKILL after KILL seconds."""
    # A signal to a process that has ended does nothing.
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + KILL
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        process.kill()
        process.join()
