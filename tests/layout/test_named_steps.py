"""Files whose path states another step than their content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import network, save_pth
from support.listings import list_fields

import syncheck
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report


def list_steps(report: Report) -> list[tuple[int, int]]:
    """Return the steps in paths and in the content that the notes of a report state."""
    steps = []
    for group in report.groups:
        for note in group.notes:
            if note.code is Note.CONTRADICTING_STEPS:
                steps.append((note.parameters["named"], note.parameters["stored"]))
    return steps


def write(folder: Path, name: str, **values: Any) -> Path:
    """Write the files of two ranks with values beside the model."""
    for rank in range(2):
        save_pth(folder / name.format(rank=rank), {"model": network(), **values})
    return folder


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("step_100_rank{rank}.pth", {"step": 200}, [(100, 200)]),
        ("checkpoint-100/rank{rank}.pth", {"global_step": 200}, [(100, 200)]),
        ("epoch_3_rank{rank}.pth", {"epoch": 7}, [(3, 7)]),
        ("iter_5_rank{rank}.pth", {"iteration": 9}, [(5, 9)]),
        ("step_100_rank{rank}.pth", {"step": 100}, []),
        # One of several counters agrees.
        ("step_100_rank{rank}.pth", {"step": 4, "global_step": 100}, []),
        # Counted from 0, or saved before the step is counted.
        ("epoch_3_rank{rank}.pth", {"epoch": 2}, []),
        ("step_100_rank{rank}.pth", {"step": 101}, []),
        # A number of epochs is no number of steps.
        ("epoch_3_rank{rank}.pth", {"step": 5000}, []),
        ("step_100_rank{rank}.pth", {"epoch": 3}, []),
        ("ckpt_3_rank{rank}.pth", {"epoch": 3, "step": 5000}, []),
        ("rank{rank}.pth", {"step": 100}, []),
        ("step_100_rank{rank}.pth", {"step": "200", "iteration": True}, []),
    ],
)
def test_steps_of_paths_and_contents(
    tmp_path: Path, name: str, values: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """A note states the step in the path and in the content if they differ; the verdict is that of the tensors."""
    folder = write(tmp_path, name, **values)
    report = syncheck.compare(folder)
    assert (report.exit_code, list_steps(report)) == (0, expected)
    files = sorted(folder.rglob("*.pth"))
    save_pth(tmp_path / "export.pt", {"model": network()})
    for side in (files, files[0]):
        assert (
            list_steps(syncheck.diff(side, tmp_path / "export.pt", options=syncheck.DiffOptions(subset=True)))
            == expected
        )


def test_one_rank_contradicts_its_path(tmp_path: Path) -> None:
    """Ranks of different steps under one step in the path are SYN106, and a note names the file."""
    for rank, step in enumerate((100, 200)):
        save_pth(tmp_path / f"step_100_rank{rank}.pth", {"model": network(), "step": step})
    report = syncheck.compare(tmp_path)
    (note,) = [note for note in report.groups[0].notes if note.code is Note.CONTRADICTING_STEPS]
    assert list_fields(report.findings, "code") == ["SYN106"]
    assert note.parameters["files"] == ("step_100_rank1.pth",)


def test_many_steps_have_few_notes(tmp_path: Path) -> None:
    """If the content contradicts every path, the first steps are stated, and the number of further ones."""
    for step in range(10, 60, 10):
        write(tmp_path, f"step_{step}_rank{{rank}}.pth", step=1000)
    report = syncheck.compare(tmp_path)
    assert list_steps(report) == [(10, 1000), (20, 1000), (30, 1000)]
    assert Note.MORE_CONTRADICTING_STEPS(count=2) in report.groups[0].notes
