"""The fixture `syncheck`: comparing in a test, with the options of the run and the project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import config, testing

if TYPE_CHECKING:
    import os

    from syncheck.records import Report


class Syncheck:
    """Compares with the project's [tool.syncheck] and the `--syncheck-*` options of the run, unless a call says else.

    folder: pytest's rootdir, from which on upwards the table is looked for; so do the tests of `--syncheck`.
    given: fields of `syncheck.Options` that the run's options set.
    """

    def __init__(self, folder: str | os.PathLike[str], given: dict[str, Any]) -> None:
        self.options = config.merge_options(config.load(folder), **given)

    def compare(self, *things: Any, **how: Any) -> Report:
        """Compare replicas and return the report; things and keywords as `syncheck.testing.compare` takes them."""
        __tracebackhide__ = True
        return testing.compare(*things, **{"options": self.options, **how})

    def assert_in_sync(self, *things: Any, **how: Any) -> Report:
        """Fail the test unless the replicas are in sync; as `syncheck.testing.assert_in_sync`."""
        __tracebackhide__ = True
        return testing.assert_in_sync(*things, **{"options": self.options, **how})
