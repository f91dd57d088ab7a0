"""Programs whose ranks form several groups, for tests/live/test_watched_meshes.py.

python watched_meshes.py KIND RANKS PORT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # DDP imports it; forked ranks need not do it again
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
# Counted from 0.
FAULTY_STEP = 2
# A step that is judged before this time ends.
LATE_SECONDS = 0.4
VERY_LATE_SECONDS = 3.0
# The objects of the last training.
KEPT: list[Any] = []


def make_batch(step: int, shard: int) -> torch.Tensor:
    """Return the inputs of a step. shard: of the data."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + shard))


def train_two_wrappers(rank: int) -> Any:
    """Train a model of ranks 0 and 1, and another one of ranks 0 and 2; rank 1 takes its time before each step."""
    models = []
    for ranks in ((0, 1), (0, 2)):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            models.append(DistributedDataParallel(torch.nn.Linear(8, 2), process_group=group))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(make_batch(step, rank)).square().mean().backward()
            time.sleep(LATE_SECONDS * (rank == 1))
            optimizer.step()
    return [parameter for model in models for parameter in model.parameters()]


def train_again(rank: int, kind: str) -> Any:
    """Train a model. With "state", rank 1 changes the state of its optimizer after the last step."""
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(make_batch(step, rank)).square().mean().backward()
        optimizer.step()
    # The end is compared if the model and the optimizer are still there.
    KEPT[:] = [model, optimizer]
    if "state" in kind and rank == 1:
        optimizer.state[model.module.weight]["exp_avg_sq"] += 1
    return list(model.parameters())


def train_two_models(rank: int, kind: str) -> Any:
    """Train a model of ranks 0 and 1, and one of ranks 2 and 3. With "state", rank 3 changes that of its optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "replica"))
    model = DistributedDataParallel(torch.nn.Linear(8, 2), process_group=mesh["replica"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(make_batch(step, rank)).square().mean().backward()
        optimizer.step()
    if "state" in kind and rank == 3:
        optimizer.state[model.module.weight]["momentum_buffer"] += 1
    KEPT[:] = [model, optimizer]
    return list(model.parameters())


def train_with_a_late_rank(rank: int) -> Any:
    """Train with two ranks, of which rank 1 is late with its first step, and write whether rank 0 waits for it."""
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(make_batch(0, rank)).square().mean().backward()
    time.sleep(VERY_LATE_SECONDS * rank)
    begin = time.monotonic()
    optimizer.step()
    waits = time.monotonic() - begin > VERY_LATE_SECONDS / 2
    os.write(1, f"rank {rank} waits: {waits}\n".encode())
    return list(model.parameters())


def train_with_another_optimizer(rank: int, kind: str) -> Any:
    """Train with three ranks, of which rank 1 has one more optimizer: of a head of its own, or of a part of the model.

    With the head, a gradient of rank 2 is wrong at the third step.
    """
    head = torch.nn.Linear(2, 2)
    has_own = kind == "own optimizer" and rank == 1
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1)] if has_own else []
    layers = torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    parts = layers if kind == "split optimizer" and rank == 1 else [model]
    optimizers += [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = model(make_batch(step, rank))
        output.square().mean().backward()
        head(output.detach()).square().mean().backward()
        if kind == "own optimizer" and rank == 2 and step == FAULTY_STEP:
            layers[0].bias.grad += 1
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


class Model(torch.nn.Module):
    """An embedding and a layer in two parts, as a plan of tensor parallelism shards them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the activations of tokens."""
        hidden: torch.Tensor = self.down(self.up(self.embedding(tokens)).relu())
        return hidden


def train_tensor_parallel(rank: int, kind: str) -> Any:
    """Train with a mesh of replicas and tensor-parallel ranks.

    kind: "tp", "ddp tp", "fsdp tp" or "sequence", where each rank takes a part of the batch by design; with "faulty",
    the ranks of one model draw batches of their own from the third step on.
    """
    replicas = 1 if "sequence" in kind or kind.startswith("tp") else 2
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "tp"))
    replicated, local = Replicate(), Shard(1)
    plan: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=replicated), "up": ColwiseParallel()}
    plan["down"] = RowwiseParallel()
    if "sequence" in kind:
        plan = {"up": ColwiseParallel(input_layouts=local), "down": RowwiseParallel(output_layouts=local)}
    model: Any = parallelize_module(Model(), mesh["tp"], plan)
    if "ddp" in kind:
        _pre_dp_module_transform(model)
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    if "fsdp" in kind:
        model = fully_shard(model, mesh=mesh["dp"])
    if "replicated" in kind:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("r", "s", "tp"))["r", "s"])
    if "compiled" in kind:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        is_local = "sequence" in kind or ("faulty" in kind and step >= FAULTY_STEP)
        shard = rank if is_local else mesh["dp"].get_local_rank()
        tokens = make_batch(step, shard).mul(8).long().remainder(32)
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        # A batch that does not train, on each rank another one.
        with torch.no_grad():
            model(make_batch(step, rank).mul(8).long().remainder(32))
    return optimizer.param_groups[0]["params"]


def strike(kind: str, place: str) -> None:
    """End or delay a rank at the place in a step that the kind has: "forward", "backward" or "step"."""
    if place not in kind.split():
        return
    if "kill" in kind:
        os.kill(os.getpid(), signal.SIGKILL)
    if "error" in kind:
        raise ValueError("an error of the script")
    if "slow" in kind:
        time.sleep(VERY_LATE_SECONDS)


def train_hybrid(rank: int, kind: str) -> Any:
    """Train a model whose shards are replicated, and a layer beside it that is part of no mesh.

    kind: "hsdp" and faults: at the third step "clip" or "skip" on the last replica, from it on "lr" on rank 1, always a
    "head" that trains outside, or a "batch" that is equal on all ranks. "accumulate" sums two passes for each step,
    without synchronization in the first one; "partly" reduces shards in both passes; "each" reduces all in both.
    At the third step, the last ranks "kill" themselves, have an "error", or are "slow", before what `strike` names.
    "early" steps before the first pass; with "alone" rank 0 has a forward pass of its own. "flat" has one rank per
    replica, and "sharded" has no replicas.
    """
    shards = {"flat": 1, "sharded": dist.get_world_size()}.get(kind.split()[-1], 2)
    replicas = dist.get_world_size() // shards
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    if replicas == 1:
        mesh = mesh["shard"]
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    torch.manual_seed(rank)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    head = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(head.weight, 0.5)
    torch.nn.init.zeros_(head.bias)
    parameters = [*model.parameters(), *(head.parameters() if "head" in kind else ())]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    begin_hybrid(rank, kind, model, optimizer)
    is_last = rank // shards == replicas - 1
    passes = 1 if {"accumulate", "partly", "each"}.isdisjoint(kind.split()) else 2
    for step in range(STEPS):
        is_faulty = step == FAULTY_STEP and is_last
        if step == FAULTY_STEP and "lr" in kind and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.02
        for part in range(passes):
            model.set_requires_gradient_sync("accumulate" not in kind or part == 1)
            if "partly" in kind:
                model.set_requires_all_reduce(part == 1)
            inputs = make_batch(step, 0 if "batch" in kind else 10 * part + rank)
            if is_faulty:
                strike(kind, "forward")
            loss = head(model(inputs)).square().mean()
            if is_faulty:
                strike(kind, "backward")
            loss.backward()
        if is_faulty:
            strike(kind, "step")
        if is_faulty and "clip" in kind:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if not (is_faulty and "skip" in kind):
            optimizer.step()
        optimizer.zero_grad()
    return parameters


def begin_hybrid(rank: int, kind: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Do what a hybrid kind does before its first step, "early" or "alone"."""
    if "early" in kind:
        # As torch.distributed.checkpoint creates the state that it loads.
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    if "alone" in kind:
        if rank == 0:
            model(make_batch(0, 0))
        dist.barrier()


def train_context_parallel(rank: int, kind: str) -> Any:
    """Train on halves of sequences, as `context_parallel` shards them. "faulty": rank 1 has sequences of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs = make_batch(step, rank if "faulty" in kind and step >= FAULTY_STEP else 0)
        with context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[0]):
            model(inputs).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def train_first_fsdp(_rank: int, kind: str) -> Any:
    """Train with FSDP1, on two replicas of two shards with "hybrid". "clip": rank 1 clips alone from step 6 on.

    No hook shows its reductions, so ranks are held to what their first steps showed.
    """
    mesh, strategy = None, ShardingStrategy.FULL_SHARD
    if "hybrid" in kind:
        mesh, strategy = init_device_mesh("cpu", (2, 2)), ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(
        torch.nn.Linear(8, 2), device_mesh=mesh, sharding_strategy=strategy, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * STEPS):
        model(make_batch(step, dist.get_rank())).square().mean().backward()
        if "clip" in kind and step >= 2 * STEPS - 3 and dist.get_rank() == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


PROGRAMS = {
    "two wrappers": lambda rank, _kind: train_two_wrappers(rank),
    "two models": train_two_models,
    "two models state": train_two_models,
    "again": train_again,
    "again state": train_again,
    "cp": train_context_parallel,
    "cp faulty": train_context_parallel,
    "own optimizer": train_with_another_optimizer,
    "split optimizer": train_with_another_optimizer,
    "fsdp1": train_first_fsdp,
    "fsdp1 hybrid": train_first_fsdp,
    "fsdp1 hybrid clip": train_first_fsdp,
    "late": lambda rank, _kind: train_with_a_late_rank(rank),
}


def train(rank: int, ranks: int, kind: str, address: str, barrier: Any) -> None:
    """Train on one rank; "again" trains twice, each time with a process group at the same address."""
    for training in ["again", kind] if kind.startswith("again") else [kind]:
        train_once(rank, ranks, training, address)
        if kind.startswith("again"):
            # A rank must not connect to the store of the first training, which a wrapper on rank 0 keeps alive.
            KEPT.clear()
            barrier.wait()


def train_once(rank: int, ranks: int, kind: str, address: str) -> None:
    """Train on one rank with a process group."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    program = train_hybrid if kind.startswith("hsdp") else PROGRAMS.get(kind, train_tensor_parallel)
    parameters = program(rank, kind)
    numbers = []
    for parameter in parameters:
        numbers += getattr(parameter, "_local_tensor", parameter).detach().flatten().tolist()
    # In one piece, so that no other rank writes between.
    os.write(1, f"rank {rank} ends with {hash(tuple(numbers))}\n".encode())
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, and return the largest exit code."""
    kind, count, port = sys.argv[1:]
    address = f"tcp://127.0.0.1:{port}"
    context = mp.get_context("fork")
    barrier = context.Barrier(int(count))
    processes = []
    for rank in range(int(count)):
        processes.append(context.Process(target=train, args=(rank, int(count), kind, address, barrier)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
