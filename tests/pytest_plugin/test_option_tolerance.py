"""`--syncheck-rtol`, `--syncheck-atol`, `--syncheck-ulp` and `--syncheck-close`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_tolerance(tmp_path: Path) -> None:
    """A small difference passes only within a tolerance; rtol without atol is a usage error."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "bn.weight", by=1e-6))
    base = ["-v", "--syncheck", "*.pth"]
    none, near, far, steps, torchs, both, half, negative, word = sessions(
        (tmp_path, base),
        (tmp_path, [*base, "--syncheck-rtol", "1e-5", "--syncheck-atol", "0"]),
        (tmp_path, [*base, "--syncheck-rtol", "1e-8", "--syncheck-atol", "1e-8"]),
        (tmp_path, [*base, "--syncheck-ulp", "16"]),
        (tmp_path, [*base, "--syncheck-close"]),
        (tmp_path, [*base, "--syncheck-close", "--syncheck-ulp", "16"]),
        (tmp_path, [*base, "--syncheck-rtol", "1e-5"]),
        (tmp_path, [*base, "--syncheck-ulp", "-1"]),
        (tmp_path, [*base, "--syncheck-atol", "some"]),
    )
    assert [run.code for run in (none, near, far, steps, torchs)] == [1, 0, 1, 0, 0]
    assert "parameters 2/8 close" in near.out
    assert "options in effect: rtol 1e-05; atol 0" in near.out
    assert "options in effect: ulp 16" in steps.out
    assert "options in effect: close\n" in torchs.out
    for run, error in (
        (both, "--syncheck-close cannot be combined with --syncheck-ulp"),
        (half, "--syncheck-rtol and --syncheck-atol belong together"),
        (negative, "--syncheck-ulp -1: must be at least 0"),
        (word, "--syncheck-atol: must be a number, not 'some'"),
    ):
        assert run.code == pytest.ExitCode.USAGE_ERROR
        assert error in run.out
