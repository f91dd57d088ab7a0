"""`python -m train.evaluate`: scores per rank on real checkpoints, and the averaged statistics."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evaluated import FIXTURES, SYNCED, change, copy_synced, scores
from programs import SHORT, TRAIN, Programs
from scenarios import SMALL, SMALLEST, load, run
from started import ROOT

from train.data import load_data
from train.evaluate.__main__ import main
from train.evaluate.rank_scores import average_statistics, score_run
from train.evaluate.replicas import find_replicas
from train.launch import RankContext
from train.models import MODELS, build_model

if TYPE_CHECKING:
    from syncheck.testing import Rank


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two ranks, of a training that started just now: DDP whose buffers are never synchronized."""
    folder = tmp_path_factory.mktemp("drifted")
    started = Programs(folder)
    try:
        done = started.run(*TRAIN, "--spawn", 2, *SHORT, "--no-buffer-sync", "--out", "ckpts")
    finally:
        started.kill()
    assert done.returncode == 0, done.stderr
    return folder / "ckpts"


@pytest.fixture
def synced(tmp_path: Path) -> Path:
    """Copy the files of two ranks that trained with SyncBatchNorm into a folder of the test's own."""
    return copy_synced(tmp_path)


def scale_statistics(path: Path, factor: float) -> None:
    """Plant a drift: multiply every running mean and variance."""
    change(path, lambda content: [t.mul_(factor) for n, t in content["model"].items() if "running_" in n])


def score_by_hand(state: dict[str, torch.Tensor], width: int | None) -> tuple[float, float]:
    """Accuracy and loss of a resnet8 in one forward over the whole test set."""
    model = build_model("resnet8", 1, 10, width)
    model.load_state_dict(state)
    x, y = load_data("digits", None, None).test[:]
    with torch.no_grad():
        logits = model.eval()(x)
    return (logits.argmax(1) == y).double().mean().item(), F.cross_entropy(logits, y).item()


def test_scores_are_those_of_a_plain_forward(drifted: Path) -> None:
    """Each rank's accuracy and loss are those of its file, the averaged ones those of numpy's averages."""
    result = scores(drifted)
    states = [load(drifted / f"ddp-nobufsync_rank{rank}.pth")["model"] for rank in range(2)]
    merged = dict(states[0])
    for name in (n.removesuffix("running_mean") for n in states[0] if n.endswith("running_mean")):
        means, variances = (
            np.stack([state[f"{name}running_{part}"].numpy() for state in states]).astype(np.float64)
            for part in ("mean", "var")
        )
        assert (means[0] != means[1]).any()
        merged[f"{name}running_mean"] = torch.tensor(means.mean(0), dtype=torch.float32)
        merged[f"{name}running_var"] = torch.tensor(variances.mean(0) + means.var(0), dtype=torch.float32)
    expected = score_by_hand(merged, 4)
    for rank, state in zip(result.ranks, states, strict=True):
        assert rank.averaged is not None
        for found, (accuracy, loss) in ((rank.own, score_by_hand(state, 4)), (rank.averaged, expected)):
            assert found.samples == 360
            assert found.accuracy == accuracy
            assert found.loss == pytest.approx(loss, rel=1e-5)  # float32 sums in another order
    assert result.ranks[0].own.loss != result.ranks[1].own.loss
    assert result.ranks[0].averaged == result.ranks[1].averaged
    assert (result.replicas.statistics_differ, result.replicas.parameters_differ) == (True, False)


def test_averaged_statistics_are_those_of_all_samples() -> None:
    """Means and variances of three ranks' equal shares merge into mean and variance of all their samples together."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 5, 1), torch.nn.BatchNorm2d(5))
    shares = torch.randn(3, 50, 5, dtype=torch.float64) + torch.tensor([0.0, 3.0, -2.0]).view(3, 1, 1)
    states = [{"1.running_mean": x.mean(0), "1.running_var": x.var(0, correction=0)} for x in shares]
    averaged = average_statistics(model, states)
    everything = shares.flatten(0, 1)
    assert list(averaged) == ["1.running_mean", "1.running_var"]
    assert torch.allclose(averaged["1.running_mean"], everything.mean(0), rtol=0, atol=1e-14)
    assert torch.allclose(averaged["1.running_var"], everything.var(0, correction=0), rtol=1e-14)
    # The ranks' means lie up to 5 apart: without their variance the result would be far off.
    assert (averaged["1.running_var"] / states[0]["1.running_var"]).min() > 3


def test_a_synchronized_run_has_no_spread(synced: Path) -> None:
    """With SyncBatchNorm all ranks score alike, exactly, and averaging what is equal changes no bit of it."""
    result = scores(synced)
    assert (result.spread, result.averaged_spread) == (0.0, 0.0)
    assert len({score for rank in result.ranks for score in (rank.own, rank.averaged)}) == 1
    assert result.sentence.endswith("on every rank: weights and BatchNorm statistics agree")


def test_a_planted_drift_is_a_spread(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Statistics of rank 1 times 20 cost it accuracy: the table, the spread and the sentence say so."""
    scale_statistics(synced / SYNCED.format(1), 20)
    result = scores(synced)
    assert result.spread > 0.05
    assert result.averaged_spread == 0.0
    assert main([str(synced)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "step", "rank", "accuracy", "loss", "averaged:", "accuracy", "loss"]
    assert [line.split()[:3] for line in lines[:3]] == [["ddp-syncbn", "12", rank] for rank in ("0", "1", "spread")]
    assert lines[0].split()[3] == f"{result.ranks[0].own.accuracy:.2%}"
    assert lines[2].split()[3:] == [f"{100 * result.spread:.2f}", "0.00"]
    assert result.ranks[0].averaged is not None
    assert lines[-1] == (
        f"ddp-syncbn, step 12: accuracy differs by up to {100 * result.spread:.2f} points between ranks with drifted "
        f"BatchNorm statistics; averaging them gives {result.ranks[0].averaged.accuracy:.2%} on every rank"
    )


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sync_bn": True},
        {"save_format": "safetensors"},
        {"method": "localsgd", "max_steps": 10},
        {"method": "zero"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "ddp",
)
def test_runs_of_the_methods(ctx: RankContext, syncheck_rank: Rank, changes: dict[str, Any]) -> None:
    """Real runs whose ranks hold whole models are evaluated; only what each method lets drift is told as differing."""
    settings = replace(SMALL, **changes, out=syncheck_rank.shared)
    run(ctx, settings)
    result = scores(settings.out)
    assert [rank.rank for rank in result.ranks] == [0, 1]
    own = [rank.own for rank in result.ranks]
    apart = (not settings.sync_bn, settings.method == "localsgd")  # 10 steps: two after the last average
    assert (result.replicas.statistics_differ, result.replicas.parameters_differ) == apart
    assert (own[0] == own[1]) is settings.sync_bn
    assert (result.ranks[0].averaged == result.ranks[1].averaged) is (settings.method != "localsgd")


def test_replicas_of_one_process(tmp_path: Path) -> None:
    """The replicas of DataParallel are evaluated like ranks, one group for each step that was saved."""
    run(RankContext(), replace(SMALL, method="dp", replicas=2, save_every=3, max_steps=6, out=tmp_path))
    found, refused = find_replicas([str(tmp_path / "history")])
    assert refused == []
    assert [(r.run, r.step, [file.rank for file in r.files]) for r in found] == [("dp", 3, [0, 1]), ("dp", 6, [0, 1])]
    assert all(score_run(r, None).ranks[0].averaged is not None for r in found)


def test_a_model_without_batchnorm() -> None:
    """Where there is no BatchNorm nothing is averaged, and the sentence says so."""
    result = scores(FIXTURES / "in_sync" / "ddp_no_bn")
    assert result.averaged_spread is None
    assert [rank.averaged for rank in result.ranks] == [None, None]
    assert result.sentence.endswith("weights agree, and there is no BatchNorm")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.startswith("tv_") or "50" in n else ()) for n in MODELS]
)
def test_every_model_is_built(name: str, tmp_path: Path) -> None:
    """Each model of the trainer is built from the metadata, and scores what its state dict scores."""
    width = None if name.startswith("tv_") else 4  # torchvision's have one width only
    small = SMALLEST.get(name, {})
    model = build_model(name, 1, 10, width, image_size=8, **small)
    config = {"model": name, "width": width, "data": "digits", **small}
    for rank in range(2):
        block = {"schema": 1, "run": "made", "run_id": "1", "rank": rank, "world_size": 2, "step": 1, "config": config}
        torch.save({"model": model.state_dict(), "syncheck": block}, tmp_path / f"made_rank{rank}.pth")
    result = scores(tmp_path)
    x, y = load_data("digits", None, None).test[:]
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == y).double().mean().item()
    assert [rank.own.accuracy for rank in result.ranks] == [right, right]


def test_a_loss_that_is_no_number_is_null(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on stdout is a whole document with every number; a rank with a NaN weight has the loss null."""
    change(synced / SYNCED.format(1), lambda content: content["model"]["fc.bias"].fill_(float("nan")))
    assert main([str(synced), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert (document["schema"], document["refused"]) == (1, [])
    (found,) = document["runs"]
    assert (found["run"], found["step"], found["model"], found["world_size"]) == ("ddp-syncbn", 12, "resnet8", 2)
    assert (found["parameters_differ"], found["statistics_differ"]) == (True, False)
    assert [Path(rank["path"]).name for rank in found["ranks"]] == [SYNCED.format(0), SYNCED.format(1)]
    assert found["ranks"][0]["own"]["loss"] > 0
    assert found["ranks"][1]["own"]["loss"] is None
    assert found["spread"] == found["ranks"][0]["own"]["accuracy"] - found["ranks"][1]["own"]["accuracy"]
    assert "between ranks with different weights" in found["sentence"]


@pytest.mark.slow
def test_as_a_user_types_it(drifted: Path, programs: Programs) -> None:
    """`python -m train.evaluate ckpts/` prints the table and leaves with 0; --help names the exit codes."""
    command = (sys.executable, "-m", "train.evaluate")
    done = programs.run(*command, drifted, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "drifted BatchNorm statistics; averaging them gives" in done.stdout.splitlines()[-1]
    helped = programs.run(*command, "--help", cwd=ROOT)
    assert helped.returncode == 0
    assert "exit codes:" in helped.stdout


def test_prints_the_last_saved_step_once(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--save-every and --save-per-rank both write the last step: one table and one sentence have it."""
    assert main([str(synced)]) == 0
    once = capsys.readouterr().out
    step = synced / "history" / "ddp-syncbn" / "step_12"
    step.mkdir(parents=True)
    for rank in range(2):
        shutil.copy(synced / f"ddp-syncbn_rank{rank}.pth", step / f"rank_{rank}.pth")
    assert main([str(synced)]) == 0
    assert capsys.readouterr().out == once
