"""The optimizers of a watched run: which parameters they step together, and which of them replaces another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from syncheck.live.watching.causes import Causes, Comparing
from syncheck.live.watching.clock import Clock
from syncheck.live.watching.judge import Judgement
from syncheck.live.watching.layouts import Layout, Optimizers, make_layouts
from syncheck.live.watching.passing_changes import PassingChanges
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.witness import Suspicion

MODEL = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def make_clock() -> Any:
    """Return the clock of a wrapper of the model."""
    return SimpleNamespace(
        name="clock",
        ranks=(0, 1),
        ticks=0,
        wrapper=MODEL,
        module=MODEL,
        find_model=lambda: MODEL,
        list_local=list,
        list_parameters=lambda: list(MODEL.named_parameters()),
    )


def make_layout(optimizers: Optimizers, clock: Any, optimizer: Any) -> Layout:
    """Return what an optimizer steps with."""
    (layout,) = map(optimizers.continue_layout, make_layouts([clock], optimizers, optimizer))
    layout.note_optimizer(optimizer)
    return layout


def test_an_optimizer_of_the_same_parameters_continues_the_number_of_the_one_before() -> None:
    """Its steps, its end and its settings are those of the optimizer that it replaces; other parameters have others."""
    optimizers, clock = Optimizers(), make_clock()
    first, last = MODEL[0].parameters, MODEL[1].parameters
    body = torch.optim.AdamW(first())
    head = torch.optim.AdamW(last())
    layout = make_layout(optimizers, clock, body)
    assert (layout.key, make_layout(optimizers, clock, head).key) == ("clock/0", "clock/1")
    layout.posted = clock.ticks = 7
    layout.note_optimizer(body)
    # In another order, as groups with and without weight decay have it.
    body_again = torch.optim.SGD(reversed(list(first())), lr=0.1)
    clock.ticks = 8
    assert make_layout(optimizers, clock, body_again) is layout
    assert (layout.optimizer, layout.posted, layout.optimizers) == (body_again, 7, 2)
    assert [layout.is_replaced(optimizer) for optimizer in (body, body_again)] == [True, False]
    # The first one may step again, as in a script that alternates.
    clock.ticks = 9
    layout.note_optimizer(body)
    assert [layout.is_replaced(optimizer) for optimizer in (body, body_again)] == [False, True]
    assert optimizers.is_trained(layout)
    del body, body_again
    assert not optimizers.is_trained(layout)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """What torch's class is to a watcher: an optimizer with an optimizer of a part."""

    optim: torch.optim.Optimizer


def test_a_part_of_an_optimizer_has_no_number() -> None:
    """Each rank has another part, maybe none or all parameters, so parts change no number of another optimizer."""
    keys = []
    for part in ([], [MODEL[1].weight], list(MODEL.parameters())):
        optimizers, clock = Optimizers(), make_clock()
        outer = ZeroRedundancyOptimizer(MODEL.parameters(), lr=0.1)
        outer.optim = torch.optim.SGD([{"params": part}], lr=0.1)
        head = torch.optim.SGD([MODEL[1].bias], lr=0.1)
        for optimizer in (outer, outer.optim, head):
            optimizers.add(optimizer)
        assert [optimizers.is_part(optimizer) for optimizer in (outer, outer.optim, head)] == [False, True, False]
        keys.append([make_layout(optimizers, clock, optimizer).key for optimizer in (outer, head)])
        assert optimizers.count(MODEL.parameters()) == 2
    assert keys == [["clock/0", "clock/1"]] * 3


class Wrapper(torch.nn.Module):
    """What DistributedDataParallel is to a clock."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_parameters_that_are_added_or_unfrozen_after_the_wrapper_are_outside() -> None:
    """DDP reduces what its module trains when it is created; a comparison of the module contains the rest, too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(requires_grad=False)
    wrapper = Wrapper(model)
    clock = Clock("clock", (0, 1), wrapper)
    model.append(torch.nn.Linear(1, 1, bias=False))
    model[0].bias.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters())
    inside, outside = make_layouts([clock], Optimizers(), optimizer)
    assert (inside.names, inside.is_reduced) == (["0.weight", "1.weight", "1.bias"], True)
    assert [name.endswith(("0.bias", "2.weight")) for name in outside.names] == [True, True]
    assert (outside.is_reduced, outside.list_outside()) == (False, {})


def test_parameters_that_replace_those_of_the_wrapper_are_outside() -> None:
    """`load_state_dict(assign=True)` after wrapping gives the module parameters that DDP does not reduce."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    wrapper = Wrapper(model)
    clock = Clock("clock", (0, 1), wrapper)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = Optimizers()
    (layout,) = make_layouts([clock], optimizers, before)
    assert (layout.key, layout.is_reduced) == ("clock/0", True)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    (layout,) = make_layouts([clock], optimizers, optimizer)
    assert (layout.key, layout.is_reduced, layout.is_beside) == ("clock/0+", False, False)
    assert len(layout.names) == 2
    # Another optimizer of the same module has a number of its own, and a model without wrapper has no such layout.
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    (layout,) = make_layouts([clock], optimizers, head)
    assert layout.key == "clock/1+"
    assert make_layouts([clock], optimizers, torch.optim.SGD(MODEL.parameters(), lr=0.1)) == []
    # No parameter is left to note.
    changes = PassingChanges()
    changes.note_start(clock)
    changes.note_reduction(clock)
    assert not changes.exist


def test_replicas_are_known_to_be_equal_after_a_comparison_or_from_the_start() -> None:
    """Before a comparison in sync, ranks may be unequal from the start, unless the first step showed them equal."""
    causes = Causes()
    clock = SimpleNamespace(name="clock", ranks=(0, 1), reduces=True, ticks=2)
    layouts = [SimpleNamespace(key=key, signature="all") for key in ("first", "second")]
    witness = ParameterWitness()
    watcher: Any = SimpleNamespace(
        witnesses={"parameters": witness},
        clocks=[clock],
        list_optimizers=lambda _: [None],
        list_layouts_of=lambda _: layouts,
    )
    known = [Comparing(watcher, causes)._were_equal((0, 1))]
    for layout in layouts:
        witness._equal_starts.add(f"{layout.key}/all")
        known.append(Comparing(watcher, causes)._were_equal((0, 1)))
    # Other copies of the same parameters, such as those of another mesh.
    witness._starts["second/all"] = {}
    known.append(Comparing(watcher, causes)._were_equal((0, 1)))
    causes.note_in_sync(watcher, (0, 1), after_step=False)
    known.append(Comparing(watcher, causes)._were_equal((0, 1)))
    assert known == [False, False, True, False, True]


def test_a_fault_explains_its_parameters_in_each_wrapper() -> None:
    """A model that is wrapped again has the same parameters: at the end, those of the first wrapper have the cause."""
    clock = SimpleNamespace(name="clock", ranks=(0, 1))
    first, second, other = [SimpleNamespace(key=key, clock=clock, names=["weight"]) for key in ("0", "1", "2")]
    first.parameters = second.parameters = [torch.ones(2)]
    other.parameters = [torch.ones(2)]
    causes = Causes()
    skipped: Any = Judgement(6, "reduction", Suspicion("SYN214", (1,), ()), second)  # type: ignore[arg-type]
    causes.add(skipped, causes.make_finding(skipped, frozenset()))
    explained = []
    for layout in (first, other):
        differing = Suspicion("SYN411", (0, 1), (), names=("weight",), clusters=((0,), (1,)))
        explained.append(causes.find(Judgement(8, "the end", differing, layout)))  # type: ignore[arg-type]
    assert explained == ["SYN214", ""]
