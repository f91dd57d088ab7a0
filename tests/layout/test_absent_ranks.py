"""Ranks without a file are named with their step in the summary, and the ranks with files decide the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth

import syncheck
from syncheck.messages import Note
from syncheck.report import words

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

W = np.arange(6, dtype=np.float32)


def save(folder: Path, pattern: str, ranks_by_step: dict[int, Iterable[int]], world_size: int | None = None) -> None:
    """Write equal files of ranks and steps, with metadata if there is a world size."""
    for step, ranks in ranks_by_step.items():
        for rank in ranks:
            checkpoint: dict[str, Any] = {"model": {"w": W}}
            if world_size is not None:
                block = syncheck.metadata(run="r", rank=rank, world_size=world_size, step=step, run_id="x")
                checkpoint["syncheck"] = block
            path = folder / pattern.format(step=step, rank=rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_pth(path, checkpoint)


def list_absent(report: syncheck.Report) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups with absent ranks, and these ranks."""
    absent = []
    for group in report.groups:
        for note in group.notes:
            if note.code is Note.NO_FILES:
                absences = note.parameters["absences"]
                absent += [(absence.parameters["group"], absence.parameters["ranks"]) for absence in absences]
    return absent


PATTERNS = ["step{step}_rank{rank}.pth", "rank{rank}/step_{step}.pth", "step{step}/rank{rank}.pth"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("world_size", [None, 4])
def test_a_rank_without_a_file_at_one_step(tmp_path: Path, pattern: str, world_size: int | None) -> None:
    """The rank is named with its step, whichever step it is, by the metadata or by the other step."""
    for incomplete in (10, 20):
        folder = tmp_path / str(incomplete) / "ckpts"
        ranks_by_step = {step: range(3 if step == incomplete else 4) for step in (10, 20)}
        save(folder, pattern, ranks_by_step, world_size)
        report = syncheck.compare(folder)
        assert (report.exit_code, len(report.groups)) == (0, 2)
        [(group, ranks)] = list_absent(report)
        assert (group.endswith(f"step {incomplete}"), ranks) == (True, (3,))


@pytest.mark.parametrize(
    ("ranks", "world_size", "absent"),
    [
        ([0, 1, 3], None, (2,)),
        ([1, 2], None, (0,)),
        ([0, 1], None, ()),
        ([0, 1], 4, (2, 3)),
        ([0, 2], 3, (1,)),
        ([0, 1, 2], 3, ()),
    ],
)
def test_one_step(tmp_path: Path, ranks: list[int], world_size: int | None, absent: tuple[int, ...]) -> None:
    """Without metadata, only gaps show that a file is missing."""
    save(tmp_path / "ckpts", PATTERNS[0], {5: ranks}, world_size)
    report = syncheck.compare(tmp_path / "ckpts")
    assert report.exit_code == 0
    assert [ranks for _, ranks in list_absent(report)] == ([absent] if absent else [])


def test_files_that_exist_are_not_absent(tmp_path: Path) -> None:
    """A damaged file is unreadable, a run may go on with fewer ranks, and numbers of other things have gaps."""
    save(tmp_path / "a", PATTERNS[0], {10: range(3), 20: range(3)})
    (tmp_path / "a" / "step20_rank1.pth").write_bytes(b"PK\3\4 damaged")
    report = syncheck.compare(tmp_path / "a")
    assert (report.exit_code, len(report.unreadable), list_absent(report)) == (2, 1, [])
    save(tmp_path / "b", PATTERNS[0], {10: range(4)}, 4)
    save(tmp_path / "b", PATTERNS[0], {20: range(2)}, 2)
    assert list_absent(syncheck.compare(tmp_path / "b")) == []
    save(tmp_path / "c", "model-{rank}.pth", {0: (10, 30)})
    assert list_absent(syncheck.compare(tmp_path / "c")) == []


def test_the_report_names_them_once(tmp_path: Path) -> None:
    """The summary of a report has one line for all steps, and the groups do not repeat it."""
    save(tmp_path / "ckpts", PATTERNS[0], {step: range(2 + step % 2) for step in range(1, 21)})
    report = syncheck.compare(tmp_path / "ckpts")
    assert len(list_absent(report)) == 10
    assert len(words.scope_lines(report)) == 1
    assert not [line for group in report.groups for line in words.note_lines(group) if "rank 2" in line]
