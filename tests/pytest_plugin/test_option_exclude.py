"""`--syncheck-exclude`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["-v", "--syncheck", "*.pth"]


def test_exclude(tmp_path: Path) -> None:
    """Tensors with a matching name are judged by no item, and the summary contains the option."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "fc.bias"))
    (excluded,) = sessions((tmp_path, [*BASE, "--syncheck-exclude", "fc.*", "--syncheck-exclude", "*.running_*"]))
    assert (excluded.code, len(excluded.outcomes())) == (0, 2), excluded.out
    assert "options in effect: exclude fc.*, *.running_*" in excluded.out
