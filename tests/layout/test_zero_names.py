"""States of ZeroRedundancyOptimizer without metadata get the names that torch's own consolidation gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import join_fields, list_codes, list_fields
from support.states import merge
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import syncheck
from syncheck.layout.optimizer_shards import detect_partitioning

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.snapshots import Tensor
    from syncheck.testing import Rank


def network() -> nn.Module:
    """Return a network of several layers with equal shapes."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), *layers, nn.Linear(8, 2))


def tied() -> nn.Module:
    """Return a network whose last layer is tied to its embedding."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    model[3].weight = model[0].weight
    return model


def partly_trained() -> nn.Module:
    """Return a network with a frozen parameter, whose shape other parameters have."""
    model = network()
    model[2].weight.requires_grad_(requires_grad=False)
    return model


def split_by_decay(model: nn.Module) -> Any:
    """Return parameter groups with and without weight decay, which have different shapes."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": vectors, "weight_decay": 0}, {"params": matrices(model), "weight_decay": 0.1}]


def matrices(model: nn.Module) -> Any:
    """Return a part of the parameters, which the shapes determine."""
    return [p for p in model.parameters() if p.ndim > 1]


def split_by_layer(model: nn.Module) -> Any:
    """Return parameter groups with equal shapes."""
    parameters = list(model.parameters())
    return [{"params": parameters[:6]}, {"params": parameters[6:], "lr": 0.1}]


def save(rank: Rank, make: Callable[[], nn.Module], split: Callable[[nn.Module], Any]) -> dict[str, bytes]:
    """Save a file per rank after a step. Return the consolidated states by name; empty except on rank 0."""
    torch.manual_seed(0)
    model = make()
    optimizer = ZeroRedundancyOptimizer(split(model), torch.optim.AdamW, lr=1e-3)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (i + 1)) if parameter.requires_grad else None
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.optim.state_dict()}
    torch.save(content, rank.shared / f"z_rank{rank.rank}.pth")
    optimizer.consolidate_state_dict(to=0)
    rank.barrier()
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for parameter in join_fields(optimizer.param_groups, "params")]
    state = {} if rank.rank else optimizer.state_dict()["state"]
    return {f"optimizer.{ordered[i]}.exp_avg": entry["exp_avg"].numpy().tobytes() for i, entry in state.items()}


def read_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor of float32."""
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        return file.read(4 * tensor.numel)


def find_states(rank: Rank) -> dict[str, bytes]:
    """Compare the files of all ranks. Return the first moments by name."""
    report = syncheck.compare(rank.shared)
    assert (report.exit_code, list_codes(report.groups[0].findings)) == (0, ["SYN104"])
    assert report.groups[0].kinds["optimizer"].compared == 0
    files = sorted(rank.shared.iterdir())
    named, _ = detect_partitioning({i: syncheck.read(str(file)) for i, file in enumerate(files)})
    tensors = merge(list_fields(named.values(), "tensors"))
    return {name: read_bytes(tensor) for name, tensor in tensors.items() if name.endswith(".exp_avg")}


on_2_and_3_ranks = pytest.mark.parametrize(
    "world", [pytest.param(ranks, marks=pytest.mark.syncheck(ranks=ranks)) for ranks in (2, 3)]
)


@on_2_and_3_ranks
@pytest.mark.parametrize(
    ("make", "split"),
    [
        (network, nn.Module.parameters),
        (tied, nn.Module.parameters),
        (partly_trained, nn.Module.parameters),
        (network, matrices),
        (network, split_by_decay),
    ],
)
def test_parts_get_the_names_of_their_parameters(make: Any, split: Any, world: int, syncheck_rank: Rank) -> None:
    """Each state has the name and the bytes of the consolidated state, also among parameters with equal shapes."""
    consolidated = save(syncheck_rank, make, split)
    assert syncheck_rank.world_size == world
    if syncheck_rank.rank == 0:
        assert find_states(syncheck_rank) == consolidated


@on_2_and_3_ranks
def test_parts_of_an_ambiguous_partition_are_numbered(world: int, syncheck_rank: Rank) -> None:
    """If files do not show which group has which of several equal layers, names contain rank and number."""
    consolidated = save(syncheck_rank, network, split_by_layer)
    assert syncheck_rank.world_size == world
    if syncheck_rank.rank == 0:
        result = find_states(syncheck_rank)
        assert all(name.startswith("optimizer.(rank ") for name in result)
        assert sorted(result.values()) == sorted(consolidated.values())


@pytest.mark.syncheck(ranks=3)
def test_parts_without_the_file_of_a_rank_are_numbered(syncheck_rank: Rank) -> None:
    """Without the file of a rank the partition cannot be verified, and names contain rank and number."""
    save(syncheck_rank, network, nn.Module.parameters)
    if syncheck_rank.rank == 0:
        (syncheck_rank.shared / "z_rank2.pth").unlink()
        assert all(name.startswith("optimizer.(rank ") for name in find_states(syncheck_rank))
