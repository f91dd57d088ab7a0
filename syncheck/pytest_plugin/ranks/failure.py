"""The failure of a test on several ranks as pytest shows it: the first failing rank's own, then the others'."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprEntryNative, ReprFileLocation, ReprTraceback

from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from syncheck.pytest_plugin.ranks.results import Result

# Lines of a stack that are not the test's: pytest's and ours, up to the start of the process.
_FRAMEWORK = re.compile(r'File "[^"]*(/_pytest/|/pluggy/|/syncheck/pytest_plugin/|<string>)')
# The error of a traceback, the expectation of a doctest.
_BRIEF = re.compile(r"^(E .+|UNEXPECTED EXCEPTION: .*|(Expected|Differences)\b(.*\n)+?(?=\s*$))", re.MULTILINE)
# Of a failure that came after the first one.
MOST_LINES = 6
_LISTENER = re.compile(r"/syncheck/pytest_plugin/ranks/child\.py\", line \d+ in _listen")


class RanksFailed(Exception):
    """A test did not pass on all ranks. shown: what pytest prints."""

    def __init__(self, shown: ExceptionChainRepr) -> None:
        self.shown = shown
        super().__init__(shown.reprcrash.message if shown.reprcrash else "")


def failure(item: pytest.Item, results: Sequence[Result], late: str) -> RanksFailed:
    """Say how a test failed: what passed the time limit or which rank failed first, and how all the others stand.

    late: the time limit passed, in words, or "".
    """
    world, first_text = len(results), ""
    failed = sorted((r for r in results if r.failed_at is not None), key=lambda r: r.failed_at or 0)
    if late or not failed:
        ended, stuck = [r for r in results if r.clean], [r for r in results if not r.over and not r.failed]
        headline = late or "the ranks did not end alike"
        shown = _text(item, [f"{headline}\n", *_standing(ended, stuck, world)], headline)
    else:
        # Of ranks that fail at one place, the lowest: which of them was first is chance.
        first = min((r for r in failed if _key(r) == _key(failed[0])), key=lambda r: r.rank)
        failed.remove(first)
        first_text = _unnumbered(_told(first))
        shown = _own(item, first, world)
    alike: dict[tuple[str, ...], list[Result]] = {}
    for result in failed:
        alike.setdefault(_key(result), []).append(result)
    for key, same in alike.items():
        if not late and all(_unnumbered(_told(r)) == first_text for r in same):
            told = "with the same failure\n"
        elif (missing := 2 - item.config.get_verbosity()) <= 0:
            told = "\n".join(map(_told, same))
        else:
            place = "" if late or key != _key(first) else "at the same place\n"
            told = f"{place}{_shortened(same[0])}add -{'v' * missing} to see all of it\n"
        shown.addsection(f"{_named(same)}: failed too", told)
    _add_stacks(shown, results)
    return RanksFailed(shown)


def disagreement(item: pytest.Item, kinds: dict[str, list[int]], results: Sequence[Result]) -> RanksFailed:
    """Say which ranks passed and which skipped: a test that is not run everywhere proves nothing."""
    parts = [f"{kind} on {ranks_text(ranks)}" for kind, ranks in kinds.items()]
    disagree = "the ranks do not agree on the outcome: " if len(parts) > 1 else ""
    headline = f"{disagree}{'; '.join(parts)}"
    shown = _text(item, [f"{headline}\n"], headline)
    _add_stacks(shown, results)
    return RanksFailed(shown)


def _add_stacks(shown: ExceptionChainRepr, results: Sequence[Result]) -> None:
    for result in results:
        if not result.over and result.ready is not None and any(r.ready is None for r in results):
            shown.addsection(f"rank {result.rank}: had not begun the test", "it waited for the other ranks\n")
        elif not result.over:
            where = _trimmed(result.output("stacks")) or "it did not tell its stack\n"
            in_teardown = ", having failed, the teardown of its fixtures" if result.failed else ""
            title = f"rank {result.rank}: had not finished{in_teardown}; its stack, innermost call first"
            shown.addsection(title, where)


def _own(item: pytest.Item, result: Result, world: int) -> ExceptionChainRepr:
    """Show a rank's own failure: the repr that its pytest made, behind a line with the rank; later failures below."""
    (phase, text), *later = _failures(result)
    title = f"rank {result.rank} of {world} failed{phase}:\n"
    shown = next((report.longrepr for report in result.reports if report.outcome == "failed"), None)
    if isinstance(shown, ExceptionChainRepr):
        *before, (traceback, crash, description) = shown.chain
        if crash is not None:
            crash = ReprFileLocation(crash.path, crash.lineno, f"rank {result.rank}: {crash.message}")
        first = ReprTraceback([ReprEntryNative([title])], None, "native")
        made = ExceptionChainRepr([(first, None, None), *before, (traceback, crash, description)])
        for name, content, separator in shown.sections:
            made.addsection(name, content, separator)
    else:
        made = _text(item, [title, f"{text}\n"], f"rank {result.rank}: {_brief(text)}")
    for in_phase, other in later:
        made.addsection(f"rank {result.rank}: failed{in_phase} too", f"{other}\n")
    return made


def _text(item: pytest.Item, lines: list[str], headline: str) -> ExceptionChainRepr:
    path, line, _ = item.location
    traceback = ReprTraceback([ReprEntryNative(lines)], None, "native")
    return ExceptionChainRepr([(traceback, ReprFileLocation(path, (line or 0) + 1, headline), None)])


def _told(result: Result) -> str:
    """Return all that a rank told of its failure."""
    return "\n".join(text for _, text in _failures(result)) + "\n"


def _failures(result: Result) -> list[tuple[str, str]]:
    """Return each failure of a rank: the phase other than the call, as " in setup", and the text."""
    failed = [report for report in result.reports if report.outcome == "failed"]
    found = [("" if report.when == "call" else f" in {report.when}", report.longreprtext) for report in failed]
    found += [("", problem) for problem in result.problems]
    return found if result.left_with is None else [*found, ("", result.fate())]


def _shortened(result: Result) -> str:
    """Return the places and the messages of a failure that came after another rank's: most are its echo."""
    lines = []
    for report in result.reports:
        if report.outcome == "failed" and isinstance(report.longrepr, ExceptionChainRepr):
            entries = report.longrepr.reprtraceback.reprentries
            places = (entry.reprfileloc for entry in entries if isinstance(entry, ReprEntry))
            lines += [f"{place.path}:{place.lineno}" for place in places if place is not None]
            crash = report.longrepr.reprcrash
            lines += [f"E   {line}" for line in (crash.message if crash else "").splitlines()[:MOST_LINES]]
        elif report.outcome == "failed":
            lines += report.longreprtext.splitlines()[-MOST_LINES:]
    lines += [line for problem in result.problems for line in problem.splitlines()[-MOST_LINES:]]
    return "\n".join([*lines, *([result.fate()] if result.left_with is not None else [])]) + "\n"


def _standing(ended: Sequence[Result], stuck: Sequence[Result], world: int) -> list[str]:
    lines = [f"{_named(ended)} of {world} had ended\n"] if ended else []
    lines += [f"{_named(stuck)} of {world} had not finished\n"] if stuck else []
    if ended and stuck:
        lines.append("a rank that has ended takes part in no collective: was one called on some ranks only?\n")
    return lines


def _named(results: Sequence[Result]) -> str:
    return ranks_text(sorted(r.rank for r in results))


def _brief(text: str) -> str:
    found = _BRIEF.search(text)
    return " ".join((found[0] if found else text.strip().partition("\n")[0]).removeprefix("E ").split())


def _key(result: Result) -> tuple[str, ...]:
    """Return the same for ranks that failed at one place in one way, whatever their values were."""
    report = next((report for report in result.reports if report.outcome == "failed"), None)
    crash = report.longrepr.reprcrash if report and isinstance(report.longrepr, ExceptionChainRepr) else None
    if report is None or crash is None:
        return (_unnumbered(_told(result)),)
    return (report.when, crash.path, str(crash.lineno), re.split(r"\W", crash.message, maxsplit=1)[0])


def _unnumbered(text: str) -> str:
    """Leave out what differs between ranks that failed alike: rank numbers, addresses, folders of tmp_path."""
    return re.sub(r"0x[0-9a-f]+|rank[ _=]?\d+\b", "#", text)


def _trimmed(stacks: str) -> str:
    """Leave out frames of pytest below the test, and threads that hold nothing else; name what is left."""
    kept = []
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
            kept.append("\n".join([head, *own]) + "\n")
    return "".join(kept) or stacks
