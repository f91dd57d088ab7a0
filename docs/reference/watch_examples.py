"""Observations for each finding of a witness, as tests/live makes them on real ranks. Needs torch, as witnesses do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from syncheck.live.witnesses.batches import BatchWitness, observe_replicated
from syncheck.live.witnesses.copies import Details
from syncheck.live.witnesses.gradients import compare_details, describe_disagreement
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.rng import RngWitness
from syncheck.live.witnesses.rules import make_finding

if TYPE_CHECKING:
    from syncheck.findings import Finding
    from syncheck.live.witnesses.witness import Suspicion

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
CLOCK = SimpleNamespace(reduces=True, ranks=(0, 1, 2))
LAYOUT: Any = SimpleNamespace(
    key="layout",
    clock=CLOCK,
    is_reduced=True,
    hides_reductions=False,
    numbers_steps=True,
    signature="",
    names=NAMES,
    find_replicas=lambda _rank: CLOCK.ranks,
)
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
    indices = range(len(NAMES))
    equal = Details(["a", "b", "c", "d"], {key: [0.5, 0.25] for key in indices})
    clipped = Details(["e", "f", "g", "h"], {key: [0.5 * FACTOR, 0.25 * FACTOR] for key in indices})
    return find([describe_disagreement(LAYOUT, compare_details({0: equal, 1: clipped, 2: equal}, indices))])


def find_changed(code: str = "SYN411") -> Finding:
    """Return the finding of a rank whose last parameter was changed. code: SYN412 after the last step."""
    equal, changed = Details(["a", "b", "c", "d"], {}), Details(["a", "b", "c", "e"], {})
    suspicion = ParameterWitness().describe(LAYOUT, {0: equal, 1: changed, 2: equal}, range(len(NAMES)))
    return find([suspicion._replace(code=code)])


def make_findings() -> dict[str, tuple[str, Finding]]:
    """Return for each code a description of the program and its finding."""
    ranks = CLOCK.ranks
    batch = {"d": ["digest"], "n": 98304}
    drawn = {rank: {"e": 1, "s": samples} for rank, samples in zip(ranks, BATCHES, strict=True)}
    repeated = {"e": 2, "s": "", "o": 256}
    tensor_parallel: Any = SimpleNamespace(clock=SimpleNamespace(reduces=False))
    inputs = {rank: observe_replicated(bytes([rank] * 8), 4096) for rank in ranks[:2]}
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
        "SYN406": (
            "two tensor-parallel ranks with a DistributedSampler over all ranks.",
            find(BatchWitness().judge(tensor_parallel, inputs, dict)),
        ),
        "SYN410": ("one of three ranks clips its gradients alone.", find_clipped()),
        "SYN411": ("code that runs on one of three ranks only changes a bias.", find_changed()),
        "SYN412": ("one of three ranks loads the best checkpoint after the training.", find_changed("SYN412")),
    }
