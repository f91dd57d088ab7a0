"""Representation of a failed test on several ranks: the failure of the first failing rank, then other failures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprEntryNative, ReprFileLocation, ReprTraceback

from syncheck.text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from syncheck.pytest_plugin.ranks.results import Result

# Stack frames of pytest and of this plugin.
_FRAMEWORK = re.compile(r'File "[^"]*(/_pytest/|/pluggy/|/syncheck/pytest_plugin/|<string>)')
# The error of a traceback, or the expectation of a doctest.
_SUMMARY = re.compile(r"^(E .+|UNEXPECTED EXCEPTION: .*|(Expected|Differences)\b(.*\n)+?(?=\s*$))", re.MULTILINE)
# Lines of each failure after the first.
MOST_LINES = 6
_LISTENER = re.compile(r"/syncheck/pytest_plugin/ranks/child\.py\", line \d+ in _listen")


class RanksFailed(Exception):
    """A test did not pass on all ranks. representation: for pytest."""

    def __init__(self, representation: ExceptionChainRepr) -> None:
        self.representation = representation
        crash = representation.reprcrash
        super().__init__(crash.message if crash else "")


class Failure(NamedTuple):
    """A failure of a rank.

    phase: " in setup" or " in teardown", empty for the call.
    """

    phase: str
    text: str


def describe_failure(item: pytest.Item, results: Sequence[Result], time_limit: str) -> RanksFailed:
    """Return the failure of a test: the time limit or the first failing rank, and the state of the other ranks.

    time_limit: the message if a time limit was exceeded, or "".
    """
    by_location: dict[tuple[str, ...], list[Result]] = {}
    for result in _sort_by_failure(results):
        by_location.setdefault(_locate(result), []).append(result)

    first = None
    if time_limit or not by_location:
        representation = _describe_states(item, results, time_limit or "the ranks ended differently")
    else:
        # The lowest rank that failed at the first location, because the order of the failures is random.
        first_ranks = next(iter(by_location.values()))
        first = min(first_ranks, key=_get_rank)
        first_ranks.remove(first)
        representation = _represent_first(item, first, len(results))

    for equal in by_location.values():
        # The first rank may be the only one at its location.
        if equal:
            text = _describe_later(equal, first, item.config.get_verbosity())
            representation.addsection(f"{_ranks(equal)}: failed too", text)

    _add_stacks(representation, results)
    return RanksFailed(representation)


def _sort_by_failure(results: Sequence[Result]) -> list[Result]:
    """Return the failed ranks in the order of their failures."""
    return sorted((result for result in results if result.failed), key=_get_failure_time)


def _get_failure_time(result: Result) -> float:
    return result.failed_at or 0.0


def _get_rank(result: Result) -> int:
    return result.rank


def _describe_later(equal: Sequence[Result], first: Result | None, verbosity: int) -> str:
    """Return the text about ranks with one failure, which is not shown yet.

    equal: the ranks.
    first: the rank whose failure is shown in full; None after a time limit.
    """
    location = ""
    if first is not None:
        first_text = _mask_rank(_full_text(first))
        if {_mask_rank(_full_text(result)) for result in equal} == {first_text}:
            return "with the same failure\n"

        if _locate(equal[0]) == _locate(first):
            location = "at the same location\n"

    missing = 2 - verbosity
    if missing <= 0:
        return "\n".join([_full_text(result) for result in equal])

    return f"{location}{_short_text(equal[0])}use -{'v' * missing} to see the full failure\n"


def describe_disagreement(item: pytest.Item, kinds: dict[str, list[int]], results: Sequence[Result]) -> RanksFailed:
    """Return the failure of a test with different outcomes on the ranks."""
    headline = "; ".join([f"{kind} on {ranks_text(ranks)}" for kind, ranks in kinds.items()])
    if len(kinds) > 1:
        headline = f"the ranks disagree on the outcome: {headline}"

    representation = _represent_text(item, [f"{headline}\n"], headline)
    _add_stacks(representation, results)
    return RanksFailed(representation)


def _add_stacks(representation: ExceptionChainRepr, results: Sequence[Result]) -> None:
    """Add the stacks of the ranks that had not finished."""
    all_ready = all(result.ready is not None for result in results)
    for result in results:
        if result.over:
            continue

        # A rank starts the test when all ranks are ready.
        if all_ready or result.ready is None:
            title, text = _describe_unfinished(result)
        else:
            title = f"rank {result.rank}: had not started the test"
            text = "waiting for the other ranks\n"

        representation.addsection(title, text)


def _describe_unfinished(result: Result) -> tuple[str, str]:
    """Return the title and the text of a section about a rank that had not finished."""
    phase = " the teardown of its fixtures after a failure" if result.failed else ""
    stack = _trim_stacks(result.output("stacks"))
    title = f"rank {result.rank}: had not finished{phase}; its stack, innermost call first"
    return title, stack or "no stack available\n"


def _represent_first(item: pytest.Item, result: Result, world: int) -> ExceptionChainRepr:
    """Return the representation made by the rank's pytest, after a line with the rank and before later failures."""
    first, *later = _list_failures(result)
    title = f"rank {result.rank} of {world} failed{first.phase}:\n"
    original = _find_representation(result)
    if original is not None:
        representation = _add_title(original, title, result.rank)
    else:
        headline = f"rank {result.rank}: {_summary(first.text)}"
        representation = _represent_text(item, [title, f"{first.text}\n"], headline)

    for failure in later:
        representation.addsection(f"rank {result.rank}: failed{failure.phase} too", f"{failure.text}\n")

    return representation


def _add_title(original: ExceptionChainRepr, title: str, rank: int) -> ExceptionChainRepr:
    """Return a representation with a line before it, and with the rank in its message."""
    *before, (traceback, crash, description) = original.chain
    if crash is not None:
        crash = ReprFileLocation(crash.path, crash.lineno, f"rank {rank}: {crash.message}")

    first = ReprTraceback([ReprEntryNative([title])], None, "native")
    representation = ExceptionChainRepr([(first, None, None), *before, (traceback, crash, description)])
    for name, content, separator in original.sections:
        representation.addsection(name, content, separator)

    return representation


def _represent_text(item: pytest.Item, lines: list[str], headline: str) -> ExceptionChainRepr:
    path, line, _ = item.location
    traceback = ReprTraceback([ReprEntryNative(lines)], None, "native")
    return ExceptionChainRepr([(traceback, ReprFileLocation(path, (line or 0) + 1, headline), None)])


def _full_text(result: Result) -> str:
    return "\n".join(failure.text for failure in _list_failures(result)) + "\n"


def _list_failed_reports(result: Result) -> list[pytest.TestReport]:
    return [report for report in result.reports if report.outcome == "failed"]


def _find_representation(result: Result) -> ExceptionChainRepr | None:
    """Return pytest's representation of the first failed phase; None if it is a text, or if no phase failed."""
    report = _find_failed_report(result)
    longrepr = None if report is None else report.longrepr
    return longrepr if isinstance(longrepr, ExceptionChainRepr) else None


def _find_failed_report(result: Result) -> pytest.TestReport | None:
    """Return the report of the first failed phase, or None."""
    failed = _list_failed_reports(result)
    return failed[0] if failed else None


def _list_failures(result: Result) -> list[Failure]:
    """Return the failures of a rank: of the phases of the test, then outside the test."""
    failures = []
    for report in _list_failed_reports(result):
        phase = "" if report.when == "call" else f" in {report.when}"
        failures.append(Failure(phase, report.longreprtext))

    for problem in _list_problems(result):
        failures.append(Failure("", problem))

    return failures


def _list_problems(result: Result) -> list[str]:
    """Return the failures of a rank outside the test: problems of its session, and the end of its process."""
    if result.left_with is None:
        return result.problems

    return [*result.problems, result.describe_exit()]


def _short_text(result: Result) -> str:
    """Return locations and messages only. Most later failures are consequences of the first one."""
    lines = []
    for report in _list_failed_reports(result):
        if isinstance(report.longrepr, ExceptionChainRepr):
            lines += _list_locations(report.longrepr)
        else:
            lines += report.longreprtext.splitlines()[-MOST_LINES:]

    for problem in _list_problems(result):
        lines += problem.splitlines()[-MOST_LINES:]

    return "\n".join(lines) + "\n"


def _list_locations(representation: ExceptionChainRepr) -> list[str]:
    """Return the locations of a traceback, and its message."""
    lines = []
    for entry in representation.reprtraceback.reprentries:
        location = entry.reprfileloc if isinstance(entry, ReprEntry) else None
        if location is not None:
            lines.append(f"{location.path}:{location.lineno}")

    crash = representation.reprcrash
    if crash is not None:
        lines += [f"E   {line}" for line in crash.message.splitlines()[:MOST_LINES]]

    return lines


def _describe_states(item: pytest.Item, results: Sequence[Result], headline: str) -> ExceptionChainRepr:
    """Represent a failure without a failed rank: which ranks had ended, and which had not."""
    ended = [result for result in results if result.clean]
    stuck = [result for result in results if result.stuck]
    lines = [f"{headline}\n"]
    if ended:
        lines.append(f"{_ranks(ended)} of {len(results)} had ended\n")

    if stuck:
        lines.append(f"{_ranks(stuck)} of {len(results)} had not finished\n")

    if ended and stuck:
        lines.append(
            "a collective may be waiting for a rank after its end; check for collectives called on some ranks only\n"
        )

    return _represent_text(item, lines, headline)


def _ranks(results: Sequence[Result]) -> str:
    return ranks_text(sorted(result.rank for result in results))


def _summary(text: str) -> str:
    """Return the error of a traceback in one line, or the first line of another text."""
    match = _SUMMARY.search(text)
    line = match[0] if match else text.strip().partition("\n")[0]
    return " ".join(line.removeprefix("E ").split())


def _locate(result: Result) -> tuple[str, ...]:
    """Return the location and the type of a rank's first failure; the text of a failure without a location."""
    report = _find_failed_report(result)
    representation = _find_representation(result)
    crash = None if representation is None else representation.reprcrash
    if report is None or crash is None:
        return (_mask_rank(_full_text(result)),)

    error_type = re.split(r"\W", crash.message, maxsplit=1)[0]
    return (report.when, crash.path, str(crash.lineno), error_type)


def _mask_rank(text: str) -> str:
    """Replace ranks, addresses and folders of tmp_path, which differ between ranks with the same failure."""
    return re.sub(r"0x[0-9a-f]+|rank[ _=]?\d+\b", "#", text)


def _trim_stacks(stacks: str) -> str:
    """Remove the frames of pytest below the test, and threads without other frames."""
    threads = []
    for thread in re.split(r"\n(?=Thread 0x|Current thread 0x)", stacks):
        # The thread that receives messages is not part of the test.
        if _LISTENER.search(thread):
            continue

        head, _, frames = thread.partition("\n")
        frames_of_test = _take_frames_of_test(frames.splitlines())
        if frames_of_test:
            threads.append("\n".join([head, *frames_of_test]) + "\n")

    return "".join(threads) or stacks


def _take_frames_of_test(frames: Sequence[str]) -> list[str]:
    """Return the frames above the first frame of pytest, innermost call first."""
    frames_of_test = []
    for frame in frames:
        if _FRAMEWORK.search(frame):
            break
        frames_of_test.append(frame)

    return frames_of_test
