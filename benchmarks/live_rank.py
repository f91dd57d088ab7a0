"""Measure live checks in a gloo process; rank 0 prints the results as JSON.

    python -m benchmarks.live_rank RANK STORE ROUNDS

`python -m benchmarks live` starts two processes. Both measure at the same time, like ranks of a job on one machine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.live_baselines import megatron, naive, reading
from benchmarks.live_models import MODELS, resnet18, tensors_of
from benchmarks.timing import take_turns
from benchmarks.traffic import counted
from syncheck.live import channel, check
from syncheck.live.exchange import across_ranks, manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The phases of a check, each with the owner and the name of its function.
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("snapshot", across_ranks, "snapshot"),
    ("digests", manifest, "compute_digests"),
    ("messages", channel.Channel, "gather"),
    ("judging", across_ranks, "judge"),
)
DIFFERENT = ("resnet18, SGD", "5,000 small tensors")
STEPS = 3  # of training, in each round
Times = dict[str, list[float]]


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of a call on this rank, with a common start on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def split(spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds of each phase of a check to `spent`. Raises AttributeError if a function of PHASES is missing."""
    kept = [(owner, name, getattr(owner, name)) for _, owner, name in PHASES]

    def watched(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start

        return call

    for phase, (owner, name, function) in zip((phase for phase, _, _ in PHASES), kept, strict=True):
        setattr(owner, name, watched(phase, function))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure a check of one model in sync, against reading its bytes and against other methods."""
    torch.manual_seed(0)
    model, optimizer = MODELS[name]()
    tensors, parameters = tensors_of(model, optimizer), [p.detach() for p in model.parameters()]
    report = check(model, optimizer)
    assert report.verdict == "in_sync"
    assert report.counts.tensors == len(tensors), report.counts
    works = {
        "read": reading(tensors),
        "check": lambda: check(model, optimizer),
        "read parameters": reading(parameters),
        "check parameters": lambda: check(model, only=("params",)),
        "megatron": lambda: megatron(model),
        "naive": lambda: naive(model),
    }
    assert megatron(model)
    assert naive(model)
    times = take_turns(works, rounds, measure=timed)
    phases: Times = {}
    for _ in range(rounds):
        spent: dict[str, float] = {}
        with split(spent):
            timed(works["check"])
        for phase, seconds in spent.items():
            phases.setdefault(phase, []).append(seconds)
    return {
        "tensors": len(tensors),
        "parameters": len(parameters),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
        "times": times,
        "phases": phases,
    }


def traffic(name: str) -> dict[str, dict[str, Any]]:
    """Count the bytes sent by each rank for a check with zero, one or all tensors different."""
    torch.manual_seed(0)
    model, optimizer = MODELS[name]()
    parts = tensors_of(model, optimizer)
    floats = [tensor for tensor in parts if tensor.is_floating_point()]
    found = {}
    for what, different in (("in sync", 0), ("one different", 1), ("all different", len(floats))):
        if dist.get_rank() == 1:
            for tensor in floats[:different]:
                tensor.add_(1e-3)
        with counted() as sending:
            report = check(model, optimizer)
        assert (report.counts.different or 0) >= (different > 0)
        sent: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sent, sending.sent)
        found[what] = {
            "different": report.counts.different,
            "sent": sent,
            "calls": sending.calls,
            "tensors": len(parts),
            "bytes": sum(t.numel() * t.element_size() for t in floats[:different]),
        }
    return found


def training(rounds: int) -> Times:
    """Time a check beside training steps of resnet18 under DDP: 32 pictures of 32 x 32 a rank."""
    torch.manual_seed(0)
    bare, optimizer = resnet18()
    model = DistributedDataParallel(bare)
    pictures, labels = torch.randn(32, 3, 32, 32), torch.randint(1000, (32,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    works = {f"step {i}": step for i in range(STEPS)} | {"check": lambda: check(model, optimizer)}
    times = take_turns(works, rounds, measure=timed)
    return {"check": times["check"], "step": [took for i in range(STEPS) for took in times[f"step {i}"]]}


def main() -> None:
    """Measure all models together with the other rank."""
    rank, store, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {"models": {}, "traffic": {}}
    for name in MODELS:
        found["models"][name] = measure(name, rounds)
        gc.collect()
    for name in DIFFERENT:
        found["traffic"][name] = traffic(name)
    found["training"] = training(rounds)
    if torch.cuda.is_available():
        from benchmarks import live_cuda

        found["cuda"] = live_cuda.measure(rounds)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
