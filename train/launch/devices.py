"""Which GPUs a process computes on, or the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.errors import RankError, UserError

if TYPE_CHECKING:
    from train.launch.place import Place


def choose_devices(gpus: str | None, place: Place | None) -> tuple[torch.device, ...]:
    """List the GPUs of this process; empty means the CPU.

    gpus: the text of --gpus. place: None for a process that runs alone and may use them all. Of several on one
    machine each gets one of its own, for NCCL refuses two ranks on one GPU. Raises UserError, or RankError where
    only this machine is concerned.
    """
    if gpus == "none":
        return ()
    numbers = list(range(count())) if gpus is None else parse(gpus)
    if place is None:
        return tuple(torch.device("cuda", number) for number in numbers)
    if not numbers:
        return ()
    if place.own_gpus:
        return (torch.device("cuda", numbers[0]),)
    if place.local_world_size is None:
        # By hand: nobody has said which ranks share this machine. Let them take turns.
        local_rank = place.rank % len(numbers) if place.local_rank is None else place.local_rank
        if local_rank >= len(numbers):
            raise RankError(f"--local-rank {local_rank}: this machine has {_gpus(len(numbers))} for its ranks")
    elif place.local_world_size > len(numbers):
        if gpus is not None:
            ranks = place.local_world_size
            raise UserError(f"--gpus {gpus}: {_gpus(len(numbers))} for {ranks} ranks on this machine; each needs one")
        return ()
    else:
        local_rank = place.local_rank or 0
    return (torch.device("cuda", numbers[local_rank]),)


def idle_gpus(gpus: str | None, devices: tuple[torch.device, ...], ranks: int) -> str:
    """Say that this machine has GPUs, too few for its ranks, so that these compute on the CPU; else nothing.

    ranks: on this machine.
    """
    if gpus is not None or devices or not count():
        return ""
    return f"{_gpus(count())} for {ranks} ranks on this machine: all compute on the CPU; --gpus none if that is meant"


def count() -> int:
    """Count the GPUs that this process sees; CUDA_VISIBLE_DEVICES may hide some."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def parse(gpus: str) -> list[int]:
    """Read the numbers in --gpus. Raises UserError, or RankError for a GPU that this machine has not."""
    texts = [text.strip() for text in gpus.split(",")]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise UserError(f"--gpus {gpus}: needs numbers with commas between them, as 0,1, or none for the CPU")
    numbers = [int(text) for text in texts]
    for number in numbers:
        if numbers.count(number) > 1:
            raise UserError(f"--gpus {gpus}: {number} is there twice")
        if number >= count():
            there = f"has {_gpus(count())}" + (f", 0 to {count() - 1}" if count() > 1 else "")
            raise RankError(f"--gpus {gpus}: this machine {there}; use these, or --gpus none")
    return numbers


def choose_backend(backend: str | None, devices: tuple[torch.device, ...]) -> str:
    """Choose how the process group sends: NCCL between GPUs, gloo between CPUs. Raises UserError."""
    if backend == "nccl" and not devices:
        raise UserError("--backend nccl needs a GPU for each rank, these compute on the CPU: use --backend gloo")
    return backend or ("nccl" if devices else "gloo")


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number or 'no'} GPUs"
