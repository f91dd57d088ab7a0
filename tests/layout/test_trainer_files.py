"""The trainer's files of all ranks equal the model gathered by torch, for each method that partitions a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts, list_fields, list_rank_files
from support.marks import slow
from support.states import add_prefix, merge

import syncheck

torch = pytest.importorskip("torch")
from train.engine import train  # noqa: E402
from train.launch import RankContext  # noqa: E402
from train.methods import assign_mesh  # noqa: E402
from train.methods.fsdp import ON_CPU  # noqa: E402
from train.recorders.base import Recorder  # noqa: E402
from train.settings import Settings  # noqa: E402

if not ON_CPU:
    pytest.skip("this torch shards on GPUs only", allow_module_level=True)
from torch.distributed.tensor import DTensor  # noqa: E402

from syncheck.records import Place  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

# Methods in which another rank has a copy of each tensor of the last rank.
COPIES = ("hsdp", "hsdp_tp", "ddp_tp")


def gather(tensor: Any) -> Any:
    """Return the whole tensor; a collective of the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_all(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the whole tensors by name."""
    return {name: gather(tensor) for name, tensor in tensors.items()}


def find_last_element(part: Any) -> tuple[int, ...]:
    """Return the index of the last element of this rank's part; a collective of the ranks that share the tensor."""
    marks = part.detach().clone().fill_(0)
    local = marks.to_local() if isinstance(marks, DTensor) else marks
    local[(-1,) * local.ndim] = torch.distributed.get_rank() + 1
    return tuple((gather(marks) == torch.distributed.get_rank() + 1).nonzero()[0].tolist())


def gather_state(rank: Rank, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of this rank's file as torch loads them, by name, and the content of a file with all parts."""
    content = torch.load(file, weights_only=False)
    names = content["syncheck"]["optimizer_parameters"]
    states = {names[i]: state for i, state in content["optimizer"]["state"].items()}
    own_states = {name: gather_all(state) for name, state in states.items()}
    parts = rank.gather((gather_all(content["model"]), own_states))[::-1]
    (group,) = content["optimizer"]["param_groups"]
    model, state = merge(list_fields(parts, 0)), merge(list_fields(parts, 1))
    for copy in content["syncheck"].get("tied", ()):
        state.pop(copy, None)  # a process alone has one parameter
    optimizer = {"state": state, "param_groups": [group | {"params": list(state)}]}
    complete = {"model": model, "optimizer": optimizer, "epoch": content["epoch"], "step": content["step"]}
    flat = dict(content["model"])
    for name, tensors in states.items():
        flat |= add_prefix(tensors, f"optimizer.{name}.")
    return flat, complete


def check_method(rank: Rank, method: str) -> None:
    """Train, save, and compare the files with the whole model; then flip a bit in the last rank's file."""
    model = "gpt-tiny-moe" if method == "ep" else "gpt-tiny"
    settings = Settings(
        method=method, model=model, data="text", width=16, depth=2, batch_size=8, limit_train=40, max_steps=2,
        optimizer="adamw", save_per_rank=True, out=rank.shared,
    )  # fmt: skip
    ctx = RankContext(rank.rank, rank.world_size, rank.rank, rank.device, "gloo")
    train(settings, assign_mesh(settings, ctx), Recorder())
    files = list_rank_files(rank.shared, f"{settings.run}_rank{{}}.pth", rank.world_size)
    tensors, complete = gather_state(rank, files[rank.rank])
    # A state of the optimizer, of which the last rank holds a part.
    name = rank.gather(find_texts(tensors, end="down.weight.exp_avg")[-1:])[-1][0]
    index = rank.gather(find_last_element(tensors[name]) if name in tensors else ())[-1]
    if not rank.rank:
        full, ranks = rank.shared / "full.pth", f"{rank.shared}/{settings.run}_rank*.pth"
        torch.save(complete, full)
        report = syncheck.diff(ranks, full)
        count = len(complete["model"]) + sum(map(len, complete["optimizer"]["state"].values()))
        assert (report.exit_code, report.counts.identical, report.counts.tensors) == (0, count, count), report
        flip_last_bit(files[-1], name)
        report = syncheck.diff(ranks, full)
        (diff,) = report.groups[0].tensors if method in COPIES else report.groups[-1].tensors
        assert (report.exit_code, diff.name, diff.mismatched) == (1, name, 1), report
        if method in COPIES:  # copies of parts
            assert (rank.world_size - 1,) in diff.clusters
        else:
            assert (diff.index, diff.places[0]) == (index, Place(str(files[-1]), rank.world_size - 1))
    rank.gather(None)


def flip_last_bit(file: Path, name: str) -> None:
    """Flip the lowest bit of the last element of a float32 tensor."""
    tensor = syncheck.read(str(file)).tensors[name]
    with file.open("r+b") as opened:
        opened.seek(tensor.offset + 4 * (tensor.numel - 1))
        old = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([old ^ 1]))


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4, timeout=120)
@pytest.mark.parametrize("method", ["hsdp", "fsdp_tp", "ddp_tp", "pp_fsdp"])
def test_four_ranks(syncheck_rank: Rank, method: str) -> None:
    """Two dimensions of a mesh."""
    check_method(syncheck_rank, method)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=8, timeout=120)
def test_eight_ranks(syncheck_rank: Rank) -> None:
    """A mesh of three dimensions."""
    check_method(syncheck_rank, "hsdp_tp")


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["pp", *slow("tp", "fsdp", "ep", "zero")])
def test_two_ranks(syncheck_rank: Rank, method: str) -> None:
    """One dimension of a mesh."""
    check_method(syncheck_rank, method)
