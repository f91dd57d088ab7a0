"""The notes of groups in what `report` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import Done, network, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_report_tells_each_note_once(cli: Callable[..., Done], tmp_path: Path) -> None:
    """What concerns the answer is said below the matrix, once for all runs; how files were found is not."""
    for run in ("one", "two"):
        for rank in range(2):
            save(tmp_path / f"ckpts/{run}_rank{rank}.pth", network())
    done = cli("report", "ckpts", "--quick")
    assert done.code == 0
    assert done.out.count("compared by the checksums stored in the files") == 1
    assert "ranks taken from the names" not in done.out
