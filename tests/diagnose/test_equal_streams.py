"""RNG states that only some ranks have in common: no majority is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_safetensors
from support.listings import get_failing

import syncheck
from syncheck.diagnose import syn299_unexplained_difference as syn299

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Finding


def compare(folder: Path, seeds: Sequence[int], weights: Sequence[float] = ()) -> Finding:
    """Compare ranks with streams of these seeds, and weights that are equal unless given, and return the finding."""
    for rank, seed in enumerate(seeds):
        stream = np.random.default_rng(seed).integers(0, 255, 64, np.uint8)
        weight = weights[rank] if weights else 0
        content = {"fc.weight": np.full((4, 4), weight, np.float32), "rng_state": stream}
        save_safetensors(folder / f"m_rank{rank}.safetensors", content)
    return get_failing(syncheck.compare(folder, options=syncheck.Options(rng=True)))


@pytest.mark.parametrize(
    ("seeds", "groups"),
    [
        ((0, 1, 1), ((1, 2),)),
        ((1, 1, 0), ((0, 1),)),
        ((0, 1, 1, 0), ((0, 3), (1, 2))),
        ((0, 1, 1, 1, 2), ((1, 2, 3),)),
    ],
)
def test_ranks_with_equal_streams_are_named(tmp_path: Path, seeds: Any, groups: Any) -> None:
    """If some ranks have equal streams, the finding names them, and suspects no minority."""
    finding = compare(tmp_path, seeds)
    assert (finding.code, finding.ranks) == ("SYN299", tuple(range(len(seeds))))
    assert finding.cause.code is syn299.Text.CAUSE_RNG_PARTLY
    assert syn299.Text.EQUAL_STREAMS(groups=groups) in finding.facts


def test_all_streams_differ(tmp_path: Path) -> None:
    """If all streams differ, as usual, no set of ranks is named."""
    finding = compare(tmp_path, (0, 1, 2))
    assert (finding.code, finding.cause.code) == ("SYN299", syn299.Text.CAUSE_RNG)


def test_other_tensors_differ_too(tmp_path: Path) -> None:
    """Beside differing parameters, equal streams do not change the suspects."""
    finding = compare(tmp_path, (0, 1, 1), (0, 0, 1))
    assert (finding.code, finding.ranks) == ("SYN299", (0, 2))
