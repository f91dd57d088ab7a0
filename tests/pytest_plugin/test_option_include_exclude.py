"""`--syncheck-include`, `--syncheck-exclude` and `--syncheck-buffers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_include_exclude_buffers(tmp_path: Path) -> None:
    """Tensors that are left out are judged by no item; leaving out all is no pass."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "fc.bias"))
    base = ["-v", "--syncheck", "*.pth"]
    included, excluded, nothing, buffers = sessions(
        (tmp_path, [*base, "--syncheck-include", "layer*"]),
        (tmp_path, [*base, "--syncheck-exclude", "fc.*", "--syncheck-exclude", "*.running_*"]),
        (tmp_path, [*base, "--syncheck-include", "no such tensor"]),
        (tmp_path, [*base, "--syncheck-buffers", "fc.bias"]),
    )
    assert (included.code, len(included.outcomes())) == (0, 2), included.out
    assert (excluded.code, len(excluded.outcomes())) == (0, 2), excluded.out
    assert "options in force: exclude fc.*, *.running_*" in excluded.out
    assert (nothing.code, nothing.outcomes()) == (1, {".::ddp::tensors": "FAILED"})
    assert "no tensor was compared: the options leave all of them out" in nothing.out
    assert buffers.outcomes() == {
        ".::ddp::parameters": "PASSED",
        ".::ddp::bn-stats": "PASSED",
        ".::ddp::buffers": "FAILED",
    }
