"""`--syncheck-include`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["-v", "--syncheck", "*.pth"]


def test_include(tmp_path: Path) -> None:
    """Only tensors with a matching name are judged; a pattern without a match fails."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "fc.bias"))
    included, nothing = sessions(
        (tmp_path, [*BASE, "--syncheck-include", "layer*"]),
        (tmp_path, [*BASE, "--syncheck-include", "no such tensor"]),
    )
    assert (included.code, len(included.outcomes())) == (0, 2), included.out
    assert (nothing.code, nothing.outcomes()) == (1, {".::ddp::tensors": "FAILED"})
    assert "no tensor was compared: the options exclude all tensors" in nothing.out
