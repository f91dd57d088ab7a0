"""Real ranks save one model in many layouts; `diff` joins the files and locates a flipped bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.imports import import_or_skip
from support.listings import list_codes
from support.marks import slow

import syncheck
from syncheck.messages import Note

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("FSDP2 is in torch 2.6 and newer", allow_module_level=True)
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.testing import Rank

SPLIT = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
# The changed element of a rank's part. The tensors of the model, and three states of AdamW for each parameter.
ELEMENT = 9
TENSORS = 9 + 3 * 8


class Block(torch.nn.Module):
    """Layers for tensor parallelism, and a head whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.head = torch.nn.Linear(8, 11)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of all layers."""
        return self.head(self.down(self.up(self.norm(x)).relu()))


def shard_fully(model: Any) -> None:
    """FSDP2 over all ranks."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def shard_in_copies(model: Any) -> None:
    """HSDP: two copies of the model."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def split_layers(model: Any) -> None:
    """Tensor parallelism over all ranks."""
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), SPLIT)


def split_in_copies(model: Any) -> None:
    """Tensor parallelism within data parallelism: DTensors on sub-meshes."""
    parallelize_module(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], SPLIT)


def shard_and_split(model: Any) -> None:
    """FSDP2 of layers that tensor parallelism has split: strided, uneven shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], SPLIT)
    fully_shard(model, mesh=mesh["dp"])


def shard_three_ways(model: Any) -> None:
    """HSDP of layers that tensor parallelism has split: a mesh of three dimensions."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    parallelize_module(model, mesh["tp"], SPLIT)
    fully_shard(model, mesh=mesh["replicate", "shard"])


def gather(tree: Any) -> Any:
    """Return the tree with whole tensors instead of DTensors."""
    if isinstance(tree, dict):
        return {key: gather(value) for key, value in tree.items()}
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def shared_folder(rank: Rank, name: str) -> Path:
    """Return a folder for all ranks."""
    folder = rank.shared / name
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return folder


def check_layout(rank: Rank, spread: Callable[[Any], None]) -> None:
    """Save each rank's state, and the whole state in one file: equal, until one bit of the last rank's shard flips."""
    torch.manual_seed(0)
    model: Any = Block()
    spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(16.0).reshape(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    complete = gather(state)
    # The last rank with enough elements, and the index of the element that is changed later.
    with torch.no_grad():
        marks = model.head.weight.detach().clone()
        marks.to_local().zero_()
        sizes = rank.gather(marks.to_local().numel())
        last = max(i for i, size in enumerate(sizes) if size > ELEMENT)
        if rank.rank == last:
            marks.to_local().reshape(-1)[ELEMENT] = 1
        index = tuple(marks.full_tensor().nonzero().flatten().tolist())
    folder = shared_folder(rank, spread.__name__)
    file = folder / f"m_rank{rank.rank}.pth"
    torch.save(state, file)
    dist.barrier()
    if rank.rank:
        dist.barrier()
        return
    torch.save(complete, rank.shared / f"{spread.__name__}.pth")
    report = syncheck.diff(folder, rank.shared / f"{spread.__name__}.pth")
    assert (report.exit_code, report.counts.identical) == (0, report.counts.tensors), report
    assert report.counts.tensors == TENSORS
    flip_a_bit(folder / f"m_rank{last}.pth", "head.weight", ELEMENT)
    report = syncheck.diff(f"{folder}/*.pth", rank.shared / f"{spread.__name__}.pth")
    if spread in (shard_in_copies, split_in_copies, shard_three_ways):
        # The last rank holds a copy. The copies are compared first, and the first copy with B.
        assert (report.exit_code, len(report.groups), report.groups[1].counts.different) == (1, 2, 0)
        (diff,) = report.groups[0].tensors
        assert (diff.name, diff.mismatched, last in diff.clusters[1]) == ("head.weight", 1, True)
    else:
        (diff,) = report.groups[-1].tensors
        assert (report.exit_code, diff.name, diff.mismatched) == (1, "head.weight", 1)
        assert (diff.places[0].rank, Path(diff.places[0].path).name) == (last, f"m_rank{last}.pth")
        assert diff.index == index
    dist.barrier()


def flip_a_bit(path: Path, name: str, element: int) -> None:
    """Flip the lowest exponent bit of an element of a rank's part of a float32 tensor."""
    tensor = syncheck.read(str(path)).tensors[name]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 4 * element + 2)
        old = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ 0x80]))


@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize(
    "spread", [shard_in_copies, shard_and_split, *slow(shard_fully, split_layers, split_in_copies)]
)
def test_layouts_of_four_ranks(syncheck_rank: Rank, spread: Callable[[Any], None]) -> None:
    """Each layout of four ranks equals the full file."""
    check_layout(syncheck_rank, spread)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("spread", [split_layers, *slow(shard_fully)])
def test_layouts_of_three_ranks(syncheck_rank: Rank, spread: Callable[[Any], None]) -> None:
    """Three ranks hold uneven parts."""
    check_layout(syncheck_rank, spread)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=8)
@pytest.mark.parametrize("spread", [shard_fully, shard_three_ways])
def test_layouts_of_eight_ranks(syncheck_rank: Rank, spread: Callable[[Any], None]) -> None:
    """Eight ranks: empty shards, and a mesh of three dimensions."""
    check_layout(syncheck_rank, spread)


@pytest.mark.syncheck(ranks=3)
def test_sharded_tensors_of_fsdp1(syncheck_rank: Rank) -> None:
    """The sharded state dicts of FSDP1 equal the full state dict; a flipped bit is found."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    rank = syncheck_rank
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(Block(), device_id=torch.device("cpu"), use_orig_params=True)
    folder, full = shared_folder(rank, "fsdp1"), rank.shared / "full.pth"
    config = ShardedStateDictConfig(_use_dtensor=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        torch.save({"model": model.state_dict()}, folder / f"m_rank{rank.rank}.pth")
    complete = {"model": model.state_dict()}
    if not rank.rank:
        torch.save(complete, full)
        report = syncheck.diff(folder, full)
        assert (report.exit_code, report.counts.identical) == (0, 9), report
        flip_a_bit(folder / "m_rank1.pth", "head.weight", ELEMENT)
        (diff,) = syncheck.diff(folder, full).groups[-1].tensors
        assert (diff.name, diff.index, diff.places[0].rank) == ("head.weight", (4 + ELEMENT // 8, ELEMENT % 8), 1)
    dist.barrier()


@pytest.mark.syncheck(ranks=4)
def test_distributed_checkpoints(syncheck_rank: Rank) -> None:
    """A folder saved by four ranks, the same model loaded and saved by two ranks, and files of ranks are equal."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    rank = syncheck_rank
    torch.manual_seed(0)
    model: Any = Block()
    shard_fully(model)
    state = get_model_state_dict(model)
    by_four = shared_folder(rank, "by_four")
    by_two = shared_folder(rank, "by_two")
    files = shared_folder(rank, "files")
    dcp.save(state, checkpoint_id=str(by_four))
    torch.save(state, files / f"m_rank{rank.rank}.pth")
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (4,))  # noqa: F841 - a collective call of all ranks
    if rank.rank < 2:
        from torch.distributed.device_mesh import DeviceMesh

        torch.manual_seed(1)
        second: Any = Block()
        fully_shard(second, mesh=DeviceMesh.from_group(pair, "cpu"))
        loaded = get_model_state_dict(second)
        dcp.load(loaded, checkpoint_id=str(by_four), process_group=pair)
        set_model_state_dict(second, loaded)
        dcp.save(get_model_state_dict(second), checkpoint_id=str(by_two), process_group=pair)
    dist.barrier()
    if not rank.rank:
        for a, b in ((by_four, by_two), (files, by_two), (f"{files}/*.pth", by_four)):
            report = syncheck.diff(a, b)
            assert (report.exit_code, report.counts.identical) == (0, 9), (a, b, report)
        shard = next(iter(sorted(by_two.glob("*.distcp"))))
        tensor = syncheck.read(str(by_two)).tensors["head.weight"]
        part = next(box for box in tensor.shards if box.tensor.path == str(shard))
        with shard.open("r+b") as file:
            file.seek(part.tensor.offset + 4 * 17 + 2)
            file.write(b"\xff")
        report = syncheck.diff(files, by_two)
        (diff,) = report.groups[-1].tensors
        assert (report.exit_code, diff.name) == (1, "head.weight")
        assert diff.index == (part.start[0] + 2, 1)
        assert (diff.places[1].path, diff.places[0].path) == (str(shard), str(files / "m_rank0.pth"))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_transformers(tmp_path: Path, tied: bool) -> None:
    """`save_pretrained` in several files equals the full file; a changed element is found in its file.

    It stores a tied weight under one name, and torch.save under two.
    """
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    torch.save(model.state_dict(), tmp_path / "full.pth")
    model.save_pretrained(tmp_path / "export", max_shard_size="10KB")
    shards = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(shards) > 2
    for a, b in (("full.pth", "export"), ("export", "full.pth")):
        report = syncheck.diff(tmp_path / a, tmp_path / b)
        assert (report.exit_code, report.counts.identical) == (0, len(model.state_dict()))
        assert (Note.TIED in list_codes(report.groups[-1].notes)) == tied
    name = "model.layers.1.mlp.down_proj.weight"
    part = syncheck.read(str(tmp_path / "export")).tensors[name]
    with Path(part.path).open("r+b") as file:
        file.seek(part.offset + 4 * 35)
        file.write(b"\xff\xff")
    report = syncheck.diff(tmp_path / "full.pth", tmp_path / "export")
    (diff,) = report.groups[-1].tensors
    assert (report.exit_code, diff.name, diff.index, diff.places[1].path) == (1, name, (1, 3), part.path)
