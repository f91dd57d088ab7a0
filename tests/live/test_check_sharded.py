"""`check` of sharded models (HSDP, FSDP2, tensor parallelism) compares the copies of each shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import Net, all_pass, all_raise, each_rank, flip, needs_fsdp2
from support.listings import find_all, list_codes, list_failing, list_fields, list_names
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from syncheck.live import check
from syncheck.messages import Detail
from syncheck.testing import assert_in_sync

if TYPE_CHECKING:
    from syncheck.testing import Rank


class Uneven(nn.Module):
    """A network with no evenly divisible dimension and a bias of one element, so that some ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.fc(x)))


def sharded(mesh: Any) -> tuple[Any, Any]:
    """Return a network under FSDP2 over a mesh after two steps, with its optimizer; copies of a shard are equal."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = Uneven()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@needs_fsdp2
@pytest.mark.syncheck(ranks=4)
def test_copies_of_shards_under_hsdp(syncheck_rank: Rank) -> None:
    """In a 2 x 2 mesh copies of shards agree; a changed element in one rank's shard names the pair of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = sharded(mesh)
    report = all_pass(each_rank(check, model, optimizer))
    group = report.groups[0]
    assert (report.verdict, report.counts.not_compared, report.counts.identical) == ("in_sync", 0, 9 + 3 * 6)
    [finding] = group.findings
    assert (finding.code, finding.fails) == ("SYN104", False)
    assert finding.facts[0].parameters["groups"][0] == (0, 2)

    for tensor, name, outlier, pair, code in (
        (model.fc.weight, "fc.weight", 3, (1, 3), "SYN220"),
        (optimizer.state[model.fc.weight]["exp_avg"], "optimizer.fc.weight.exp_avg", 0, (0, 2), "SYN220"),
        # Ranks 1 and 3 hold none of its single element.
        (model.out.bias, "out.bias", 2, (0, 2), "SYN299"),
    ):
        local = tensor.to_local()
        if syncheck_rank.rank == outlier:
            flip(local, index=local.numel() - 1, bit=4)
        outcomes = each_rank(check, model, optimizer)
        group = all_pass(outcomes).groups[0]
        [diff] = group.tensors
        assert (group.verdict, diff.name, diff.mismatched, diff.max_ulp) == ("out_of_sync", name, 1, 16)
        assert (diff.replica_groups, diff.clusters) == (((0, 2), (1, 3)), tuple((rank,) for rank in pair))
        failing = list_failing(group)
        assert list_fields(failing, "code", "ranks") == [(code, pair)]
        if syncheck_rank.rank == outlier:
            flip(local, index=local.numel() - 1, bit=4)
    assert all_pass(each_rank(check, model, optimizer)) == report


@needs_fsdp2
@pytest.mark.syncheck(ranks=2)
def test_shards_alone_are_not_compared(syncheck_rank: Rank) -> None:
    """Under pure FSDP only buffers have copies; without buffers nothing is compared, and the verdict is undecided."""
    model, optimizer = sharded(init_device_mesh("cpu", (2,)))
    report = all_pass(each_rank(check, model, optimizer))
    counts = report.groups[0].kinds
    assert (report.verdict, counts["parameter"].compared, counts["optimizer"].compared) == ("in_sync", 0, 0)
    assert list_codes(report.groups[0].findings) == ["SYN104"]
    assert all_pass(each_rank(check, model, optimizer, only="params")).verdict == "undecided"
    assert all_pass(each_rank(check, model, optimizer, exclude="norm.*")).verdict == "undecided"
    if syncheck_rank.rank == 1:
        flip(model.norm.running_mean)
    report = all_pass(each_rank(check, model, optimizer))
    assert list_names(find_all(report.groups[0].tensors, status="different")) == ["norm.running_mean"]


def draw_shards(mesh: Any, seed: int) -> Any:
    """Return a network under FSDP2 that was created without memory, so that each rank drew its own shards."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for module in model:
        module.reset_parameters()
    return model


@needs_fsdp2
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.syncheck(ranks=4)
def test_shards_drawn_with_one_seed(syncheck_rank: Rank) -> None:
    """Ranks that drew their shards with one seed are SYN405; norms of ones are not, and the verdict stays."""
    rank = syncheck_rank.rank
    mesh = init_device_mesh("cpu", (4,))
    weights = ["0.weight", "2.weight"]
    for seed, clusters in ((0, ((0, 1, 2, 3),)), (rank // 2, ((0, 1), (2, 3))), (rank, None)):
        report = all_pass(each_rank(check, draw_shards(mesh, seed)))
        found = list_fields(report.groups[0].evidence.equal_shards, "name", "clusters")
        assert found == ([] if clusters is None else [(name, clusters) for name in weights])
        assert ("SYN405" in list_codes(report.findings)) == (clusters is not None)
        assert (report.verdict, list_failing(report)) == ("undecided", [])


@needs_fsdp2
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.syncheck(ranks=4)
def test_equal_shards_beside_a_difference(syncheck_rank: Rank) -> None:
    """Under HSDP, a tensor with equal shards is measured to its last element if a copy differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = draw_shards(mesh, 0)
    local = model[0].weight.to_local()
    if syncheck_rank.rank == 3:
        flip(local, index=local.numel() - 1, bit=4)
    report = all_pass(each_rank(check, model))
    [diff] = report.groups[0].tensors
    assert (report.verdict, diff.name, diff.mismatched, diff.max_ulp) == ("out_of_sync", "0.weight", 1, 16)
    found = list_fields(report.groups[0].evidence.equal_shards, "name", "clusters")
    assert found == [("2.weight", ((0, 1, 2, 3),))]


class Block(nn.Module):
    """A norm and two tensor-parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


def parallel(mesh: Any, norms: str) -> Any:
    """Return a block sharded over the mesh dimension tp. norms: plain tensors, or replicated DTensors."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if norms == "DTensors":
        for name, parameter in list(model.norm.named_parameters()):
            created = distribute_tensor(parameter.data, mesh["tp"], [Replicate()])
            setattr(model.norm, name, nn.Parameter(created))
    return model


@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("norms", ["plain", "DTensors"])
def test_replicated_tensors_of_tensor_parallel_ranks(syncheck_rank: Rank, norms: str) -> None:
    """On a 2 x 2 mesh of dp and tp, shards are compared along dp, and a replicated norm along both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(mesh, norms)
    report = all_pass(each_rank(check, model, mesh=mesh))
    assert (report.verdict, report.counts.different) == ("in_sync", 0)
    weight = model.norm.weight
    weight = weight.to_local() if norms == "DTensors" else weight
    if syncheck_rank.rank == 3:
        flip(weight)
    report = all_pass(each_rank(check, model, mesh=mesh))
    [diff] = find_all(report.groups[0].tensors, status="different")
    assert (report.verdict, diff.name, diff.minority) == ("out_of_sync", "norm.weight", (3,))


@pytest.mark.syncheck(ranks=4)
def test_plain_shards_are_compared_along_dp(syncheck_rank: Rank) -> None:
    """With mesh=, plain tensors that differ along tp are shards; a difference along dp is a fault."""
    rank = syncheck_rank.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Sizes also differ along tp.
    state = {"up.weight": torch.full((2 + rank % 2,), float(rank % 2)), "norm.weight": torch.ones(3)}
    report = all_pass(each_rank(check, state, mesh=mesh))
    assert (report.verdict, report.counts.identical) == ("in_sync", 2)
    assert all_pass(each_rank(check, state)).verdict == "out_of_sync"
    if rank == 2:
        state["up.weight"][1] += 1
    report = all_pass(each_rank(check, state, mesh=mesh))
    [diff] = report.groups[0].tensors
    assert (report.verdict, diff.name, diff.clusters, diff.max_abs) == ("out_of_sync", "up.weight", ((0,), (2,)), 1.0)
    assert diff.replica_groups == ((0, 2), (1, 3))


@pytest.mark.syncheck(ranks=2)
def test_dtensors_of_each_placement(syncheck_rank: Rank) -> None:
    """A replicated DTensor is compared, and a flipped bit found; shards have no replica, and a sum is unknown."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    local, shard = torch.arange(8.0), torch.full((4,), float(syncheck_rank.rank))
    state = {
        "replicated": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
        "sharded": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False),
    }
    report = all_pass(each_rank(assert_in_sync, state))
    assert (report.counts.identical, report.counts.not_compared) == (1, 1)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    undecided = all_raise(each_rank(assert_in_sync, {**state, "partial": partial})).report
    assert undecided is not None
    assert (undecided.verdict, undecided.counts.not_compared) == ("undecided", 2)
    found_codes = {diff.name: (diff.reason, diff.detail and diff.detail.code) for diff in undecided.groups[0].tensors}
    assert found_codes == {"sharded": ("sharded", Detail.SHARDED), "partial": ("ambiguous", Detail.PARTS_OF_SUM)}
    if syncheck_rank.rank == 1:
        flip(local)
    assert all_raise(each_rank(assert_in_sync, state)).findings[0].tensors == ("replicated",)


@pytest.mark.syncheck(ranks=2)
def test_flat_parameters_are_counted_as_sharded(syncheck_rank: Rank) -> None:
    """Under FSDP1, parameters and their states count as sharded, and buffers are compared."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    net = Net(norm=True)
    model: Any = FullyShardedDataParallel(net, device_id=syncheck_rank.device, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.full((4, 4), 1.0)).sum().backward()
        optimizer.step()
    report = all_pass(each_rank(check, model, optimizer))
    kinds = report.groups[0].kinds
    assert report.verdict == "in_sync"
    assert (kinds["parameter"].not_compared, kinds["optimizer"].not_compared) == (6, 6)
    assert kinds["bn_mean"].identical == 1
    assert set(list_fields(report.groups[0].tensors, "reason")) == {"sharded"}
