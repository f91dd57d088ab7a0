"""A test on several ranks in the outer pytest session: it runs the ranks and reports their results."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import socket
import sys
import tempfile
import types
import warnings
import zlib
from collections import defaultdict
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from syncheck.pytest_plugin.ranks.failure import RanksFailed, describe_disagreement, describe_failure
from syncheck.pytest_plugin.ranks.marker import RETRIED, Marker, ranks_of, read_marker
from syncheck.pytest_plugin.ranks.pool import Pool
from syncheck.pytest_plugin.ranks.process import import_path
from syncheck.pytest_plugin.ranks.results import Result, failed_start, is_main_report, is_strict_xpass
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence


_STREAMS = ("stdout", "stderr")
_STRICT_XPASS = "passed against strict xfail"
# Outcomes beside an expected failure: ranks that have not finished may be waiting for the rank that failed.
_NO_FAILURE_BESIDE_XFAIL = frozenset({"xfailed", "passed", _STRICT_XPASS, "not finished"})
# "not run": another plugin prevented the test in the rank's session.
_NEVER_ALONE = frozenset({"not run", "not finished"})


class Tail:
    """Prints new complete lines of the ranks' output at every call. live: whether to print at all."""

    def __init__(self, results: Sequence[Result], live: bool) -> None:
        self._results = results if live else ()
        # Bytes that have been printed, by rank and stream.
        self._printed: dict[tuple[int, str], int] = defaultdict(int)

    def __call__(self) -> None:
        """Print new lines."""
        for result in self._results:
            for stream in _STREAMS:
                lines = [f"[rank {result.rank}] {line}\n" for line in self._read_lines(result, stream)]
                getattr(sys, stream).writelines(lines)

    def _read_lines(self, result: Result, stream: str) -> list[str]:
        """Return the lines that were written since the last call; an incomplete line only after the end of the rank."""
        try:
            with (result.folder / stream).open("rb") as file:
                file.seek(self._printed[result.rank, stream])
                content = file.read()
        except OSError:
            return []

        if not result.over:
            content = content[: content.rfind(b"\n") + 1]

        self._printed[result.rank, stream] += len(content)
        return content.decode(errors="replace").splitlines()


POOL = pytest.StashKey[Pool]()
LIMIT = pytest.StashKey[float]()
# A process may abort while gloo connects. No code of the test has run then, so the ranks can be started again.
STARTS = 3


class OnRanks:
    """Mixin before an item's own class. Fixtures are set up in the ranks only."""

    def setup(self) -> None:
        """Skip the setup in the outer session."""

    def teardown(self) -> None:
        """Skip the teardown in the outer session."""

    def runtest(self: Any) -> None:
        """Run the test on all ranks. Raise their common outcome, or RanksFailed."""
        __tracebackhide__ = True
        _run(self)

    def repr_failure(self: Any, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """Return the representation of the failing ranks instead of a traceback of this plugin."""
        if isinstance(excinfo.value, RanksFailed):
            return excinfo.value.representation
        return super().repr_failure(excinfo)  # type: ignore[misc]


def run_on_ranks(item: pytest.Item) -> None:
    """Change the class of an item to run it on ranks."""
    item_class = type(item)
    if hasattr(item, "funcargs"):
        item.funcargs = _NoFixtures()
    item.__class__ = types.new_class(item_class.__name__, (OnRanks, item_class))


class _NoFixtures(dict[str, Any]):
    """Fixture values in the outer session, all None. Hooks of a conftest may read them after the test."""

    def __missing__(self, name: str) -> None:
        return None


def _run(item: Any) -> None:
    """Run an item on its ranks."""
    __tracebackhide__ = True
    marker = read_marker(item)
    assert marker is not None
    if marker.group and util.find_spec("torch") is None:
        pytest.fail("tests on several ranks require torch: pip install 'syncheck[live]'", pytrace=False)

    results, time_limit = _run_once(item, marker)
    for attempt in range(1, STARTS):
        reason = "" if time_limit else failed_start(results)
        if not reason:
            break

        item.user_properties.append((RETRIED, f"start {attempt} of {STARTS} failed: {reason}"))
        results, time_limit = _run_once(item, marker)

    _judge(item, results, time_limit)


def _run_once(item: Any, marker: Marker) -> tuple[list[Result], str]:
    """Run the test on its ranks. Return their results, and the message about an exceeded time limit or ""."""
    world = ranks_of(item)
    limit = marker.timeout or item.config.stash[LIMIT]
    shared = _make_folder(item)
    results = []
    for rank in range(world):
        folder = shared / f"rank{rank}"
        folder.mkdir()
        results.append(Result(rank, folder))

    (shared / "shared").mkdir()
    tasks = _make_tasks(
        item,
        shared,
        world,
        limit,
        group=marker.group,
    )
    live = item.config.getoption("capture", "") == "no"
    tail = Tail(results, live=live)
    time_limit = ""
    try:
        time_limit = item.config.stash[POOL].run(tasks, results, limit, tail)
    # The time limit of another plugin, for example pytest-timeout.
    except pytest.fail.Exception as error:
        time_limit = str(error)
    finally:
        tail()
        _add_sections(item, results, output=not live)

    return results, time_limit


def _make_folder(item: pytest.Item) -> Path:
    """Create a folder for a test's ranks beside the folders of tmp_path, which pytest keeps for a few runs."""
    name = re.sub(r"\W", "_", item.name)[:30]
    # The value of tmp_path_factory, to which items have no public access. It does not exist with -p no:tmpdir.
    factory = getattr(item.config, "_tmp_path_factory", None)
    if factory is None:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        item.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        return folder

    created: Path = factory.mktemp(name)
    return created


def _make_tasks(item: Any, shared: Path, world: int, limit: float, *, group: bool) -> list[dict[str, Any]]:
    """Return the message for each rank to run the test."""
    config, environment = item.config, _environment(world)
    start = config.invocation_params.dir
    common = {
        "args": _arguments(config),
        "files": _files(item, start),
        "nodeid": item.nodeid,
        "world_size": world,
        "limit": limit,
        "group": group,
        "cwd": str(start),
        "path": import_path(),
        "store": str(shared / "store"),
        "shared": str(shared / "shared"),
        "seed": zlib.crc32(item.nodeid.encode()) & 0xFFFFFF,
        "coverage": _coverage_settings(config),
        # Hooks may read the input of the pytest-xdist worker, so each rank receives a copy.
        "workerinput": getattr(config, "workerinput", None),
    }
    tasks = []
    for rank in range(world):
        folder = shared / f"rank{rank}"
        task = {
            "rank": rank,
            "folder": str(folder),
            "basetemp": str(folder / "tmp"),
            "environment": environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        }
        tasks.append(common | task)
    return tasks


def _arguments(config: pytest.Config) -> list[str]:
    """Return pytest's arguments for a rank: those of this run, and additional options before a `--`."""
    args = [str(argument) for argument in config.invocation_params.args]
    extra = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    for plugin, option in (("capture", "--capture=no"), ("pytest_cov", "--no-cov")):
        if config.pluginmanager.hasplugin(plugin):
            extra.append(option)
    end = args.index("--") if "--" in args else len(args)
    return [*args[:end], *extra, *args[end:]]


def _environment(world: int) -> dict[str, str]:
    """Return the environment common to all ranks, with the variables of torchrun."""
    # A port for stores created by tests.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        # The loopback interface, because all ranks are on one machine. One thread, because the ranks share its cores.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONBREAKPOINT": "syncheck.pytest_plugin.ranks.session.no_breakpoint",
    }


def _files(item: pytest.Item, start: Path) -> list[str]:
    """Return the files of all tests on ranks in this run, as arguments of pytest."""
    # The file of the running test is always among them.
    files = {os.path.relpath(item.path, start)}
    for item_on_ranks in item.session.items:
        if isinstance(item_on_ranks, OnRanks):
            path = os.path.relpath(item_on_ranks.path, start)
            # pytest interprets brackets in an argument as parameters of a test.
            if re.search(r"\[|::", path) is None:
                files.add(path)

    return sorted(files)


def _coverage_settings(config: pytest.Config) -> dict[str, Any] | None:
    """Return the settings of pytest-cov in this run, or None if it is not active."""
    controller: Any = getattr(config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    measured = getattr(controller, "cov", None)
    if measured is None:
        return None

    return {
        "data_file": os.path.abspath(measured.config.data_file),
        "config_file": controller.cov_config or True,
        "source": controller.cov_source,
        "branch": controller.cov_branch,
    }


def _add_sections(item: pytest.Item, results: Sequence[Result], *, output: bool) -> None:
    """Add the ranks' output, logs, warnings and properties to the item. output: whether to add stdout and stderr."""
    # The keys of a dictionary, to record a warning of several ranks once and in their order.
    distinct_warnings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        if output:
            _add_output(item, result)

        _add_logs(item, result)
        for warning in result.warnings:
            distinct_warnings.setdefault(tuple(warning.values()), warning)

    for warning in distinct_warnings.values():
        _record_warning(item, warning)

    _add_properties(item, results)


def _add_logs(item: pytest.Item, result: Result) -> None:
    """Add the log messages of a rank."""
    for title, text in result.sections:
        if "log" in title:
            phase = title.split()[-1]
            item.add_report_section(phase, f"log rank {result.rank}", text)


def _add_output(item: pytest.Item, result: Result) -> None:
    """Add what a rank has written to stdout and stderr."""
    for stream in _STREAMS:
        text = result.output(stream)
        if text:
            item.add_report_section("call", f"{stream} rank {result.rank}", text)


def _add_properties(item: pytest.Item, results: Sequence[Result]) -> None:
    """Add the ranks' properties: once if they are equal on all ranks, otherwise with the rank."""
    properties_of = {result.rank: list(result.reports[-1].user_properties) for result in results if result.reports}
    for rank, properties in properties_of.items():
        for entry in properties:
            name, value = entry
            # Values may not be hashable.
            ranks = [number for number, recorded in properties_of.items() if entry in recorded]
            if len(ranks) < len(results):
                item.user_properties.append((f"{name}[rank {rank}]", value))
            elif rank == 0:
                item.user_properties.append((name, value))


def _record_warning(item: pytest.Item, warning: dict[str, Any]) -> None:
    """Record a warning of a rank as a warning of the test."""
    category = _find_category(warning["category"])
    message = warnings.WarningMessage(
        message=category(warning["text"]),
        category=category,
        filename=warning["file"],
        lineno=warning["line"],
    )
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )


def _find_category(name: str) -> type[Warning]:
    """Return the class of a warning of Python or pytest. A class of another library is not imported for its name."""
    category: Any = getattr(builtins, name, None) or getattr(pytest, name, None)
    is_category = isinstance(category, type) and issubclass(category, Warning)
    return category if is_category else UserWarning


def _judge(item: pytest.Item, results: Sequence[Result], time_limit: str) -> None:
    """Raise the outcome of the test; return if it passed, or if the outer pytest evaluates its xfail marker."""
    __tracebackhide__ = True
    kind_of_rank: dict[int, str] = {}
    reasons: dict[str, str] = {}
    for result in results:
        outcome = _find_outcome(result)
        kind_of_rank[result.rank] = outcome.kind
        # The reason of the first rank stands for all.
        reasons.setdefault(outcome.kind, outcome.reason)

    ranks_of_kind = group_ranks(kind_of_rank)
    kinds = frozenset(ranks_of_kind)
    if "xfailed" in kinds and kinds <= _NO_FAILURE_BESIDE_XFAIL:
        pytest.xfail(reasons["xfailed"])

    # After a skip on some ranks, the other ranks wait for them, and no rank has failed.
    is_unfinished = "not finished" in kinds and not kinds <= {"skipped", "not finished"}
    if time_limit or "failed" in kinds or is_unfinished:
        raise describe_failure(item, results, time_limit)

    if len(kinds) > 1 or kinds & _NEVER_ALONE:
        raise describe_disagreement(item, ranks_of_kind, results)

    (kind,) = kinds
    if kind == "skipped":
        raise pytest.skip.Exception(reasons[kind], _use_item_location=True)

    if kind == _STRICT_XPASS and not _outer_is_strict(item):
        raise describe_failure(item, results, reasons[kind])


class Outcome(NamedTuple):
    """The outcome of a test on one rank. reason: of a skip or an expected failure."""

    kind: str
    reason: str = ""


def _find_outcome(result: Result) -> Outcome:
    """Return the outcome on a rank. The first report with another outcome than "passed" decides."""
    if result.failed:
        return Outcome("failed")

    phases_passed = set()
    main_reports = [report for report in result.reports if is_main_report(report)]
    for report in main_reports:
        if report.outcome == "skipped":
            return _describe_skip(report)

        if is_strict_xpass(report):
            return Outcome(_STRICT_XPASS, str(report.longrepr))

        phases_passed.add(report.when)

    if not result.done:
        return Outcome("not finished")

    return Outcome("passed" if "call" in phases_passed else "not run")


def _describe_skip(report: pytest.TestReport) -> Outcome:
    """Return the outcome of a skipped test, or of a test that failed as expected."""
    if hasattr(report, "wasxfail"):
        return Outcome("xfailed", str(report.wasxfail))

    reason: Any = report.longrepr
    # (file, line, reason), converted to a list by JSON.
    if isinstance(reason, (list, tuple)):
        reason = reason[2]

    return Outcome("skipped", str(reason).removeprefix("Skipped: "))


def _outer_is_strict(item: pytest.Item) -> bool:
    """Whether the outer session sees the strict marker too. A fixture or condition may apply it in a rank only."""
    from _pytest.skipping import xfailed_key

    xfailed = item.stash.get(xfailed_key, None)
    return xfailed is not None and xfailed.strict and not item.config.getoption("runxfail")
