"""`resync` of tensors with several replica groups, as under HSDP: one source per group of the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, all_pass, all_raise, each_rank, flip, needs_fsdp2, on_all
from support.groups import make_group
from support.listings import list_fields

from syncheck.errors import UsageError
from syncheck.live import resync
from syncheck.live.channel import Channel
from syncheck.live.repair import state
from syncheck.live.repair.plan import plan_repair
from syncheck.records import Counts, Replica, Report, Shards, TensorDiff, ValueDiff

PAIRS = ((0, 2), (1, 3))
TRIPLES = ((0, 2, 4), (1, 3, 5))


def differing(name: str, groups: tuple[tuple[int, ...], ...], *clusters: tuple[int, ...]) -> TensorDiff:
    return TensorDiff(name, "parameter", "float32", (4,), "different", replica_groups=groups, clusters=clusters)


def lacking(ranks: tuple[int, ...], *clusters: tuple[int, ...]) -> TensorDiff:
    source_value = {"replica_groups": (ranks,), "clusters": clusters}
    return TensorDiff("optimizer.w.exp_avg", "optimizer", "float32", (4,), "not_compared", "missing", **source_value)  # type: ignore[arg-type]


def jobs(size: int, source: int | str, *found: TensorDiff | ValueDiff, shards: tuple[Shards, ...] = ()) -> list[Any]:
    """Plan a repair; return name, source, targets, and the kind of transfer of each job."""
    group = make_group(
        "model", None, "out_of_sync",
        tuple(Replica("model", rank, "memory", 1, 16) for rank in range(size)), Counts(),
        tensors=tuple(diff for diff in found if isinstance(diff, TensorDiff)),
        values=tuple(diff for diff in found if isinstance(diff, ValueDiff)),
        shards=shards,
    )  # fmt: skip
    plan = plan_repair(Report("out_of_sync", (group,)), source)
    return list_fields(plan, "name", "source", "targets", "sends_bytes", "sets_entry")


def test_each_replica_group_has_a_source_of_its_own() -> None:
    """Rank 2's shard is copied from rank 0 and rank 1's from rank 3; equal groups do not change."""
    both = differing("w", TRIPLES, (0, 4), (2,), (3, 5), (1,))
    assert jobs(6, "majority", both) == [("w", 0, (2,), True, False), ("w", 3, (1,), True, False)]
    assert jobs(6, "majority", differing("w", TRIPLES, (3, 5), (1,))) == [("w", 3, (1,), True, False)]


def test_a_source_is_healthy_in_all_tensors() -> None:
    """Rank 0 is in the majority of w but not of v, so w comes from rank 2."""
    result = jobs(6, "majority", differing("w", TRIPLES, (0, 2), (4,)), differing("v", TRIPLES, (2, 4), (0,)))
    assert [job[:3] for job in result] == [("w", 2, (4,)), ("v", 2, (0,))]


def test_two_replicas_have_no_majority() -> None:
    """In pairs there is no majority; the error lists five tensors and counts the rest."""
    with pytest.raises(UsageError, match=r"no majority: w; "):
        jobs(4, "majority", differing("w", PAIRS, (0,), (2,)))
    with pytest.raises(UsageError, match=r"w3, w4 and 7 more; "):
        jobs(2, "majority", *(differing(f"w{i}", ((0, 1),), (0,), (1,)) for i in range(12)))


def test_a_chosen_rank_represents_its_replica() -> None:
    """source=2 is in one pair; the other pair uses rank 3 at the same mesh position, or a majority."""
    assert [job[:3] for job in jobs(4, 2, differing("w", PAIRS, (0,), (2,), (1,), (3,)))] == [
        ("w", 2, (0,)), ("w", 3, (1,)),
    ]  # fmt: skip
    unlike = differing("w", ((0, 2), (1, 3, 4)), (0,), (2,), (3, 4), (1,))
    assert [job[:3] for job in jobs(5, 2, unlike)] == [("w", 2, (0,)), ("w", 3, (1,))]


def test_lost_state_is_created_or_removed() -> None:
    """State missing on two of three ranks is removed from the third; state missing on one of three is created.

    A report does not have the replica groups of missing tensors.
    """
    assert jobs(3, "majority", lacking((0, 1, 2), (1,))) == [("optimizer.w.exp_avg", 0, (1,), False, True)]
    assert jobs(3, "majority", lacking((0, 1, 2), (0, 2))) == [("optimizer.w.exp_avg", 0, (1,), True, True)]
    parts = Shards("model parallel", "parts along tp", 2, 2)
    for source in (0, 3):
        with pytest.raises(UsageError, match=r"no other rank has a copy of optimizer\.w\.exp_avg; load"):
            jobs(4, source, lacking((0, 1, 2, 3), (0, 1, 2)), shards=(parts,))


def test_values_vote_too() -> None:
    """A rank with another learning rate is never a source; NaN equals NaN."""
    nan = float("nan")
    rate = ValueDiff("optimizer.param_groups.0.lr", {0: 0.5, 1: 0.1, 2: 0.1}, counts=True)
    note = ValueDiff("loss", {0: nan, 1: nan, 2: 0.1}, counts=False)
    assert jobs(3, "majority", differing("w", ((0, 1, 2),), (0, 1), (2,)), rate, note) == [
        ("w", 1, (2,), True, False), (rate.name, 1, (0,), False, True),
    ]  # fmt: skip
    assert jobs(3, "majority", ValueDiff("best", {0: nan, 1: nan, 2: 0.1}, counts=True))[0][1:3] == (0, (2,))
    with pytest.raises(UsageError, match=r"no majority: best; "):
        jobs(4, "majority", ValueDiff("best", {0: nan, 1: nan, 2: 0.1, 3: 0.2}, counts=True))


def hybrid(names: tuple[int, int]) -> Any:
    """Return a network under HSDP over a mesh of this shape, and its optimizer after a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", names, mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def local_bits(model: Any, optimizer: Any) -> list[Any]:
    """Return the local bytes of a sharded model and its optimizer state."""
    states = [state for p in model.parameters() for state in optimizer.state[p].values()]
    tensors = [*model.parameters(), *states]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().numpy().tobytes() for t in tensors]


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
def test_hybrid_shards_are_repaired_within_their_group(syncheck_rank: Any) -> None:
    """Under HSDP with two copies of two shards, source=2 repairs rank 0, and rank 1 from rank 3.

    Without source=, pairs have no majority.
    """
    model, optimizer = hybrid((2, 2))
    before = on_all(local_bits(model, optimizer))
    if syncheck_rank.rank < 2:
        flip(model.fc.weight.to_local())
    if syncheck_rank.rank == 1:
        flip(optimizer.state[model.head.weight]["exp_avg"].to_local())
    outcome = all_raise(each_rank(resync, model, optimizer), "UsageError")
    assert outcome.text.startswith("no majority: fc.weight")
    done: Any = all_pass(each_rank(resync, model, optimizer, source=2))
    assert [source_value[:3] for source_value in done.copied] == [
        ("fc.weight", 2, (0,)), ("fc.weight", 3, (1,)), ("optimizer.head.weight.exp_avg", 3, (1,)),
    ]  # fmt: skip
    assert dict(done.sources) == {(0, 2): 2, (1, 3): 3}
    assert on_all(local_bits(model, optimizer)) == before


@needs_fsdp2
@pytest.mark.syncheck(ranks=3)
def test_three_copies_of_shards_have_a_majority(syncheck_rank: Any) -> None:
    """With three copies, a flipped bit in one copy is repaired from the other two."""
    model, optimizer = hybrid((3, 1))
    before = on_all(local_bits(model, optimizer))
    if syncheck_rank.rank == 0:
        flip(model.fc.weight.to_local())
    done: Any = all_pass(each_rank(resync, model, optimizer))
    assert set(list_fields(done.copied, "source", "ranks")) == {(1, (0,))}
    assert on_all(local_bits(model, optimizer)) == before


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("batch, device", [(1, "cpu"), (40, "cpu"), (1 << 20, "cpu"), (40, "elsewhere")])
def test_broadcasts_overwrite_their_group_only(
    syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, batch: int, device: str
) -> None:
    """Tensors of some ranks, of different sizes, are copied within their group in batches of any size.

    Also if the backend does not send from the tensors' device, and the bytes go through another device.
    """
    monkeypatch.setattr(state, "BATCH", batch)
    monkeypatch.setattr(state, "get_device", lambda kind: torch.device("cpu"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"{device}:any")
    rank = syncheck_rank.rank
    pair, complete = torch.full((5,), float(rank)), torch.full((3, 2), float(rank)).t()
    sizes = [state.get_size(tensor, None) for tensor in (pair, complete)]
    assert sizes == [(20, device), (24, device)]
    state.broadcast_tensors(Channel(), [(None if rank == 1 else pair, 2, sizes[0]), (complete, 1, sizes[1])])
    assert on_all(pair.tolist()) == [[2.0] * 5, [1.0] * 5, [2.0] * 5]
    assert torch.equal(complete, torch.ones(2, 3))
