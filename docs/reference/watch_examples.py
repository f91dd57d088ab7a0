"""Observations for each finding of a witness, as tests/live makes them on real ranks. Needs torch, as witnesses do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.gradients import Details, compare_details, describe_disagreement
from syncheck.live.witnesses.rng import RngWitness
from syncheck.live.witnesses.rules import make_finding

if TYPE_CHECKING:
    from syncheck.findings import Finding
    from syncheck.live.witnesses.witness import Suspicion

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
CLOCK = SimpleNamespace(reduces=True, ranks=(0, 1, 2))
LAYOUT: Any = SimpleNamespace(key="layout", clock=CLOCK, is_reduced=True, names=NAMES)
# Batches of the ranks: the hashes of their watched samples, in the order of each rank.
BATCHES = ("AAAAAAAABBBBBBBBCCCCCCCCDDDDDDDD", "DDDDDDDDCCCCCCCCBBBBBBBBAAAAAAAA", "BBBBBBBBAAAAAAAADDDDDDDDCCCCCCCC")
FACTOR = 0.25


def find(suspicions: list[Suspicion]) -> Finding:
    """Return the finding of the only suspicion."""
    (suspicion,) = suspicions
    return make_finding(
        suspicion.code, suspicion.ranks, suspicion.facts, names=suspicion.names, variant=suspicion.variant
    )


def find_clipped() -> Finding:
    """Return the finding of a rank that clips alone."""
    equal = Details(["a", "b", "c", "d"], {0: [0.5, 0.25]})
    clipped = Details(["e", "f", "g", "h"], {0: [0.5 * FACTOR, 0.25 * FACTOR]})
    return find([describe_disagreement(LAYOUT, compare_details({0: equal, 1: clipped, 2: equal}))])


def make_findings() -> dict[str, tuple[str, Finding]]:
    """Return for each code a description of the program and its finding."""
    ranks = CLOCK.ranks
    batch = {"d": ["digest"], "n": 98304}
    drawn = {rank: {"e": 1, "s": samples} for rank, samples in zip(ranks, BATCHES, strict=True)}
    repeated = {"e": 2, "s": "", "o": 256}
    return {
        "SYN401": (
            "the data loaders of three ranks have no DistributedSampler, and one seed.",
            find(BatchWitness().judge(LAYOUT, dict.fromkeys(ranks, batch), dict)),
        ),
        "SYN402": (
            "three ranks shuffle the whole dataset, each with its own seed.",
            find(BatchWitness().judge(LAYOUT, drawn, dict)),
        ),
        "SYN403": (
            "`set_epoch` is not called.",
            find(BatchWitness().judge(LAYOUT, dict.fromkeys(ranks, repeated), dict)),
        ),
        "SYN404": (
            "a model with dropout, and one seed for all ranks.",
            find(RngWitness().judge(LAYOUT, dict.fromkeys(ranks, "state"), dict)),
        ),
        "SYN410": ("one of three ranks clips its gradients alone.", find_clipped()),
    }
