"""Loading with and without worker processes: batches are bitwise equal, and no worker outlives its rank."""

from __future__ import annotations

import signal
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import pytest
import torch
from support.programs import TRAIN, children, wait_until_trains
from support.scenarios import trained
from support.started import alive, wait_for
from support.states import list_differing

from train.data import DistributedBatchSampler, load_data
from train.data.loading import training_batches
from train.launch import RankContext
from train.settings import Settings

if TYPE_CHECKING:
    from support.programs import Programs

TINY = Settings(width=4, limit_train=96, epochs=2)


def test_an_epoch_does_not_change_the_rng_state() -> None:
    """Starting and reading an epoch does not change torch's RNG state."""
    samples = load_data("digits", None, None).train
    sampler = DistributedBatchSampler(len(samples), 64, 0, 1, shuffle=True, seed=0)
    before = torch.get_rng_state()
    assert sum(len(y) for _, y in training_batches(samples, sampler, RankContext(), 0)) == 22 * 64
    assert torch.get_rng_state().equal(before)


@pytest.mark.slow
def test_workers_load_the_same_bits() -> None:
    """Training with two workers ends bitwise equal to training without workers, augmentation included."""
    settings = replace(TINY, augment="basic")
    states = [trained(RankContext(), replace(settings, workers=n)).method.module.state_dict() for n in (0, 2)]
    assert not list_differing(states[0], states[1])


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=attrgetter("name"))
def test_workers_end_with_their_rank(programs: Programs, signal_number: signal.Signals) -> None:
    """If a rank is killed, or interrupted at its terminal, all its workers end too."""
    process = programs.start(*TRAIN, "--width", 4, "--epochs", 1000, "--workers", 2, "--log-interval", 1)
    wait_until_trains(process)  # after one step, workers have loaded a batch
    wait_for(lambda: any(len(children(child)) == 2 for child in children(process.pid)))
    process.send_signal(signal_number)
    process.wait(30)
    assert not alive(process)
