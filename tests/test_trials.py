"""The simulated ranks of the trials are those of DistributedDataParallel, and outcomes are classified by the fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trials.faults import FAULTS, BitFlipWeight, Fault, LocalGradients, NoisyGradient
from benchmarks.trials.models import MODELS, Sizes
from benchmarks.trials.simulation import RATES, Rank, Run, Setup
from benchmarks.trials.trial import PARTS, Outcome, Trajectory, draw_trajectories, run_trial

if TYPE_CHECKING:
    from torch import nn

SETUP = Setup("mlp", Sizes(12, 2), "adamw", 2, 5, 4, 2e-3, 0.01, onset=2, odd_rank=1)
STEPS = 4


def train_with_ddp(setup: Setup, rank: int) -> nn.Module:
    """Train a rank of a real process group, and return its module."""
    model = MODELS[setup.model]
    torch.manual_seed(setup.seed)
    own = Rank(setup, rank, model.build(setup.sizes))
    wrapped = DistributedDataParallel(own.module)
    for _ in range(STEPS):
        x, y = model.draw(setup.sizes, setup.samples, own.data)
        for optimizer in own.optimizers:
            optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        for optimizer in own.optimizers:
            optimizer.step()
    return own.module


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    ("model", "optimizer"), [*zip(MODELS, RATES, strict=False), ("conv", "muon"), ("gpt", "adafactor")]
)
def test_simulated_ranks_have_the_bits_of_ddp(syncheck_rank: Any, model: str, optimizer: str) -> None:
    """After some steps, all tensors of a simulated rank are bitwise equal to those of a rank of gloo's DDP."""
    setup = replace(SETUP, model=model, optimizer=optimizer)
    run = Run(setup, Fault())
    for _ in range(STEPS):
        run.train()
    simulated = run.ranks[syncheck_rank.rank].module.state_dict()
    real = train_with_ddp(setup, syncheck_rank.rank).state_dict()
    different = [name for name, tensor in real.items() if not torch.equal(tensor, simulated[name])]
    assert different == []


def test_each_part_has_models_of_its_own() -> None:
    """Parts of the design have no model in common, and every fault occurs in every part."""
    trajectories = draw_trajectories(3 * len(FAULTS), seed=3)
    sizes = {part: {(t.setup.model, t.setup.sizes.width) for t in trajectories if t.part == part} for part in PARTS}
    assert all(sizes[one].isdisjoint(sizes[other]) for one in PARTS for other in PARTS if one != other)
    assert all({t.fault for t in trajectories if t.part == part} == set(FAULTS) for part in PARTS)
    assert draw_trajectories(5, seed=3) == trajectories[:5]


@pytest.mark.parametrize(
    ("fault", "saved", "stated", "hedged", "kind"),
    [
        (LocalGradients, "optimizer", ("SYN211",), (), "right"),
        (LocalGradients, "optimizer", ("SYN213",), (), "false"),
        (LocalGradients, "optimizer", ("SYN211", "SYN213"), (), "false"),
        (LocalGradients, "optimizer", (), (("SYN213", "SYN211"),), "right"),
        (LocalGradients, "optimizer", (), (("SYN299",),), "open"),
        (NoisyGradient, "optimizer", (), (("SYN299",),), "right"),
        (NoisyGradient, "optimizer", ("SYN211",), (), "false"),
    ],
)
def test_outcomes_are_classified_by_the_fault(
    fault: type[Fault], saved: str, stated: tuple[str, ...], hedged: tuple[tuple[str, ...], ...], kind: str
) -> None:
    """A stated cause is right or false, and causes that are only consistent with the evidence are never false."""
    trajectory = Trajectory("fit", fault, SETUP)
    assert Outcome(trajectory, 1, saved, True, "out_of_sync", stated, hedged).kind == kind
    assert Outcome(trajectory, 1, saved, True, "in_sync", stated, hedged).kind == "false"
    assert Outcome(trajectory, 1, saved, False, "in_sync", (), ()).kind == "equal"


def test_a_trial_finds_a_bit_flip() -> None:
    """A trial with a flipped bit, which every version must diagnose, is right; without a fault, the files are equal."""
    flipped = run_trial(Trajectory("fit", BitFlipWeight, SETUP))
    assert [outcome.kind for outcome in flipped if outcome.lag == 0] == ["right", "right"]
    clean = run_trial(Trajectory("fit", Fault, replace(SETUP, onset=1)))
    assert {outcome.kind for outcome in clean} == {"equal"}
