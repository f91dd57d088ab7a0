"""The state that --resume loads, the states that it skips, and its errors."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from resumed import TINY, interrupt, resume, state_of, whole

from train.engine import train
from train.errors import UserError
from train.launch import RankContext
from train.recorders.base import Recorder
from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.testing import Rank

ALONE = replace(TINY, method="single", model="convnet", width=None, save_per_rank=False)
ME = RankContext()


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """States after steps 2 and 3 of a run of one process; returns their folder."""
    interrupt(ME, replace(ALONE, out=tmp_path), 3)
    return states_folder(tmp_path, "single")


def cut(path: Path) -> None:
    """Leave half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip one bit of a weight, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["model"]["conv1.weight"].numpy().tobytes()
    data[data.index(weight)] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    """Replace the file by a checkpoint of another program."""
    torch.save({"model": {"weight": torch.zeros(2)}}, path)


def hostile(path: Path) -> None:
    """Replace the file by a pickle with code to execute."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.parent / "exploded"),)

    torch.save({"format": "train-resume", "bomb": Bomb()}, path)


def moved(path: Path) -> None:
    """Replace the file by the file of another step."""
    shutil.copy(path.parent.parent / "step_2" / path.name, path)


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (cut, "damaged or truncated"),
    "empty": (lambda path: path.write_bytes(b"") and None, "damaged or truncated"),
    "bit flipped": (flip, "damaged at "),
    "foreign": (foreign, "not a state file"),
    "hostile": (hostile, "damaged or truncated"),
    "other step": (moved, "contains step 2 of rank 0"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_states_are_passed_over(stopped: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """One line names the file, and the run resumes from the previous state; no code in a file is executed."""
    spoil, said = SPOILED[how]
    path = state_path(stopped, 3, 0)
    spoil(path)
    _, notes = resume(ME, replace(ALONE, out=stopped.parents[1]))
    assert notes.steps == [3, 4, 5, 6, 7, 8]
    passed, went_on = capsys.readouterr().err.splitlines()
    assert passed.startswith(f"run.py: --resume: skipping step 3: {path}: {said}")
    assert "step 2/8" in went_on
    assert not (path.parent / "exploded").exists()


def test_no_usable_state_is_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all states are damaged, the run ends with an error instead of starting at step 0."""
    for step in (2, 3):
        cut(state_path(stopped, step, 0))
    with pytest.raises(UserError, match=r"no state in .* is usable"):
        resume(ME, replace(ALONE, out=stopped.parents[1]))
    assert capsys.readouterr().err.count("--resume: skipping step ") == 2


def test_without_a_state_it_starts_at_the_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run and all later ones may use the same command."""
    _, notes = resume(ME, replace(ALONE, out=tmp_path))
    assert notes.steps == list(range(1, 9))
    assert (
        capsys.readouterr().err == f"run.py: --resume: no state in {tmp_path}/.resume/single yet, starting at step 0\n"
    )


def test_two_states_are_kept(stopped: Path) -> None:
    """The newest two states remain, and so does a user's own file."""
    assert sorted(path.name for path in stopped.iterdir()) == ["step_2", "step_3"]
    (stopped / "step_2" / "notes.txt").write_text("mine")
    resume(ME, replace(ALONE, out=stopped.parents[1]))
    assert sorted(str(path.relative_to(stopped)) for path in stopped.rglob("*") if path.is_file()) == [
        "step_2/notes.txt",
        "step_7/rank_0.pth",
        "step_8/rank_0.pth",
    ]


def test_a_new_run_replaces_the_states_of_an_older_one(stopped: Path) -> None:
    """Without --resume, the first save removes all states of an older run, even of later steps."""
    interrupt(ME, replace(ALONE, out=stopped.parents[1]), 1)
    assert [path.name for path in stopped.iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.2}, "--resume: --lr: 0.1 when .*step_3 was saved, 0.2 now"),
        ({"shuffle": False}, "--no-shuffle: True when"),
        ({"batch_size": 17}, "--batch-size: 16 when"),
        ({"seed": 1}, "--seed: 0 when"),
        ({"max_steps": 2}, "step_3 was saved after step 3, but the run ends after 2"),
    ],
    ids=str,
)
def test_another_run_is_refused(stopped: Path, change: dict[str, Any], said: str) -> None:
    """Options that change the training must be those of the saved run; the error names both values."""
    with pytest.raises(UserError, match=said):
        resume(ME, replace(ALONE, out=stopped.parents[1], **change))


def test_a_longer_run_is_allowed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--epochs may change; a message describes the effect on the schedule."""
    result, _ = resume(ME, replace(ALONE, out=stopped.parents[1], epochs=3))
    assert (result.steps, result.epochs) == (12, 3)
    told = capsys.readouterr().err.splitlines()[1]
    assert told.startswith("run.py: resumed: --epochs 3 (was 2): ")


def test_replicas_of_dp_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of dp's replicas may change; a message warns that rounding changes with it."""
    settings = replace(ALONE, method="dp", out=tmp_path)
    interrupt(ME, settings, 3)
    assert resume(ME, replace(settings, replicas=4))[1].steps == [4, 5, 6, 7, 8]
    told = capsys.readouterr().err.splitlines()[1]
    assert told.startswith("run.py: resumed: saved with 2 replicas, now 4: not bitwise from here")


def test_a_run_that_had_ended_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run is evaluated without training, and newly requested final files are written."""
    settings = replace(ALONE, out=tmp_path)
    result, notes = whole(ME, settings)
    again, later = resume(ME, replace(settings, save_per_rank=True))
    assert (later.steps, later.epochs) == ([], notes.epochs[-1:])
    assert (again.steps, again.test) == (result.steps, result.test)
    assert [path.name for path in again.saved] == ["single_rank0.pth"]
    assert "the run had already ended" in capsys.readouterr().err
    final = tmp_path / "single_rank0.pth"
    ended = torch.load(final, weights_only=True)["model"]
    assert all(tensor.equal(ended[name]) for name, tensor in state_of(ME, settings, 8)["model"].items())


def test_a_final_file_that_was_removed_is_written_again(tmp_path: Path) -> None:
    """The summary of a finished run names only existing files."""
    settings = replace(ALONE, save_per_rank=True, out=tmp_path)
    whole(ME, settings)
    (tmp_path / "single_rank0.pth").unlink()
    assert [path.exists() for path in resume(ME, settings)[0].saved] == [True]


def test_best_of_another_format_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files of the best epoch are removed with new ones, so that two epochs are never mixed."""
    monkeypatch.setattr("train.metrics.Best.update", lambda *_: True)
    settings = replace(ALONE, save_best=True, save_per_rank=True, out=tmp_path)
    interrupt(ME, settings, 5)
    best = tmp_path / "best" / "single"
    assert [path.name for path in best.iterdir()] == ["rank_0.pth"]
    result, _ = resume(ME, replace(settings, save_format="safetensors"))
    assert [path.name for path in best.iterdir()] == ["rank_0.safetensors"]
    assert sorted(path.relative_to(tmp_path) for path in result.saved) == sorted(
        path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")
    )


def test_states_that_are_not_saved_are_told(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run resumed without --checkpoint-every warns: it saves no more states."""
    resume(ME, replace(ALONE, out=stopped.parents[1], checkpoint_every=None))
    assert "resumed: without --checkpoint-every N, " in capsys.readouterr().err


def test_other_tensors_are_refused(stopped: Path) -> None:
    """A state of another model is refused before anything is restored; the error names the tensor."""
    path = state_path(stopped, 3, 0)
    state = torch.load(path, weights_only=True)
    state["model"]["fc.bias"] = torch.zeros(11)
    torch.save(state, path)
    with pytest.raises(UserError, match=r"model: fc.bias is \[11\]; this program expects \[10\]"):
        resume(ME, replace(ALONE, out=stopped.parents[1]))


@pytest.mark.syncheck(ranks=2)
def test_a_state_counts_if_all_ranks_have_it(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a folder per rank, rank 0 skips a state that rank 1 does not have or cannot read."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared / f"node{ctx.rank}")
    interrupt(ctx, settings, 3)
    mine = state_path(states_folder(settings.out, "ddp"), 3, ctx.rank)
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]
    if ctx.rank == 1:
        mine.unlink()
    capfd.readouterr()
    assert resume(ctx, settings)[1].steps == [3, 4, 5, 6, 7, 8]
    told = capfd.readouterr().err
    assert ("step_3/rank_1.pth: rank 1 lacks this file" in told) is (ctx.rank == 0)
    if ctx.rank == 1:
        for step in (7, 8):
            cut(state_path(states_folder(settings.out, "ddp"), step, 1))
    with pytest.raises(UserError, match=r"no state in .* is usable"):
        train(replace(settings, resume=True), ctx, Recorder())


@pytest.mark.syncheck(ranks=2)
def test_a_first_save_cut_short_starts_over(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 was killed before it wrote its part of the first state, there is no state."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared)
    interrupt(ctx, settings, 1)
    if ctx.rank == 1:
        state_path(states_folder(settings.out, "ddp"), 1, 1).unlink()
    capfd.readouterr()
    ctx.gather(None)
    assert resume(ctx, settings)[1].steps == list(range(1, 9))
    assert ("starting at step 0" in capfd.readouterr().err) is (ctx.rank == 0)


@pytest.mark.syncheck(ranks=2)
def test_a_failed_save_leaves_the_older_state(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 cannot write, one line names file and reason, and the previous state remains usable."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared)
    folder = states_folder(settings.out, "ddp")
    (folder / "step_3" / "rank_1.pth").mkdir(parents=True, exist_ok=True)  # no file can take its place
    interrupt(ctx, settings, 3)
    said = f"rank 1: cannot write {folder}/step_3/rank_1.pth: Is a directory"
    assert capfd.readouterr().err.count(said) == (ctx.rank == 0)
    ctx.gather(None)
    assert [path.name for path in sorted(folder.rglob("rank_0.pth"))] == ["rank_0.pth"] * 2  # of steps 1 and 2
    ctx.gather(None)  # both have listed the folder
    if ctx.rank == 1:
        (folder / "step_3" / "rank_1.pth").rmdir()
    ctx.gather(None)
    assert resume(ctx, settings)[1].steps == [3, 4, 5, 6, 7, 8]
