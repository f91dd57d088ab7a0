"""`pytest --syncheck-diff A B`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.dtensors import save_ranks
from support.sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(24, dtype=np.float32).reshape(8, 3)


def write(folder: Path) -> Path:
    """Write a model in shards, the same model in a file, a file with one changed element, and an incomplete model."""
    for name, parts in (("ranks", {0: W[:4], 1: W[4:]}), ("half", {0: W[:4]})):
        (folder / name).mkdir()
        save_ranks(folder / name, parts, ["S(0)"], [2])
    save_pth(folder / "full.pth", {"w": W})
    changed = W.copy()
    changed[5, 1] += 1
    save_pth(folder / "changed.pth", {"w": changed})
    state = {"state": {0: {"exp_avg": W}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save_pth(folder / "with_step.pth", {"model": {"w": W}, "optimizer": state})
    return folder


@pytest.mark.slow
def test_a_test_for_each_pair(tmp_path: Path) -> None:
    """A pair in sync passes, a difference and an incomplete model fail, and no other test is collected."""
    (write(tmp_path) / "test_other.py").write_text("def test_other(): assert False\n")
    option = "--syncheck-diff"
    arguments = [option, "ranks", "full.pth", option, "full.pth", "changed.pth", option, "half", "full.pth"]
    (run, spread, subset) = sessions(
        (tmp_path, ["-v", *arguments]),
        (tmp_path, ["-v", *arguments, "-n", "2", "test_other.py"]),
        (tmp_path, ["-v", "--syncheck-diff", "with_step.pth", "full.pth", "--syncheck-subset"]),
    )
    assert run.outcomes() == {
        "syncheck-diff::ranks::full.pth": "PASSED",
        "syncheck-diff::full.pth::changed.pth": "FAILED",
        "syncheck-diff::half::full.pth": "FAILED",
    }
    assert "[5, 1]" in run.out
    assert "could not tell: A: " in run.out
    assert spread.outcomes() == {**run.outcomes(), "test_other.py::test_other": "FAILED"}
    assert (subset.code, subset.outcomes()) == (0, {"syncheck-diff::with_step.pth::full.pth": "PASSED"})
