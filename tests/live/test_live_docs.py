"""The examples of docs/live.md run as described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import each_rank, trained
from support.listings import list_fields
from support.monitored import flip_at
from torch import nn

if TYPE_CHECKING:
    from syncheck.records import Report
    from syncheck.testing import Rank

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "live.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
[FUNCTION] = [block for block in BLOCKS if "def stop_on_errors" in block]


def surroundings(norm: bool) -> dict[str, Any]:
    """Return the names that the examples assume: a model under DDP, its optimizer, batches, a loss, a step."""
    model, optimizer = trained(norm)
    loss = nn.MSELoss()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(4)]
    return {"model": model, "optimizer": optimizer, "batches": batches, "loss": loss, "train_step": train_step}


@pytest.mark.syncheck(ranks=2)
def test_examples_of_the_guide_run(syncheck_rank: Rank) -> None:
    """Each block runs after its predecessors: drift of plain DDP is printed, warned about, and allowed."""
    names = surroundings(norm=True)

    def run() -> Report:
        for block in BLOCKS:
            exec(compile(block, str(GUIDE), "exec"), names)
        last: Report = names["monitor"].last
        return last

    outcomes = each_rank(run)
    assert list_fields(outcomes, "text") == ["", ""]
    assert list_fields(outcomes, "codes") == [["SYN201"]] * 2
    assert names["report"].verdict == "out_of_sync"
    assert names["monitor"].checks == 2


@pytest.mark.syncheck(ranks=2)
def test_the_function_of_the_guide_stops_on_errors(syncheck_rank: Rank) -> None:
    """The guide's function raises OutOfSync on all ranks for a flipped bit."""
    names = surroundings(norm=True)
    flip_at(1, rank=1)(1, names["model"].module)
    exec("from syncheck.live import SyncMonitor", names)
    outcomes = each_rank(lambda: exec(FUNCTION, names))  # type: ignore[arg-type, return-value]
    assert list_fields(outcomes, "error") == ["OutOfSync"] * 2
    assert outcomes[0].text.startswith("stopped by ")
    assert "SYN220" in outcomes[0].text
