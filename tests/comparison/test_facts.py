"""A finding covers what its evidence explains: all else that is wrong with a tensor has a finding of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import compare_ranks

from syncheck import baseline, testing
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report

ONE, TWO = np.ones(4, np.float32), np.full(4, 2, np.float32)
LONG, WIDE = np.ones(5, np.float32), np.ones(4, np.float64)
MISSING, UNLIKE, REST = "SYN101", "SYN102", "SYN299"


def compared(folder: Path, *versions: Any, **options: Any) -> Report:
    """Compare ranks that hold these versions of a tensor beside one that is equal."""
    return compare_ranks(folder, *map(state_of, versions), **options)


def state_of(version: Any) -> dict[str, Any]:
    """Return the state of a rank with this version of a tensor, None for none at all."""
    return {"same": ONE} | ({} if version is None else {"odd": version})


CASES = {
    "missing": ((ONE, ONE, None), {MISSING: (2,)}),
    "missing, and two versions": ((ONE, TWO, None), {MISSING: (2,), REST: (0, 1)}),
    "missing, and one odd": ((ONE, TWO, ONE, None), {MISSING: (3,), REST: (1,)}),
    "shape": ((ONE, ONE, LONG), {UNLIKE: (2,)}),
    "shape, and two versions": ((ONE, TWO, LONG), {UNLIKE: (2,), REST: (0, 1)}),
    "shape, and two versions of both": ((ONE, TWO, LONG, 2 * LONG), {UNLIKE: (0, 1, 2, 3), REST: (0, 1, 2, 3)}),
    "dtype, and one odd": ((WIDE, ONE, TWO, ONE), {UNLIKE: (0,), REST: (2,)}),
    "all at once": ((ONE, TWO, LONG, None, ONE), {MISSING: (3,), UNLIKE: (2,), REST: (1,)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["files", "memory"])
def test_each_fact_has_its_finding(tmp_path: Path, name: str, where: str) -> None:
    """Missing, of another shape, and unequal among those alike are three findings, and each is excused by itself."""
    versions, codes = CASES[name]

    def judged(*allow: str) -> Report:
        if where == "files":
            return compared(tmp_path, *versions, allow=allow)
        return testing.compare(*map(state_of, versions), allow=allow)

    report = judged()
    assert {finding.code: finding.ranks for finding in report.groups[0].findings} == codes
    assert report.groups[0].counts.tensors == 2
    assert judged(*codes).exit_code == 0
    for code in codes:
        assert judged(*(codes.keys() - {code})).exit_code == 1


@pytest.mark.parametrize("name", CASES)
def test_a_reference_changes_no_fact(tmp_path: Path, name: str) -> None:
    """Whichever rank the differences are described against, the same findings are made."""
    versions, codes = CASES[name]
    for rank in range(len(versions)):
        report = compared(tmp_path, *versions, reference=rank)
        assert {finding.code for finding in report.groups[0].findings} == codes.keys()


def test_a_fact_has_the_numbers_of_its_ranks(tmp_path: Path) -> None:
    """A tensor missing on one rank is measured on the others, in the JSON document too."""
    report = compared(tmp_path, ONE, TWO, None, ONE)
    (diff,) = report.groups[0].tensors
    missing, values = diff.facts
    assert (missing.reason, missing.status, missing.minority) == (Reason.MISSING, "not_compared", (2,))
    assert (values.reason, values.status, values.minority, values.max_abs) == (None, "different", (1,), 1)
    assert values.evidence is not None


STATES = {
    "one": (ONE, ONE, ONE),
    "two": (ONE, TWO, ONE),
    "missing": (ONE, None, ONE),
    "missing, two": (ONE, None, TWO),
    "shape": (ONE, LONG, ONE),
    "shape, two": (ONE, LONG, TWO),
    "dtype": (ONE, WIDE, ONE),
}


@pytest.mark.parametrize("known", STATES)
def test_a_baseline_accepts_no_other_fact(tmp_path: Path, known: str) -> None:
    """What was accepted passes, and fewer facts do; another one in the same tensor fails."""
    accepted = baseline.update_baseline(compared(tmp_path, *STATES[known]), frozenset())
    baseline.write(str(tmp_path / "known.json"), accepted)
    read = baseline.read(str(tmp_path / "known.json"))
    passes = {"one", known, *([known.partition(",")[0], "two"] if "," in known else [])}
    for name, versions in STATES.items():
        found = baseline.apply_baseline(compared(tmp_path, *versions), read)
        assert (found.exit_code == 0) == (name in passes), name


def test_an_older_baseline_is_read(tmp_path: Path) -> None:
    """An entry without the fact accepts any of its code, is not told as fixed, and an update writes which it is."""
    report = compared(tmp_path, *STATES["shape"])
    older = frozenset({baseline.Entry("run", UNLIKE, "parameter", "odd")})
    (run,) = {entry.run for entry in baseline.update_baseline(report, frozenset())}
    older = frozenset(entry._replace(run=run) for entry in older)
    judged = baseline.apply_baseline(report, older)
    assert (judged.exit_code, judged.groups[0].fixed) == (0, ())
    assert {entry.kind for entry in baseline.update_baseline(report, older)} == {"parameter (shape)"}


def at(step: int, state: Any = ONE, **settings: float) -> dict[str, Any]:
    """Return a checkpoint of a step."""
    group = {"lr": 0.1, "weight_decay": 0.0, "params": [0]} | settings
    optimizer = {"state": {0: {"momentum_buffer": state}}, "param_groups": [group]}
    return {"model": {"fc.weight": state * step}, "optimizer": optimizer, "step": step}


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ((at(5), at(6)), 0),
        ((at(5), at(6), at(6)), 0),
        ((at(5), at(6), at(6, TWO)), 1),
        ((at(5), at(5, TWO), at(6)), 1),
        ((at(5), at(6), at(6, lr=0.2)), 1),
        ((at(5), at(6, lr=0.2), at(6, lr=0.2)), 0),
        ((at(5), at(6, weight_decay=0.2), at(6, weight_decay=0.2)), 1),
    ],
)
def test_another_progress_explains_what_training_moves(tmp_path: Path, ranks: Any, code: int) -> None:
    """SYN106 excuses differences between ranks of different steps, and none between two ranks of one step."""
    report = compare_ranks(tmp_path, *ranks, allow=("SYN106",))
    assert "SYN106" in {finding.code for finding in report.groups[0].findings}
    assert report.exit_code == code
