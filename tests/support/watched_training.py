"""A training script that knows nothing of syncheck, with faults: the program of tests/live/test_watched_programs.py.

python watched_training.py FAULT METHOD RANKS PORT     METHOD: fork, spawn, forkserver, or torchrun, which starts it
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import torch
import torch._dynamo  # DDP imports it; forked ranks need not do it again
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

SAMPLES = 64
FAULTY_STEP = 5
FAULTY_RANK = 1


def make_loader(fault: str, rank: int) -> DataLoader[Any]:
    """Return the loader of a rank."""
    inputs = torch.arange(SAMPLES * 6.0).reshape(SAMPLES, 6).sin()
    data = TensorDataset(inputs, torch.zeros(SAMPLES))
    sampler: Any = DistributedSampler(data)
    if fault == "same-batch":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    elif fault == "overlap":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    return DataLoader(data, 4, sampler=sampler)


def damage_gradients(fault: str, model: Any) -> None:
    """Change the gradients of one rank after the reduction."""
    parameters = list(model.parameters())
    if fault == "clip":
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    elif fault in ("one tensor", "manual"):
        parameters[-1].grad[0] += 1
    elif fault == "overflow":
        parameters[0].grad[0] = float("inf")


def end(fault: str) -> None:
    """End one rank."""
    if fault == "error":
        raise ValueError("an error of the script")
    if fault == "exit":
        sys.exit(7)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def average(model: Any) -> None:
    """Average the gradients by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank: int, ranks: int, fault: str, store: str) -> None:
    """Train on one rank."""
    if store:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)
    model: Any = torch.nn.Sequential(*layers)
    head = torch.nn.Linear(3, 2)
    if fault != "manual":
        model = DistributedDataParallel(model)
    parameters = [*model.parameters(), *(head.parameters() if fault == "head" else ())]
    is_faulty = rank == FAULTY_RANK
    optimizer = torch.optim.AdamW(parameters, lr=0.02 if fault == "lr" and is_faulty else 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=fault == "overflow")
    loader = make_loader(fault, rank)
    torch.manual_seed(0 if fault == "rng" else rank)
    step = 0
    for epoch in range(3):
        if fault not in ("no-set-epoch", "same-batch", "overlap"):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch, _ in loader:
            step += 1
            # Of two micro-batches, the first one is not reduced.
            is_first_half = fault == "accumulation" and step % 2 == 1
            if fault != "accumulation" or is_first_half:
                optimizer.zero_grad()
            with model.no_sync() if is_first_half else contextlib.nullcontext():
                output = model(batch)
                loss = (head(output) if fault == "head" else output).square().mean()
                scaler.scale(loss).backward()
            if is_first_half:
                continue
            if fault == "manual":
                average(model)
            if step == FAULTY_STEP and is_faulty:
                end(fault)
                damage_gradients(fault, model)
                if fault == "skip":
                    continue
            scaler.step(optimizer)
            scaler.update()
    digest = hash(tuple(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()))
    # In one piece, so that no other rank writes between.
    os.write(1, f"rank {rank} ends with {digest}\n".encode())
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, and return the largest exit code."""
    fault, method, ranks, port = sys.argv[1:]
    if method == "torchrun":
        train(0, 0, fault, "")
        return 0
    context: Any = mp.get_context(method)
    address = f"tcp://127.0.0.1:{port}"
    processes = [context.Process(target=train, args=(rank, int(ranks), fault, address)) for rank in range(int(ranks))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
