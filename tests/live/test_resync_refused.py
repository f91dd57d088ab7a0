"""`resync` where it cannot tell or must not touch: all ranks raise one text, nothing is changed; and where it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from agreement import Net, all_raise, each_rank, flip, on_all, trained
from healing import bits, healed, untouched
from torch import nn

from syncheck.live import resync
from syncheck.live.repair import state

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.syncheck(ranks=2)
def test_a_tie_is_refused_and_a_named_rank_settles_it(syncheck_rank: Any) -> None:
    """Two ranks with two versions have no majority: the tensor is named; source=1 then makes rank 0 equal to rank 1."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    text = untouched(model, optimizer)
    assert text == "no majority: fc.weight; choose the healthy rank with source=RANK"
    done = healed(model, optimizer, bad=(0,), source=1, named=True)
    assert done.copied == (("fc.weight", 1, (0,), 64),)


@pytest.mark.syncheck(ranks=3)
def test_no_rank_that_is_healthy_everywhere_is_refused(syncheck_rank: Any) -> None:
    """Each of three ranks has a fault of its own: every tensor has a majority, and no rank is in all of them."""
    model, optimizer = trained()
    flip([model.module.fc.weight, model.module.fc.bias, model.module.head.weight][syncheck_rank.rank])
    text = untouched(model, optimizer)
    assert text.startswith(
        "no rank of ranks 0, 1, 2 is in the majority for all tensors: rank 0 differs in fc.weight, rank 1"
    )


@pytest.mark.syncheck(ranks=3)
def test_batchnorm_of_plain_ddp_is_refused_with_a_hint(syncheck_rank: Any) -> None:
    """Statistics that differ on all ranks have no majority; parameters alone can be healed, and leave them."""
    model, optimizer = trained(norm=True)
    text = untouched(model, optimizer)
    assert text.startswith(
        "no majority: norm.running_mean, norm.running_var; choose the healthy rank with source=RANK. Under"
    )
    assert "source=0 copies the statistics of rank 0, only=('params', 'optimizer') skips them" in text
    if syncheck_rank.rank == 2:
        flip(model.module.head.bias)
    statistics = bits(model.module.norm)
    done: Any = each_rank(resync, model, optimizer, only=("params", "optimizer"))[0].report
    assert [of.name for of in done.copied] == ["head.bias"]
    assert bits(model.module.norm) == statistics
    assert len({str(held) for held in on_all(statistics)}) == 3


@pytest.mark.syncheck(ranks=3)
def test_what_is_allowed_to_differ_is_left_alone(syncheck_rank: Any) -> None:
    """With allow=['SYN201'] the statistics of BatchNorm neither vote nor are copied."""
    model, optimizer = trained(norm=True)
    if syncheck_rank.rank == 2:
        optimizer.param_groups[0]["lr"] = 0.5
    statistics = bits(model.module.norm)
    done: Any = each_rank(resync, model, optimizer, allow=("SYN201",))[0].report
    assert [of.name for of in done.values] == ["optimizer.param_groups.0.lr"]
    assert done.copied == ()
    assert bits(model.module.norm) == statistics


def with_optimizer(rank: int, bad: str) -> tuple[Any, ...]:
    model = nn.Linear(2, 2)
    if rank == 1 and bad == "optimizer":
        return (model,)
    return model, torch.optim.SGD(list(model.parameters())[: 1 if rank == 1 else 2], lr=0.1)


STRUCTURES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    ": weight (shape: [2, 2] on ranks 0, 2 and [3, 2] on rank 1)": (
        lambda rank: (nn.Linear(2, 3 if rank == 1 else 2),)
    ),
    ": weight (dtype: float32 on ranks 0, 2 and float16 on rank 1)": (
        lambda rank: (nn.Linear(2, 2, dtype=torch.float16 if rank == 1 else None),)
    ),
    ": bias (missing: not on rank 1)": lambda rank: (nn.Linear(2, 2, bias=rank != 1),),
    "rank 1: optimizer.param_groups.0.": lambda rank: with_optimizer(rank, "optimizer"),
    ": optimizer.param_groups.0.params": lambda rank: with_optimizer(rank, "members"),
}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("text", STRUCTURES)
def test_another_structure_is_refused(syncheck_rank: Any, text: str) -> None:
    """Another shape or dtype, a missing parameter, optimizer or member of a group on one rank: all ranks refuse."""
    torch.manual_seed(0)
    parts = STRUCTURES[text](syncheck_rank.rank)
    before = bits(*parts)
    assert text in all_raise(each_rank(resync, *parts), "UsageError").text
    assert bits(*parts) == before


@pytest.mark.syncheck(ranks=3)
def test_without_anything_to_compare_it_is_refused(syncheck_rank: Any) -> None:
    """Tensors without values tell nothing, so that no rank can be called healthy."""
    outcome = all_raise(each_rank(resync, nn.Linear(2, 2, device="meta")), "UsageError")
    assert outcome.text == "no tensor could be compared, so there is no healthy rank to copy from"


MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "a rank outside": ({"source": 3}, "source=3 is not in the group; choose from ranks 0, 1, 2"),
    "a word": ({"source": "rank0"}, "source='rank0': needs \"majority\" or the number of a rank"),
    "a truth": ({"source": True}, "source=True: needs"),
    "random numbers": ({"only": ("rng",)}, "RNG states differ by design"),
    "an unknown option": ({"bucket": 1}, "bucket=: no such option of resync or of syncheck.live.check"),
    "unlike kinds": ({"only": ("weights",)}, "needs one of params"),
}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("what", MISUSES)
def test_a_wrong_call_is_refused(syncheck_rank: Any, what: str) -> None:
    """A source that is no rank, or an option that makes no sense, raises on all ranks before anything is sent."""
    options, says = MISUSES[what]
    model = nn.Linear(2, 2)  # not seeded alike, and so out of sync
    assert says in untouched(model, **options)


@pytest.mark.syncheck(ranks=3)
def test_unlike_calls_are_refused(syncheck_rank: Any) -> None:
    """Sources that differ between ranks, and an unknown option on one rank, raise on all of them."""
    text = untouched(nn.Linear(2, 2), source=syncheck_rank.rank)
    assert text == "source= differs between ranks: 0 on rank 0, 1 on rank 1, 2 on rank 2"
    text = untouched(nn.Linear(2, 2), **({"bucket": 1} if syncheck_rank.rank == 1 else {}))
    assert text == "rank 1: bucket=: no such option of resync or of syncheck.live.check"


@pytest.mark.syncheck(ranks=3)
def test_a_subgroup_is_healed_by_its_members_alone(syncheck_rank: Any) -> None:
    """In the group of ranks 1 and 2 source=2 is one of them and source=0 is none; rank 0 keeps what it has."""
    group = dist.new_group([1, 2])
    model = nn.Linear(2, 2)
    before = on_all(bits(model))
    outcomes = each_rank(resync, model, group=group, source=0)
    assert {outcome.error for outcome in outcomes} == {"UsageError"}
    assert "source=0 is not in the group; choose from ranks 1, 2" in outcomes[1].text
    assert "rank 0 is not in the process group" in outcomes[0].text
    each_rank(resync, model, group=group, source=2)
    assert on_all(bits(model)) == [before[0], before[2], before[2]]


class Copies:
    """An average of weights whose state dict gives copies."""

    def __init__(self) -> None:
        self.average = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


@pytest.mark.syncheck(ranks=3)
def test_what_cannot_be_changed_in_place_is_told(syncheck_rank: Any) -> None:
    """A state dict of copies stays as it was: the check afterwards finds that, and all ranks raise."""
    average = Copies()
    average.average += float(syncheck_rank.rank == 2)
    outcome = all_raise(each_rank(resync, (Net(), average), exclude=("fc.*", "head.*")), "RankFailed")
    assert outcome.text.startswith("still out of sync after resync: Copies.average; ")


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_fails_on_the_way_tells_the_others(
    syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """A source or a target without memory for the bytes: all raise one error, and the call can be made again."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)

    def no_room(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        if syncheck_rank.rank == bad:
            patched.setattr(state, "_row", no_room)
        outcome = all_raise(each_rank(resync, model, optimizer), "RankFailed")
    assert outcome.text == (
        f"rank {bad}: resync failed during the repair: MemoryError: no room. Some tensors may be copied already; "
        "calling it again with source=0 is safe"
    )
    healed(model, optimizer, bad=(1,), source=0)


@pytest.mark.syncheck(ranks=3)
def test_what_must_not_be_written_is_refused(syncheck_rank: Any) -> None:
    """Elements that share memory, and an array that is read-only (a mapped file, say): nothing is changed."""
    torch.manual_seed(0)
    model: Any = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 2)) for name in "ab"})
    if syncheck_rank.rank == 1:
        model["a"].data = torch.ones(1, 2).expand(3, 2)
        flip(model["b"])
    before = bits(model)
    outcome = all_raise(each_rank(resync, model), "UsageError")
    assert (
        outcome.text
        == "rank 1: a has elements that share memory, like the result of expand(); call clone() on all ranks"
    )
    average = np.arange(4.0) + (syncheck_rank.rank == 1)
    average.flags.writeable = False
    outcome = all_raise(each_rank(resync, (model, {"ema": average}), include=("b", "ema")), "UsageError")
    assert outcome.text == "rank 1: ema is a read-only array; call copy() on all ranks"
    assert bits(model) == before


@pytest.mark.syncheck(ranks=3)
def test_a_tie_that_others_lack_is_found_afterwards(syncheck_rank: Any) -> None:
    """One tensor on rank 1 cannot take the bytes of two that differ: the check afterwards finds that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if syncheck_rank.rank == 1:
        model[1].weight = model[0].weight
    outcome = all_raise(each_rank(resync, model), "RankFailed")
    assert outcome.text.startswith("still out of sync after resync: ")
