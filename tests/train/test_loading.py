"""How batches are loaded: by processes or not, the bits are the same, and no process outlives its rank."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from programs import TRAIN, children, wait_until_trains
from scenarios import trained
from started import alive, wait_for

from train.data import DistributedBatchSampler, load_data
from train.launch import RankContext
from train.loading import training_batches
from train.settings import Settings

if TYPE_CHECKING:
    from programs import Programs

TINY = Settings(width=4, limit_train=96, epochs=2)


def test_an_epoch_draws_nothing_at_random() -> None:
    """Starting and reading an epoch leaves torch's random numbers where they were."""
    samples = load_data("digits", None, None).train
    sampler = DistributedBatchSampler(len(samples), 64, 0, 1, shuffle=True, seed=0)
    before = torch.get_rng_state()
    assert sum(len(y) for _, y in training_batches(samples, sampler, RankContext(), 0)) == 22 * 64
    assert torch.get_rng_state().equal(before)


@pytest.mark.slow
def test_workers_load_the_same_bits() -> None:
    """Two processes that load, augmented samples too, end with the bits of none."""
    settings = replace(TINY, augment="basic")
    states = [trained(RankContext(), replace(settings, workers=n)).method.module.state_dict() for n in (0, 2)]
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_workers_end_with_their_rank(programs: Programs, signal_number: signal.Signals) -> None:
    """A rank that is killed, or interrupted at its terminal, leaves none of its loading processes behind."""
    process = programs.start(*TRAIN, "--width", 4, "--epochs", 1000, "--workers", 2, "--log-interval", 1)
    wait_until_trains(process)  # a step: they have loaded a batch
    wait_for(lambda: any(len(children(child)) == 2 for child in children(process.pid)))
    process.send_signal(signal_number)
    process.wait(30)
    assert not alive(process)
