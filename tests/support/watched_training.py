"""A training script that knows nothing of syncheck, with faults: the program of tests/live/test_watched_programs.py.

python watched_training.py FAULT METHOD RANKS PORT     METHOD: fork, spawn, forkserver, file (forked ranks that meet at
a file), or torchrun, which starts it
"""

from __future__ import annotations

import contextlib
import os
import random
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


class OwnOptimizer:
    """An optimizer that knows nothing of torch's class."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Follow the gradients."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(0.1 * parameter.grad)


FAULTY_STEP = 5
FAULTY_RANK = 1


def make_loader(fault: str, rank: int) -> DataLoader[Any]:
    """Return the loader of a rank."""
    inputs = torch.arange(SAMPLES * 6.0).reshape(SAMPLES, 6).sin()
    data = TensorDataset(inputs, torch.zeros(SAMPLES))
    sampler: Any = DistributedSampler(data)
    if fault == "join":
        # The ranks run out of data one after the other.
        sampler = range(rank, SAMPLES - 12 * rank, 3)
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
    elif fault == "frozen":
        parameters[0].data[0] += 1
    elif fault in ("memory", "own optimizer"):
        parameters[-1].data[0] += 1
    elif fault == "two faults":
        # Beside the gradient of one tensor, the values of another one, which no gradient explains.
        parameters[-1].grad[0] += 1
        parameters[0].data[0] += 1


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


def connect(rank: int, ranks: int, store: str) -> int:
    """Connect the ranks, at an address or as torchrun says; return the rank."""
    if store:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank()


def make_model(fault: str) -> Any:
    """Return the model of a rank, wrapped unless its gradients are averaged by hand."""
    torch.manual_seed(dist.get_rank() if fault == "seeds" else 0)
    layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)
    model: Any = torch.nn.Sequential(*layers)
    if fault == "frozen":
        layers[0].requires_grad_(False)
    return model if fault in ("manual", "seeds") else DistributedDataParallel(model)


def make_optimizer(fault: str, parameters: list[Any], *, is_faulty: bool) -> Any:
    """Return the optimizer of a rank."""
    if fault == "own optimizer":
        return OwnOptimizer(parameters)
    if fault == "join":
        # The moments of AdamW would differ after the context, which synchronizes parameters only.
        return torch.optim.SGD(parameters)
    return torch.optim.AdamW(parameters, lr=0.02 if fault == "lr" and is_faulty else 0.01)


def begin_epoch(fault: str, model: Any, loader: Any, epoch: int) -> Any:
    """Shuffle the data; return the context of the epoch."""
    if fault == "join":
        return model.join()
    if fault not in ("no-set-epoch", "same-batch", "overlap"):
        loader.sampler.set_epoch(epoch)
    return contextlib.nullcontext()


class Training:
    """The objects that one rank trains with."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.rank = dist.get_rank()
        self.is_faulty = self.rank == FAULTY_RANK
        self.model = make_model(fault)
        self.head = torch.nn.Linear(3, 2)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parameters += self.head.parameters() if fault == "head" else ()
        self.optimizer = make_optimizer(fault, parameters, is_faulty=self.is_faulty)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=fault == "overflow")
        # Each rank trains a head of its own, with an optimizer of its own.
        self.own_head = torch.optim.SGD(self.head.parameters()) if fault == "own head" else None
        self.steps = 0

    def run(self, batch: Any) -> None:
        """Train on one batch."""
        self.steps += 1
        # Of two micro-batches, the first one is not reduced.
        is_first_half = self.fault == "accumulation" and self.steps % 2 == 1
        if self.fault != "accumulation" or is_first_half:
            self.optimizer.zero_grad()
        is_local = is_first_half or (self.fault == "no_sync" and self.steps == FAULTY_STEP)
        with self.model.no_sync() if is_local else contextlib.nullcontext():
            self.compute_gradients(batch)
        if not is_first_half:
            self.update()

    def compute_gradients(self, batch: Any) -> None:
        """Run the forward and backward passes."""
        output = (self.model.module if self.fault == "module" else self.model)(batch)
        loss = (self.head(output) if self.fault == "head" else output).square().mean()
        if self.own_head is not None:
            self.head(output.detach()).square().mean().backward()
            self.own_head.step()
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """Step, after the fault."""
        if self.fault in ("manual", "seeds"):
            average(self.model)
        is_fault = self.is_faulty and self.steps == FAULTY_STEP
        if is_fault:
            end(self.fault)
            damage_gradients(self.fault, self.model)
        if is_fault and self.fault == "skip":
            return
        if self.fault == "own optimizer":
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def train(rank: int, ranks: int, fault: str, store: str) -> None:
    """Train on one rank."""
    rank = connect(rank, ranks, store)
    random.seed(0)
    training = Training(fault)
    loader = make_loader(fault, rank)
    torch.manual_seed(0 if fault == "rng" else rank)
    for epoch in range(3):
        with begin_epoch(fault, training.model, loader, epoch):
            for batch, _ in loader:
                training.run(batch)
    flat = torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])
    # In one piece, so that no other rank writes between.
    os.write(1, f"rank {rank} ends with {hash(tuple(flat.tolist()))} and {random.random()}\n".encode())
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, and return the largest exit code."""
    fault, method, ranks, port = sys.argv[1:]
    if method == "torchrun":
        train(0, 0, fault, "")
        return 0
    context: Any = mp.get_context("fork" if method == "file" else method)
    address = f"file://{os.getcwd()}/meet" if method == "file" else f"tcp://127.0.0.1:{port}"
    processes = [context.Process(target=train, args=(rank, int(ranks), fault, address)) for rank in range(int(ranks))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
