"""`--syncheck-only KIND`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import changed, network, save_pth
from sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


def test_only(tmp_path: Path) -> None:
    """Only items of this kind exist, RNG states on request, and differences of other kinds are ignored."""
    for rank in range(2):
        model = changed(network(), "running_mean") if rank else network()
        tree = {"model": model, "rng_state": np.full(4, rank, np.int64), "optimizer": {"state": {}, "param_groups": []}}
        save_pth(tmp_path / "ckpts" / f"ddp_rank{rank}.pth", tree)
    every, params, buffers, both, rng, wrong = sessions(
        (tmp_path, ["-v", "--syncheck", "ckpts"]),
        (tmp_path, ["-v", "--syncheck", "ckpts", "--syncheck-only", "params"]),
        (tmp_path, ["-v", "--syncheck", "ckpts", "--syncheck-only", "buffers"]),
        (tmp_path, ["-v", "--syncheck", "ckpts", "--syncheck-only", "params", "--syncheck-only=buffers"]),
        (tmp_path, ["-v", "--syncheck", "ckpts", "--syncheck-only", "rng"]),
        (tmp_path, ["-v", "--syncheck", "ckpts", "--syncheck-only", "nonsense"]),
    )
    parameters = {"ckpts::ddp::parameters": "PASSED"}
    statistics = {"ckpts::ddp::bn-stats": "FAILED"}
    assert (every.code, every.outcomes()) == (1, parameters | statistics), every.out
    assert (params.code, params.outcomes()) == (0, parameters), params.out
    assert (buffers.code, buffers.outcomes()) == (1, statistics), buffers.out
    assert (both.code, both.outcomes()) == (1, parameters | statistics), both.out
    assert (rng.code, rng.outcomes()) == (1, {"ckpts::ddp::rng": "FAILED"}), rng.out
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert wrong.out.strip() == "ERROR: --syncheck-only nonsense: must be one of params, buffers, optimizer, rng"
    # What was left out by an option is told at the start and at the end.
    assert params.out.count("only params") == 2
