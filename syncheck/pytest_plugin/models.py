"""`pytest --syncheck-diff A B`: one test for each pair of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from syncheck.options import DiffOptions

# Characters of a path in an id.
_MOST = 100


def configure(config: pytest.Config) -> None:
    """Register the plugin if this run has models to compare. Without paths, pytest then collects no other tests."""
    pairs = config.getoption("syncheck_diff")
    if not pairs or config.getoption("help") or config.pluginmanager.hasplugin("syncheck-rank"):
        return
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        config.args, config.args_source = [], pytest.Config.ArgsSource.ARGS
    config.pluginmanager.register(ModelsPlugin(pairs), "syncheck-models")


class ModelsPlugin:
    """Adds the tests. pairs: A and B of each test."""

    def __init__(self, pairs: Sequence[Sequence[str]]) -> None:
        self.pairs = pairs

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the tests to the collected items."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            for a, b in self.pairs:
                name = f"syncheck-diff::{_write_side(a)}::{_write_side(b)}"
                report.result.append(
                    ModelsItem.from_parent(
                        collector,
                        name=name,
                        nodeid=name,
                        a=a,
                        b=b,
                    )
                )
        return report


def _write_side(path: str) -> str:
    from syncheck.text import shorten

    return shorten(path, _MOST).replace("::", ":")


class ModelsItem(pytest.Item):
    """Compares two models."""

    def __init__(self, *, a: str, b: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.a, self.b = a, b

    def runtest(self) -> None:
        """Compare, and fail with a report instead of a traceback."""
        __tracebackhide__ = True
        import contextlib

        from syncheck.api import diff
        from syncheck.errors import SyncheckError
        from syncheck.report import failure
        from syncheck.text import TYPED_IN_PYTEST, options_as_typed

        with contextlib.chdir(self.config.invocation_params.dir), options_as_typed(TYPED_IN_PYTEST):
            try:
                report = diff(self.a, self.b, options=_read_options(self.config))
            except SyncheckError as error:
                pytest.fail(f"could not tell: {error}", pytrace=False)
            if report.verdict != "in_sync":
                pytest.fail(failure.message(report), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the folder in which pytest was started, and the title of a failure.

        The title is more than the id, because pytest -v would interpret dots in an id as attributes.
        """
        return self.config.invocation_params.dir, None, f"syncheck {self.nodeid}"


def _read_options(config: pytest.Config) -> DiffOptions:
    from syncheck import config as project
    from syncheck.options import DiffOptions
    from syncheck.pytest_plugin.options import read_options

    _, values = project.load(config.rootpath)
    return project.merge_options(values, DiffOptions, read_options(config, DiffOptions))
