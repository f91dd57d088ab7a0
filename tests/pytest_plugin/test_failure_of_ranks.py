"""What pytest shows of a test that failed on several ranks: the first failure in full, then the state of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks.failure import MOST_LINES, describe_disagreement, describe_failure
from syncheck.pytest_plugin.ranks.results import Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _pytest._code.code import TerminalRepr

STACKS = """Thread 0x1 (most recent call first):
  File "/env/syncheck/pytest_plugin/ranks/child.py", line 9 in _listen
Current thread 0x2 (most recent call first):
  File "/tests/test_model.py", line 7 in wait_for_nothing
  File "/env/_pytest/python.py", line 3 in call
  File "/env/pluggy/call.py", line 2 in run
"""


def fail_in_first_place(rank: int) -> None:
    """Raise an error whose text names the rank."""
    raise ValueError(f"the loss of rank {rank} is NaN")


def fail_in_second_place(rank: int) -> None:
    """Raise another error."""
    raise KeyError(rank)


def represent(work: Callable[[int], None], rank: int) -> TerminalRepr:
    """Return pytest's representation of the error of a function."""
    with pytest.raises((ValueError, KeyError)) as caught:
        work(rank)
    return caught.getrepr(style="long")


class Ranks:
    """Builds the results of ranks that were ready at the same time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.results = []
        for rank in range(count):
            rank_folder = folder / str(rank)
            rank_folder.mkdir()
            self.results.append(Result(rank, rank_folder, ready=1.0))

    def end(self, *ranks: int) -> None:
        """Let ranks end without a failure."""
        for rank in ranks:
            self.results[rank].done = True

    def fail(self, rank: int, longrepr: Any, at: float, when: Any = "call") -> None:
        """Let a rank fail in a phase of the test, and end. at: seconds."""
        report = pytest.TestReport("test", ("test.py", 1, "test"), {}, "failed", longrepr, when)
        result = self.results[rank]
        result.add(report)
        result.failed_at = at
        result.done = True

    def describe(self, item: pytest.Item, time_limit: str = "") -> tuple[str, dict[str, str]]:
        """Return the message, and the sections by title."""
        failure = describe_failure(item, self.results, time_limit)
        sections = {name: content for name, content, _ in failure.representation.sections}
        return str(failure), sections


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Four ranks."""
    return Ranks(tmp_path, 4)


def test_the_lowest_rank_at_the_first_location_is_shown(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """Ranks with the same failure are one section, although their texts name their ranks."""
    for rank, seconds in ((2, 1.0), (1, 2.0), (3, 3.0)):
        ranks.fail(rank, represent(fail_in_first_place, rank), seconds)
    ranks.end(0)
    message, sections = ranks.describe(request.node)
    assert message == "rank 1: ValueError: the loss of rank 1 is NaN"
    assert sections == {"ranks 2, 3: failed too": "with the same failure\n"}


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_a_later_failure_is_short_unless_verbose(
    verbosity: int, ranks: Ranks, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure is the earliest one; a later one has its location and error, or all lines with -vv."""
    monkeypatch.setattr(request.config.option, "verbose", verbosity)
    ranks.fail(0, represent(fail_in_second_place, 0), 2.0)
    ranks.fail(1, represent(fail_in_first_place, 1), 1.0)
    ranks.end(2, 3)
    message, sections = ranks.describe(request.node)
    assert message == "rank 1: ValueError: the loss of rank 1 is NaN"
    (text,) = sections.values()
    assert list(sections) == ["rank 0: failed too"]
    assert "KeyError: 0" in text
    assert ("def fail_in_second_place" in text) == (verbosity == 2)
    assert "test_failure_of_ranks.py:" in text


def test_equal_locations_with_other_texts(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """A failure at the same location with another text is named as such."""
    ranks.fail(0, represent(fail_in_first_place, 0), 1.0)
    ranks.fail(1, represent(lambda rank: fail_in_first_place(rank), 1), 2.0)
    ranks.end(2, 3)
    _, sections = ranks.describe(request.node)
    assert sections["rank 1: failed too"].startswith("at the same location\n")


def test_all_failures_of_the_first_rank_are_shown(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """A failed teardown, a problem of the session and the end of the process follow the first failure."""
    ranks.fail(3, represent(fail_in_first_place, 3), 1.0, when="setup")
    ranks.fail(3, "the teardown\nfailed", 1.0, when="teardown")
    ranks.results[3].problems = ["no process group"]
    ranks.results[3].left_with = -9
    ranks.end(0, 1, 2)
    failure = describe_failure(request.node, ranks.results, "")
    (first, *_), *_ = failure.representation.chain
    assert "rank 3 of 4 failed in setup" in str(first)
    texts = [content for _, content, _ in failure.representation.sections]
    assert texts[0] == "the teardown\nfailed\n"
    assert texts[1] == "no process group\n"
    assert "SIGKILL" in texts[2]


def test_a_failure_without_a_location(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """A text is shown as it is; its last lines are the short text, and equal texts are one failure."""
    lines = [f"line {number}" for number in range(MOST_LINES + 3)]
    ranks.fail(0, "first line\nE   assert 1 == 2\n", 1.0)
    for rank in (1, 2):
        ranks.fail(rank, "\n".join(lines), 2.0)
    ranks.end(3)
    message, sections = ranks.describe(request.node)
    assert message == "rank 0: assert 1 == 2"
    assert sections["ranks 1, 2: failed too"].splitlines()[:MOST_LINES] == lines[-MOST_LINES:]


def test_the_stacks_of_unfinished_ranks(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """The frames of a test are shown without those of pytest, and without the thread that receives messages."""
    ranks.fail(0, represent(fail_in_first_place, 0), 1.0)
    ranks.results[0].done = False
    for rank in (0, 1):
        (ranks.results[rank].folder / "stacks").write_text(STACKS)
    (ranks.results[2].folder / "stacks").write_text(STACKS.partition("Current")[0])
    _, sections = ranks.describe(request.node)
    texts = list(sections.values())
    frames = 'Current thread 0x2 (most recent call first):\n  File "/tests/test_model.py", line 7 in wait_for_nothing\n'
    # Nothing is left of the third rank's threads, so they are shown as they are; the last rank has no file.
    assert texts == [frames, frames, STACKS.partition("Current")[0], "no stack available\n"]
    assert "after a failure" in next(iter(sections))


def test_a_rank_that_waits_for_others_had_not_started(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """Ranks that are ready wait for the others, whose stacks are shown."""
    ranks.results[3].ready = None
    _, sections = ranks.describe(request.node, "no start within 5 s")
    assert list(sections.values()) == ["waiting for the other ranks\n"] * 3 + ["no stack available\n"]


@pytest.mark.parametrize(("ended", "lines"), [((), 2), ((0, 1, 2, 3), 2), ((0, 1), 4)], ids=["none", "all", "some"])
def test_the_states_after_a_time_limit(
    ended: tuple[int, ...], lines: int, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    """The ranks that had ended and those that had not are named; if there are both, with a hint about collectives."""
    ranks.end(*ended)
    failure = describe_failure(request.node, ranks.results, "no end within 5 s")
    (traceback, _, _), *_ = failure.representation.chain
    stated = str(traceback).splitlines()
    assert (stated[0], len(stated), str(failure)) == ("no end within 5 s", lines, "no end within 5 s")
    assert ("collective" in stated[-1]) == (lines == 4)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"skipped": [0], "passed": [1, 2, 3]}, "the ranks disagree on the outcome: skipped on rank 0; passed on "),
        ({"failed": [2]}, "failed on rank 2"),
    ],
)
def test_different_outcomes(
    kinds: dict[str, list[int]], message: str, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    """Each outcome is named with its ranks."""
    ranks.end(0, 1, 2, 3)
    assert str(describe_disagreement(request.node, kinds, ranks.results)).startswith(message)
