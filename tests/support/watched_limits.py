"""Programs of unusual shapes, for tests/live/test_watched_limits.py.

python watched_limits.py KIND RANKS PORT
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch._dynamo  # DDP imports it; forked ranks need not do it again
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

STEPS = 10
# Counted from 1.
FAULTY_STEP = 5
# The end is compared if the model and the optimizer are still there.
KEPT: list[Any] = []


class Model(torch.nn.Module):
    """Two layers and a buffer, which the wrapper does not send."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        outputs: torch.Tensor = self.norm(self.down(self.up(inputs).relu())) * self.scale[0]
        return outputs


def make_batch(step: int, rank: int) -> torch.Tensor:
    """Return the inputs of a step of a rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def perturb(model: Any, parameters: list[Any], inputs: torch.Tensor) -> list[torch.Tensor]:
    """Move the parameters by the gradients of this rank; return the parameters of before."""
    with model.no_sync():
        model(inputs).square().mean().backward()
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        # Changes neither the version nor the address.
        parameter.data.add_(parameter.grad, alpha=0.1)
        parameter.grad = None
    return before


def compute_loss(model: Any, optimizer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Compute the loss and its gradients, as the closure of an optimizer does."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(inputs).square().mean()
    loss.backward()
    return loss


def train_wrapped(rank: int, kind: str) -> None:
    """Train a model of DistributedDataParallel.

    kind: with "average", "probe" or "optimizer", one rank has an additional averaged copy, a model of its own, or an
    optimizer that it replaces before training. With "sharpness", each rank moves its parameters for each reduction, and
    with "decay" before each step. "compiled" compiles the wrapper, "closure" computes gradients within the optimizer's
    step, "pairs" has two forward passes for each backward pass, "ignored" leaves a layer to each rank. At the faulty
    step, rank 1 changes a "buffer" or a "value" of a parameter, or all ranks replace the parameters by "assigned" ones,
    which the wrapper does not know.
    """
    module: Any = Model()
    parameters = list(module.parameters())
    ignored = ["norm.weight", "norm.bias"] if "ignored" in kind else []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if "optimizer" in kind and rank == 1:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    average = AveragedModel(module) if "average" in kind and rank == 0 else None
    run = torch.compile(model, backend="eager") if "compiled" in kind else model
    KEPT[:] = [model, optimizer]
    for step in range(1, STEPS + 1):
        inputs = make_batch(step, rank)
        optimizer.zero_grad()
        before = perturb(model, parameters, inputs) if "sharpness" in kind else []
        if "closure" in kind:
            optimizer.step(partial(compute_loss, run, optimizer, inputs))
            continue
        loss = run(inputs).square().mean()
        if "pairs" in kind:
            loss = loss + run(-inputs).square().mean()
        loss.backward()
        if "pairs" in kind and step == FAULTY_STEP and rank == 1:
            parameters[0].grad *= 2 if "gradient" in kind else 1
        for parameter, value in zip(parameters, before, strict=False):
            parameter.data.copy_(value)
        if "decay" in kind:
            for parameter in parameters:
                parameter.data.mul_(0.99)
        optimizer.step()
        if step == FAULTY_STEP and rank == 1:
            module.scale[2] += "buffer" in kind
            parameters[0].data[0, 0] += "value" in kind
        if step == FAULTY_STEP and "assigned" in kind:
            module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            KEPT[:] = [model, optimizer]
        if average is not None:
            average.update_parameters(module)


def train_again(rank: int, kind: str) -> None:
    """Train a model, freeze a layer, and train the rest within another wrapper.

    kind: during the second training, rank 1 changes a "buffer", or a "value" of the frozen layer.
    """
    module: Any = Model()
    for number in range(2):
        model = DistributedDataParallel(module, broadcast_buffers=False)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        KEPT.extend([model, optimizer])
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(make_batch(step, rank)).square().mean().backward()
            optimizer.step()
            if (number, step, rank) == (1, FAULTY_STEP, 1):
                module.scale[2] += "buffer" in kind
                module.up.weight.data[0, 0] += "value" in kind
        module.up.requires_grad_(False)


def train_adversarial(rank: int) -> None:
    """Train two models in turn, of which rank 1 skips a step of the second one."""
    models = [DistributedDataParallel(Model(), broadcast_buffers=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(1, STEPS + 1):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(make_batch(step, rank)).square().mean().backward()
            if (step, number, rank) != (FAULTY_STEP, 1, 1):
                optimizer.step()


def train_without_wrapper(rank: int, kind: str) -> None:
    """Train equal models with equal batches and, later, other learning rates. With "reduced", gradients are summed."""
    model: Any = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(make_batch(step, 0)).square().mean().backward()
        for parameter in model.parameters():
            if "reduced" in kind:
                dist.all_reduce(parameter.grad)
        if step == FAULTY_STEP + 2:
            optimizer.param_groups[0]["lr"] *= 1 + rank
        optimizer.step()
    dist.barrier()


def train_tensor_parallel(kind: str) -> None:
    """Train shards of two layers, and copies of a third one. With "batch", the ranks have inputs of their own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: Any = parallelize_module(Model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(make_batch(step, dist.get_rank() * ("batch" in kind))).square().mean().backward()
        if step == FAULTY_STEP and "shard" in kind and dist.get_rank() == 1:
            model.up.weight.grad.to_local().zero_()
        optimizer.step()


def train(rank: int, ranks: int, kind: str, port: str) -> None:
    """Train on one rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    if kind.startswith("tensor-parallel"):
        train_tensor_parallel(kind)
    elif kind.startswith("alone"):
        train_without_wrapper(rank, kind)
    elif kind.startswith("again"):
        train_again(rank, kind)
    elif kind == "adversarial":
        train_adversarial(rank)
    else:
        train_wrapped(rank, kind)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, and return the largest exit code."""
    kind, count, port = sys.argv[1:]
    processes = []
    for rank in range(int(count)):
        processes.append(mp.get_context("fork").Process(target=train, args=(rank, int(count), kind, port)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
