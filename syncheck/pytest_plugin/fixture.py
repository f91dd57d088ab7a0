"""The fixture `syncheck`: comparisons in a test with the options of the run and of the project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import config, testing
from syncheck.options import Options

if TYPE_CHECKING:
    import os

    from syncheck.records import Report


class Syncheck:
    """Compares replicas; the defaults are the project's [tool.syncheck] and the `--syncheck-*` options of the run.

    folder: pytest's rootdir; pyproject.toml is searched from there upwards, as for `--syncheck`.
    given: fields of `syncheck.Options` set by the run's options.
    """

    def __init__(self, folder: str | os.PathLike[str], given: dict[str, Any]) -> None:
        _, values = config.load(folder)
        self.options = config.merge_options(values, Options, given)

    def compare(self, *replicas: Any, **keywords: Any) -> Report:
        """Compare replicas and return the report, with the arguments of `syncheck.testing.compare`."""
        __tracebackhide__ = True
        return testing.compare(*replicas, **{"options": self.options, **keywords})

    def assert_in_sync(self, *replicas: Any, **keywords: Any) -> Report:
        """Fail the test unless the replicas are in sync, with the arguments of `syncheck.testing.assert_in_sync`."""
        __tracebackhide__ = True
        return testing.assert_in_sync(*replicas, **{"options": self.options, **keywords})
