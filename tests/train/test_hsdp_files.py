"""Files of a real HSDP run: replicas of each shard are compared, and a difference is reported with its rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.listings import list_failing, list_fields
from support.scenarios import NEEDS_FSDP, SMALL, run

import syncheck

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext


@NEEDS_FSDP
@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
def test_replicas_of_shards_are_compared(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Two replicas on four ranks are equal in all tensors; a bit flip in rank 3's file is attributed to rank 3."""
    settings = replace(SMALL, method="hsdp", sync_bn=True, out=syncheck_rank.shared)
    run(ctx, settings)
    (group,) = syncheck.compare(settings.out).groups
    assert (group.verdict, group.tensors, group.counts.not_compared) == ("in_sync", (), 0)
    (finding,) = group.findings
    assert (finding.code, finding.fails) == ("SYN104", False)
    (fact,) = finding.facts
    assert fact.parameters["layout"] == "copied to 2 along replicate, divided in 2 along shard (dimension 0)"
    assert fact.parameters["groups"][0] == (0, 2)

    syncheck_rank.barrier()  # compare reads all subfolders, and a slower rank must not read the copies of a faster rank
    damaged = settings.out / f"damaged{ctx.rank}"
    damaged.mkdir()
    for rank in range(4):
        data = bytearray((settings.out / f"hsdp-syncbn_rank{rank}.pth").read_bytes())
        if rank == 3:
            tensor = syncheck.read(str(settings.out / "hsdp-syncbn_rank3.pth")).tensors["fc.weight"]
            data[tensor.offset + 2] ^= 1 << 6
        (damaged / f"hsdp-syncbn_rank{rank}.pth").write_bytes(data)
    (group,) = syncheck.compare(damaged).groups
    (diff,) = group.tensors
    assert (group.verdict, diff.name, diff.mismatched) == ("out_of_sync", "fc.weight", 1)
    assert (diff.replica_groups, diff.clusters) == (((0, 2), (1, 3)), ((1,), (3,)))
    # The bytes show only a difference between ranks 1 and 3; the checksum in rank 3's file shows the changed rank.
    assert list_fields(list_failing(group), "code", "ranks") == [("SYN223", (3,))]
