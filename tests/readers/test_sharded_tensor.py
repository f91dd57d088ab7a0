"""ShardedTensors in files of FSDP1 (FullyShardedDataParallel): each rank's shard is read with its sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import Call, Global, save_pth
from support.dtensors import new
from support.listings import find_all, list_codes, list_fields, map_fields
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import syncheck
from syncheck.errors import MalformedFile, RefusedFile, UnsupportedFormat
from syncheck.messages import Refusal
from syncheck.snapshots import Sharding

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank


def save(rank: Rank, kind: str = "SHARDED_STATE_DICT", odd: int | None = None, **options: Any) -> tuple[Path, Any]:
    """Train with FSDP1 for a step and save the state of this rank. Return the folder and the state dict of the model.

    Dimensions of 5, 7 and 1 rows are uneven, and some ranks have no rows. odd: a rank that changes one element.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Linear(7, 1))
    policy = ModuleWrapPolicy({nn.Linear})
    model: Any = FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=rank.device, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(12.0).reshape(4, 3)).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType[kind])
    state = model.state_dict()
    if rank.rank == odd:
        state["2.weight"].local_shards()[0].tensor[1, 2] += 1
    content = {"model": state, "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    folder = rank.shared / f"{kind}-{odd}-{'-'.join(options)}"
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / f"m_rank{rank.rank}.pth")
    rank.barrier()
    return folder, state


def check_own_file(rank: Rank, folder: Path, state: Any) -> None:
    """Check the shapes, sharding and bytes of the tensors in this rank's file."""
    file = syncheck.read(str(folder / f"m_rank{rank.rank}.pth"))
    world = tuple(range(rank.world_size))
    for name in ("0.weight", "0.bias", "1.bias", "2.weight", "3.weight", "3.bias"):
        sharded = state[name]
        layout = Sharding((len(world),), world, ("S(0)",), tuple(sharded.shape), (), (rank.rank,))
        for key in (name, f"optimizer.{name}.exp_avg"):
            assert (file.tensors[key].sharding, file.tensors[key].dtype) == (layout, "float32"), key
        shards = sharded.local_shards()
        shape, data = (tuple(shards[0].tensor.shape), shards[0].tensor.numpy().tobytes()) if shards else ((), b"")
        tensor = file.tensors[name]
        with open(tensor.path, "rb") as opened:
            opened.seek(tensor.offset)
            assert opened.read(4 * tensor.numel) == data
        assert (tensor.shape == shape) if shards else (tensor.shape == (0, *layout.shape[1:]))
    assert file.tensors["1.running_mean"].sharding is file.tensors["optimizer.0.bias.step"].sharding is None


def check_comparison(folder: Path) -> None:
    """Check that shards are sharded by design, and that buffers and step counters are compared."""
    report = syncheck.compare(folder)
    (group,) = report.groups
    assert (report.exit_code, list_codes(group.findings)) == (0, ["SYN104"])
    assert (report.counts.identical, report.counts.not_compared) == (3 + 8, 8 + 2 * 8)
    assert set(list_fields(group.tensors, "reason")) == {"sharded"}
    assert not [note for note in group.notes if "torch.distributed" in str(note)]


@pytest.mark.syncheck(ranks=2)
def test_shards_of_two_ranks(syncheck_rank: Rank) -> None:
    """Each rank's file contains its rows with their sharding, in the model and in the optimizer."""
    folder, state = save(syncheck_rank)
    check_own_file(syncheck_rank, folder, state)
    check_comparison(folder)


@pytest.mark.syncheck(ranks=3)
def test_shards_of_three_ranks_equal_dtensors(syncheck_rank: Rank) -> None:
    """Shards of three ranks have the sharding of the DTensors that FSDP1 writes with a device mesh."""
    folder, state = save(syncheck_rank, use_orig_params=True)
    check_own_file(syncheck_rank, folder, state)
    check_comparison(folder)
    meshed, _ = save(syncheck_rank, device_mesh=init_device_mesh("cpu", (3,)))
    file = f"m_rank{syncheck_rank.rank}.pth"
    layouts = [
        map_fields(syncheck.read(str(source_value / file)).tensors, "shape", "sharding")
        for source_value in (folder, meshed)
    ]
    assert layouts[0] == layouts[1]


@pytest.mark.syncheck(ranks=4)
def test_replicas_under_hybrid_sharding(syncheck_rank: Rank) -> None:
    """With HYBRID_SHARD, ranks with the same shard are compared, and a changed element is out of sync."""
    shards = [dist.new_group(ranks) for ranks in [[0, 1], [2, 3]]]
    copies = [dist.new_group(ranks) for ranks in [[0, 2], [1, 3]]]
    groups = shards[syncheck_rank.rank // 2], copies[syncheck_rank.rank % 2]
    options = {"process_group": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    folder, _ = save(syncheck_rank, **options)
    report = syncheck.compare(folder)
    assert (report.exit_code, report.counts.not_compared) == (0, 0)
    file = syncheck.read(str(folder / f"m_rank{syncheck_rank.rank}.pth"))
    own_values = (0, 1) if syncheck_rank.rank < 2 else (2, 3)
    assert {t.sharding.ranks for t in file.tensors.values() if t.sharding} == {own_values}
    folder, _ = save(syncheck_rank, odd=3, **options)
    (group,) = syncheck.compare(folder).groups
    assert list_fields(find_all(group.tensors, out_of_sync=True), "name", "index") == [("2.weight", (1, 2))]


@pytest.mark.syncheck(ranks=2)
def test_flat_parameters_are_refused(syncheck_rank: Rank) -> None:
    """A local state dict has pieces of parameters without their shapes: the file is refused with the alternative."""
    folder, _ = save(syncheck_rank, "LOCAL_STATE_DICT", use_orig_params=True)
    with pytest.raises(UnsupportedFormat, match="SHARDED_STATE_DICT"):
        syncheck.read(str(folder / f"m_rank{syncheck_rank.rank}.pth"))


API = "torch.distributed._shard.sharded_tensor.api"
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def described(offsets: Any, sizes: Any, rank: Any) -> Call:
    """Return the metadata of a shard."""
    placement = new("torch.distributed.remote_device", "_remote_device", {"_rank": rank})
    state = {"shard_offsets": offsets, "shard_sizes": sizes, "placement": placement}
    return new("torch.distributed._shard.metadata", "ShardMetadata", (None, state))


def sharded(
    local: Any = ROWS,
    at: Any = (2, 0),
    size: Any = (2, 3),
    group: Any = (1, 1, 3),
    shape: Any = (5, 3),
    ends: Any = (0, 2),
) -> Call:
    """Return a ShardedTensor of 5 rows as written by rank 1 of 3 (without the other fields), or with other values."""
    own_values = new(f"{API}.shard", "Shard", (None, {"tensor": local, "metadata": described(at, size, 1)}))
    listing = [described([0, 0], [2, 3], ends[0]), own_values, described([4, 0], [1, 3], ends[1])]
    ranks = dict(zip(("local_rank", "global_rank", "local_world_size"), group, strict=True))
    metadata = new(f"{API}.metadata", "ShardedTensorMetadata", {"shards_metadata": listing})
    state = ([own_values] if local is not None else [], metadata, new(API, "ShardedTensor.ProcessGroupState", ranks))
    kind, float32 = Global(API, "ShardedTensor"), Global("torch", "float32")
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, (kind, float32, shape), state))


ODD = {
    "an offset of another rank": sharded(at=(0, 0)),
    "an offset within the chunk": sharded(at=(2, 1)),
    "sizes of another chunk": sharded(size=(1, 3)),
    "fewer rows than the chunk": sharded(ROWS[:1]),
    "no local shard": sharded(None),
    "another number of chunks": sharded(shape=(7, 3), group=(1, 1, 7)),
    "a rank beyond the group": sharded(group=(3, 3, 3)),
    "a group of a trillion ranks": sharded(shape=(3 * 10**12, 3), size=(10**12, 3), group=(1, 1, 10**12)),
    "ranks at unequal distances": sharded(ends=(0, 5)),
    "ranks without numbers": sharded(ends=(None, None)),
    "negative ranks": sharded(group=(-1, 1, 3)),
    "no dimension": sharded(shape=()),
    "no rows": sharded(shape=(0, 3)),
    "a shard that is no tensor": sharded("x"),
    "a shard of a shard": sharded(sharded()),
}


def read_entry(folder: Path, value: Any) -> Any:
    """Write a checkpoint with one entry `w` and return its tensor."""
    return syncheck.read(str(save_pth(folder / "f.pth", {"w": value}))).tensors["w"]


def test_the_written_tensor_is_read(tmp_path: Path) -> None:
    """The tensor from which the invalid tensors derive is read."""
    tensor = read_entry(tmp_path, sharded())
    assert (tensor.refused, tensor.shape) == (None, (2, 3))
    assert tensor.sharding == Sharding((3,), (0, 1, 2), ("S(0)",), (5, 3), (), (1,))


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_another_layout_is_counted_as_sharded(tmp_path: Path, value: Call) -> None:
    """A ShardedTensor with shards that are not the chunks of its ranks is refused with a reason."""
    tensor = read_entry(tmp_path, value)
    assert (tensor.refused, tensor.sharding) == (Refusal.SHARDED_TENSOR(), None)


def test_an_invalid_shape_is_an_error(tmp_path: Path) -> None:
    """A negative size is an error, as in any tensor."""
    with pytest.raises(MalformedFile, match="non-negative"):
        read_entry(tmp_path, sharded(shape=(-5, 3)))


def test_more_groups_than_any_run_has(tmp_path: Path) -> None:
    """A small file cannot list a million ranks for each tensor."""
    many = {f"w{i}": sharded(group=(1, 1 + i, 3), ends=(i, 2 + i)) for i in range(100)}
    tensors = syncheck.read(str(save_pth(tmp_path / "f.pth", many))).tensors
    assert [t.refused is None for t in tensors.values()] == [True] * 64 + [False] * 36


@pytest.mark.parametrize(
    "of", [(Global(API, "ShardedTensor"), "__init__"), (Global("os", "path"), "ProcessGroupState")]
)
def test_getattr_is_limited_to_the_class_of_the_group(tmp_path: Path, of: Any) -> None:
    """Protocol 2 looks up the class of the process group with getattr; any other use is refused as code."""
    value = {"w": sharded(), "x": Call(Global("builtins", "getattr"), of)}
    with pytest.raises(RefusedFile, match="which runs code"):
        syncheck.read(str(save_pth(tmp_path / "f.pth", value)))
