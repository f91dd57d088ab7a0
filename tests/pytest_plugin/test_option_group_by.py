"""`--syncheck-group-by REGEX`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_group_by(tmp_path: Path) -> None:
    """Files with equal matches are one group, and an invalid expression is a usage error."""
    for name, state in {"alice": network(), "bob": network(), "carol": changed(network(), "fc.bias")}.items():
        save(tmp_path / f"final-{name}.pth", state)
    grouped, split, wrong = sessions(
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-group-by", "(final)"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-group-by", "(alice|bob|carol)"]),
        (tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-group-by", "("]),
    )
    assert grouped.code == 1
    assert grouped.outcomes() == {".::final::parameters": "FAILED", ".::final::bn-stats": "PASSED"}, grouped.out
    # Three groups of one file have no verdict and fail.
    assert set(split.outcomes().values()) == {"FAILED"}
    assert "no replica to compare with" in split.out
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert wrong.out.startswith("ERROR: --syncheck-group-by '(': not a regular expression")
