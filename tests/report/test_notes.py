"""Notes of groups in the output of `syncheck report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import Done, network, save

from syncheck.messages import Grouping, Note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_report_prints_each_note_once(cli: Callable[..., Done], tmp_path: Path) -> None:
    """A note common to several runs is printed once; the grouping of files is not printed."""
    for run in ("one", "two"):
        for rank in range(2):
            save(tmp_path / f"ckpts/{run}_rank{rank}.pth", network())
    done = cli("report", "ckpts", "--quick")
    assert done.code == 0
    assert done.out.count(str(Note.QUICK()).partition(",")[0]) == 1
    assert str(Grouping.RANKS_IN_NAMES()) not in done.out
