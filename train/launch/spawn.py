"""--spawn N: this process starts N others on its machine, and answers for them.

Each of them gets the options that one would type by hand, and meets the others in a file that nobody else knows.
"""

from __future__ import annotations

import argparse
import json
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
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from torch.multiprocessing.spawn import spawn

from train.errors import UserError
from train.launch import slurm, torchrun
from train.launch.devices import count, parse
from train.launch.leaving import Ending, end_with_parent, leave, write_line
from train.launch.options import LaunchOptions
from train.launch.signals import GRACE, REPEAT, SIGNALS, held_back, name, overdue, signals_as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from multiprocessing.process import BaseProcess
    from socket import socket

    Work = Callable[[argparse.Namespace], Ending]

LINGER = 10.0  # seconds that the others get to end by themselves after one has failed
KILL = 3.0  # seconds between asking a process to end and ending it


def take_over(environment: MutableMapping[str, str], args: argparse.Namespace, *, saves: bool) -> None:
    """Let --spawn work under a torchrun that started one process, and imply it for files that need a replica.

    torchrun cannot tell its default of one process from --nproc-per-node 1, so only the trainer's own options count as
    a choice. Changes both arguments. saves: whether each rank shall write a file. Raises UserError for wrong --gpus.
    """
    options = LaunchOptions.of(args)
    by_srun = slurm.recognizes(environment, options) and slurm.several(environment, options)
    if not torchrun.started_one(environment) or by_srun or args.local_rank not in (None, 0):
        return  # torch.distributed.launch adds --local-rank 0
    if options.typed("rank", "world_size", "init_method", "ip", "port"):
        return
    if args.spawn is None:
        listed = args.gpus not in (None, "none")
        gpus = len(parse(args.gpus)) if listed else count() * (args.gpus is None)
        # An explicit single GPU, or NCCL with a single GPU, keeps one rank.
        ranks = gpus if listed or args.backend == "nccl" else max(2, gpus)
        if args.method is not None or not saves or ranks < 2:
            return
        args.spawn = ranks
        write_line(
            f"torchrun started one process, and one rank has no replica: {ranks} are spawned; --spawn 1 keeps one"
        )
    args.local_rank, args.under_torchrun = None, True
    torchrun.forget(environment)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()


def _end_with_launcher(launcher: int) -> None:
    """Stop this run as SIGTERM does once torchrun is gone; it may have been killed."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def wanted(options: LaunchOptions) -> bool:
    """Tell whether this process shall start others."""
    return options.spawn is not None


def check(environment: Mapping[str, str], options: LaunchOptions) -> None:
    """Raise UserError for a number that cannot be, or where another launcher is at work too."""
    number = options.spawn or 0
    if number < 1:
        raise UserError(f"--spawn {number}: needs 1 or more")
    wrong = options.typed("rank", "world_size", "local_rank", "init_method", "ip", "port")
    if wrong:
        raise UserError(f"--spawn and {wrong[0]}: --spawn chooses that itself; drop one of them")
    if torchrun.recognizes(environment, options):
        raise UserError("--spawn under a launcher, which has set RANK or WORLD_SIZE: drop it, or unset these")
    if slurm.recognizes(environment, options) and slurm.several(environment, options):
        raise UserError("--spawn under srun, which has started several tasks: drop it, or use srun --ntasks 1")


def options_of_rank(args: argparse.Namespace, rank: int, folder: Path) -> argparse.Namespace:
    """Write the arguments that one would type to start this rank by hand."""
    number = args.spawn
    where = {"init_method": (folder / "meeting").as_uri(), "local_rank": rank, "local_world_size": number}
    return argparse.Namespace(**vars(args) | {"spawn": None, "rank": rank, "world_size": number} | where)


def start(work: Work, args: argparse.Namespace) -> Ending:
    """Run `work` in `args.spawn` processes, and wait for them.

    work: a function of a module, which each process imports. Returns how the run ended; no process and no file
    is left then, nor if a signal ends this process.
    """
    # Signals are noted rather than raised: a second Ctrl-C must not interrupt the cleaning up after the first.
    with signals_as_bytes(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) as signals:
        folder = Path(tempfile.mkdtemp(prefix="train-"))
        processes: Sequence[BaseProcess] = []
        try:
            # Ctrl-C reaches every process of a terminal. This one hears it and tells the others.
            with held_back(signal.SIGINT):
                context = spawn(_run, (work, args, folder), args.spawn, join=False)  # type: ignore[no-untyped-call]
            processes = context.processes
            number = wait(processes, signals)
            codes, notes = [process.exitcode for process in processes], endings(len(processes), folder)
            return after_signal(number, codes, notes) if number else verdict(codes, notes)
        finally:
            end(processes)
            shutil.rmtree(folder, ignore_errors=True)
            if processes and sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # rank 0 may have been ended within its bar, which hides the cursor
                sys.stdout.flush()


def _run(rank: int, work: Work, args: argparse.Namespace, folder: Path) -> None:
    """Be one rank: leave the ending in a file, for the parent to judge and to print."""
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    if getattr(args, "under_torchrun", False):
        os.setpgrp()  # torchrun signals the whole group of the parent, which already passes signals on
    SIGNALS.listen(speaks=False)
    try:
        ending = work(options_of_rank(args, rank, folder))
        note = folder / f"writing.{rank}"
        note.write_text(json.dumps(asdict(ending)))
        note.rename(folder / f"ending.{rank}")
    except BaseException:  # noqa: BLE001  # nothing may reach torch's own reporting, which blames the victims
        if folder.exists():  # or the parent has gone, and this rank is about to
            sys.stderr.write(traceback.format_exc())
        leave(1)
    leave(ending.code)


def wait(processes: Sequence[BaseProcess], signals: socket) -> int:
    """Wait until all have ended, or some time after one has failed; returns the number of a signal, or 0.

    The first signal is passed on, and they get the time to come to an agreed step; a second one ends the wait.
    """
    running = list(processes)
    number, since, deadline = 0, float("inf"), float("inf")
    while running and time.monotonic() < deadline:
        patience = None if deadline == float("inf") else max(deadline - time.monotonic(), 0)
        if signals in connection.wait([signals, *(process.sentinel for process in running)], patience):
            another = signals.recv(1)[0]
            if another == signal.SIGHUP or (another != signal.SIGUSR1 and time.monotonic() - since > REPEAT):
                return number or another
            number = number or another
            if since == float("inf"):
                _tell(running, another)
            if another != signal.SIGUSR1 and since == float("inf"):
                since = time.monotonic()
                deadline = min(deadline, since + GRACE + KILL)
        running = [process for process in running if process.exitcode is None]
        if deadline == float("inf") and any(process.exitcode for process in processes):
            deadline = time.monotonic() + LINGER
    return number


def _tell(processes: Sequence[BaseProcess], number: int) -> None:
    """Pass a signal on; Ctrl-C as SIGTERM, for they hold the other back."""
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)


def after_signal(number: int, codes: Sequence[int | None], notes: Sequence[Ending | None]) -> Ending:
    """Choose the ending of a run that a signal was to end: what the ranks say, if they came to an agreed step."""
    if not any(codes) and None not in codes:
        return Ending()  # they were through
    for note in notes:
        if note is not None and note.code > 128:
            # They know the signal by which they were told.
            told = name(note.code - 128)
            return Ending(128 + number, note.message.replace(told, name(number), 1), alike=True)
    if 128 + signal.SIGTERM in codes:  # in time to be asked, but not to agree
        return overdue(number)
    return Ending(128 + number, f"ended by {name(number)}")


def endings(number: int, folder: Path) -> list[Ending | None]:
    """Read what the processes have left; None of one that ended on its way, or runs on."""
    found: list[Ending | None] = []
    for rank in range(number):
        path = folder / f"ending.{rank}"
        found.append(Ending(**json.loads(path.read_text())) if path.exists() else None)
    return found


def verdict(codes: Sequence[int | None], notes: Sequence[Ending | None]) -> Ending:
    """Choose the ending that says why: first who died, then who refused, last who lost another.

    codes: of the ranks; negative for a signal, None for one that still runs.
    """
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            with suppress(ValueError):  # real-time signals have no names
                return Ending(1, f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name})")
            return Ending(1, f"rank {rank} was ended by signal {-code}")
    for rank, (code, note) in enumerate(zip(codes, notes, strict=True)):
        if code and note is None:
            return Ending(1, f"rank {rank} ended with code {code}; its own message stands above")
    failed = [note for note in notes if note is not None and note.code != 0]
    # 2 is the user's mistake, 1 another rank's end; all ranks' word counts more than one's.
    ending = min(failed, key=lambda note: (-note.code, not note.alike), default=Ending())
    if ending.code == 1 and None in codes and f"rank {codes.index(None)} " not in ending.message:
        return Ending(1, f"rank {codes.index(None)} stood still: {ending.message}")
    return ending


def end(processes: Sequence[BaseProcess]) -> None:
    """End those that still run, politely at first."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    deadline = time.monotonic() + KILL
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
