"""`--syncheck-buffers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["-v", "--syncheck", "*.pth"]


def test_buffers(tmp_path: Path) -> None:
    """Matching names are judged as buffers if the files have no metadata."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "fc.bias"))
    (buffers,) = sessions((tmp_path, [*BASE, "--syncheck-buffers", "fc.bias"]))
    assert buffers.outcomes() == {
        ".::ddp::parameters": "PASSED",
        ".::ddp::bn-stats": "PASSED",
        ".::ddp::buffers": "FAILED",
    }
