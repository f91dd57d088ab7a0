"""`resync` in undecidable and forbidden cases, in which all ranks raise the same error, and its failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, all_raise, each_rank, flip, on_all, trained
from support.healing import bits, healed, untouched
from support.listings import list_fields, list_names
from torch import nn

from syncheck.live import resync
from syncheck.live.repair import state

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.syncheck(ranks=2)
def test_no_majority_requires_a_source(syncheck_rank: Any) -> None:
    """Two different ranks have no majority; source=1 makes rank 0 equal to rank 1."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    text = untouched(model, optimizer)
    assert text == "no majority: fc.weight; choose the healthy rank with source=RANK"
    done = healed(model, optimizer, bad=(0,), source=1, named=True)
    assert done.copied == (("fc.weight", 1, (0,), 64),)
    assert "from rank 1 (chosen by the caller)" in done.summary


@pytest.mark.syncheck(ranks=3)
def test_no_rank_is_healthy_in_all_tensors(syncheck_rank: Any) -> None:
    """If each of three ranks has its own fault, no rank is in the majority of all tensors."""
    model, optimizer = trained()
    flip([model.module.fc.weight, model.module.fc.bias, model.module.head.weight][syncheck_rank.rank])
    text = untouched(model, optimizer)
    assert text.startswith(
        "no rank of ranks 0, 1, 2 is in the majority for all tensors: rank 0 differs in fc.weight, rank 1"
    )


@pytest.mark.syncheck(ranks=3)
def test_batchnorm_of_plain_ddp_is_refused_with_a_hint(syncheck_rank: Any) -> None:
    """Statistics that differ on all ranks have no majority; only= repairs the parameters alone."""
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
    assert list_names(done.copied) == ["head.bias"]
    assert bits(model.module.norm) == statistics
    assert len({str(contents) for contents in on_all(statistics)}) == 3


@pytest.mark.syncheck(ranks=3)
def test_allowed_differences_remain(syncheck_rank: Any) -> None:
    """With allow=['SYN201'], BatchNorm statistics neither vote nor change."""
    model, optimizer = trained(norm=True)
    if syncheck_rank.rank == 2:
        optimizer.param_groups[0]["lr"] = 0.5
    statistics = bits(model.module.norm)
    done: Any = each_rank(resync, model, optimizer, allow=("SYN201",))[0].report
    assert list_names(done.values) == ["optimizer.param_groups.0.lr"]
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
    """All ranks refuse another shape or dtype, a missing parameter, optimizer or group member on one rank."""
    torch.manual_seed(0)
    parts = STRUCTURES[text](syncheck_rank.rank)
    before = bits(*parts)
    assert text in all_raise(each_rank(resync, *parts), "UsageError").text
    assert bits(*parts) == before


@pytest.mark.syncheck(ranks=3)
def test_without_anything_to_compare_it_is_refused(syncheck_rank: Any) -> None:
    """Without comparable tensors, no rank counts as healthy."""
    outcome = all_raise(each_rank(resync, nn.Linear(2, 2, device="meta")), "UsageError")
    assert outcome.text == "no tensor could be compared, so there is no healthy rank to copy from"


MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "a rank outside": ({"source": 3}, "source=3 is not in the group; choose from ranks 0, 1, 2"),
    "a word": ({"source": "rank0"}, "source='rank0': must be"),
    "a truth": ({"source": True}, "source=True: must be"),
    "random numbers": ({"only": ("rng",)}, "RNG states differ by design"),
    "an unknown option": ({"bucket": 1}, "bucket=: no such option of resync or of syncheck.live.check"),
    "unlike kinds": ({"only": ("weights",)}, "must be one of params"),
}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("what", MISUSES)
def test_a_wrong_call_is_refused(syncheck_rank: Any, what: str) -> None:
    """An invalid source or option raises on all ranks before any transfer."""
    options, says = MISUSES[what]
    model = nn.Linear(2, 2)  # seeded differently, so out of sync
    assert says in untouched(model, **options)


@pytest.mark.syncheck(ranks=3)
def test_different_arguments_are_refused(syncheck_rank: Any) -> None:
    """Sources that differ between ranks, and an unknown option on one rank, raise on all ranks."""
    text = untouched(nn.Linear(2, 2), source=syncheck_rank.rank)
    assert text == "source= differs between ranks: 0 on rank 0, 1 on rank 1, 2 on rank 2"
    text = untouched(nn.Linear(2, 2), **({"bucket": 1} if syncheck_rank.rank == 1 else {}))
    assert text == "rank 1: bucket=: no such option of resync or of syncheck.live.check"


@pytest.mark.syncheck(ranks=3)
def test_a_subgroup_repairs_only_its_members(syncheck_rank: Any) -> None:
    """In the group of ranks 1 and 2, source=2 is valid and source=0 is not; rank 0 does not change."""
    group = dist.new_group([1, 2])
    model = nn.Linear(2, 2)
    before = on_all(bits(model))
    outcomes = each_rank(resync, model, group=group, source=0)
    assert set(list_fields(outcomes, "error")) == {"UsageError"}
    assert "source=0 is not in the group; choose from ranks 1, 2" in outcomes[1].text
    assert "rank 0 is not in group=" in outcomes[0].text
    each_rank(resync, model, group=group, source=2)
    assert on_all(bits(model)) == [before[0], before[2], before[2]]


class Copies:
    """A weight average whose state dict returns copies."""

    def __init__(self) -> None:
        self.average = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


@pytest.mark.syncheck(ranks=3)
def test_state_dicts_of_copies(syncheck_rank: Any) -> None:
    """A state dict of copies does not change; the final check finds the difference, and all ranks raise."""
    average = Copies()
    average.average += float(syncheck_rank.rank == 2)
    outcome = all_raise(each_rank(resync, (Net(), average), exclude=("fc.*", "head.*")), "RankFailed")
    assert outcome.text.startswith("still out of sync after resync: Copies.average; ")


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("bad", [0, 2])
def test_a_failure_during_the_repair(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """If a source or target runs out of memory, all ranks raise the same error, and the call can be repeated."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)

    def no_room(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        if syncheck_rank.rank == bad:
            patched.setattr(state, "_make_row", no_room)
        outcome = all_raise(each_rank(resync, model, optimizer), "RankFailed")
    assert outcome.text == (
        f"rank {bad}: resync failed during the repair: MemoryError: no room. Some tensors may be copied already; "
        "calling it again with source=0 is safe"
    )
    healed(model, optimizer, bad=(1,), source=0)


@pytest.mark.syncheck(ranks=3)
def test_unwritable_tensors_are_refused(syncheck_rank: Any) -> None:
    """Tensors with shared elements and read-only arrays (memory maps) are refused, and nothing changes."""
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
def test_a_tie_on_one_rank_only(syncheck_rank: Any) -> None:
    """A tensor tied on rank 1 only cannot hold the bytes of two tensors; the final check finds the difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if syncheck_rank.rank == 1:
        model[1].weight = model[0].weight
    outcome = all_raise(each_rank(resync, model), "RankFailed")
    assert outcome.text.startswith("still out of sync after resync: ")
