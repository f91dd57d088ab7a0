"""Signals that end a run: at once while it starts, and after an agreed step once it trains; and how a process ends.

Python runs a signal handler only when its main thread returns from C++, and a collective may hold it for --timeout.
The wakeup file descriptor gets the number of a signal at once, and a thread reads it.

A process ends with one message on stderr and an exit code, and on errors rank 0 ends first.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process, resource_tracker
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from train.launch.environment import prints_for_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from train.launch.environment import RankContext

# Seconds for rank 0 to print the error first; torchrun ends them sooner.
LINGER = 10.0
# srun ends the other ranks only with --kill-on-bad-exit.
LINGER_SLURM = 3.0


@dataclass(frozen=True)
class ExitStatus:
    """How the run of one rank ended.

    message: one line for stderr, or empty. shared: whether all ranks end with this message, and only rank 0 prints it.
    """

    code: int = 0
    message: str = ""
    shared: bool = False


INTERRUPTED = ExitStatus(128 + signal.SIGINT, "interrupted", shared=True)

# Seconds after Ctrl-C in which a starting process may end by KeyboardInterrupt.
INTERRUPT = 2.0
# Seconds in which a training must stop: torchrun (multiprocessing/api.py, close) and SLURM (KillWait) kill a process
# 30 s after the first signal.
GRACE = 20.0
# Approximate seconds between agreements of the ranks on a signal.
EVERY = 0.5
# Seconds: a terminal and torchrun both deliver one Ctrl-C; a later signal counts as a second.
REPEAT = 1.0
# SLURM can send SIGUSR1 as a notice before its time limit (--signal=USR1@60), without a kill 30 s later.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def signals_to_socket(*numbers: int) -> Iterator[socket.socket]:
    """Replace the handlers of these signals during the block: each signal only writes its number to the socket."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # nohup, and shells that start background jobs, ignore some signals on purpose.
    handlers = {}
    for number in numbers:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            handlers[number] = handler
    with reader, writer:
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in handlers:
            signal.signal(number, lambda *_: None)
        try:
            yield reader
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)


@contextmanager
def block_signals(*numbers: int) -> Iterator[None]:
    """Block signals during the block, and permanently in processes started by the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        # When multiprocessing starts it, it unblocks the signals.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """The signals that ask this process to stop.

    number: the first signal, or 0. since: the time of the first signal with a deadline; None without.
    """

    def __init__(self) -> None:
        self.number = 0
        self.since: float | None = None

    def receive(self, number: int) -> bool:
        """Record a signal. Returns whether the process must end now, because it has received a second one."""
        self.number = self.number or number
        if number == signal.SIGUSR1:  # a notice of SLURM, without a deadline
            return False
        if self.since is None:
            self.since = time.monotonic()
        return time.monotonic() - self.since > REPEAT

    def deadline(self, grace: float) -> float:
        """Return the end of the time of grace; infinity without a signal that has a deadline."""
        if self.since is None:
            return math.inf
        return self.since + grace


class Signals:
    """The signals received by this process.

    number: the first signal of STOP, or 0. Only programs call `listen`: a library must not replace a process's
    signal handlers.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.number = 0
        self.prints = True
        self._deferred = False
        self._raised = threading.Event()

    def listen(self, *, prints: bool = True) -> None:
        """Install the handlers: Ctrl-C then ends this process even while it waits inside torch for another rank.

        prints: whether this process prints the reason if it cannot end normally. Call it on the main thread.
        """
        self.prints = prints
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handle(signal.SIGINT, self._interrupt)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # A fork shares the socket, and its signals would count as signals of this process. Data loading does not fork
        # (train/data/loading.py), but a library may.
        os.register_at_fork(after_in_child=self._reset_in_fork)
        sys.unraisablehook = _ignore_interrupts
        threading.Thread(target=self._watch, daemon=True).start()

    def defer(self) -> None:
        """Only record signals of STOP in `number` from now on.

        After a signal the process has `grace` seconds; then, or at a second signal, it ends. Without `listen` nothing
        changes.
        """
        if hasattr(self, "_reader"):
            self._deferred = True
            # --spawn starts ranks with SIGINT blocked.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._handle(number, lambda *_: None)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in signals_to_socket
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            self._raised.set()
            signal.default_int_handler(number, frame)

    def _reset_in_fork(self) -> None:
        """Ignore signals in a fork, because its parent needs it until the agreed step."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self._deferred:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        """Read signal numbers, and end the process when its time is up."""
        request = StopRequest()
        while wait_until(request.deadline(self.grace), [self._reader]):
            number = self._reader.recv(1)[0]
            if not self._deferred:
                self._end_early(number)
            elif number in STOP:
                is_second = request.receive(number)
                self.number = request.number
                if is_second:
                    self._end_now(number)
        self._exit(grace_expired(self.number, self.grace))

    def _end_early(self, number: int) -> None:
        """End a starting process after Ctrl-C, unless Python raises KeyboardInterrupt, maybe at a debugger's prompt."""
        if number == signal.SIGINT and not self._raised.wait(INTERRUPT):
            self._exit(INTERRUPTED)
        self._raised.clear()

    def _end_now(self, number: int) -> None:
        """End the process at a second signal."""
        if number == signal.SIGINT:
            self._exit(INTERRUPTED)
        self._exit(ExitStatus(128 + number, f"ended by {signal.Signals(number).name}"))

    def _exit(self, status: ExitStatus) -> None:
        if self.prints and prints_for_all_ranks(os.environ):
            print_status(status)
        os._exit(status.code)


def wait_until(deadline: float, objects: Sequence[Any]) -> list[Any]:
    """Return the objects that are ready to be read, as soon as there are any; empty at the deadline.

    deadline: in the seconds of time.monotonic; infinity waits forever. objects: sockets and sentinels of processes.
    """
    if math.isinf(deadline):
        return connection.wait(objects)
    return connection.wait(objects, max(deadline - time.monotonic(), 0))


def _ignore_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    """Do not print a KeyboardInterrupt from a destructor or a callback."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def grace_expired(number: int, grace: float = GRACE) -> ExitStatus:
    """Return the status after a signal if the ranks did not stop in time."""
    text = f"ended by {signal.Signals(number).name}: the ranks did not reach an agreed step within {grace:g} s"
    return ExitStatus(128 + number, f"{text}; earlier checkpoints are complete", shared=True)


# A process has one set of signal handlers.
SIGNALS = Signals()


class SignalAgreement:
    """Lets all ranks agree on a signal received by any rank.

    A signal may reach ranks at different steps, or only one rank, and a rank that stopped alone would leave the other
    ranks waiting in their next collective. Therefore ranks agree at common steps, with one all-reduce of two numbers:
    the largest signal number, and the longest time since the last agreement. From this time every rank computes the
    same number of steps until the next agreement: as many as take half a second, and at least 1.

    signals: of this process; None disables agreements, for example in a notebook. between: whether ranks may agree
    within an epoch; not if they make different numbers of steps.
    """

    def __init__(self, ctx: RankContext, signals: Signals | None = None, *, between: bool = True) -> None:
        self.ctx, self.signals, self.between = ctx, signals, between
        self.due = 0  # step
        # Step and time of the last agreement; at step 0 the speed is unknown.
        self.last = (0, 0.0)

    def begin(self) -> None:
        """Start to handle signals."""
        if self.signals is not None:
            self.signals.defer()

    def agree_on_signal(self, step: int, *, now: bool = False) -> int:
        """Return the number of the signal received by any rank, or 0; a collective when an agreement is due.

        Call it on every rank after each optimizer step, counted from 1. Pass `now` after an evaluation, whose time is
        not part of the speed.
        """
        if self.signals is None:
            return 0
        if self.ctx.backend is None:
            return self.signals.number
        if not now and (step < self.due or not self.between):
            return 0
        before, since = self.last
        # float64 represents both numbers exactly enough; NCCL needs a tensor on the device.
        mine = [float(self.signals.number), time.monotonic() - since]
        largest = torch.tensor(mine, dtype=torch.float64, device=self.ctx.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        number, seconds = largest.tolist()
        self.last = (step, time.monotonic())
        if not now:
            # At the first agreement the speed is unknown.
            steps = count_steps_within(step - before, seconds) if before else 1
            self.due = step + steps
        return int(number)


def count_steps_within(steps: int, seconds: float, every: float = EVERY) -> int:
    """Return the number of steps that take `every` seconds, at least 1. seconds: the time of `steps` steps."""
    return max(1, int(every * steps / max(seconds, 1e-6)))


def print_status(status: ExitStatus) -> None:
    """Print the message of a status to stderr, if it has one."""
    if not status.message:
        return
    prefix = "error: " if status.code in (1, 2) else ""
    print_line(prefix + status.message)


def print_once(ctx: RankContext, text: str) -> None:
    """Print one line to stderr on rank 0 only."""
    if ctx.is_main:
        print_line(text)


def print_line(text: str) -> None:
    """Print one line to stderr in a single write, to keep the lines of several ranks apart."""
    with suppress(OSError):  # the reader may be gone
        sys.stderr.write(f"run.py: {text}\n")
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Replace stdout and stderr by /dev/null if the shell has closed them (>&-): Python sets them to None."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


def exit_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Start a thread to call `clean_up` and end this process when its multiprocessing parent is killed."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def choose_linger() -> float:
    """Return the seconds for which this rank waits for rank 0; 0 for rank 0 itself, and without a launcher."""
    for launcher, rank_variable, seconds in (
        ("TORCHELASTIC_RUN_ID", "RANK", LINGER),
        ("SLURM_STEP_ID", "SLURM_PROCID", LINGER_SLURM),
    ):
        if launcher in os.environ and os.environ.get(rank_variable, "0") != "0":
            return seconds
    return 0.0


def exit_process(code: int, *, shared: bool = False, signaled: bool = False) -> NoReturn:
    """End this process; after an error rank 0 goes first.

    shared: rank 0 prints the message of all ranks. signaled: the launcher has already signaled all ranks.

    torchrun ends all ranks when any rank has failed, and might kill rank 0 before it has printed the error. Therefore
    every other rank waits for SIGTERM, and exits with the same code.

    The interpreter is not torn down, because gloo's threads may still release the tensors of the last collective, and
    abort the process if the interpreter is gone (https://github.com/pytorch/pytorch/pull/179291; with torch 2.15 a DDP
    script of 20 lines aborted in every fifth run).
    """
    # Rank 0 prints errors of all ranks, and in any case the errors of the user.
    rank_zero_prints = code == 2 or (code == 1 and shared)
    linger = choose_linger()
    if linger and rank_zero_prints and not signaled:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(linger)
    # torch 2.6 creates a temporary folder on import, which only the end of the interpreter would remove.
    folder = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if isinstance(folder, TemporaryDirectory):
        with suppress(OSError):
            folder.cleanup()
    with suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
