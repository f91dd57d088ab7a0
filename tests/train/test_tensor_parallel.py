"""A real run, 2 data-parallel x 2 tensor-parallel, with and without the fault of BLOOM-176B."""

from __future__ import annotations

import sys
from itertools import product
from typing import TYPE_CHECKING

import pytest
from support.listings import find_all, list_codes, list_failing, list_fields
from support.started import ROOT

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from support.programs import Programs


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_clipping_on_one_tensor_parallel_rank(programs: Programs, tmp_path: Path, fault: bool) -> None:
    """With the fault, norms and row-parallel biases are SYN231; without the fault, all tensors are in sync."""
    out = tmp_path / "out"
    done = programs.run(
        sys.executable, ROOT / "fixtures" / "tensor_parallel.py", out, *["--fault"] * fault, timeout=150
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    for kind in ("plain", "dtensor"):
        (group,) = syncheck.compare(out / kind).groups
        failing = list_failing(group)
        assert list_codes(failing) == ["SYN231"] * fault
        if not fault:
            assert group.verdict == "in_sync"
            continue
        parameters = {name for name in failing[0].tensors if not name.startswith("optimizer.")}
        wrong = {
            f"{i}.{name}" for i, name in product((0, 1), ("mlp_norm.weight", "mlp_norm.bias", "mlp.down_proj.bias"))
        }
        assert parameters == wrong
        assert set(list_fields(find_all(group.tensors, out_of_sync=True), "clusters")) == {((0, 2), (1, 3))}
