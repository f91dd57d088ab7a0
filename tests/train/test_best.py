"""--save-best: the checkpoint of the epoch that was best on the test set, and what syncheck makes of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from scenarios import SMALL, run, tensors

import syncheck
from train.checkpoints.saver import Saver
from train.launch import RankContext

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

BEST = replace(SMALL, max_steps=None, epochs=3, limit_train=64, save_every=2, save_best=True)


@pytest.mark.syncheck(ranks=2)
def test_best_holds_the_bits_of_its_step(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Written after the evaluation, it is what the last step of that epoch left: byte for byte the history's file."""
    out = syncheck_rank.shared
    result = run(ctx, replace(BEST, out=out))
    path = out / "best" / "ddp" / f"rank_{ctx.rank}.pth"
    step = syncheck.read(path).metadata.step
    assert step in (2, 4, 6)
    saved, kept = tensors(path), tensors(out / "history" / "ddp" / f"step_{step}" / f"rank_{ctx.rank}.pth")
    assert all(saved[name].equal(kept[name]) for name in kept)
    assert path in result.saved


@pytest.mark.syncheck(ranks=2)
def test_report_takes_best_for_the_step_that_it_is(ctx: RankContext, syncheck_rank: Rank) -> None:
    """It belongs to the run's series at its own step; mixed from two steps, as after a kill, it is SYN106."""
    out = syncheck_rank.shared
    run(ctx, replace(BEST, out=out))
    if ctx.rank == 1:
        return
    best = out / "best" / "ddp"
    step = syncheck.read(best / "rank_0.pth").metadata.step
    alone = syncheck.compare(best)
    assert [(g.run, g.step, [f.code for f in g.findings]) for g in alone.groups] == [("ddp", step, ["SYN201"])]
    whole = syncheck.compare(out)
    assert {group.run for group in whole.groups} == {"ddp"}
    assert sorted(group.step for group in whole.groups) == sorted([2, 4, 6, 6, step])
    assert {len(group.replicas) for group in whole.groups} == {2}
    other = next(s for s in (2, 4, 6) if s != step)
    shutil.copy(out / "history" / "ddp" / f"step_{other}" / "rank_1.pth", best)
    (torn,) = syncheck.compare(best).groups
    assert [f.code for f in torn.findings] == ["SYN106"]


def test_best_is_replaced_and_removed_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when the score improves, and only then; the next run of the name clears it, nothing else there."""
    steps = []
    monkeypatch.setattr(
        Saver, "save_best", lambda self, step, save=Saver.save_best: steps.append(step) or save(self, step)
    )
    settings = replace(BEST, method="single", out=tmp_path, save_every=None, log_dir=tmp_path / "logs")
    from train.engine import train
    from train.recorders.composite import make_recorder

    with make_recorder(settings, RankContext(), "none") as recorder:
        train(settings, RankContext(), recorder)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "single" / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert steps == [line["step"] for line in epochs if line["best"]]
    best = tmp_path / "best" / "single" / "rank_0.pth"
    assert syncheck.read(best).metadata.step == steps[-1]
    best.with_name("mine.txt").write_text("")
    best.with_name("rank_7.safetensors").write_text("")
    result = run(RankContext(), replace(settings, save_best=False, log_dir=None))
    assert result.replaced == 3
    assert [path.name for path in best.parent.iterdir()] == ["mine.txt"]
