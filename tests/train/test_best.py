"""--save-best: the checkpoint of the epoch with the best test score, and its comparison by syncheck."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.listings import find_all, list_codes, list_fields, list_files, read_json_lines
from support.scenarios import SMALL, run, tensors
from support.states import list_differing

import syncheck
from train.checkpoints.saver import Saver
from train.launch import RankContext

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

BEST = replace(SMALL, max_steps=None, epochs=3, limit_train=64, save_every=2, save_best=True)


@pytest.mark.syncheck(ranks=2)
def test_best_equals_the_periodic_checkpoint(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The best checkpoint is bitwise equal to the periodic checkpoint of its step, although it is saved later."""
    out = syncheck_rank.shared
    result = run(ctx, replace(BEST, out=out))
    path = out / "best" / "ddp" / f"rank_{ctx.rank}.pth"
    step = syncheck.read(path).metadata.step
    assert step in (2, 4, 6)
    saved, retained = tensors(path), tensors(out / "history" / "ddp" / f"step_{step}" / f"rank_{ctx.rank}.pth")
    assert not list_differing(retained, saved)
    assert path in result.saved


@pytest.mark.syncheck(ranks=2)
def test_syncheck_compares_best_at_its_step(ctx: RankContext, syncheck_rank: Rank) -> None:
    """syncheck compares the best checkpoint at its own step, and reports SYN106 if its files are of two steps."""
    out = syncheck_rank.shared
    run(ctx, replace(BEST, out=out))
    if ctx.rank == 1:
        return
    best = out / "best" / "ddp"
    step = syncheck.read(best / "rank_0.pth").metadata.step
    alone = syncheck.compare(best)
    assert [(g.run, g.step, list_codes(g.findings)) for g in alone.groups] == [("ddp", step, ["SYN201"])]
    complete = syncheck.compare(out)
    assert set(list_fields(complete.groups, "run")) == {"ddp"}
    assert sorted(list_fields(complete.groups, "step")) == sorted([2, 4, 6, 6, step])
    assert {len(group.replicas) for group in complete.groups} == {2}
    # A killed save may leave files of two steps.
    second = next(s for s in (2, 4, 6) if s != step)
    shutil.copy(out / "history" / "ddp" / f"step_{second}" / "rank_1.pth", best)
    (torn,) = syncheck.compare(best).groups
    assert list_codes(torn.findings) == ["SYN106"]


def test_best_is_replaced_and_removed_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a better score replaces the best checkpoint; the next run of the same name removes only checkpoint files."""
    steps = []
    monkeypatch.setattr(
        Saver, "save_best", lambda self, step, save=Saver.save_best: steps.append(step) or save(self, step)
    )
    settings = replace(BEST, method="single", out=tmp_path, save_every=None, log_dir=tmp_path / "logs")
    from train.engine import train
    from train.recorders.composite import make_recorder

    with make_recorder(settings, RankContext(), "none") as recorder:
        train(settings, RankContext(), recorder)
    lines = read_json_lines(tmp_path / "logs" / "single" / "metrics.jsonl")
    epochs = find_all(lines, event="epoch")
    assert steps == [line["step"] for line in epochs if line["best"]]
    best = tmp_path / "best" / "single" / "rank_0.pth"
    assert syncheck.read(best).metadata.step == steps[-1]
    best.with_name("mine.txt").write_text("")
    best.with_name("rank_7.safetensors").write_text("")
    result = run(RankContext(), replace(settings, save_best=False, log_dir=None))
    assert result.replaced == 3
    assert list_files(best.parent) == ["mine.txt"]
