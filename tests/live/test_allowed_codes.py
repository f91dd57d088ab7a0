"""Codes of witnesses in `allow`: no comparison finds them, and the findings of witnesses do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from syncheck.errors import UsageError
from syncheck.live import SyncMonitor, watch
from syncheck.live.checks import list_allowed, make_options

if TYPE_CHECKING:
    from syncheck.testing import Rank

ALLOW = ("SYN201", "syn410")


def test_comparisons_have_no_codes_of_witnesses() -> None:
    """The options of a comparison leave them out, and a witness has all codes, in upper case."""
    assert make_options(allow=ALLOW).allow == ("SYN201",)
    assert list_allowed(ALLOW) == ("SYN201", "SYN410")
    assert list_allowed("syn401") == ("SYN401",)
    assert list_allowed(None) == ()


@pytest.mark.parametrize("allow", ["SYN999", ("SYN410", "SYN4100"), 5, (5,)])
def test_unknown_codes_are_refused(allow: object) -> None:
    """An unknown code, or no text, is refused when watching begins."""
    with pytest.raises(UsageError):
        watch(allow=allow)  # type: ignore[arg-type]


@pytest.mark.syncheck(ranks=2)
def test_a_monitor_allows_codes_of_its_witnesses(syncheck_rank: Rank) -> None:
    """A check with an allowed code of a witness compares the replicas."""
    torch.manual_seed(0)
    with SyncMonitor(nn.Linear(2, 2), every=1, witnesses=("gradients",), allow=ALLOW, console=False) as monitor:
        monitor.step()
    assert monitor.last is not None
    assert monitor.last.verdict == "in_sync"


@pytest.mark.parametrize(("allow", "meant"), [("SYN4100", "SYN410"), ("syn4011", "SYN401"), ("SYN2011", "SYN201")])
def test_a_misspelled_code_of_a_witness_is_suggested(allow: str, meant: str) -> None:
    """The most similar code may be one of a witness."""
    with pytest.raises(UsageError) as raised:
        list_allowed(allow)
    assert str(raised.value).endswith(f"did you mean {meant}?")
