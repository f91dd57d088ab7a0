"""A test on several ranks, in the pytest that shows it: set up nothing, run the ranks, tell how they ended."""

from __future__ import annotations

import builtins
import json
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
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks import coverage, marker
from syncheck.pytest_plugin.ranks.failure import RanksFailed, disagreement, failure
from syncheck.pytest_plugin.ranks.pool import Pool
from syncheck.pytest_plugin.ranks.process import import_path
from syncheck.pytest_plugin.ranks.results import Result, failed_start, is_strict_xpass, is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tail:
    """Called again and again, it passes on what came since the last time, whole lines only. live: else does nothing."""

    def __init__(self, results: Sequence[Result], live: bool) -> None:
        self._results = results if live else ()
        self._read: dict[tuple[int, str], int] = defaultdict(int)  # bytes

    def __call__(self) -> None:
        """Pass on what is new."""
        for result in self._results:
            for stream in ("stdout", "stderr"):
                try:
                    with (result.folder / stream).open("rb") as file:
                        file.seek(self._read[result.rank, stream])
                        new = file.read()
                except OSError:
                    continue
                whole = new if result.over else new[: new.rfind(b"\n") + 1]
                self._read[result.rank, stream] += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    getattr(sys, stream).write(f"[rank {result.rank}] {line}\n")


POOL = pytest.StashKey[Pool]()
LIMIT = pytest.StashKey[float]()
# A process may abort while gloo connects it. No code of the test has run then, so the ranks are started anew.
STARTS = 3


class OnRanks:
    """Mixed in front of an item's own class. Its fixtures are set up in the ranks, and there only."""

    def setup(self) -> None:
        """Set up nothing here."""

    def teardown(self) -> None:
        """Tear down nothing here."""

    def runtest(self: Any) -> None:
        """Run the test on all ranks; raise what they agree on, or RanksFailed."""
        __tracebackhide__ = True
        run(self)

    def repr_failure(self: Any, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """Show the failing ranks' own failures in place of a traceback of ours."""
        if isinstance(excinfo.value, RanksFailed):
            return excinfo.value.shown
        return super().repr_failure(excinfo)  # type: ignore[misc]


def spread(item: pytest.Item) -> None:
    """Make an item one that runs on ranks."""
    own = type(item)
    if hasattr(item, "funcargs"):
        item.funcargs = _InTheRanks()
    item.__class__ = types.new_class(own.__name__, (OnRanks, own))


class _InTheRanks(dict[str, Any]):
    """The fixtures' values of such a test here: None. Hooks of a conftest may ask for them after the test."""

    def __missing__(self, name: str) -> None:
        return None


def run(item: Any) -> None:
    """Run an item on its ranks."""
    __tracebackhide__ = True
    wanted = marker.of(item)
    assert wanted is not None
    if wanted.group and util.find_spec("torch") is None:
        pytest.fail("a test on several ranks needs torch: pip install 'syncheck[live]'", pytrace=False)
    for attempt in range(1, STARTS + 1):
        results, late = _run_once(item, wanted)
        if attempt < STARTS and not late and (reason := failed_start(results)):
            item.user_properties.append((marker.RETRIED, f"start {attempt} of {STARTS} failed: {reason}"))
        else:
            break
    _judge(item, results, late)


def _run_once(item: Any, wanted: marker.Wanted) -> tuple[list[Result], str]:
    """Start the ranks and let them run the test; return their results and the time limit that passed, in words."""
    world = marker.ranks_of(item)
    limit = wanted.timeout or item.config.stash[LIMIT]
    shared = _folder(item)
    results = [Result(rank, shared / f"rank{rank}") for rank in range(world)]
    for result in results:
        result.folder.mkdir()
    (shared / "shared").mkdir()
    tasks = _tasks(item, shared, world, limit, group=wanted.group)
    live = item.config.getoption("capture", "") == "no"
    tail = Tail(results, live=live)
    late = ""
    try:
        late = item.config.stash[POOL].run(tasks, results, limit, tail)
    except pytest.fail.Exception as error:  # another plugin's limit, raised where this process waits
        late = str(error)
    finally:
        tail()
        _keep(item, results, output=not live)
    return results, late


def _folder(item: pytest.Item) -> Path:
    """Make a folder for a test's ranks where pytest makes those of tmp_path: it keeps the last few runs'."""
    name = re.sub(r"\W", "_", item.name)[:30]
    # The value of the fixture tmp_path_factory, which an item has no public way to; it is not there under -p no:tmpdir.
    factory = getattr(item.config, "_tmp_path_factory", None)
    if factory is None:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        item.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        return folder
    made: Path = factory.mktemp(name)
    return made


def _tasks(item: Any, shared: Path, world: int, limit: float, *, group: bool) -> list[dict[str, Any]]:
    """Return what each rank is sent to run the test."""
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
        "coverage": coverage.settings(config),
        # What xdist and the hooks of others gave its worker, for a rank stands in for that.
        "workerinput": _sendable(getattr(config, "workerinput", None)),
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
    """Return pytest's arguments for a rank: those of this run, and some of ours before a `--`."""
    args = list(map(str, config.invocation_params.args))
    end = args.index("--") if "--" in args else len(args)
    ours = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    ours += ["--capture=no"] if config.pluginmanager.hasplugin("capture") else []
    ours += ["--no-cov"] if config.pluginmanager.hasplugin("pytest_cov") else []
    return [*args[:end], *ours, *args[end:]]


def _environment(world: int) -> dict[str, str]:
    """Return the environment of all ranks: this process's, and what torchrun sets alike on all of them."""
    with socket.socket() as probe:  # for tests that open a store of their own
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        # One machine: gloo need not find out which of its names lead back to it. One thread: ranks share the cores.
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
    # As an argument a bracket is taken for the parameters of a test.
    return sorted({own} | {path for path in others if "[" not in path and "::" not in path})


def _sendable(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Leave out what cannot be written as JSON."""
    if given is None:
        return None
    kept = {}
    for key, value in given.items():
        with suppress(TypeError, ValueError, RecursionError):
            json.dumps(value)
            kept[key] = value
    return kept


def _keep(item: pytest.Item, results: Sequence[Result], *, output: bool) -> None:
    """Add to the item what the ranks wrote, if that was not shown already, logged, recorded and warned of."""
    seen: set[tuple[Any, ...]] = set()
    for result in results:
        for stream in ("stdout", "stderr") if output else ():
            if text := result.output(stream):
                item.add_report_section("call", f"{stream} rank {result.rank}", text)
        # Each report has the sections of those before it too.
        for title, text in result.reports[-1].sections if result.reports else ():
            if "log" in title:
                item.add_report_section(title.split()[-1], f"log rank {result.rank}", text)
        for warning in result.warnings:
            if (key := tuple(warning.values())) not in seen:
                seen.add(key)
                _warn_again(item, warning)
    _keep_properties(item, results)


def _keep_properties(item: pytest.Item, results: Sequence[Result]) -> None:
    """Add what the ranks recorded: once where all recorded the same, else with the rank."""
    recorded = {r.rank: list(r.reports[-1].user_properties) for r in results if r.reports}
    for rank, properties in recorded.items():
        for one in properties:
            everywhere = len(recorded) == len(results) and all(one in other for other in recorded.values())
            name, value = one
            if not everywhere:
                item.user_properties.append((f"{name}[rank {rank}]", value))
            elif rank == 0:
                item.user_properties.append((name, value))


def _warn_again(item: pytest.Item, warning: dict[str, Any]) -> None:
    found = getattr(builtins, warning["category"], None) or getattr(pytest, warning["category"], None)
    category = found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
    message = warnings.WarningMessage(category(warning["text"]), category, warning["file"], warning["line"])
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )


def _judge(item: pytest.Item, results: Sequence[Result], late: str) -> None:
    """Raise for what the ranks found; return when all passed, or when the outer pytest fails the test by itself."""
    __tracebackhide__ = True
    kinds: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for result in results:
        kind, reason = _outcome(result)
        kinds.setdefault(kind, []).append(result.rank)
        reasons.setdefault(kind, reason)
    # A rank that fails as expected may well leave the others waiting.
    if "xfailed" in kinds and kinds.keys() <= {"xfailed", "passed", "passed against strict xfail", "not finished"}:
        pytest.xfail(reasons["xfailed"])
    if late or kinds.keys() & {"failed", "not finished"}:
        if kinds.keys() <= {"skipped", "not finished"} and not late:
            raise disagreement(item, kinds, results)
        raise failure(item, results, late)
    if len(kinds) > 1 or "not run" in kinds:  # another plugin may keep a session from running what it collected
        raise disagreement(item, kinds, results)
    if "skipped" in kinds:
        raise pytest.skip.Exception(reasons["skipped"], _use_item_location=True)
    if "passed against strict xfail" in kinds and not _outer_is_strict(item):
        raise failure(item, results, reasons["passed against strict xfail"])


def _outcome(result: Result) -> tuple[str, str]:
    if result.failed:
        return "failed", ""
    whole = [report for report in result.reports if is_whole(report)]
    for report in whole:
        if report.outcome == "skipped":
            if hasattr(report, "wasxfail"):
                return "xfailed", str(report.wasxfail)
            # A tuple of file, line and reason, which JSON made a list.
            reason = str(report.longrepr[2] if isinstance(report.longrepr, (list, tuple)) else report.longrepr)
            return "skipped", reason.removeprefix("Skipped: ")
        if is_strict_xpass(report):
            return "passed against strict xfail", str(report.longrepr)
    if not result.done:
        return "not finished", ""
    called = any(report.when == "call" and report.outcome == "passed" for report in whole)
    return "passed" if called else "not run", ""


def _outer_is_strict(item: pytest.Item) -> bool:
    """Whether the outer pytest sees the marker too, and not only a rank: through a fixture, or a condition."""
    from _pytest.skipping import xfailed_key

    xfailed = item.stash.get(xfailed_key, None)
    return xfailed is not None and xfailed.strict and not item.config.getoption("runxfail")
