"""Changes of parameters after the last step are distinguished from those that a script makes after each step."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.live.watching.clock import Clock
from syncheck.live.watching.last_steps import LastSteps, watch_sent_states
from syncheck.live.watching.layouts import Layout
from syncheck.live.watching.records import CHANGED, find_changed
from syncheck.live.watching.watcher import Watcher
from syncheck.live.witnesses.inputs import list_inputs

CLOCK: Any = SimpleNamespace(name="clock", ranks=(0, 1), reduces=True, ticks=0, local_passes=0)


@pytest.mark.parametrize("clips", [False, True])
def test_a_change_that_follows_each_step_is_no_change_at_the_end(clips: bool) -> None:
    """A script may clip its weights after each step; loading a checkpoint afterwards is another change."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    layout = Layout(CLOCK, "0", optimizer, [weight], ["weight"], is_reduced=True)
    for _ in range(3):
        layout.note_changes()
        weight.data.add_(1)
        weight.data = weight.data.clone()
        layout.changes.note_step()
        if clips:
            weight.detach().clamp_(0, 1)
    assert not layout.changes.has_new()
    assert bool(layout.describe_change()) is clips
    weight.detach().copy_(torch.zeros(3))
    weight.detach().copy_(torch.zeros(3))
    assert layout.changes.has_new()
    assert layout.describe_change() < 0


def test_a_layout_that_no_longer_steps_has_its_last_change_before_the_last_step() -> None:
    """While another optimizer trains a part of a model, changes of the rest come before the end of the training."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    layouts = [Layout(CLOCK, str(id(weight)), None, [weight], ["weight"], is_reduced=True) for weight in weights]
    last_steps = LastSteps()

    def step(layout: Layout) -> None:
        layout.note_changes()
        last_steps.note_before_step([layout], layouts)
        layout.parameters[0].data.add_(1)
        layout.changes.note_step()
        last_steps.note_step()

    # In turn, neither is idle.
    for layout in layouts * 2:
        step(layout)
    weights[0].data = torch.zeros(3)
    assert layouts[0].changes.has_new()
    for _ in range(2):
        step(layouts[1])
    assert not layouts[0].changes.has_new()
    assert last_steps.hold(layouts, (0, 1))
    weights[0].data = torch.zeros(3)
    weights[0].detach().add_(1)
    assert not last_steps.hold(layouts, (0, 1))


def make_ended(last_steps: LastSteps) -> torch.nn.Parameter:
    """Return a parameter whose optimizer has stepped and ended."""
    weight = torch.nn.Parameter(torch.ones(3))
    layout = Layout(CLOCK, "0", None, [weight], ["weight"], is_reduced=True)
    layout.changes.note_step()
    last_steps.note_end([layout])
    return weight


def test_the_end_of_an_optimizer_is_no_end_of_the_parameters() -> None:
    """Without any optimizer, the parameters still show whether the script has changed them."""
    last_steps = LastSteps()
    weight = make_ended(last_steps)
    assert last_steps.hold([], (0, 1))
    assert not last_steps.hold([], (0, 2))
    weight.detach().zero_()
    assert not last_steps.hold([], (0, 1))
    # A new wrapper makes the ranks equal.
    last_steps.note_wrapper([], (0, 1))
    assert last_steps.hold([], (0, 1))
    del weight
    assert not last_steps.hold([], (0, 1))


def test_an_optimizer_continues_the_parameters_of_an_ended_one() -> None:
    """A script may create an optimizer for each epoch: the steps of the last one count."""
    last_steps = LastSteps()
    weight = make_ended(last_steps)
    layout = Layout(CLOCK, "1", None, [weight], ["weight"], is_reduced=True)
    last_steps.note_before_step([layout], [layout])
    weight.data = torch.zeros(3)
    layout.changes.note_step()
    last_steps.note_step()
    assert last_steps.hold([layout], (0, 1))
    # Ended optimizers of many epochs would slow each step down.
    assert not last_steps._ended[0, 1]


def test_sending_the_states_of_a_module_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function still runs, and the process group is noted after it."""
    calls: list[Any] = []
    utilities = sys.modules["torch.distributed.utils"]
    monkeypatch.setattr(utilities, "_sync_module_states", lambda *_arguments, **named: calls.append(named))
    watch_sent_states(calls.append)
    utilities._sync_module_states("module", "group", src=0)  # type: ignore[attr-defined]
    assert calls == [{"src": 0}, "group"]


def test_a_rank_without_data_takes_no_step_of_its_own() -> None:
    """Within `Join`, ZeroRedundancyOptimizer steps on this rank for the others, after a reduction that it joins."""
    weight = torch.nn.Parameter(torch.ones(3))
    clock = Clock("clock", (0, 1))
    layout = Layout(clock, "0", None, [weight], ["weight"], is_reduced=True)
    watcher = Watcher({}, print, lambda *_: None)
    posted: list[int] = []
    watcher._post = lambda step, _observations: posted.append(step.number)  # type: ignore[method-assign]
    for clock.ticks, clock.joined_at in ((0, 0), (1, 0), (2, 2), (3, 2)):
        watcher._observe(layout)
    assert posted == [0, 1, 3]


def test_steps_that_are_not_seen_are_no_changes() -> None:
    """Between two reductions, an optimizer that is not torch's steps; a skipped step is no change."""
    weight = torch.nn.Parameter(torch.ones(3))
    layout = Layout(CLOCK, "reductions", None, [weight], ["weight"], is_reduced=True)
    layout.note_changes()
    assert (layout.changes.are_known, layout.changes.has_new(), layout.describe_change()) == (False, False, 0)
    weight.detach().add_(1)
    layout.note_changes()
    assert (layout.changes.are_known, layout.describe_change()) == (True, 0)
    weight.detach().add_(1)
    assert layout.describe_change() == 0
    weight.detach().copy_(torch.zeros(3))
    assert layout.describe_change() < 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([0, 0, 0], ()),
        ([5, 5, 5], ()),
        ([0, 5, 0], (1,)),
        ([-7, 0, 0], (0,)),
        ([-7, -7, -7], (0, 1, 2)),
        ([5, -7, 0], (1,)),
    ],
)
def test_ranks_that_changed_parameters_are_named(changes: list[int], expected: tuple[int, ...]) -> None:
    """A usual change of all ranks belongs to the step; a new one, or one of some ranks, does not."""
    records = {rank: {CHANGED: change} for rank, change in enumerate(changes)}
    assert find_changed(records) == expected


class Graph:
    """A batch of graphs, as libraries have it."""

    def __init__(self, features: torch.Tensor) -> None:
        self.features = features


class Slots:
    """An object whose tensors are not found."""

    __slots__ = ("features",)


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        (((torch.ones(2), 1, "text"), {"mask": [torch.ones(1)]}), 2),
        (((Graph(torch.ones(2)), torch.ones(2)), {}), 2),
        (((Slots(), torch.ones(2)), {}), 0),
        (((print, torch.ones(2)), {}), 0),
    ],
)
def test_inputs_count_if_all_of_their_tensors_are_found(inputs: Any, count: int) -> None:
    """Edges that are equal on all ranks say nothing about features in an object that is not read."""
    assert len(list_inputs(inputs)) == count
