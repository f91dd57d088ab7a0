"""What a watched run claims about differences without a finding of a witness: only what it has seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.diagnose.syn299_unexplained_difference import Text
from syncheck.live.watching.claims import find_unseen, limit_claims
from syncheck.live.witnesses.rules import make_finding

MODEL = torch.nn.Linear(2, 1)


class OwnOptimizer(torch.optim.SGD):
    """An optimizer that may do anything within its step."""


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ([torch.optim.SGD(MODEL.parameters())], (0, False)),
        ([torch.optim.SGD([MODEL.weight])], (1, False)),
        ([torch.optim.SGD([MODEL.weight]), OwnOptimizer([MODEL.bias])], (0, True)),
        ([], (2, False)),
    ],
    ids=["all", "part", "own class", "none"],
)
def test_only_parameters_of_optimizers_of_torch_are_seen(optimizers: list[Any], expected: tuple[int, bool]) -> None:
    """Parameters without such an optimizer are listed, and a class that is not torch's is noted."""
    clock = SimpleNamespace(ranks=(0, 1), reduces=True, list_parameters=lambda: list(MODEL.named_parameters()))

    def list_layouts_of(optimizer: Any) -> list[Any]:
        return [SimpleNamespace(identities=[id(part) for part in optimizer.param_groups[0]["params"]])]

    watcher: Any = SimpleNamespace(
        clocks=[clock], list_optimizers=lambda _ranks: optimizers, list_layouts_of=list_layouts_of
    )
    unseen = find_unseen(watcher, (0, 1))
    assert (len(unseen.parameters), unseen.has_own_step) == expected


@pytest.mark.parametrize(
    ("cause", "unseen", "expected"),
    [
        ("CAUSE_STATELESS", (True, False), Text.CAUSE_UNSEEN),
        ("CAUSE_WATCHED", (False, True), Text.CAUSE_OWN_STEP),
        ("CAUSE_WATCHED", (False, False), Text.CAUSE_WATCHED),
        ("CAUSE_STATE", (True, True), Text.CAUSE_STATE),
    ],
)
def test_a_cause_names_what_was_not_seen(cause: str, unseen: tuple[bool, bool], expected: Any) -> None:
    """The claim that everything was equal is made only of what was compared."""
    finding = make_finding("SYN299", (1,), (), variant=cause.removeprefix("CAUSE"))
    are_unseen, has_own_step = unseen
    (limited,) = limit_claims([finding], are_unseen=are_unseen, has_own_step=has_own_step)
    assert limited.cause.code is expected
