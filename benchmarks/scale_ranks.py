"""Check a simulated job of many ranks; print the time of one rank and its traffic as JSON.

    python -m benchmarks.scale_ranks RANKS TENSORS CASE ROUNDS

Started by `python -m benchmarks scale`, a process for each job.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.scale import CASES, ELEMENTS
from benchmarks.simulated import Kinds, play
from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.records import Report

FIRST, OTHERS, ODD = "first", "others", "odd"


def kinds_of(ranks: int, *, odd: bool) -> Kinds:
    """Return who is who: rank 0, which speaks for those that are like it; the last rank where it is odd; the others."""
    of = [FIRST, *[OTHERS] * (ranks - 1)]
    if odd:
        of[-1] = ODD
    return Kinds({kind: of.index(kind) for kind in dict.fromkeys(of)}, of)


def model(tensors: int, *, odd: bool) -> torch.nn.Module:
    """Return a model of many small tensors, on an odd rank with one element changed."""
    torch.manual_seed(0)
    made = torch.nn.ParameterDict({f"p{i:05}": torch.nn.Parameter(torch.randn(ELEMENTS)) for i in range(tensors)})
    if odd:
        made["p00003"].data[5] += 1
    return made


def once(kinds: Kinds, models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Play one check; return the seconds and bytes of the kind of rank that takes and sends most."""
    played = play(kinds, lambda kind: check(models[kind]))
    reports: list[Report] = [of.result for of in played.values()]
    assert all(report == reports[0] for report in reports)
    assert reports[0].counts.different == (ODD in models)
    return {
        "seconds": max(of.seconds for of in played.values()),
        "sent": max(of.sent for of in played.values()),
        "received": max(of.received for of in played.values()),
        "calls": max(of.calls for of in played.values()),
    }


def main() -> None:
    """Play the job, after once that is not counted."""
    ranks, tensors, case, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    odd = case == CASES[1]
    kinds = kinds_of(ranks, odd=odd)
    models = {kind: model(tensors, odd=kind == ODD) for kind in kinds.first}
    found = [once(kinds, models) for _ in range(rounds + 1)][1:]
    print(json.dumps(found[0] | {"seconds": [of["seconds"] for of in found]}))


if __name__ == "__main__":
    main()
