"""docs/methods.md is correct: every method runs with every modifier, and syncheck's verdicts equal the table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios import NEEDS_FSDP, SMALL, run

import syncheck
from train.errors import UserError
from train.faults import FAULTS
from train.launch import RankContext
from train.methods import METHODS, MODIFIERS

if TYPE_CHECKING:
    from syncheck.records import Group
    from syncheck.testing import Rank
    from train.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
# The settings of each row except "all together", which combines all modifiers that the method does not refuse. If two
# values of one option exclude each other, the later value applies.
RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "--sync-bn": {"sync_bn": True},
    "--no-buffer-sync": {"buffer_sync": False},
    "--amp bf16": {"amp": "bf16"},
    "--amp fp16": {"amp": "fp16"},
    "--accumulate": {"accumulate": 3},
    "--grad-clip": {"grad_clip": 0.1},
    "--find-unused": {"find_unused": True},
    "--join": {"join": True},
    "--compile": {"compile": True},
    "--channels-last": {"channels_last": True},
    "--comm-hook": {"comm_hook": "fp16"},
    "--ema": {"ema": 0.9},
    "--save-format safetensors": {"save_format": "safetensors"},
}
# Not part of "all together": --join excludes most modifiers, and --compile takes minutes, so only test_field_compile.py
# runs it.
NOT_COMBINED = ("--join", "--compile")
# Eight steps, because localsgd and diloco average after the eighth.
BASE = replace(SMALL, max_steps=8)


def read_table() -> dict[str, dict[str, str]]:
    """Return the page's verdicts by method and modifier."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    start = next(i for i, row in enumerate(rows) if row[0] == "modifier")
    methods, cells = rows[start][1:], rows[start + 2 : start + 4 + len(MODIFIERS)]
    return {method: {row[0]: row[i] for row in cells} for i, method in enumerate(methods, 1)}


def test_table_is_complete() -> None:
    """Each method has a column, each modifier has a row, and code and table refuse the same combinations."""
    methods = read_table()
    assert list(methods) == list(METHODS), "the page's columns are METHODS, in their order"
    for name, cells in methods.items():
        assert set(cells) == {*RUNS, "all together"} == {"alone", "all together", *MODIFIERS}
        assert {modifier for modifier, text in cells.items() if text == "refused"} == set(METHODS[name].refuses)


def test_page_gives_every_reason() -> None:
    """The page quotes the program's reason for each refusal word for word."""
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    for name, method in METHODS.items():
        missing = [f"{option}: {reason}" for option, reason in method.refuses.items() if reason not in text]
        assert missing == [], f"docs/methods.md must quote the reasons of {name}"


def test_page_lists_every_fault() -> None:
    """The page ends with the name, code and summary of every fault in FAULTS."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [f"| `{name}` | {fault.code} | {fault.summary} |" for name, fault in FAULTS.items()]
    assert text.splitlines()[-len(rows) :] == rows, "docs/methods.md ends with a row for each fault, in FAULTS' order"


# The pytest marks of each method: its number of ranks, and `slow` if its runs take long.
SLOW = pytest.mark.slow
CELLS: dict[str, list[pytest.MarkDecorator]] = {
    "single": [],
    "dp": [],
    "ddp": [pytest.mark.syncheck(ranks=2)],
    "zero": [SLOW, pytest.mark.syncheck(ranks=2)],
    "localsgd": [SLOW, pytest.mark.syncheck(ranks=2)],
    "diloco": [SLOW, pytest.mark.syncheck(ranks=2)],
    "fsdp": [NEEDS_FSDP, SLOW, pytest.mark.syncheck(ranks=2)],
    "hsdp": [NEEDS_FSDP, SLOW, pytest.mark.syncheck(ranks=4)],
}


def test_runs_include_every_method() -> None:
    """The runs below include every method of the trainer."""
    assert list(CELLS) == list(METHODS), "CELLS has to name every method"


@pytest.mark.parametrize("method", [pytest.param(name, marks=marks) for name, marks in CELLS.items()])
def test_the_table_is_correct(method: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With each modifier, the verdict on the method's real files is that of the page: refused, in sync, or findings."""
    grouped = METHODS[method].grouped
    ctx: RankContext = request.getfixturevalue("ctx") if grouped else RankContext()
    base = replace(BASE, method=method, average_every=4 if method == "diloco" else None)
    rank: Rank | None = request.getfixturevalue("syncheck_rank") if grouped else None
    out = rank.shared if rank is not None else tmp_path
    runs = {row: settings for row, settings in RUNS.items() if row != "--compile"}
    verdicts = {row: train_and_compare(ctx, replace(base, out=out, **s)) for row, s in runs.items()}
    together = [s for row, s in runs.items() if verdicts[row] != "refused" and row not in NOT_COMBINED]
    accepted = {key: value for settings in together for key, value in settings.items()}
    verdicts["all together"] = train_and_compare(ctx, replace(base, out=out, **accepted))
    assert verdicts == {row: cell for row, cell in read_table()[method].items() if row != "--compile"}


def train_and_compare(ctx: RankContext, settings: Settings) -> str:
    """Train, compare the files of this run, and return the verdict in the table's words."""
    if any(option in METHODS[settings.method].refuses and used(settings) for option, used in MODIFIERS.items()):
        with pytest.raises(UserError, match=f"not with --method {settings.method}: "):
            run(ctx, settings)
        return "refused"
    saved = run(ctx, settings).saved
    (group,) = syncheck.compare(*saved).groups
    return describe_group(group)


def describe_group(group: Group) -> str:
    """Return the verdict on a group in the table's words."""
    if group.verdict == "alone":
        return "one replica"
    codes = [finding.code for finding in group.findings if finding.severity != "info"]
    sharded = ["sharded"] if any(diff.reason == "sharded" for diff in group.tensors) else []
    assert (group.verdict == "out_of_sync") is bool(codes)
    return ", ".join([*(codes or ["in sync"]), *sharded])
