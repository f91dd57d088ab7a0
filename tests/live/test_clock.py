"""The clock of a wrapper counts what DDP reduces: its communication hook counts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncheck.live.watching.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3


class Counting:
    """A wrapper with its clock.

    reductions: that the communication hook saw.
    ticks: the reductions at which the clock called.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.wrapper = DistributedDataParallel(module, **options)
        self.clock = Clock("0/0-1", (0, 1), self.wrapper)
        self.reductions = 0
        self.ticks: list[int] = []
        # torch accepts no annotation that is a string.
        self.wrapper.register_comm_hook(None, lambda _state, bucket: self.reduce(bucket))
        self.wrapper.register_forward_hook(self.see_output)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket, and count the last one of each reduction."""
        self.reductions += bucket.is_last()
        return allreduce_hook(dist.group.WORLD, bucket)

    def see_output(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        """Watch an output as the watcher does."""
        self.clock.watch_output(output, lambda: None, lambda: self.ticks.append(self.reductions))


class Checkpointed(nn.Module):
    """A model whose activations are computed again."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> Any:
        """Return the output of a checkpoint."""
        return checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=self.use_reentrant)


def make_module() -> nn.Module:
    """Return a small critic."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def score(model: nn.Module) -> torch.Tensor:
    """Return the mean score of a random batch."""
    mean: torch.Tensor = model(torch.randn(3, 4)).mean()
    return mean


def step_once(model: Any) -> None:
    """One forward pass, one backward pass."""
    score(model).backward()


def step_pair(model: Any) -> None:
    """A critic scores real and generated data in two forward passes, with one backward pass."""
    (score(model) - score(model)).backward()


def step_triplet(model: Any) -> None:
    """Three forward passes, one backward pass."""
    (score(model) - score(model) + score(model)).backward()


def step_twice(model: Any) -> None:
    """Two forward passes, each with its backward pass: two reductions."""
    step_once(model)
    step_once(model)


def step_late(model: Any) -> None:
    """Two forward passes, then two backward passes, of which DDP reduces the first one."""
    first, second = score(model), score(model)
    first.backward()
    second.backward()


def step_retained(model: Any) -> None:
    """Two backward passes of one output, of which DDP reduces the first one."""
    loss = score(model)
    loss.backward(retain_graph=True)
    loss.backward()


def step_accumulated(model: Any) -> None:
    """A backward pass within no_sync, and a pair of outputs of which one is from no_sync."""
    with model.no_sync():
        step_once(model)
        first = score(model)
    (first + score(model)).backward()


def step_penalty(model: Any) -> None:
    """A gradient penalty through the wrapper: the pass of autograd.grad reduces nothing."""
    inputs = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    (score(model) - score(model) + gradient.norm()).backward()


def step_gradients_only(model: Any) -> None:
    """The gradients of parameters without accumulation, before a backward pass of the parameters alone."""
    torch.autograd.grad(score(model), list(model.parameters()))
    score(model).backward(inputs=list(model.parameters()))


def step_frozen(model: Any) -> None:
    """The critic is frozen in the step of the generator, and reduces nothing."""
    model.requires_grad_(False)
    model(torch.randn(3, 4, requires_grad=True)).mean().backward()
    model.requires_grad_(True)
    step_once(model)


def step_unused(model: Any) -> None:
    """A forward pass without a backward pass is no reduction."""
    score(model)
    step_once(model)


def step_failing(model: Any) -> None:
    """A backward pass that fails, which the script catches, hides no later reduction."""
    output = model(torch.randn(3, 4))
    output.register_hook(lambda _gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.mean().backward()
    step_once(model)


# A static graph has the same backward pass in each step.
CHANGING = (step_accumulated, step_penalty, step_gradients_only, step_frozen)


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize(
    ("step", "reductions"),
    [
        (step_once, 1),
        (step_pair, 1),
        (step_triplet, 1),
        (step_twice, 2),
        (step_late, 1),
        (step_retained, 1),
        (step_accumulated, 1),
        (step_penalty, 1),
        (step_gradients_only, 1),
        (step_frozen, 1),
        (step_unused, 1),
        (step_failing, 1),
    ],
)
def test_reductions_are_counted_as_ddp_reduces(
    step: Callable[[Any], None], reductions: int, options: dict[str, bool]
) -> None:
    """A step has as many reductions as DDP's communication hook counts, and each is counted after it."""
    if options.get("static_graph") and step in CHANGING:
        pytest.skip("a static graph has the same backward pass in each step")
    counting = Counting(make_module(), **options)
    for _ in range(STEPS):
        step(counting.wrapper)
    assert counting.clock.ticks == counting.reductions == STEPS * reductions
    assert counting.ticks == list(range(1, STEPS * reductions + 1))


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("step", [step_once, step_pair])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_does_not_hide_reductions(step: Callable[[Any], None], use_reentrant: bool) -> None:
    """The parameters within a reentrant checkpoint are no part of the graph of the backward pass."""
    counting = Counting(Checkpointed(use_reentrant=use_reentrant), static_graph=True)
    for _ in range(STEPS):
        step(counting.wrapper)
    assert counting.clock.ticks == counting.reductions == STEPS


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_wrappers_in_one_backward_pass_have_clocks_of_their_own() -> None:
    """Encoder and decoder, each with two outputs in one backward pass: both clocks count one reduction."""
    encoder, decoder = Counting(nn.Linear(4, 4)), Counting(make_module())
    for _ in range(STEPS):
        codes = [encoder.wrapper(torch.randn(3, 4)) for _ in range(2)]
        sum(decoder.wrapper(code).mean() for code in codes).backward()
    assert encoder.clock.ticks == decoder.clock.ticks == STEPS
    assert encoder.reductions == decoder.reductions == STEPS


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_a_wrapper_that_was_used_before_hides_steps() -> None:
    """Skipped steps are excluded only if the clock counts from the first forward pass on, and no rank joined."""
    counting = Counting(make_module())
    assert counting.clock.numbers_all_steps()
    step_once(counting.wrapper)
    assert counting.clock.numbers_all_steps()
    assert not Clock("1/0-1", (0, 1), counting.wrapper).numbers_all_steps()
    counting.clock.joined_at = 1
    assert not counting.clock.numbers_all_steps()


@pytest.mark.slow  # processes that have compiled are not used again
@pytest.mark.syncheck(ranks=2, timeout=110)
def test_a_compiled_module_has_one_reduction_for_two_outputs() -> None:
    """Compiled code within the wrapper changes no number."""
    module: Any = torch.compile(make_module(), backend="aot_eager")
    counting = Counting(module)
    for _ in range(STEPS):
        step_pair(counting.wrapper)
    assert counting.clock.ticks == counting.reductions == STEPS
