"""`check` on ranks with different structures reports, never hangs, and is never in sync if nothing was compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, Outcome, all_pass, all_raise, each_rank
from support.listings import find_all
from torch import nn

from syncheck.errors import UsageError
from syncheck.live import check
from syncheck.messages import Note


def plain(optimizer: str = "AdamW") -> tuple[nn.Module, Any]:
    """Return a network and an optimizer after a step, equal on every rank."""
    torch.manual_seed(0)
    model = Net(norm=True)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    model(torch.ones(4, 4)).sum().backward()
    stepper.step()
    return model, stepper


def more(model: nn.Module, optimizer: Any) -> Any:
    model.register_buffer("extra", torch.ones(3))
    model.more = nn.Linear(2, 2)
    return model, optimizer


def fewer(model: nn.Module, optimizer: Any) -> Any:
    del model.norm
    return model, optimizer


def reshaped(model: nn.Module, optimizer: Any) -> Any:
    model.head = nn.Linear(4, 3)
    return model, optimizer


def scaler() -> Any:
    return torch.amp.GradScaler("cpu")


# What rank 1 of 2 checks, the code, and the ranks that lack tensors or a text of the report. Rank 0 checks the plain
# model, its optimizer and a scaler.
UNLIKE: dict[str, tuple[Any, str, str | tuple[int, ...]]] = {
    "more tensors": (lambda m, o: (*more(m, o), scaler()), "SYN101", (0,)),
    "fewer tensors": (lambda m, o: (*fewer(m, o), scaler()), "SYN101", (0, 1)),
    "another shape": (lambda m, o: (*reshaped(m, o), scaler()), "SYN102", "[3, 4] on rank 1"),
    "another dtype": (lambda m, o: (m.double(), o, scaler()), "SYN102", "float64 on rank 1"),
    "another optimizer": (lambda m, o: (*plain("SGD"), scaler()), "SYN107", "different classes"),
    "no optimizer": (lambda m, o: (m, None, scaler()), "SYN101", "optimizer.fc.weight.exp_avg"),
    "no scaler": (lambda m, o: (m, o, None), "SYN101", "scaler"),
    "an optimizer that has not run": (
        lambda m, o: (m, torch.optim.AdamW(m.parameters(), lr=1e-2), scaler()),
        "SYN215",
        "rank 1 holds no state",
    ),
    "no parameters": (lambda m, o: (nn.ReLU(), None, scaler()), "SYN101", (1,)),
    "an empty tuple": (lambda m, o: ((), None, None), "SYN101", (1,)),
    "a state dict": (lambda m, o: ({"w": torch.ones(2)}, None, None), "SYN101", (0, 1)),
    "on meta": (lambda m, o: (m.to("meta"), o, scaler()), "SYN102", "a meta tensor"),
}


def text_of(outcome: Outcome) -> str:
    """Return the text of all findings and tensors."""
    assert outcome.report is not None
    group = outcome.report.groups[0]
    findings = [f"{finding.evidence} {finding.tensors} {finding.values}" for finding in group.findings]
    return "\n".join([*findings, *(f"{diff.name} {diff.detail}" for diff in group.tensors), repr(group.values)])


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("what", UNLIKE)
def test_different_structures_are_reported(syncheck_rank: Any, what: str) -> None:
    """For any structure on rank 1, both ranks return the same out-of-sync report about the difference."""
    second, code, says = UNLIKE[what]
    items = second(*plain()) if syncheck_rank.rank else (*plain(), scaler())
    outcomes = each_rank(check, *items)
    assert all_pass(outcomes).verdict == "out_of_sync"
    assert code in outcomes[0].codes
    if isinstance(says, tuple):
        (finding,) = find_all(outcomes[0].findings, code=code)
        named_ranks: set[int] = set()
        for fact in finding.facts:
            named_ranks.update(fact.parameters["ranks"])
        assert named_ranks == set(says)
    else:
        assert says in text_of(outcomes[0])


# Objects without comparable tensors, on all ranks.
NOTHING: dict[str, Any] = {
    "no tensors": lambda: nn.Identity(),
    "an empty dict": dict,
    "meta tensors": lambda: Net().to("meta"),
    "lazy parameters": lambda: nn.LazyLinear(3),
    "sparse": lambda: {"w": torch.eye(3).to_sparse()},
    "quantized": lambda: {"w": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)},
    "nested": lambda: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "steps alone": lambda: {"optimizer": {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}]}},
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", NOTHING)
def test_nothing_compared_is_never_in_sync(what: str) -> None:
    """If no tensor of any rank can be compared, the verdict is undecided with exit code 2."""
    report = all_pass(each_rank(check, NOTHING[what]()))
    assert (report.verdict, report.exit_code) == ("undecided", 2)


# --- groups ---


def test_check_without_a_process_group() -> None:
    """Without a process group, the UsageError names the missing call."""
    with pytest.raises(UsageError, match=r"init_process_group\(\)"):
        check(nn.Linear(2, 2))


@pytest.mark.syncheck(ranks=1)
def test_a_group_of_one_is_undecided() -> None:
    """One rank has no replica to compare with: undecided, exit code 2, no error."""
    model, optimizer = plain()
    report = check(model, optimizer)
    assert (report.verdict, report.exit_code) == ("undecided", 2)
    assert report.groups[0].verdict == "alone"


@pytest.mark.syncheck(ranks=3)
def test_only_the_members_of_a_subgroup_are_compared(syncheck_rank: Any) -> None:
    """Ranks 1 and 2 agree although rank 0 differs; only rank 0 raises because it is no member."""
    group = dist.new_group([2, 1])
    state = {"w": torch.full((3,), 1.0 if syncheck_rank.rank else 2.0)}
    outsider, *members = each_rank(check, state, group=group)
    report = all_pass(members)
    assert (report.verdict, report.groups[0].ranks) == ("in_sync", (1, 2))
    for code in (Note.RANKS_ABSENT, Note.NO_FILES):
        assert not find_all(report.groups[0].notes, code=code)
    assert (outsider.error, outsider.text) == (
        "UsageError",
        "rank 0 is not in group=; call this on its members only",
    )
    everyone = all_pass(each_rank(check, state))
    assert everyone.groups[0].tensors[0].clusters == ((1, 2), (0,))


@pytest.mark.syncheck(ranks=2)
def test_an_invalid_group_is_refused() -> None:
    """An invalid or destroyed process group is a UsageError."""
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    for group, kind in (("world", "str"), ([0, 1], "list"), (gone, "ProcessGroup")):
        outcome = all_raise(each_rank(check, {"w": torch.ones(1)}, group=group), "UsageError")
        assert (
            outcome.text == f"group= of class {kind}: expected a torch.distributed process group that was not destroyed"
        )
