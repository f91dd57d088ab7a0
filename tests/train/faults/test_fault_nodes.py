"""The fault that averages gradients only within each node."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import QUIET, check_report, optimizer_names, parameters
from support.listings import list_rank_files
from support.scenarios import SMALL, differing, load, run, tensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

FAULT = "differs-by-node"


def files(settings: Settings) -> list[Path]:
    """Return the files of four ranks."""
    return list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", 4)


@pytest.mark.syncheck(ranks=4, timeout=120)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow
def test_each_half_of_the_ranks_acts_as_a_node(ctx: RankContext, syncheck_rank: Rank, accumulate: int) -> None:
    """Ranks 0 and 1 are equal, ranks 2 and 3 are equal, and trained tensors and hosts differ between the halves."""
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
    """If the ranks know their nodes, each node averages by itself, and the recorded host is the real host."""
    settings = replace(QUIET, max_steps=2, fault=FAULT, out=syncheck_rank.shared)
    run(replace(ctx, node=ctx.rank % 2), settings)
    a, b, c, d = files(settings)
    assert differing(a, c) == differing(b, d) == set()
    assert differing(a, b) == parameters(a) | optimizer_names(a, "exp_avg", "exp_avg_sq")
    assert load(d)["syncheck"]["host"] == os.uname().nodename


@pytest.mark.syncheck(ranks=4, timeout=120)
def test_mean_of_both_nodes_equals_the_global_average(ctx: RankContext, syncheck_rank: Rank) -> None:
    """After one step, the mean of both nodes' parameters equals the parameters of a run without the fault."""
    plain = replace(SMALL, model="convnet", max_steps=1, out=syncheck_rank.shared)
    settings = replace(plain, fault=FAULT, out=syncheck_rank.shared / "planted")
    run(ctx, plain)
    run(ctx, settings)
    clean = tensors(files(plain)[0])
    first_node = tensors(files(settings)[0])
    second_node = tensors(files(settings)[3])
    for name in parameters(files(plain)[0]):
        mean = (first_node[name].double() + second_node[name].double()) / 2
        # The tolerance covers float32 rounding of weights below 1; a step is about 1e-3.
        assert (mean - clean[name]).abs().max() < 2e-7
        assert (first_node[name] - second_node[name]).abs().max() > 1e-5
