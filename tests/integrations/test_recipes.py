"""Every code block in docs/integrations.md runs unchanged on gloo ranks, and finds them in sync."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from support.libraries import need
from support.listings import list_codes, list_fields
from support.outcomes import outcomes
from support.recipes import blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# In torch 2.6 fully_shard requires more stream features than the CPU stand-in has.
SHARDS = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards on GPUs only")
LIBRARIES = {"Lightning": "lightning", "transformers": "transformers", "Accelerate": "accelerate"}
LOOPS = {"Parity": 1, "Plain loop: DDP": 1, "FSDP2": 1, "HSDP": 1, "Tensor, pipeline and expert parallelism": 2}


def run(code: str, train_step: Callable[..., None] | None = None) -> dict[str, Any]:
    """Run a block with the names it assumes, and return its names. Batches differ between ranks."""
    from torch.distributed import get_rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    batches = [(torch.randn(4, 8) + get_rank(), torch.randint(0, 2, (4,))) for _ in range(8)]
    namespace: dict[str, Any] = {
        "torch": torch, "F": F, "contextlib": contextlib, "model": model, "loader": batches, "train_step": train_step,
        "DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
    }  # fmt: skip
    exec(code, namespace)
    return namespace


def averaged(layer: Any, x: Any, y: Any, group: Any) -> None:
    """Make a step of a model shard with the gradient averaged over its copies in the group."""
    with torch.no_grad():
        if not hasattr(layer, "begun"):  # each shard starts as a copy of its first replica, and shards differ
            layer.begun = True
            for parameter in layer.parameters():
                parameter += torch.distributed.get_rank()
                torch.distributed.broadcast(parameter, torch.distributed.get_process_group_ranks(group)[0], group)
        for parameter in layer.parameters():
            step = torch.full_like(parameter, float(x.sum()))
            torch.distributed.all_reduce(step, group=group)
            parameter -= 0.01 * step


def test_every_block_is_run() -> None:
    """The tests below run every block of the document."""
    assert {heading: len(code) for heading, code in blocks().items()} == LOOPS | dict.fromkeys(LIBRARIES, 1)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_parity(syncheck_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the Trainer and of the loop with Accelerate are those of one process."""
    need("transformers")
    need("accelerate")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks()["Parity"]
    for report in run(code)["reports"]:
        assert (report.command, report.verdict) == ("parity", "in_sync")
        assert report.counts.tensors > 1


@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_a_loop_with_ddp() -> None:
    """Eight batches are two optimizer steps; the final check finds parameters and optimizer state in sync."""
    (code,) = blocks()["Plain loop: DDP"]
    monitor = run(code)["monitor"]
    assert (monitor.checks, monitor.last.verdict) == (1, "in_sync")
    assert monitor.last.counts.identical == 6 + 3 * 6


@SHARDS
@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_a_loop_with_fsdp() -> None:
    """Shards with a single copy cannot be compared: undecided, with a finding."""
    (code,) = blocks()["FSDP2"]
    report = run(code)["report"]
    assert report.verdict == "undecided"
    assert list_codes(report.findings) == ["SYN104"]


@SHARDS
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.slow
def test_a_loop_with_hsdp(syncheck_rank: Any, damaged: bool) -> None:
    """With two copies of each shard, all shards are compared, and a changed weight on one rank is found."""
    (code,) = blocks()["HSDP"]
    namespace = run(code)
    assert (namespace["monitor"].checks, namespace["monitor"].last.verdict) == (1, "in_sync")
    if damaged and syncheck_rank.rank == 3:
        next(namespace["model"].parameters()).to_local().data.view(-1)[0] += 1
    report = out_of_sync(namespace) if damaged else namespace["monitor"].check()
    assert report.verdict == ("out_of_sync" if damaged else "in_sync")
    assert report.counts.tensors == 6 + 3 * 6


def out_of_sync(namespace: dict[str, Any]) -> Any:
    """Check, expect OutOfSync, and return the report."""
    from syncheck import OutOfSync

    with pytest.raises(OutOfSync) as raised:
        namespace["monitor"].check()
    return raised.value.report


@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("block", [0, 1], ids=["mesh", "group"])
@pytest.mark.slow
def test_a_loop_with_parts(syncheck_rank: Any, block: int) -> None:
    """Shards of a layer differ by design and are in sync; a changed copy is found."""
    namespace = run(blocks()["Tensor, pipeline and expert parallelism"][block], averaged)
    assert (namespace["monitor"].checks, namespace["monitor"].last.verdict) == (1, "in_sync")
    if syncheck_rank.rank in (0, 1):  # with group= each pair compares separately, and both raise
        namespace["half"].weight.data[0, 0] += 1
    assert out_of_sync(namespace).verdict == "out_of_sync"


@pytest.mark.slow
@pytest.mark.parametrize("heading", LIBRARIES)
def test_the_recipe_of_a_library(heading: str, tmp_path: Path) -> None:
    """The recipe trains on two ranks, whose final check finds them in sync."""
    need(LIBRARIES[heading])
    result = outcomes("recipe.py", tmp_path, heading)
    result.ended_well()
    assert list_fields(result.of(heading), "checks", "verdict") == [(1, "in_sync")] * 2
