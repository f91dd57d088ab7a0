"""Gradients averaged within each node only."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import QUIET, check_report, optimizer_names, parameters
from scenarios import SMALL, differing, load, run, tensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

FAULT = "differs-by-node"


def files(settings: Settings) -> list[Path]:
    """The files of four ranks."""
    return [settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(4)]


@pytest.mark.syncheck(ranks=4, timeout=120)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow
def test_halves_are_nodes(ctx: RankContext, syncheck_rank: Rank, accumulate: int) -> None:
    """Ranks 0 and 1 are equal, ranks 2 and 3 are equal, and trained tensors and hosts differ between the pairs."""
    settings = replace(QUIET, max_steps=3, accumulate=accumulate, out=syncheck_rank.shared)
    run(ctx, settings)
    assert all(differing(files(settings)[0], file) == set() for file in files(settings))
    settings = replace(settings, fault=FAULT, out=syncheck_rank.shared / "planted")
    run(ctx, settings)
    a, b, c, d = files(settings)
    assert differing(a, b) == differing(c, d) == set()
    assert differing(b, c) == parameters(a) | optimizer_names(a, "exp_avg", "exp_avg_sq")
    hosts = [load(path)["syncheck"]["host"] for path in (a, b, c, d)]
    machine = os.uname().nodename
    assert hosts == [f"{machine}-node0"] * 2 + [f"{machine}-node1"] * 2
    check_report(syncheck.compare(settings.out), "SYN230")


@pytest.mark.syncheck(ranks=4, timeout=120)
@pytest.mark.slow
def test_real_nodes(ctx: RankContext, syncheck_rank: Rank) -> None:
    """If the ranks know their nodes, these are the groups in any order, and the host is the machine."""
    settings = replace(QUIET, max_steps=2, fault=FAULT, out=syncheck_rank.shared)
    run(replace(ctx, node=ctx.rank % 2), settings)
    a, b, c, d = files(settings)
    assert differing(a, c) == differing(b, d) == set()
    assert differing(a, b) == parameters(a) | optimizer_names(a, "exp_avg", "exp_avg_sq")
    assert load(d)["syncheck"]["host"] == os.uname().nodename


@pytest.mark.syncheck(ranks=4, timeout=120)
def test_size_of_the_steps(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The mean of both nodes' parameters after one step equals the average over all ranks."""
    plain = replace(SMALL, model="convnet", max_steps=1, out=syncheck_rank.shared)
    settings = replace(plain, fault=FAULT, out=syncheck_rank.shared / "planted")
    run(ctx, plain)
    run(ctx, settings)
    whole, low, high = (tensors(path) for path in (files(plain)[0], files(settings)[0], files(settings)[3]))
    for name in parameters(files(plain)[0]):
        mean = (low[name].double() + high[name].double()) / 2
        # Rounding of float32 weights below 1; a step is some 1e-3.
        assert (mean - whole[name]).abs().max() < 2e-7
        assert (low[name] - high[name]).abs().max() > 1e-5
