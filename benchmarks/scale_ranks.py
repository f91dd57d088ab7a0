"""Check a simulated job of many ranks; print the maximum time and traffic of a rank as JSON.

    python -m benchmarks.scale_ranks RANKS TENSORS CASE ROUNDS

`python -m benchmarks scale` starts a process for each job.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.scale import ELEMENTS, HSDP, HSDP_DIFFERS, ONE_DIFFERS
from benchmarks.simulated import Kinds, play
from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Report

ODD = "odd"


def kinds_of(ranks: int, *, shards: int, odd: bool) -> Kinds:
    """Return the kinds of ranks: the first rank of each shard, which represents equal ranks, and its copies.

    shards: 1 if each rank has the full model. odd: whether the last rank differs from its copies.
    """
    of = [f"{'first' if rank < shards else 'copy'} of shard {rank % shards}" for rank in range(ranks)]
    if odd:
        of[-1] = ODD
    return Kinds({kind: of.index(kind) for kind in dict.fromkeys(of)}, of)


def values(tensors: int, shard: int, *, odd: bool) -> dict[str, torch.Tensor]:
    """Return many small tensors, different for each shard. odd: change one element."""
    torch.manual_seed(shard)
    made = {f"p{i:05}": torch.randn(ELEMENTS) for i in range(tensors)}
    if odd:
        made["p00003"][5] += 1
    return made


def plain(found: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return an unsharded model."""
    return torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in found.items()})


def sharded(found: dict[str, torch.Tensor], ranks: int, shards: int) -> torch.nn.Module:
    """Return a model with DTensors of this rank's shard, as with FSDP2 on a mesh of two dimensions."""
    ordered = torch.arange(ranks).view(-1, shards)
    # No process groups along the dimensions of the mesh, because nothing is sent in them.
    mesh = DeviceMesh("cpu", ordered, mesh_dim_names=("dp_replicate", "dp_shard"), _init_backend=False)
    model = torch.nn.ParameterDict()
    for name, value in found.items():
        whole = torch.Size([value.numel() * shards])
        tensor = DTensor.from_local(value, mesh, [Replicate(), Shard(0)], run_check=False, shape=whole, stride=(1,))
        model[name] = torch.nn.Parameter(tensor)
    return model


def once(kinds: Kinds, model_of: Callable[[str], torch.nn.Module]) -> dict[str, Any]:
    """Play one check; return the maximum seconds and bytes over the kinds of ranks."""
    played = play(kinds, lambda kind: check(model_of(kind)))
    reports: list[Report] = [of.result for of in played.values()]
    assert all(report == reports[0] for report in reports)
    differs = ODD in kinds.first
    assert reports[0].verdict == ("out_of_sync" if differs else "in_sync")
    assert reports[0].counts.different == differs
    assert not differs or kinds.first[ODD] in reports[0].groups[0].findings[0].ranks
    return {
        "seconds": max(of.seconds for of in played.values()),
        "sent": max(of.sent for of in played.values()),
        "received": max(of.received for of in played.values()),
        "calls": max(of.calls for of in played.values()),
    }


def measured(ranks: int, tensors: int, case: str, rounds: int = 1) -> dict[str, Any]:
    """Play a job `rounds` times; return the result of `once`, with the seconds of every round.

    The passes with missing messages are the warm-up of the timed pass.
    """
    shards = math.isqrt(ranks) if case in (HSDP, HSDP_DIFFERS) else 1
    kinds = kinds_of(ranks, shards=shards, odd=case in (ONE_DIFFERS, HSDP_DIFFERS))
    made: dict[str, torch.nn.Module] = {}

    def model_of(kind: str) -> torch.nn.Module:
        # Created in the first pass as the played rank, because the mesh reads the rank number.
        if kind not in made:
            found = values(tensors, kinds.first[kind] % shards, odd=kind == ODD)
            made[kind] = plain(found) if shards == 1 else sharded(found, ranks, shards)
        return made[kind]

    found = [once(kinds, model_of) for _ in range(rounds)]
    return found[0] | {"seconds": [of["seconds"] for of in found]}


def main() -> None:
    """Play one job in this process."""
    torch.set_num_threads(1)
    ranks, tensors, case, rounds = sys.argv[1:5]
    print(json.dumps(measured(int(ranks), int(tensors), case, int(rounds))))


if __name__ == "__main__":
    main()
