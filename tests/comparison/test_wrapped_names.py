"""Names that start with `module.`: a wrapper's prefix, or a submodule of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import list_codes

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

ONE = np.ones(3, np.float32)
MODEL = {"module.enc.w": ONE, "module.enc.b": ONE, "module.head.w": ONE}


def compare(folder: Path, *states: dict[str, Any]) -> Any:
    """Compare one file per rank."""
    for rank, state in enumerate(states):
        save_pth(folder / f"m_rank{rank}.pth", state)
    (group,) = syncheck.compare(folder).groups
    return group


@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
@pytest.mark.parametrize("lost", ["logit_scale", "n_averaged"])
def test_a_tensor_lost_beside_a_submodule(lost: str, wrapper: str, tmp_path: Path) -> None:
    """A rank that lost the only tensor outside `module.` lacks this tensor; all others are compared."""
    group = compare(tmp_path, MODEL | {lost: ONE}, {f"{wrapper}{name}": value for name, value in MODEL.items()})
    assert [(diff.name, diff.clusters) for diff in group.tensors] == [(lost, ((0,),))]
    assert "SYN101" in list_codes(group.findings)
    assert group.counts.identical == 3


def test_a_tensor_of_one_rank_beside_a_submodule(tmp_path: Path) -> None:
    """A tensor that only the other rank has keeps the name of the submodule, too."""
    group = compare(tmp_path, MODEL | {"logit_scale": ONE}, MODEL | {"module.extra.w": ONE})
    assert {(diff.name, diff.clusters) for diff in group.tensors} == {
        ("logit_scale", ((0,),)),
        ("module.extra.w", ((1,),)),
    }


def test_a_wrapped_model_beside_an_unwrapped_one(tmp_path: Path) -> None:
    """Without other tensors, the prefix is that of a wrapper."""
    plain = {name.removeprefix("module."): value for name, value in MODEL.items()}
    assert compare(tmp_path, MODEL, plain, MODEL).verdict == "in_sync"
