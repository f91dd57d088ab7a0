"""The plugin's options: all begin with `--syncheck`, so that they clash with no other plugin's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Seconds. A gloo group that hangs does so for 30 minutes by default.
TIMEOUT = 60.0
# The fields of `syncheck.Options` that an option sets, and what `pytest.Config.getoption` calls it.
COMPARING = {
    field: f"syncheck_{field}"
    for field in (
        *("only", "include", "exclude", "buffers", "rtol", "atol", "ulp", "close"),
        *("allow", "baseline", "group_by", "reference", "jobs", "quick", "rng"),
    )
}


def add(parser: pytest.Parser) -> None:
    """Declare the options and ini values."""
    group = parser.getgroup("syncheck", "syncheck: are the replicas of a model the same?")

    def many(name: str, metavar: str, text: str) -> None:
        group.addoption(name, action="append", default=[], metavar=metavar, help=f"{text}; repeatable")

    def flag(name: str, text: str) -> None:
        group.addoption(name, action="store_true", default=None, help=text)

    many(
        "--syncheck",
        "GLOB",
        "judge these checkpoints, one test per group of replicas and kind of tensor; no others without a path",
    )
    many("--syncheck-only", "KIND", "judge only params, buffers, optimizer or rng")
    many("--syncheck-include", "GLOB", "judge only tensors whose name matches")
    many("--syncheck-exclude", "GLOB", "leave out tensors whose name matches")
    many("--syncheck-buffers", "GLOB", "names that are buffers, where the files do not say")
    many("--syncheck-allow", "CODE", "a finding that fails no test")
    group.addoption(
        "--syncheck-baseline",
        metavar="FILE",
        help="findings in this file fail no test; what it lacks does, and is named",
    )
    group.addoption(
        "--syncheck-update-baseline",
        action="store_true",
        help="write to that file what is found on the checkpoints of this run, which is accepted then",
    )
    many("--syncheck-output", "FILE", "write the report on the checkpoints to .html, .json, .md, .txt or .xml")
    group.addoption("--syncheck-rtol", type=float, metavar="R", help="|a-b| <= atol + rtol * max(|a|,|b|) is close")
    group.addoption("--syncheck-atol", type=float, metavar="A", help="see --syncheck-rtol; both or none")
    group.addoption("--syncheck-ulp", type=int, metavar="N", help="floats within N steps of their dtype are close")
    flag("--syncheck-close", "floats within the tolerance of torch.testing for their dtype are close")
    group.addoption(
        "--syncheck-group-by", metavar="REGEX", help="files whose path gives equal captured groups are replicas"
    )
    group.addoption(
        "--syncheck-reference",
        metavar="PATH|RANK",
        help="describe differences against this replica (default: the majority)",
    )
    group.addoption("--syncheck-jobs", type=int, metavar="N", help="threads for large tensors")
    flag("--syncheck-quick", "compare the checksums that torch.save stored, and read no data")
    flag("--syncheck-rng", "compare random number states too, which differ between ranks by design")
    group.addoption(
        "--syncheck-timeout",
        type=float,
        metavar="SECONDS",
        help=f"limit of a test marked syncheck(ranks=...); its timeout=SECONDS wins (default: {TIMEOUT:g})",
    )
    parser.addini(
        "syncheck_checkpoints",
        "checkpoints to judge beside the tests, in a run from the rootdir that names no path",
        type="args",
        default=[],
    )
    parser.addini("syncheck_timeout", "seconds; --syncheck-timeout wins", default=str(TIMEOUT))


def given(config: pytest.Config) -> dict[str, Any]:
    """Return what the run's options say of how to compare, by the name that `syncheck.Options` has for it."""
    return {field: config.getoption(option) for field, option in COMPARING.items()}


def written(value: object) -> str:
    """Write the value of an option: texts one after the other, of a table of tolerances what they are for."""
    return ", ".join(value) if isinstance(value, (tuple, dict)) else str(value)
