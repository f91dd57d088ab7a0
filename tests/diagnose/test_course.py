"""One fault at several steps of a run is one finding, and two faults are two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import small_model
from support.groups import make_finding
from support.listings import join_fields, list_codes, list_fields
from torch import nn

import syncheck
from syncheck.diagnose.course import decide_over_steps
from syncheck.diagnose.single_events import Event
from syncheck.live.desync_state import DesyncState
from syncheck.records import Report

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Group

NAMES = tuple(small_model.MODEL)


def step(number: int, *codes: str, ranks: int = 2, odd: Any = None, certainty: Any = "likely") -> Group:
    """Return a step whose parameters differ, with one finding per code about all of them; none if it is in sync."""
    tensors = small_model.model(ranks=ranks, odd=odd) if codes else ()
    group = small_model.group(*tensors, ranks=ranks, step=number)
    findings = [
        replace(make_finding(code, code.lower(), "error", tuple(range(ranks)), NAMES, code), certainty=certainty)
        for code in codes
    ]
    return replace(group, verdict="out_of_sync" if codes else "in_sync", findings=tuple(findings))


def decide(*steps: Group) -> list[list[tuple[str, str, tuple[str, ...]]]]:
    """Return code, certainty and alternatives of the findings of each step."""
    return [list_fields(group.findings, "code", "certainty", "alternatives") for group in decide_over_steps(steps)]


def test_alternating_causes_become_one() -> None:
    """The code of most steps decides. Both seemed likely, so the finding is only consistent with it."""
    findings = decide(step(5, "SYN211"), step(10, "SYN213"), step(20, "SYN211"))
    assert findings == [[("SYN211", "consistent", ("SYN213",))]] * 3


def test_a_weaker_step_refers_to_the_clearest_step() -> None:
    """A step that is only consistent with another cause does not weaken the clear one."""
    findings = decide(
        step(5, "SYN213", certainty="consistent"), step(10, "SYN211"), step(20, "SYN299", certainty="consistent")
    )
    assert findings == [[("SYN211", "likely", ())]] * 3


def test_small_first_differences() -> None:
    """Rounding differences of a first step with a tiny learning rate belong to the fault of the next steps."""
    assert decide(step(1, "SYN240"), step(2, "SYN211"), step(3, "SYN211")) == [[("SYN211", "likely", ())]] * 3
    # Later rounding is no first difference.
    assert decide(step(1, "SYN211"), step(2, "SYN240"))[1] == [("SYN240", "likely", ())]


@pytest.mark.parametrize(
    "steps",
    [
        (step(5, "SYN211"), step(10), step(20, "SYN213")),
        (step(5, "SYN211", ranks=3), step(10, "SYN213", ranks=3, odd=(0,))),
        (step(5, "SYN210"), step(10, "SYN211")),
        (step(5, "SYN217"), step(10, "SYN211")),
        (step(5, "SYN240"), step(10, "SYN299", certainty="consistent")),
    ],
    ids=["in sync between", "other ranks", "start and gradients", "stale and gradients", "no cause"],
)
def test_two_faults_stay_two(steps: Sequence[Group]) -> None:
    """Faults of other ranks, at separate times, or with other evidence keep their findings."""
    assert list(decide_over_steps(steps)) == list(steps)


def test_allowed_findings_do_not_hide_other_findings() -> None:
    """A finding that the user does not allow is not merged into an allowed one."""
    first = step(5, "SYN211")
    allowed = replace(first, findings=tuple(replace(finding, allowed=True) for finding in first.findings))
    steps = (allowed, step(10, "SYN213"), replace(allowed, step=20))
    decided = decide_over_steps(steps)
    assert list_fields(join_fields(decided, "findings"), "fails") == [False, True, False]


def test_a_running_job_keeps_the_code() -> None:
    """The checks of a monitor decide like the steps of files, and forget the fault when the ranks are in sync."""
    state = DesyncState()
    codes = []
    for group in (step(5, "SYN211"), step(10, "SYN213"), step(15), step(20, "SYN213")):
        report = state.decide(group.step or 0, Report(group.verdict, (replace(group, step=None),)))
        codes.append(list_fields(report.groups[0].findings, "code", "alternatives"))
        assert report.groups[0].step is None
    assert codes == [[("SYN211", ())], [("SYN211", ("SYN213",))], [], [("SYN213", ())]]


def _save(folder: Path, number: int, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
    torch.save(content, folder / f"run_step{number}_rank{rank}.pth")


def test_files_of_ranks_with_nearly_equal_batches(tmp_path: Path) -> None:
    """Ranks that train alone, on nearly equal batches at some steps, have one finding in their files of all steps."""
    trained = []
    for _ in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        trained.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.3, 0.999))))
    for number in range(1, 13):
        torch.manual_seed(number)
        shared = torch.randn(32, 6)
        for rank, (model, optimizer) in enumerate(trained):
            x = shared + (0.01 if 5 <= number <= 8 else 2.0) * torch.randn(32, 6)
            scale = 1.0 if rank == 0 or not 5 <= number <= 8 else 0.3
            optimizer.zero_grad()
            (scale * nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))).backward()
            optimizer.step()
            if number in (4, 8, 12):
                _save(tmp_path, number, rank, model, optimizer)
    report = syncheck.compare(tmp_path)
    codes = set(list_codes(report.findings))
    assert report.exit_code == 1
    assert len(codes) == 1


def test_converging_moments_are_a_single_event() -> None:
    """After one wrong step, the first moments agree more and more; under local gradients, they do not."""
    events = []
    for cosines in ((0.9, 0.95, 0.999), (0.9, 0.85, 0.8), (0.97, 0.9, 0.985)):
        steps = []
        for position, cosine in enumerate(cosines):
            group = step(10 * position + 10, "SYN211")
            steps.append(replace(group, tensors=(*group.tensors, *small_model.moments(cosine=cosine))))
        decided = join_fields(decide_over_steps(steps), "findings")
        events.append([Event.CONVERGED in list_codes(finding.facts) for finding in decided])
    assert events == [[True] * 3, [False] * 3, [False] * 3]
