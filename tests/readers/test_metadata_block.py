"""The metadata block of an untrusted file is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import find_all

import syncheck
from syncheck.errors import MalformedFile
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path

W = np.ones(2, np.float32)


def read(folder: Path, block: Any) -> Any:
    """Return the metadata of a checkpoint with this block."""
    return syncheck.read(str(save_pth(folder / "a.pth", {"w": W, "syncheck": block}))).metadata


def test_round_trip(tmp_path: Path) -> None:
    """Every field is read, and unknown keys are dropped."""
    block = syncheck.metadata(
        run="ddp", rank=1, world_size=4, step=7, epoch=2, run_id="x", buffers_synced=False,
        mesh={"dp": 1}, config={"lr": 0.1}, host="node3",
    )  # fmt: skip
    result = read(tmp_path, block | {"of_later_versions": 1})
    for name in ("run", "rank", "world_size", "step", "epoch", "run_id", "buffers_synced", "mesh", "config", "host"):
        assert getattr(result, name) == block[name], name


def test_model_and_optimizer_are_described(tmp_path: Path) -> None:
    """Saved buffers, frozen parameters, momentum and the optimizer's order are recorded from the model."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3, momentum=None))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [model[1].weight, model[0].weight]}, {"params": [model[1].bias]}], lr=0.1)
    result = read(tmp_path, syncheck.metadata(run="r", rank=0, world_size=1, model=model, optimizer=optimizer))
    assert result.buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert result.frozen == ("0.bias",)
    assert result.bn_momentum == {"1": None}
    assert result.optimizer_parameters == ("1.weight", "0.weight", "1.bias")


def unending(kind: str) -> dict[str, Any]:
    """Return a configuration that contains itself, or 60 nested lists with two references to each inner list."""
    if kind == "cycle":
        created: dict[str, Any] = {}
        created["me"] = created
        return created
    part: list[Any] = []
    for _ in range(60):
        part = [part, part]
    return {"parts": part}


@pytest.mark.parametrize("kind", ["cycle", "doubled"])
@pytest.mark.parametrize("key", ["config", "versions", "bn_momentum"])
def test_endless_containers_are_malformed(tmp_path: Path, kind: str, key: str) -> None:
    """Recursive and exponentially nested containers are malformed, and detected quickly."""
    with pytest.raises(MalformedFile, match=f"{key}: nested without end"):
        read(tmp_path, {"rank": 0, key: unending(kind)})


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"}, {"rank": True}, {"rank": -1}, {"rank": 10**5000}, {"mesh": {"dp": 10**5000}},
        {"mesh": {"dp": -1}},
        {"averaging": {"period": 2**63}}, {"rank": 0.5}, {"world_size": 10**9},
        {"step": 2**63}, {"epoch": [1]}, {"run": 3}, {"mesh": []}, {"buffers": [1]}, {"buffers": "w"}, {"schema": 2},
        {"buffers_synced": 1}, {"config": "x"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_fields_of_another_type_or_out_of_bounds(tmp_path: Path, change: dict[str, Any]) -> None:
    """A field with an invalid value makes the file malformed, with a short one-line error."""
    block = syncheck.metadata(run="ddp", rank=0, world_size=2, step=7) | change
    with pytest.raises(MalformedFile, match=f"metadata block 'syncheck', {next(iter(change))}: ") as caught:
        read(tmp_path, block)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("rank, world", [(-1, 2), (2, 2), (0, 0)])
def test_writing_an_impossible_rank(rank: int, world: int) -> None:
    """A rank outside its world is refused when writing."""
    with pytest.raises(ValueError, match="must be from 0 to world_size - 1"):
        syncheck.metadata(run="r", rank=rank, world_size=world)


def test_absent_ranks_are_noted(tmp_path: Path) -> None:
    """Ranks without a file are noted, abbreviated if there are many."""
    for rank in range(2):
        block = syncheck.metadata(run="r", rank=rank, world_size=100_000, step=1, run_id="x")
        save_pth(tmp_path / f"rank{rank}.pth", {"w": W, "syncheck": block})
    (group,) = syncheck.compare(tmp_path).groups
    (note,) = find_all(group.notes, code=Note.RANKS_ABSENT)
    assert len(note.parameters["ranks"]) == 99_998
    assert len(str(note)) < 100


def test_a_top_level_key_that_is_no_block(tmp_path: Path) -> None:
    """A tensor named like the metadata block is read as a tensor."""
    result = syncheck.read(str(save_pth(tmp_path / "a.pth", {"syncheck": W})))
    assert list(result.tensors) == ["syncheck"]
    assert result.metadata is None


def test_the_wrapper_says_whether_buffers_are_synchronized() -> None:
    """Of DDP's wrapper, the names are those of its module, and an explicit value counts more."""
    torch = pytest.importorskip("torch")

    class DistributedDataParallel(torch.nn.Module):  # type: ignore[name-defined, misc]
        forward_sync_buffers = False

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = syncheck.metadata(run="r", rank=0, world_size=2, model=DistributedDataParallel(model))
    plain = syncheck.metadata(run="r", rank=0, world_size=2, model=model, buffers_synced=False)
    assert wrapped == plain
    explicit = syncheck.metadata(
        run="r", rank=0, world_size=2, model=DistributedDataParallel(model), buffers_synced=True
    )
    assert explicit["buffers_synced"] is True
