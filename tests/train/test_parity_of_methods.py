"""Every method of the trainer computes the gradient and the step of one process: no false alarm of parity."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from support.parity_cases import codes
from support.scenarios import NEEDS_FSDP

from benchmarks.equivalence import ROWS, Row, check_row
from benchmarks.trainer_case import SMALL, TrainerCase
from syncheck.parity.check import check_parity
from train.launch import RankContext
from train.methods import METHODS

if TYPE_CHECKING:
    from train.settings import Settings

# Ranks and options by method.
FOUR = ("hsdp", "fsdp_tp", "ddp_tp", "pp_fsdp")
OPTIONS: dict[str, dict[str, Any]] = {"ep": {"model": "gpt-tiny-moe"}}
ALONE = ("single", "dp")
# Each rank has the gradient of its own samples.
LOCAL = ("diloco",)
# A schedule of torch splits the share of a rank, whose size must be a multiple.
SCHEDULED = ("pp", "pp_fsdp")
# Size of the global batch, micro-batches and seed: each value once, or all combinations.
COMBINATIONS = [(11, 1, 0), (8, 3, 1), (11, 3, 2)]
if os.environ.get("SYNCHECK_MATRIX") == "all":
    COMBINATIONS = list(product((8, 11), (1, 3), (0, 1, 2)))
TWO = [name for name in METHODS if name not in (*FOUR, *ALONE, "hsdp_tp")]
# The slow tests check all of them with more settings.
QUICK = ("ddp", "fsdp", "tp", "pp")


def make_settings(method: str, **changes: Any) -> Settings:
    """Return the settings of a method with clipping."""
    return replace(SMALL, method=method, grad_clip=0.1, **OPTIONS.get(method, {}), **changes)


def check(ctx: RankContext, settings: Settings) -> None:
    """Check a method that must be right, or one whose ranks have their own gradient by design."""
    report = check_parity(TrainerCase(settings, ctx))
    expected = ["SYN443"] if settings.method in LOCAL else []
    assert codes(report) == expected, [finding.evidence for finding in report.findings]


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", QUICK)
def test_methods_on_two_ranks(ctx: RankContext, method: str) -> None:
    """Gradient, clipping and step are those of one process."""
    check(ctx, make_settings(method, batch_size=8))


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "accumulate", "seed"), COMBINATIONS)
@pytest.mark.parametrize("method", TWO)
def test_all_methods_on_two_ranks(ctx: RankContext, method: str, batch_size: int, accumulate: int, seed: int) -> None:
    """The same with accumulation, shares of unequal sizes and three seeds, also with AdamW.

    SYNCHECK_MATRIX=all runs every combination.
    """
    is_fixed = method in SCHEDULED
    if is_fixed and (accumulate > 1 or batch_size != 8):
        pytest.skip("the schedule has its own micro-batches of equal sizes")
    optimizer = "adamw" if seed == 2 else "sgd"
    check(ctx, make_settings(method, batch_size=batch_size, accumulate=accumulate, seed=seed, optimizer=optimizer))


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("batch_size", [16, 19], ids=["equal", "unequal"])
@pytest.mark.parametrize("method", FOUR)
def test_all_methods_on_four_ranks(ctx: RankContext, method: str, batch_size: int, accumulate: int) -> None:
    """Combinations of methods on four ranks."""
    if method in SCHEDULED and (accumulate > 1 or batch_size != 16):
        pytest.skip("the schedule has its own micro-batches of equal sizes")
    check(ctx, make_settings(method, batch_size=batch_size, accumulate=accumulate))


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=8, timeout=240)
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_hsdp_with_tensor_parallelism(ctx: RankContext) -> None:
    """HSDP over tensor parallelism on eight ranks."""
    check(ctx, make_settings("hsdp_tp", batch_size=19, accumulate=2))


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("tp", {"sequence_parallel": True}),
        ("tp", {"loss_parallel": True}),
        ("cp", {"context_mode": "ulysses"}),
        ("pp", {"pipeline_schedule": "gpipe"}),
        ("pp", {"pipeline_schedule": "interleaved", "depth": 4}),
        ("pp", {"pipeline_schedule": "zbv", "depth": 4}),
        ("ddp", {"bucket_view": True}),
        ("fsdp", {"cpu_offload": True}),
        ("fsdp", {"reshard_after_forward": "false"}),
    ],
)
def test_options_of_methods(ctx: RankContext, method: str, changes: dict[str, Any]) -> None:
    """Options that change how a method computes do not change what it computes."""
    check(ctx, make_settings(method, batch_size=8, **changes))


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("method", ALONE)
def test_methods_of_one_process(method: str, accumulate: int) -> None:
    """`single` and `dp` compute the gradient of the whole batch in one process, with accumulation."""
    check(RankContext(), make_settings(method, batch_size=11, accumulate=accumulate))


@pytest.mark.parametrize("row", [row for row in ROWS if row.ranks == 1], ids=attrgetter("name"))
def test_rows_of_the_benchmark_in_one_process(row: Row) -> None:
    """Each row of `benchmarks equivalence` in one process has several parts to compare."""
    assert check_row(row)["codes"] == []


def test_every_method_is_checked() -> None:
    """The tests above list all methods of the trainer."""
    assert sorted([*TWO, *FOUR, *ALONE, "hsdp_tp"]) == sorted(METHODS)
