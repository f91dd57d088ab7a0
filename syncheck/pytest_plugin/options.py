"""The options of the pytest plugin, all with the prefix `--syncheck` to avoid clashes with other plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import options
from syncheck.text import to_flag

if TYPE_CHECKING:
    import pytest

# Seconds. A gloo process group that hangs does so for 30 minutes by default.
TIMEOUT = 60.0


def add(parser: pytest.Parser) -> None:
    """Declare the options and ini values."""
    group = parser.getgroup("syncheck", "syncheck: compare the replicas of a model")
    group.addoption(
        "--syncheck",
        action="append",
        default=[],
        metavar="GLOB",
        help="test these checkpoints: one test for each group of replicas and kind of tensor; collect other tests only "
        "if paths are given; repeatable",
    )
    group.addoption(
        "--syncheck-diff",
        action="append",
        nargs=2,
        default=[],
        metavar=("A", "B"),
        help="test that two models are the same, in any layout: A is the source, B the copy; collect other tests only "
        "if paths are given; repeatable",
    )
    pytest_options = options.list_options(options.PYTEST, options.Options, options.DiffOptions, options.RunOptions)
    for name, declaration in pytest_options.items():
        group.addoption(to_flag(name, "--syncheck-"), **declaration.argparse_settings())
    group.addoption(
        "--syncheck-timeout",
        type=float,
        metavar="SECONDS",
        help=f"time limit of a test marked syncheck(ranks=...), unless the marker has its own (default: {TIMEOUT:g})",
    )
    parser.addini(
        "syncheck_checkpoints",
        "checkpoints to test, in a run that starts in the rootdir and has no path on its command line",
        type="args",
        default=[],
    )
    parser.addini(
        "syncheck_timeout", "time limit in seconds; the option --syncheck-timeout overrides it", default=str(TIMEOUT)
    )


def read_options(config: pytest.Config, kind: type = options.Options) -> dict[str, Any]:
    """Return the values of the run's options by field; a missing option is None or empty.

    kind: the class with the fields.
    """
    # pytest derives the name for `getoption` from the flag.
    return {name: config.getoption(f"syncheck_{name}") for name in options.list_options(options.PYTEST, kind)}


def format_value(value: object) -> str:
    """Return the value of an option in one line; of a table of tolerances, only its keys."""
    return ", ".join(value) if isinstance(value, (tuple, dict)) else str(value)
