"""A few processes in one gloo group, kept for the whole session: starting them costs seconds, a scenario does not."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from train.launch import RankContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

STUCK = 20  # seconds after which a rank gives up waiting for its peers, and the scenario fails


class Ranks:
    """Runs a function on every rank: `ranks(function, *arguments)` calls `function(ctx, *arguments)`.

    The function must live in a module, and return something that can be pickled. When it raises on a rank, or
    takes too long, all ranks are killed, the test fails with that rank's traceback, and the next call starts
    new ones.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size, self.folder = world_size, folder
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        deadline = time.monotonic() + timeout
        results, problems = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                problems.append(f"rank {rank}: no answer in {timeout} s")
                continue
            try:
                ok, result = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                ok, result = False, "the process is gone"
            results.append(result)
            if not ok:
                problems.append(f"rank {rank}: {result}")
        if problems:
            self.kill()
            raise AssertionError("\n".join(problems))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = self.folder / f"rendezvous_{secrets.token_hex(8)}"  # such a file serves once
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def kill(self) -> None:
        """End the processes of this pool, and no others."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes = [], []


def _serve(rank: int, world_size: int, store: Path, pipe: Connection) -> None:
    """Answer calls until the other end is closed."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=STUCK),
    )
    ctx = RankContext(rank, world_size, rank, torch.device("cpu"), "gloo")
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = True, function(ctx, *arguments)
        except Exception:  # noqa: BLE001 - whatever it is, the caller's test fails with it
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
