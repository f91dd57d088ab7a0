"""A test on several ranks, in the pytest that shows it: set up nothing, run the ranks, tell how they ended."""

from __future__ import annotations

import builtins
import os
import re
import socket
import sys
import tempfile
import types
import warnings
import zlib
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck.pytest_plugin.ranks import coverage, marker
from syncheck.pytest_plugin.ranks.failure import (
    STARTUP_LIMIT,
    TEST_LIMIT,
    RanksFailed,
    disagreement,
    failure,
)
from syncheck.pytest_plugin.ranks.pool import STARTUP, Pool
from syncheck.pytest_plugin.ranks.results import Result
from syncheck.pytest_plugin.ranks.tail import Tail

if TYPE_CHECKING:
    from collections.abc import Sequence

POOL = pytest.StashKey[Pool]()
LIMIT = pytest.StashKey[float]()


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
    item.__class__ = types.new_class(own.__name__, (OnRanks, own))


def run(item: Any) -> None:
    """Run an item on its ranks."""
    __tracebackhide__ = True
    wanted = marker.of(item)
    assert wanted is not None
    if wanted.group and util.find_spec("torch") is None:
        pytest.fail("a test on several ranks needs torch: pip install 'syncheck[live]'", pytrace=False)
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
        passed = item.config.stash[POOL].run(tasks, results, limit, tail)
        late = {"startup": STARTUP_LIMIT.format(STARTUP), "test": TEST_LIMIT.format(limit)}.get(passed, "")
    except pytest.fail.Exception as error:  # another plugin's limit, raised where this process waits
        late = str(error)
    finally:
        tail()
        _keep(item, results, output=not live)
    _judge(item, results, late)


def _folder(item: pytest.Item) -> Path:
    """Make a folder for a test's ranks where pytest makes those of tmp_path: it keeps the last few runs'."""
    name = re.sub(r"\W", "_", item.name)[:30]
    # The value of the fixture tmp_path_factory, which an item has no public way to; it is not there under -p no:tmpdir.
    factory = getattr(item.config, "_tmp_path_factory", None)
    if factory is None:
        return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    made: Path = factory.mktemp(name)
    return made


def _tasks(item: Any, shared: Path, world: int, limit: float, *, group: bool) -> list[dict[str, Any]]:
    config = item.config
    with socket.socket() as probe:  # for tests that open a store of their own
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = list(map(str, config.invocation_params.args))
    end = args.index("--") if "--" in args else len(args)
    ours = ["--capture=no", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    ours += ["--no-cov"] if config.pluginmanager.hasplugin("pytest_cov") else []
    # One machine: gloo need not find out which of its names lead back to it. One thread: ranks share the cores.
    environment = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "OMP_NUM_THREADS": "1"}
    environment |= os.environ
    environment |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"PYTHONBREAKPOINT": "syncheck.pytest_plugin.ranks.session.no_breakpoint"}
    name, *rest = item.nodeid.split("::")
    common = {
        "args": [*args[:end], *ours, *args[end:]],
        "node": "::".join([str(config.rootpath / name), *rest]),
        "nodeid": item.nodeid,
        "world_size": world,
        "limit": limit,
        "group": group,
        "cwd": str(config.invocation_params.dir),
        "path": sys.path,
        "store": str(shared / "store"),
        "shared": str(shared / "shared"),
        "seed": zlib.crc32(item.nodeid.encode()) & 0xFFFFFF,
        "coverage": coverage.settings(config),
        "workerinput": {"mainargv": sys.argv, "testrunuid": "", "workercount": 1, "workerid": "master"}
        | {k: v for k, v in getattr(config, "workerinput", {}).items() if isinstance(v, (str, int))},
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


def _keep(item: pytest.Item, results: Sequence[Result], *, output: bool) -> None:
    """Add to the item what the ranks wrote, if that was not shown already, logged, recorded and warned of."""
    seen: set[tuple[Any, ...]] = set()
    for result in results:
        for stream in ("stdout", "stderr") if output else ():
            if text := result.output(stream):
                item.add_report_section("call", f"{stream} rank {result.rank}", text)
        for report in result.reports:
            for title, text in report.sections:
                if "log" in title and report.when == "call":
                    item.add_report_section("call", f"log rank {result.rank}", text)
        for warning in result.warnings:
            if (key := tuple(warning.values())) not in seen:
                seen.add(key)
                _warn_again(item, warning)
    recorded = [dict(report.user_properties) for r in results for report in r.reports if report.when == "teardown"]
    for name, value in recorded[0].items() if recorded else ():
        if all(other.get(name) == value for other in recorded):
            item.user_properties.append((name, value))
    for rank, properties in enumerate(recorded):
        alike = dict(item.user_properties)
        item.user_properties += [(f"{n}[rank {rank}]", v) for n, v in properties.items() if n not in alike]


def _warn_again(item: pytest.Item, warning: dict[str, Any]) -> None:
    found = getattr(builtins, warning["category"], None) or getattr(pytest, warning["category"], None)
    category = found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
    message = warnings.WarningMessage(category(warning["text"]), category, warning["file"], warning["line"])
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )


def _judge(item: pytest.Item, results: Sequence[Result], late: str) -> None:
    """Raise for what the ranks found; return when all passed."""
    __tracebackhide__ = True
    if late or not all(result.clean for result in results):
        if not late and all(result.done for result in results) and _strict_xpass(results):
            return  # the outer pytest fails it for the same reason
        raise failure(item, results, late)
    kinds: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for result in results:
        kind, reason = _outcome(result)
        kinds.setdefault(kind, []).append(result.rank)
        reasons.setdefault(kind, reason)
    if "not run" in kinds:  # another plugin may keep a session from running what it collected
        raise disagreement(item, kinds)
    if "xfailed" in kinds and kinds.keys() <= {"xfailed", "passed"}:
        pytest.xfail(reasons["xfailed"])
    if len(kinds) > 1:
        raise disagreement(item, kinds)
    if "skipped" in kinds:
        raise pytest.skip.Exception(reasons["skipped"], _use_item_location=True)


def _outcome(result: Result) -> tuple[str, str]:
    for report in result.reports:
        if report.outcome == "skipped":
            if hasattr(report, "wasxfail"):
                return "xfailed", str(report.wasxfail)
            # A tuple of file, line and reason, which JSON made a list.
            reason = str(report.longrepr[2] if isinstance(report.longrepr, (list, tuple)) else report.longrepr)
            return "skipped", reason.removeprefix("Skipped: ")
    called = any(report.when == "call" and report.outcome == "passed" for report in result.reports)
    return "passed" if called else "not run", ""


def _strict_xpass(results: Sequence[Result]) -> bool:
    """Whether all that failed is that a test passed which is marked xfail(strict=True)."""
    failed = [report for result in results for report in result.reports if report.outcome == "failed"]
    return bool(failed) and all(report.longreprtext.startswith("[XPASS(strict)]") for report in failed)
