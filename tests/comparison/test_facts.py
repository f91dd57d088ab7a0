"""Each finding covers one fact about a tensor; every other fault of the same tensor has its own finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import compare_ranks
from support.listings import list_codes, list_fields

from syncheck import testing
from syncheck.diagnose import baseline
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report

ONE, TWO = np.ones(4, np.float32), np.full(4, 2, np.float32)
LONG, WIDE = np.ones(5, np.float32), np.ones(4, np.float64)
MISSING, UNLIKE, REST = "SYN101", "SYN102", "SYN299"


def compare_versions(folder: Path, *versions: Any, **options: Any) -> Report:
    """Compare ranks that hold these versions of one tensor, and an equal second tensor."""
    return compare_ranks(folder, *map(state_of, versions), **options)


def state_of(version: Any) -> dict[str, Any]:
    """Return a rank's state with this version of the tensor `odd`; None for a state without the tensor."""
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
    """A missing tensor, another shape and different values are three findings, each allowed separately."""
    versions, codes = CASES[name]

    def judge(*allow: str) -> Report:
        if where == "files":
            return compare_versions(tmp_path, *versions, allow=allow)
        return testing.compare(*map(state_of, versions), allow=allow)

    report = judge()
    assert dict(list_fields(report.groups[0].findings, "code", "ranks")) == codes
    assert report.groups[0].counts.tensors == 2
    assert judge(*codes).exit_code == 0
    for code in codes:
        assert judge(*(codes.keys() - {code})).exit_code == 1


@pytest.mark.parametrize("name", CASES)
def test_the_reference_does_not_change_the_findings(tmp_path: Path, name: str) -> None:
    """The findings have the same codes whichever rank is the reference."""
    versions, codes = CASES[name]
    for rank in range(len(versions)):
        report = compare_versions(tmp_path, *versions, reference=rank)
        assert set(list_codes(report.groups[0].findings)) == codes.keys()


def test_values_are_measured_if_one_rank_lacks_the_tensor(tmp_path: Path) -> None:
    """If one rank lacks a tensor, the values of the other ranks are still compared and measured."""
    report = compare_versions(tmp_path, ONE, TWO, None, ONE)
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
def test_a_baseline_accepts_known_facts_only(tmp_path: Path, known: str) -> None:
    """Accepted facts pass, also if some of them are fixed; another fact about the same tensor fails."""
    accepted = baseline.update_baseline(compare_versions(tmp_path, *STATES[known]), frozenset())
    (tmp_path / "known.json").write_text(baseline.serialize(accepted))
    read = baseline.read(str(tmp_path / "known.json"))
    passes = {"one", known, *([known.partition(",")[0], "two"] if "," in known else [])}
    for name, versions in STATES.items():
        report = baseline.apply_baseline(compare_versions(tmp_path, *versions), read)
        assert (report.exit_code == 0) == (name in passes), name


def test_an_older_baseline_is_read(tmp_path: Path) -> None:
    """A baseline entry without a fact accepts every fact of its code, is not fixed, and an update adds the fact."""
    report = compare_versions(tmp_path, *STATES["shape"])
    older = frozenset({baseline.Entry("run", UNLIKE, "parameter", "odd")})
    (run,) = set(list_fields(baseline.update_baseline(report, frozenset()), "run"))
    older = frozenset(entry._replace(run=run) for entry in older)
    judged = baseline.apply_baseline(report, older)
    assert (judged.exit_code, judged.groups[0].fixed) == (0, ())
    assert set(list_fields(baseline.update_baseline(report, older), "kind")) == {"parameter (shape)"}


def checkpoint_at(step: int, state: Any = ONE, **settings: float) -> dict[str, Any]:
    """Return a checkpoint of this step, with this momentum and these settings of the parameter group."""
    group = {"lr": 0.1, "weight_decay": 0.0, "params": [0]} | settings
    optimizer = {"state": {0: {"momentum_buffer": state}}, "param_groups": [group]}
    return {"model": {"fc.weight": state * step}, "optimizer": optimizer, "step": step}


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ((checkpoint_at(5), checkpoint_at(6)), 0),
        ((checkpoint_at(5), checkpoint_at(6), checkpoint_at(6)), 0),
        ((checkpoint_at(5), checkpoint_at(6), checkpoint_at(6, TWO)), 1),
        ((checkpoint_at(5), checkpoint_at(5, TWO), checkpoint_at(6)), 1),
        ((checkpoint_at(5), checkpoint_at(6), checkpoint_at(6, lr=0.2)), 1),
        ((checkpoint_at(5), checkpoint_at(6, lr=0.2), checkpoint_at(6, lr=0.2)), 0),
        ((checkpoint_at(5), checkpoint_at(6, weight_decay=0.2), checkpoint_at(6, weight_decay=0.2)), 1),
    ],
)
def test_different_progress_explains_differences_between_steps_only(tmp_path: Path, ranks: Any, code: int) -> None:
    """Allowing SYN106 accepts differences between steps, but not within a step, nor in settings that stay constant."""
    report = compare_ranks(tmp_path, *ranks, allow=("SYN106",))
    assert "SYN106" in list_codes(report.groups[0].findings)
    assert report.exit_code == code
