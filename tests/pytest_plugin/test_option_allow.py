"""`--syncheck-allow CODE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_allow(tmp_path: Path) -> None:
    """An allowed finding passes and is reported, other findings fail, and an unknown code is a usage error."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "running_mean"))
    allowed, spread, other, wrong = sessions(
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-allow", "syn201"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-allow", "SYN201", "-n", "2"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-allow", "SYN101"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-allow", "SYN999"]),
    )
    for run in (allowed, spread):
        assert (run.code, run.outcomes()[".::ddp::bn-stats"]) == (0, "PASSED"), run.out
        assert "bn-stats 2/6 differ (SYN201 allowed)" in run.out
        assert "options in effect: allow" in run.out
    assert (other.code, other.outcomes()[".::ddp::bn-stats"]) == (1, "FAILED"), other.out
    assert "(SYN201)" in other.out
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert wrong.out.startswith("ERROR: --syncheck-allow SYN999: no such code")
    assert wrong.out.strip().count("\n") == 0
