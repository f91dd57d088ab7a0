"""docs/matrix.md is correct: every method runs with every modifier, and syncheck's verdicts equal the table.

By default two rows run for methods that need at most two ranks. SYNCHECK_MATRIX=all runs every cell.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.scenarios import NEEDS_FSDP, SMALL, run
from support.states import merge, pick

import syncheck
from train.errors import UserError
from train.faults import FAULTS
from train.launch import RankContext
from train.methods import METHODS, MODIFIERS, check_modifiers
from train.methods.all_methods import OWN

if TYPE_CHECKING:
    from syncheck.records import Group
    from syncheck.testing import Rank
    from train.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "matrix.md"
# The settings of each row except "all together", which combines all modifiers that the method does not refuse. If two
# values of one option exclude each other, the later value applies.
RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "--sync-bn": {"sync_bn": True},
    "--no-buffer-sync": {"buffer_sync": False},
    "--amp bf16": {"amp": "bf16"},
    "--amp fp16": {"amp": "fp16"},
    "--accumulate": {"accumulate": 4},  # a multiple of the pipeline ranks
    "--grad-clip": {"grad_clip": 0.1},
    "--find-unused": {"find_unused": True},
    "--join": {"join": True},
    "--compile": {"compile": True},
    "--channels-last": {"channels_last": True},
    "--comm-hook": {"comm_hook": "fp16"},
    "--ema": {"ema": 0.9},
    "--save-format safetensors": {"save_format": "safetensors"},
}
# Options of some methods, in a second table.
OPTIONS: dict[str, dict[str, Any]] = {
    "--static-graph": {"static_graph": True},
    "--bucket-view": {"bucket_view": True},
    "--reshard-after-forward": {"reshard_after_forward": "false"},
    "--cpu-offload": {"cpu_offload": True},
    "--mp-policy": {"mp_policy": True, "model": "convnet", "width": None},
}
# Not part of "all together": --join excludes most modifiers, and --compile takes minutes, so only test_field_compile.py
# runs it.
NOT_COMBINED = ("--join", "--compile")
# The number of ranks of each method; 2 if it is not listed.
RANKS = {"single": 1, "dp": 1, "hsdp": 4, "fsdp_tp": 4, "hsdp_tp": 8, "ddp_tp": 4, "ep": 4, "pp_fsdp": 4}
# The model and data of each method: in eight steps, because localsgd and diloco average after the eighth. Methods that
# split the model need a transformer.
BASE = replace(SMALL, max_steps=8)
GPT = {"data": "text", "model": "gpt-tiny", "width": 16, "depth": 2}
CHANGES: dict[str, dict[str, Any]] = {"diloco": {"average_every": 4}, "ep": {"model": "gpt-tiny-moe"}}
ALL = os.environ.get("SYNCHECK_MATRIX") == "all"


def make_settings(method: str) -> Settings:
    """Return the settings of a method without modifiers."""
    changes = (GPT if METHODS[method].parallel else {}) | CHANGES.get(method, {})
    return replace(BASE, method=method, **changes)


def parametrize(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test with these methods, or with all methods for SYNCHECK_MATRIX=all, on the ranks they need."""
    params = []
    for name in METHODS if ALL else names:
        ranks = RANKS.get(name, 2)
        marks = [pytest.mark.syncheck(ranks=ranks, timeout=600)] if METHODS[name].grouped else []
        marks += [NEEDS_FSDP] if "fsdp" in name or "hsdp" in name or name == "replicate" else []
        marks += [] if name in ("single", "dp", "ddp") else [pytest.mark.slow]
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("method", params)


def read_table(first: str = "modifier") -> dict[str, dict[str, str]]:
    """Return the page's verdicts by method and modifier, from all tables whose first cell is `first`."""
    table: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or cells[0] == first:
            header = cells[1:]
        elif header and set(cells[0]) != {"-"}:
            for method, cell in zip(header, cells[1:], strict=True):
                table.setdefault(method, {})[cells[0]] = cell
    return table


def test_table_is_complete() -> None:
    """Each method has a column, each modifier has a row, and code and table refuse the same combinations."""
    methods = read_table()
    assert list(methods) == list(METHODS), "the page's columns are METHODS, in their order"
    for name, cells in methods.items():
        assert set(cells) == {*RUNS, "all together"} == {"alone", "all together", *MODIFIERS}
        assert {modifier for modifier, text in cells.items() if text == "refused"} == set(METHODS[name].refuses)


def test_options_of_some_methods_are_complete() -> None:
    """The second table has a verdict for each method in OWN, and the remaining methods refuse the option."""
    table = read_table("option")
    for option, changes in OPTIONS.items():
        owners = {name for name, cells in table.items() if cells[option] != "-"}
        assert owners == set(OWN[option])
        for name in set(METHODS) - owners:
            with pytest.raises(UserError, match=f"{option}: only for --method "):
                check_modifiers(replace(make_settings(name), **changes))


def test_page_gives_every_reason() -> None:
    """The page quotes the program's reason for each refusal word for word."""
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    for name, method in METHODS.items():
        missing = [f"{option}: {reason}" for option, reason in method.refuses.items() if reason not in text]
        assert missing == [], f"docs/matrix.md must quote the reasons of {name}"


def test_page_lists_every_fault() -> None:
    """docs/faults.md ends with the name, code and summary of every fault in FAULTS."""
    text = PAGE.with_name("faults.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {fault.code} | {fault.summary} |" for name, fault in FAULTS.items()]
    assert text.splitlines()[-len(rows) :] == rows, "docs/faults.md ends with a row for each fault, in FAULTS' order"


@parametrize(*(name for name in METHODS if RANKS.get(name, 2) <= 2))
def test_the_table_is_correct(method: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With each modifier, the verdict on the method's real files is that of the page: refused, in sync, or findings."""
    grouped = METHODS[method].grouped
    ctx: RankContext = request.getfixturevalue("ctx") if grouped else RankContext()
    rank: Rank | None = request.getfixturevalue("syncheck_rank") if grouped else None
    base = replace(make_settings(method), out=rank.shared if rank is not None else tmp_path)
    refuses = METHODS[method].refuses
    accepted = [s for row, s in RUNS.items() if row not in refuses and row not in NOT_COMBINED]
    together = merge(accepted)
    runs = RUNS | OPTIONS | {"all together": together}
    expected = read_table()[method] | read_table("option").get(method, {})
    # Refusals cost no time. Other rows train.
    rows = [row for row in runs if row != "--compile" and expected.get(row, "-") != "-"]
    rows = [row for row in rows if ALL or row in ("alone", "all together") or row in refuses]
    verdicts = {row: train_and_compare(ctx, replace(base, **runs[row])) for row in rows}
    assert verdicts == pick(expected, rows)


def train_and_compare(ctx: RankContext, settings: Settings) -> str:
    """Train, compare the files of this run, and return the verdict in the table's words."""
    if any(settings.uses(option) for option in METHODS[settings.method].refuses):
        with pytest.raises(UserError, match=f"not with --method {settings.method}: "):
            check_modifiers(settings)
        return "refused"
    saved = run(ctx, settings).saved
    return "; ".join(dict.fromkeys(describe_group(group) for group in syncheck.compare(*saved).groups))


def describe_group(group: Group) -> str:
    """Return the verdict on a group in the table's words."""
    if group.verdict == "alone":
        return "one replica"
    codes = [finding.code for finding in group.findings if finding.severity != "info"]
    sharded = ["sharded"] if any(diff.reason == "sharded" for diff in group.tensors) else []
    assert (group.verdict == "out_of_sync") is bool(codes)
    # Undecided: each tensor is sharded, so there is nothing to compare.
    return ", ".join([*(codes or ["in sync"] * (group.verdict == "in_sync")), *sharded])
