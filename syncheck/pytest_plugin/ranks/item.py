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
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks.failure import RanksFailed, describe_disagreement, describe_failure
from syncheck.pytest_plugin.ranks.marker import RETRIED, Settings, ranks_of, read_marker
from syncheck.pytest_plugin.ranks.pool import Pool
from syncheck.pytest_plugin.ranks.process import import_path
from syncheck.pytest_plugin.ranks.results import Result, failed_start, is_main_report, is_strict_xpass

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tail:
    """Prints new complete lines of the ranks' output at every call. live: whether to print at all."""

    def __init__(self, results: Sequence[Result], live: bool) -> None:
        self._results = results if live else ()
        self._read: dict[tuple[int, str], int] = defaultdict(int)  # bytes

    def __call__(self) -> None:
        """Print new lines."""
        for result in self._results:
            for stream in ("stdout", "stderr"):
                try:
                    with (result.folder / stream).open("rb") as file:
                        file.seek(self._read[result.rank, stream])
                        new = file.read()
                except OSError:
                    continue
                complete = new if result.over else new[: new.rfind(b"\n") + 1]
                self._read[result.rank, stream] += len(complete)
                for line in complete.decode(errors="replace").splitlines():
                    getattr(sys, stream).write(f"[rank {result.rank}] {line}\n")


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
            return excinfo.value.shown
        return super().repr_failure(excinfo)  # type: ignore[misc]


def run_on_ranks(item: pytest.Item) -> None:
    """Change the class of an item to run it on ranks."""
    own = type(item)
    if hasattr(item, "funcargs"):
        item.funcargs = _NoFixtures()
    item.__class__ = types.new_class(own.__name__, (OnRanks, own))


class _NoFixtures(dict[str, Any]):
    """Fixture values in the outer session, all None. Hooks of a conftest may read them after the test."""

    def __missing__(self, name: str) -> None:
        return None


def _run(item: Any) -> None:
    """Run an item on its ranks."""
    __tracebackhide__ = True
    settings = read_marker(item)
    assert settings is not None
    if settings.group and util.find_spec("torch") is None:
        pytest.fail("tests on several ranks require torch: pip install 'syncheck[live]'", pytrace=False)
    for attempt in range(1, STARTS + 1):
        results, time_limit = _run_once(item, settings)
        if attempt < STARTS and not time_limit and (reason := failed_start(results)):
            item.user_properties.append((RETRIED, f"start {attempt} of {STARTS} failed: {reason}"))
        else:
            break
    _judge(item, results, time_limit)


def _run_once(item: Any, settings: Settings) -> tuple[list[Result], str]:
    """Run the test on its ranks. Return their results, and the message about an exceeded time limit or ""."""
    world = ranks_of(item)
    limit = settings.timeout or item.config.stash[LIMIT]
    shared = _make_folder(item)
    results = [Result(rank, shared / f"rank{rank}") for rank in range(world)]
    for result in results:
        result.folder.mkdir()
    (shared / "shared").mkdir()
    tasks = _make_tasks(item, shared, world, limit, group=settings.group)
    live = item.config.getoption("capture", "") == "no"
    tail = Tail(results, live=live)
    time_limit = ""
    try:
        time_limit = item.config.stash[POOL].run(tasks, results, limit, tail)
    except pytest.fail.Exception as error:  # the time limit of another plugin, such as pytest-timeout
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
    return [
        common
        | {
            "rank": rank,
            "folder": str(shared / f"rank{rank}"),
            "basetemp": str(shared / f"rank{rank}" / "tmp"),
            "environment": environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        }
        for rank in range(world)
    ]


def _arguments(config: pytest.Config) -> list[str]:
    """Return pytest's arguments for a rank: those of this run, and additional options before a `--`."""
    args = list(map(str, config.invocation_params.args))
    end = args.index("--") if "--" in args else len(args)
    extra = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    extra += ["--capture=no"] if config.pluginmanager.hasplugin("capture") else []
    extra += ["--no-cov"] if config.pluginmanager.hasplugin("pytest_cov") else []
    return [*args[:end], *extra, *args[end:]]


def _environment(world: int) -> dict[str, str]:
    """Return the environment common to all ranks, with the variables of torchrun."""
    with socket.socket() as probe:  # a port for stores created by tests
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
    own = os.path.relpath(item.path, start)
    others = {os.path.relpath(other.path, start) for other in item.session.items if isinstance(other, OnRanks)}
    # pytest interprets brackets in an argument as parameters of a test.
    return sorted({own} | {path for path in others if "[" not in path and "::" not in path})


def _coverage_settings(config: pytest.Config) -> dict[str, Any] | None:
    """Return the settings of pytest-cov in this run, or None if it is not active."""
    controller = getattr(config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    measured = getattr(controller, "cov", None)
    if controller is None or measured is None:
        return None
    return {
        "data_file": os.path.abspath(measured.config.data_file),
        "config_file": controller.cov_config or True,
        "source": controller.cov_source,
        "branch": controller.cov_branch,
    }


def _add_sections(item: pytest.Item, results: Sequence[Result], *, output: bool) -> None:
    """Add the ranks' output, logs, warnings and properties to the item. output: whether to add stdout and stderr."""
    seen: set[tuple[Any, ...]] = set()
    for result in results:
        for stream in ("stdout", "stderr") if output else ():
            if text := result.output(stream):
                item.add_report_section("call", f"{stream} rank {result.rank}", text)
        # The last report includes the sections of all earlier reports.
        for title, text in result.reports[-1].sections if result.reports else ():
            if "log" in title:
                item.add_report_section(title.split()[-1], f"log rank {result.rank}", text)
        for warning in result.warnings:
            if (key := tuple(warning.values())) not in seen:
                seen.add(key)
                _record_warning(item, warning)
    _add_properties(item, results)


def _add_properties(item: pytest.Item, results: Sequence[Result]) -> None:
    """Add the ranks' properties: once if they are equal on all ranks, otherwise with the rank."""
    recorded = {r.rank: list(r.reports[-1].user_properties) for r in results if r.reports}
    for rank, properties in recorded.items():
        for entry in properties:
            is_common = len(recorded) == len(results) and all(entry in other for other in recorded.values())
            name, value = entry
            if not is_common:
                item.user_properties.append((f"{name}[rank {rank}]", value))
            elif rank == 0:
                item.user_properties.append((name, value))


def _record_warning(item: pytest.Item, warning: dict[str, Any]) -> None:
    known = getattr(builtins, warning["category"], None) or getattr(pytest, warning["category"], None)
    category = known if isinstance(known, type) and issubclass(known, Warning) else UserWarning
    message = warnings.WarningMessage(category(warning["text"]), category, warning["file"], warning["line"])
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )


def _judge(item: pytest.Item, results: Sequence[Result], time_limit: str) -> None:
    """Raise the outcome of the test; return if it passed, or if the outer pytest evaluates its xfail marker."""
    __tracebackhide__ = True
    kinds: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for result in results:
        kind, reason = _outcome(result)
        kinds.setdefault(kind, []).append(result.rank)
        reasons.setdefault(kind, reason)
    # The other ranks may be waiting for the failed rank.
    if "xfailed" in kinds and kinds.keys() <= {"xfailed", "passed", "passed against strict xfail", "not finished"}:
        pytest.xfail(reasons["xfailed"])
    if time_limit or kinds.keys() & {"failed", "not finished"}:
        if kinds.keys() <= {"skipped", "not finished"} and not time_limit:
            raise describe_disagreement(item, kinds, results)
        raise describe_failure(item, results, time_limit)
    if len(kinds) > 1 or "not run" in kinds:  # "not run": another plugin prevented the test in the rank's session
        raise describe_disagreement(item, kinds, results)
    if "skipped" in kinds:
        raise pytest.skip.Exception(reasons["skipped"], _use_item_location=True)
    if "passed against strict xfail" in kinds and not _outer_is_strict(item):
        raise describe_failure(item, results, reasons["passed against strict xfail"])


def _outcome(result: Result) -> tuple[str, str]:
    if result.failed:
        return "failed", ""
    reports = [report for report in result.reports if is_main_report(report)]
    for report in reports:
        if report.outcome == "skipped":
            if hasattr(report, "wasxfail"):
                return "xfailed", str(report.wasxfail)
            # (file, line, reason), converted to a list by JSON.
            reason = str(report.longrepr[2] if isinstance(report.longrepr, (list, tuple)) else report.longrepr)
            return "skipped", reason.removeprefix("Skipped: ")
        if is_strict_xpass(report):
            return "passed against strict xfail", str(report.longrepr)
    if not result.done:
        return "not finished", ""
    called = any(report.when == "call" and report.outcome == "passed" for report in reports)
    return "passed" if called else "not run", ""


def _outer_is_strict(item: pytest.Item) -> bool:
    """Whether the outer session sees the strict marker too. A fixture or condition may apply it in a rank only."""
    from _pytest.skipping import xfailed_key

    xfailed = item.stash.get(xfailed_key, None)
    return xfailed is not None and xfailed.strict and not item.config.getoption("runxfail")
