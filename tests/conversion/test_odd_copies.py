"""Copies within one model differ: the other model shows which of them it equals, and is not in sync with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import llama

import syncheck
from syncheck.messages import Note

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "layers.1.up.weight"


def make_model() -> dict[str, Any]:
    """Return the weights of two layers."""
    torch.manual_seed(0)
    return {f"layers.{layer}.{part}.weight": torch.randn(12, 8) for layer in range(2) for part in ("up", "down")}


def save_copies(folder: Path, count: int, *odd_ranks: int, name: str = NAME, model: Any = None) -> str:
    """Write the files of ranks with a copy of the model, and return their glob. odd_ranks: have another element."""
    folder.mkdir(parents=True)
    for rank in range(count):
        weights = {key: weight.clone() for key, weight in (model or make_model()).items()}
        if rank in odd_ranks:
            weights[name][3, 2] += 1
        torch.save({"model": weights}, folder / f"m_rank{rank}.pth")
    return str(folder / "*.pth")


def list_notes(report: syncheck.Report) -> list[Mapping[str, Any]]:
    """Return the parameters of the notes on copies and the other model."""
    notes = [note for group in report.groups for note in group.notes]
    return [note.parameters for note in notes if note.code is Note.COPIES_AND_OTHER_MODEL]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("count", "odd_ranks", "pair_verdict"),
    [(2, (1,), "undecided"), (2, (0,), "out_of_sync"), (4, (0, 1, 3), "out_of_sync"), (3, (2,), "undecided")],
)
def test_the_other_model_equals_some_copies(
    tmp_path: Path, count: int, odd_ranks: tuple[int, ...], pair_verdict: str, is_first: bool
) -> None:
    """Also a minority of the copies; models whose copies differ are never in sync."""
    copies = save_copies(tmp_path / "ranks", count, *odd_ranks)
    torch.save(make_model(), tmp_path / "full.pth")
    paths = [copies, str(tmp_path / "full.pth")]
    report = syncheck.diff(*(paths if is_first else reversed(paths)))
    assert report.exit_code == 1
    assert [group.verdict for group in report.groups] == ["out_of_sync", pair_verdict]
    (note,) = list_notes(report)
    equal_ranks = tuple(rank for rank in range(count) if rank not in odd_ranks)
    label = "B" if is_first else "A"
    assert (note["other"], note["equal"], note["ranks"], note["names"]) == (label, equal_ranks, odd_ranks, [NAME])


def test_a_model_that_equals_no_copy_has_no_note(tmp_path: Path) -> None:
    """The comparison of the models lists the difference."""
    copies = save_copies(tmp_path / "ranks", 2, 1)
    torch.save({name: weight + 1 for name, weight in make_model().items()}, tmp_path / "full.pth")
    report = syncheck.diff(copies, tmp_path / "full.pth")
    assert list_notes(report) == []
    assert report.groups[-1].verdict == "out_of_sync"


def test_copies_of_shards(tmp_path: Path) -> None:
    """The shard of one replica group differs on one of its ranks."""
    for rank in range(4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=rank)
        state = {}
        for name, whole in make_model().items():
            state[name] = distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        if rank == 3:
            state[NAME].to_local()[0, 0] += 1
        torch.save({"model": state}, tmp_path / f"m_rank{rank}.pth")
    torch.save(make_model(), tmp_path / "full.pth")
    report = syncheck.diff(tmp_path / "m_rank*.pth", tmp_path / "full.pth")
    (note,) = list_notes(report)
    assert (note["equal"], note["ranks"]) == ((1,), (3,))


def test_names_of_another_library(tmp_path: Path) -> None:
    """The other model has its own names, and other names for the modules of a layer."""
    weights = llama.make_model()
    model = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    name = "model.layers.0.mlp.down_proj.weight"
    copies = save_copies(tmp_path / "ranks", 2, 1, name=name, model=model)
    other = {key.replace("model.", "net.").replace("mlp", "ffn"): weight for key, weight in weights.items()}
    report = syncheck.diff(
        copies, llama.write(tmp_path / "b", other), options=syncheck.DiffOptions(accept_inferred=True)
    )
    (note,) = list_notes(report)
    assert (note["ranks"], note["names"]) == ((1,), [name])


def test_accepted_copies_leave_the_models_in_sync(tmp_path: Path) -> None:
    """A user knows the difference of the copies."""
    copies = save_copies(tmp_path / "ranks", 2, 1)
    torch.save(make_model(), tmp_path / "full.pth")
    allowing = syncheck.DiffOptions(allow=("SYN220",))
    assert syncheck.diff(copies, tmp_path / "full.pth", options=allowing).exit_code == 0
