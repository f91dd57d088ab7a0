"""Run the programs of this folder, and read the outcome of each case on each rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.libraries import run
from support.listings import list_fields

if TYPE_CHECKING:
    from support.libraries import Ended

PROGRAMS = Path(__file__).parents[1] / "integrations" / "programs"


@dataclass(frozen=True)
class Outcomes:
    """The outcome of a program on each rank. ended: its processes, in order of rank."""

    folder: Path
    ended: list[Ended]

    def of(self, case: str) -> list[dict[str, Any]]:
        """Return the outcome of a case on each rank."""
        result = sorted(self.folder.glob(f"{case}.rank*.json"))
        assert result, f"nothing of {case}:\n" + "\n".join(each.output[-3000:] for each in self.ended)
        return [json.loads(path.read_text(encoding="utf-8")) for path in result]

    def steps(self, case: str) -> list[int]:
        """Return the checked steps, equal on all ranks, from rank 0's events."""
        each = self.of(case)
        steps: list[int] = each[0]["steps"]
        assert list_fields(each, "checks") == [len(steps)] * len(each)
        return steps

    def ended_well(self) -> None:
        """Assert that all processes exited with 0 and left no process behind."""
        text = "\n".join(each.output[-3000:] for each in self.ended)
        assert list_fields(self.ended, "code", "left") == [(0, False)] * len(self.ended), text


def outcomes(program: str, folder: Path, *cases: str, ranks: int = 2) -> Outcomes:
    """Run the cases of a program on some ranks; a single rank starts without a launcher."""
    return Outcomes(folder, run(PROGRAMS / program, folder, *cases, ranks=ranks))


def assert_nothing_changed(found: Outcomes) -> None:
    """Assert that a monitored training ended with the same bits, RNG state included, as an unmonitored one."""
    assert list_fields(found.of("healthy"), "trained") == list_fields(found.of("plain"), "trained")


def assert_not_checked_after_an_error(found: Outcomes, case: str) -> None:
    """Assert that rank 1's own error ended both ranks without a check, and no process remained."""
    assert [(ended.code != 0, ended.left) for ended in found.ended] == [(True, False)] * 2
    assert list_fields(found.of(case), "checks") == [0, 0]
    assert found.of(case)[1]["error"] == "ZeroDivisionError: planted"


def assert_warned_once(found: Outcomes, case: str) -> None:
    """Assert that a single process printed one warning and completed."""
    found.ended_well()
    assert found.ended[0].output.count("could not tell: ") == 1
    assert list_fields(found.of(case), "verdict") == ["undecided"]


def assert_stopped_alike(found: Outcomes, case: str, code: str, names: list[str], step: int) -> None:
    """Assert that all ranks raised one OutOfSync at this step, exited with 1, and left no process behind."""
    each = found.of(case)
    assert list_fields(each, "error") == [each[0]["error"]] * len(each)
    assert each[0]["error"].startswith(f"OutOfSync: step {step} (")
    assert list_fields(each, "codes", "names") == [([code], names)] * len(each)
    assert list_fields(found.ended, "code", "left") == [(1, False)] * len(found.ended)
    # In the process' own traceback, not in the launcher's copy.
    assert all(f"OutOfSync: step {step} (" in ended.output and code in ended.output for ended in found.ended)
