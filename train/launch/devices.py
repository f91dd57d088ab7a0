"""Select the GPUs of a process, or the CPU, and the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.errors import RankError, UserError

if TYPE_CHECKING:
    from train.launch.environment import RankInfo


def choose_devices(gpus: str | None, info: RankInfo | None) -> tuple[torch.device, ...]:
    """List the GPUs of this process; empty means the CPU.

    gpus: the text of --gpus. info: None for a process without a group, which may use all GPUs. Ranks that share a
    machine get a GPU each, because NCCL refuses two ranks on the same GPU. Raises UserError, or RankError if the
    problem concerns this machine only.
    """
    if gpus == "none":
        return ()
    numbers = list(range(count_gpus())) if gpus is None else parse_gpus(gpus)
    if info is None:
        return tuple(torch.device("cuda", number) for number in numbers)
    if not numbers:
        return ()
    if info.own_gpus:
        return (torch.device("cuda", numbers[0]),)
    if info.local_world_size is None:
        # Started by hand, so it is unknown which ranks share this machine: distribute all ranks evenly.
        local_rank = info.rank % len(numbers) if info.local_rank is None else info.local_rank
        if local_rank >= len(numbers):
            raise RankError(f"--local-rank {local_rank}: this machine has {_gpus(len(numbers))} for its ranks")
    elif info.local_world_size > len(numbers):
        if gpus is not None:
            ranks = info.local_world_size
            raise UserError(f"--gpus {gpus}: {_gpus(len(numbers))} for {ranks} ranks on this machine; each needs one")
        return ()
    else:
        local_rank = info.local_rank or 0
    return (torch.device("cuda", numbers[local_rank]),)


def describe_idle_gpus(gpus: str | None, devices: tuple[torch.device, ...], ranks: int) -> str:
    """Return a warning if ranks use the CPU because this machine has too few GPUs, else an empty string.

    ranks: on this machine.
    """
    if gpus is not None or devices or not count_gpus():
        return ""
    return f"{_gpus(count_gpus())} for {ranks} ranks on this machine: all use the CPU; --gpus none hides this line"


def count_gpus() -> int:
    """Count the visible GPUs; CUDA_VISIBLE_DEVICES may hide some."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def parse_gpus(gpus: str) -> list[int]:
    """Parse the numbers in --gpus. Raises UserError, or RankError for a GPU missing on this machine."""
    texts = [text.strip() for text in gpus.split(",")]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise UserError(f"--gpus {gpus}: must be comma-separated numbers like 0,1, or none for the CPU")
    numbers = [int(text) for text in texts]
    for number in numbers:
        if numbers.count(number) > 1:
            raise UserError(f"--gpus {gpus}: GPU {number} is repeated")
        if number >= count_gpus():
            numbered = f", 0 to {count_gpus() - 1}" if count_gpus() > 1 else ""
            raise RankError(f"--gpus {gpus}: this machine has {_gpus(count_gpus())}{numbered}; or give --gpus none")
    return numbers


def choose_backend(backend: str | None, devices: tuple[torch.device, ...]) -> str:
    """Choose NCCL for GPUs and gloo for CPUs, unless --backend is given. Raises UserError."""
    if backend == "nccl" and not devices:
        raise UserError("--backend nccl needs a GPU for each rank, but the ranks use the CPU: give --backend gloo")
    return backend or ("nccl" if devices else "gloo")


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number or 'no'} GPUs"
