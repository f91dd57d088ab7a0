"""Representation of a failed test on several ranks: the failure of the first failing rank, then other failures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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
    """A test did not pass on all ranks. shown: the representation for pytest."""

    def __init__(self, shown: ExceptionChainRepr) -> None:
        self.shown = shown
        super().__init__(shown.reprcrash.message if shown.reprcrash else "")


def describe_failure(item: pytest.Item, results: Sequence[Result], time_limit: str) -> RanksFailed:
    """Return the failure of a test: the time limit or the first failing rank, and the state of the other ranks.

    time_limit: the message if a time limit was exceeded, or "".
    """
    world, first_text = len(results), ""
    failed = sorted((r for r in results if r.failed_at is not None), key=lambda r: r.failed_at or 0)
    if time_limit or not failed:
        ended, stuck = [r for r in results if r.clean], [r for r in results if not r.over and not r.failed]
        headline = time_limit or "the ranks ended differently"
        shown = _text(item, [f"{headline}\n", *_state_lines(ended, stuck, world)], headline)
    else:
        # Show the lowest rank that failed at this location, because the order of the failures is random.
        first = min((r for r in failed if _key(r) == _key(failed[0])), key=lambda r: r.rank)
        failed.remove(first)
        first_text = _mask_rank(_full_text(first))
        shown = _own_failure(item, first, world)
    by_key: dict[tuple[str, ...], list[Result]] = {}
    for result in failed:
        by_key.setdefault(_key(result), []).append(result)
    for key, same in by_key.items():
        if not time_limit and all(_mask_rank(_full_text(r)) == first_text for r in same):
            text = "with the same failure\n"
        elif (missing := 2 - item.config.get_verbosity()) <= 0:
            text = "\n".join(map(_full_text, same))
        else:
            location = "" if time_limit or key != _key(first) else "at the same location\n"
            text = f"{location}{_short_text(same[0])}use -{'v' * missing} to see the full failure\n"
        shown.addsection(f"{_ranks(same)}: failed too", text)
    _add_stacks(shown, results)
    return RanksFailed(shown)


def describe_disagreement(item: pytest.Item, kinds: dict[str, list[int]], results: Sequence[Result]) -> RanksFailed:
    """Return the failure of a test with different outcomes on the ranks."""
    parts = [f"{kind} on {ranks_text(ranks)}" for kind, ranks in kinds.items()]
    disagree = "the ranks disagree on the outcome: " if len(parts) > 1 else ""
    headline = f"{disagree}{'; '.join(parts)}"
    shown = _text(item, [f"{headline}\n"], headline)
    _add_stacks(shown, results)
    return RanksFailed(shown)


def _add_stacks(shown: ExceptionChainRepr, results: Sequence[Result]) -> None:
    for result in results:
        if not result.over and result.ready is not None and any(r.ready is None for r in results):
            shown.addsection(f"rank {result.rank}: had not started the test", "waiting for the other ranks\n")
        elif not result.over:
            stack = _trim_stacks(result.output("stacks")) or "no stack available\n"
            phase = " the teardown of its fixtures after a failure" if result.failed else ""
            title = f"rank {result.rank}: had not finished{phase}; its stack, innermost call first"
            shown.addsection(title, stack)


def _own_failure(item: pytest.Item, result: Result, world: int) -> ExceptionChainRepr:
    """Return the representation made by the rank's pytest, after a line with the rank and before later failures."""
    (phase, text), *later = _failures(result)
    title = f"rank {result.rank} of {world} failed{phase}:\n"
    shown = next((report.longrepr for report in result.reports if report.outcome == "failed"), None)
    if isinstance(shown, ExceptionChainRepr):
        *before, (traceback, crash, description) = shown.chain
        if crash is not None:
            crash = ReprFileLocation(crash.path, crash.lineno, f"rank {result.rank}: {crash.message}")
        first = ReprTraceback([ReprEntryNative([title])], None, "native")
        representation = ExceptionChainRepr([(first, None, None), *before, (traceback, crash, description)])
        for name, content, separator in shown.sections:
            representation.addsection(name, content, separator)
    else:
        representation = _text(item, [title, f"{text}\n"], f"rank {result.rank}: {_summary(text)}")
    for in_phase, other in later:
        representation.addsection(f"rank {result.rank}: failed{in_phase} too", f"{other}\n")
    return representation


def _text(item: pytest.Item, lines: list[str], headline: str) -> ExceptionChainRepr:
    path, line, _ = item.location
    traceback = ReprTraceback([ReprEntryNative(lines)], None, "native")
    return ExceptionChainRepr([(traceback, ReprFileLocation(path, (line or 0) + 1, headline), None)])


def _full_text(result: Result) -> str:
    return "\n".join(text for _, text in _failures(result)) + "\n"


def _failures(result: Result) -> list[tuple[str, str]]:
    """Return each failure of a rank as phase (" in setup", or "" for the call) and text."""
    failed = [report for report in result.reports if report.outcome == "failed"]
    failures = [("" if report.when == "call" else f" in {report.when}", report.longreprtext) for report in failed]
    failures += [("", problem) for problem in result.problems]
    return failures if result.left_with is None else [*failures, ("", result.describe_exit())]


def _short_text(result: Result) -> str:
    """Return locations and messages only. Most later failures are consequences of the first one."""
    lines = []
    for report in result.reports:
        if report.outcome == "failed" and isinstance(report.longrepr, ExceptionChainRepr):
            entries = report.longrepr.reprtraceback.reprentries
            locations = (entry.reprfileloc for entry in entries if isinstance(entry, ReprEntry))
            lines += [f"{location.path}:{location.lineno}" for location in locations if location is not None]
            crash = report.longrepr.reprcrash
            lines += [f"E   {line}" for line in (crash.message if crash else "").splitlines()[:MOST_LINES]]
        elif report.outcome == "failed":
            lines += report.longreprtext.splitlines()[-MOST_LINES:]
    lines += [line for problem in result.problems for line in problem.splitlines()[-MOST_LINES:]]
    return "\n".join([*lines, *([result.describe_exit()] if result.left_with is not None else [])]) + "\n"


def _state_lines(ended: Sequence[Result], stuck: Sequence[Result], world: int) -> list[str]:
    lines = [f"{_ranks(ended)} of {world} had ended\n"] if ended else []
    lines += [f"{_ranks(stuck)} of {world} had not finished\n"] if stuck else []
    if ended and stuck:
        lines.append(
            "a collective may be waiting for a rank after its end; check for collectives called on some ranks only\n"
        )
    return lines


def _ranks(results: Sequence[Result]) -> str:
    return ranks_text(sorted(r.rank for r in results))


def _summary(text: str) -> str:
    match = _SUMMARY.search(text)
    return " ".join((match[0] if match else text.strip().partition("\n")[0]).removeprefix("E ").split())


def _key(result: Result) -> tuple[str, ...]:
    """Return the location and the type of a failure."""
    report = next((report for report in result.reports if report.outcome == "failed"), None)
    crash = report.longrepr.reprcrash if report and isinstance(report.longrepr, ExceptionChainRepr) else None
    if report is None or crash is None:
        return (_mask_rank(_full_text(result)),)
    return (report.when, crash.path, str(crash.lineno), re.split(r"\W", crash.message, maxsplit=1)[0])


def _mask_rank(text: str) -> str:
    """Replace ranks, addresses and folders of tmp_path, which differ between ranks with the same failure."""
    return re.sub(r"0x[0-9a-f]+|rank[ _=]?\d+\b", "#", text)


def _trim_stacks(stacks: str) -> str:
    """Remove the frames of pytest below the test, and threads without other frames."""
    threads = []
    for thread in re.split(r"\n(?=Thread 0x|Current thread 0x)", stacks):
        if _LISTENER.search(thread):
            continue
        head, *frames = thread.splitlines() or [""]
        own = []
        for frame in frames:
            if _FRAMEWORK.search(frame):
                break
            own.append(frame)
        if own:
            threads.append("\n".join([head, *own]) + "\n")
    return "".join(threads) or stacks
