"""Masks, queues, buffers of some ranks and RNG states in a running job, and their fixes, which make the ranks equal."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, each_rank
from support.listings import get_failing, join_fields, list_codes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from syncheck.diagnose.syn205_buffer_local_state import Text
from syncheck.diagnose.syn299_unexplained_difference import Text as Unexplained
from syncheck.live import check
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding, Report


def run_fix(finding: Finding, **names: Any) -> None:
    """Run the last code with a broadcast or a seed in a fix."""
    text, start = str(finding.fix), "state = ["
    code = re.findall(r"(?:for \w in [^:]+: \S+\(\S+, \w+\))|\w+(?:\.\w+)*\.(?:manual_)?seed\(seed\)", text)
    if start in text:
        code.append(start + text.partition(start)[2].removesuffix("."))
    assert code, str(finding.fix)
    for line in code:
        exec(line, {"torch": torch, "dist": dist, "random": random, **names})


class Net(nn.Module):
    """Two layers, and buffers that a test adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.first(x)))
        return result


def train(model: Net, steps: int = 3) -> tuple[Any, Any]:
    """Return the wrapped model and its optimizer after some steps on data of the rank."""
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.randn(4, 8, generator=data)).square().mean().backward()
        optimizer.step()
    return wrapper, optimizer


def smallest_on_last(model: Net, rank: int) -> None:
    """The last rank prunes its smallest weights, for good."""
    for layer in (model.first, model.last):
        share = 0.5 if rank == dist.get_world_size() - 1 else 0.0
        prune.remove(prune.l1_unstructured(layer, "weight", share), "weight")


def random_on_each(model: Net, rank: int) -> None:
    """Each rank draws its own mask."""
    with torch.no_grad():
        retained = torch.rand(8, 8, generator=torch.Generator().manual_seed(rank)) > 0.5
        model.first.weight.mul_(retained)


def two_of_four_on_0(model: Net, rank: int) -> None:
    """Rank 0 has a sparsity of 2 in 4."""
    if rank == 0:
        with torch.no_grad():
            model.first.weight.view(-1, 4)[:, ::2] = 0.0


def masks_of_prune(model: Net, rank: int) -> None:
    """Each rank has its own mask beside equal weights."""
    torch.manual_seed(rank)
    prune.random_unstructured(model.first, "weight", 0.5)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize(
    ("mask", "ranks"),
    [(smallest_on_last, (2,)), (random_on_each, (0, 1, 2)), (two_of_four_on_0, (0,)), (masks_of_prune, (0, 1, 2))],
)
def test_masks(syncheck_rank: Any, mask: Callable[[Net, int], None], ranks: tuple[int, ...]) -> None:
    """Zeros or masks on some ranks, or on each rank, are SYN226, and a broadcast makes them equal."""
    model = Net()
    wrapper, optimizer = train(model)
    mask(model, syncheck_rank.rank)
    finding = get_failing(all_pass(each_rank(check, wrapper, optimizer)))
    assert (finding.code, finding.ranks, finding.certainty) == ("SYN226", ranks, "likely")
    run_fix(finding, model=model, optimizer=optimizer, rank=0)
    assert all_pass(each_rank(check, wrapper, optimizer)).verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("change", ["whole tensor", "one row", "also others", "few"])
def test_zeros_that_are_no_mask(syncheck_rank: Any, change: str) -> None:
    """A zero tensor or row, zeros beside other differences, and few zeros have other causes."""
    model = Net()
    wrapper, optimizer = train(model)
    if syncheck_rank.rank == 1:
        with torch.no_grad():
            if change == "whole tensor":
                model.last.weight.zero_()
            elif change == "one row":
                model.first.weight[2] = 0.0
            elif change == "few":
                model.first.weight[::3, 3] = 0.0
            else:
                random_on_each(model, 1)
                model.last.weight.add_(0.1)
    report = all_pass(each_rank(check, wrapper, optimizer))
    assert report.verdict == "out_of_sync"
    assert "SYN226" not in list_codes(report.groups[0].findings)


def add_queue(model: Net) -> Callable[[int], None]:
    model.register_buffer("queue", torch.zeros(4, 6))
    model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def update(rank: int) -> None:
        torch.manual_seed(rank)
        model.queue[:, :3] = torch.randn(4, 3)
        model.queue_ptr[0] = 3

    return update


def add_codebook(model: Net) -> Callable[[int], None]:
    model.register_parameter("embed", nn.Parameter(torch.ones(4, 6), requires_grad=False))
    model.register_buffer("cluster_size", torch.ones(4))

    def update(rank: int) -> None:
        torch.manual_seed(rank)
        model.embed.data.lerp_(torch.randn(4, 6), 0.1)
        model.cluster_size.lerp_(torch.rand(4), 0.1)

    return update


def add_normalizer(model: Net) -> Callable[[int], None]:
    model.register_buffer("obs_mean", torch.zeros(6))
    model.register_buffer("obs_count", torch.zeros((), dtype=torch.long))

    def update(rank: int) -> None:
        torch.manual_seed(rank)
        model.obs_mean += torch.randn(6)
        model.obs_count += 1 + rank

    return update


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("updated", [(0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("add", [add_queue, add_codebook, add_normalizer])
def test_buffers_of_some_ranks(syncheck_rank: Any, add: Callable[..., Any], updated: tuple[int, ...]) -> None:
    """An update on one rank has another cause than an update from each rank's own data; both fixes work."""
    model = Net()
    update = add(model)
    wrapper, optimizer = train(model)
    if syncheck_rank.rank in updated:
        update(syncheck_rank.rank)
    finding = get_failing(all_pass(each_rank(check, wrapper, optimizer)))
    assert (finding.code, finding.ranks) == ("SYN205", updated)
    from_own_data = Text.CAUSE_QUEUE if add is add_queue else Text.CAUSE
    assert finding.cause.code is (Text.CAUSE_SOME if len(updated) == 1 else from_own_data)
    run_fix(finding, model=model, rank=0)
    assert all_pass(each_rank(check, wrapper, optimizer)).verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
def test_a_count_of_zero_shows_the_rank_without_updates(syncheck_rank: Any) -> None:
    """With two ranks there is no majority, but a count that is zero on one rank shows missing updates."""
    model = Net()
    update = add_normalizer(model)
    wrapper, optimizer = train(model)
    if syncheck_rank.rank == 1:
        update(1)
    finding = get_failing(all_pass(each_rank(check, wrapper, optimizer)))
    assert (finding.code, finding.cause.code) == ("SYN205", Text.CAUSE_SOME)


def has_note(report: Report) -> bool:
    return Note.EQUAL_RNG in list_codes(join_fields(report.groups, "notes"))


@pytest.mark.syncheck(ranks=2)
def test_equal_rng_states_are_a_note(syncheck_rank: Any) -> None:
    """Equal RNG states are in sync with a note, after a resume from one rank's state; different states are not."""
    import numpy as np

    net = Net()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    report = all_pass(each_rank(check, net, rng=True, only="rng"))
    assert report.verdict == "in_sync"
    assert has_note(report)
    assert not has_note(all_pass(each_rank(check, net)))

    torch.manual_seed(syncheck_rank.rank)
    random.seed(syncheck_rank.rank)
    np.random.seed(syncheck_rank.rank)
    report = all_pass(each_rank(check, net, rng=True, only="rng"))
    finding = get_failing(report)
    assert (finding.code, finding.cause.code) == ("SYN299", Unexplained.CAUSE_RNG)
    assert not has_note(report)
    run_fix(finding, seed=5, numpy=np)
    assert all_pass(each_rank(check, net, rng=True, only="rng")).verdict == "in_sync"
