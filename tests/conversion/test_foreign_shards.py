"""A rank of one model saved its shard of another tensor: the range, the rank's file and the tensor are stated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import syncheck
from syncheck.diagnose.measures import parameters_of

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORLD = 3
NAME, OTHER, THIRD = "layers.1.up.weight", "layers.2.up.weight", "layers.0.up.weight"


def make_model() -> dict[str, Any]:
    """Return weights whose rows and columns no number of ranks divides, and constant norms."""
    torch.manual_seed(0)
    weights = {f"layers.{layer}.up.weight": torch.randn(20, 16) for layer in range(4)}
    return weights | {f"layers.{layer}.norm.weight": torch.full((24,), float(layer > 1)) for layer in range(4)}


def save(folder: Path, model: dict[str, Any], dim: int, damage: Callable[[int, dict[str, Any]], None]) -> Path:
    """Write the shards of each rank. damage: changes the local tensors of a rank."""
    folder.mkdir()
    for rank in range(WORLD):
        mesh = DeviceMesh("cpu", torch.arange(WORLD), _init_backend=False, _rank=rank)
        state = {}
        for name, whole in model.items():
            placements = [Shard(dim if whole.dim() > 1 else 0)]
            state[name] = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
        damage(rank, {name: tensor.to_local() for name, tensor in state.items()})
        torch.save({"model": state}, folder / f"m_rank{rank}.pth")
    return folder


def find_relation(report: syncheck.Report) -> dict[str, Any]:
    """Return the parameters of the relation of the only finding, which explains the only tensor that differs."""
    (finding,) = report.groups[-1].findings
    assert (finding.code, finding.certainty, finding.tensors) == ("SYN313", "proved", (NAME,))
    (diff,) = [diff for diff in report.groups[-1].tensors if diff.out_of_sync]
    return dict(parameters_of(diff))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("rank", "dim", "run"),
    [(1, 0, (7, 7)), (2, 0, (14, 6)), (0, 1, (0, 6)), (2, 1, (12, 4))],
)
def test_a_shard_of_another_layer(tmp_path: Path, rank: int, dim: int, run: tuple[int, int], is_first: bool) -> None:
    """Even and uneven shards of rows and of columns, in either model."""
    model = make_model()

    def damage(damaged: int, local: dict[str, Any]) -> None:
        if damaged == rank:
            local[NAME].copy_(local[OTHER])

    shards = save(tmp_path / "shards", model, dim, damage)
    whole = tmp_path / "whole.pth"
    torch.save({"model": model}, whole)
    report = syncheck.diff(shards, whole) if is_first else syncheck.diff(whole, shards)
    found = find_relation(report)
    assert (found["side"], found["source"], found["dim"], found["runs"]) == ("A" if is_first else "B", OTHER, dim, run)
    assert found["files"].endswith(f"m_rank{rank}.pth")


def test_shards_of_two_other_layers(tmp_path: Path) -> None:
    """Two ranks saved shards of different tensors."""
    model = make_model()

    def damage(rank: int, local: dict[str, Any]) -> None:
        if rank:
            local[NAME].copy_(local[(OTHER, THIRD)[rank - 1]])

    shards = save(tmp_path / "shards", model, 0, damage)
    torch.save({"model": model}, tmp_path / "whole.pth")
    found = find_relation(syncheck.diff(shards, tmp_path / "whole.pth"))
    assert (found["source"], found["runs"]) == (f"{THIRD}, {OTHER}", (7, 7, 14, 6))


def test_constant_and_changed_shards_are_unexplained(tmp_path: Path) -> None:
    """The ones of a norm are equal to those of every other norm, and a shard with one other element is none of A."""
    model = make_model()
    for number, name in enumerate(("layers.1.norm.weight", NAME)):

        def damage(rank: int, local: dict[str, Any], name: str = name) -> None:
            if rank == 1:
                local[name].copy_(local[name.replace("layers.1", "layers.2")])
                local[NAME][0, 0] += name == NAME

        shards = save(tmp_path / "xy"[number], model, 0, damage)
        torch.save({"model": model}, tmp_path / "whole.pth")
        codes = {finding.code for finding in syncheck.diff(shards, tmp_path / "whole.pth").groups[-1].findings}
        assert codes == {"SYN399"}
