"""`python -m train.evaluate` on real checkpoints: scores per rank, with own and with averaged statistics."""

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
from support.evaluated import FIXTURES, SYNCED, change, copy_synced, scores
from support.listings import list_fields
from support.programs import SHORT, TRAIN, Programs
from support.scenarios import SMALL, SMALLEST, load, run
from support.started import ROOT

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
    """Train with DDP and --no-buffer-sync on two ranks; return the folder of the checkpoints."""
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
    """Copy the checkpoints of two ranks trained with SyncBatchNorm into the test's folder."""
    return copy_synced(tmp_path)


def scale_statistics(path: Path, factor: float) -> None:
    """Inject a drift: multiply every running mean and variance."""
    change(path, lambda content: [t.mul_(factor) for n, t in content["model"].items() if "running_" in n])


def score_by_hand(state: dict[str, torch.Tensor], width: int | None) -> tuple[float, float]:
    """Return accuracy and loss of a resnet8 in one forward over the whole test set."""
    model = build_model("resnet8", 1, 10, width)
    model.load_state_dict(state)
    x, y = load_data("digits", None, None).test[:]
    with torch.no_grad():
        logits = model.eval()(x)
    return (logits.argmax(1) == y).double().mean().item(), F.cross_entropy(logits, y).item()


@pytest.mark.slow
def test_scores_equal_a_plain_forward(drifted: Path) -> None:
    """Own scores equal a plain forward with the rank's file; averaged scores equal a forward with NumPy's averages."""
    result = scores(drifted)
    states = [load(drifted / f"ddp-nobufsync_rank{rank}.pth")["model"] for rank in range(2)]
    merged = dict(states[0])
    for name in (n.removesuffix("running_mean") for n in states[0] if n.endswith("running_mean")):
        means = np.stack([state[f"{name}running_mean"].numpy() for state in states]).astype(np.float64)
        variances = np.stack([state[f"{name}running_var"].numpy() for state in states]).astype(np.float64)
        assert (means[0] != means[1]).any()
        merged[f"{name}running_mean"] = torch.tensor(means.mean(0), dtype=torch.float32)
        merged[f"{name}running_var"] = torch.tensor(variances.mean(0) + means.var(0), dtype=torch.float32)
    expected = score_by_hand(merged, 4)
    for rank, state in zip(result.ranks, states, strict=True):
        assert rank.averaged is not None
        for score, (accuracy, loss) in ((rank.own, score_by_hand(state, 4)), (rank.averaged, expected)):
            assert score.samples == 360
            assert score.accuracy == accuracy
            assert score.loss == pytest.approx(loss, rel=1e-5)  # float32 sums in another order
    assert result.ranks[0].own.loss != result.ranks[1].own.loss
    assert result.ranks[0].averaged == result.ranks[1].averaged
    assert (result.replicas.statistics_differ, result.replicas.parameters_differ) == (True, False)


def test_averaged_statistics_cover_all_samples() -> None:
    """The means and variances of three ranks' equal shares merge into the mean and variance of all samples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 5, 1), torch.nn.BatchNorm2d(5))
    shares = torch.randn(3, 50, 5, dtype=torch.float64) + torch.tensor([0.0, 3.0, -2.0]).view(3, 1, 1)
    states = [{"1.running_mean": x.mean(0), "1.running_var": x.var(0, correction=0)} for x in shares]
    averaged = average_statistics(model, states)
    everything = shares.flatten(0, 1)
    assert list(averaged) == ["1.running_mean", "1.running_var"]
    assert torch.allclose(averaged["1.running_mean"], everything.mean(0), rtol=0, atol=1e-14)
    assert torch.allclose(averaged["1.running_var"], everything.var(0, correction=0), rtol=1e-14)
    # The ranks' means differ by up to 5, so a result without the variance of the means would be far too small.
    assert (averaged["1.running_var"] / states[0]["1.running_var"]).min() > 3


def test_a_synchronized_run_has_no_spread(synced: Path) -> None:
    """With SyncBatchNorm, all ranks have equal scores, and averaging equal statistics does not change the scores."""
    result = scores(synced)
    assert (result.spread, result.averaged_spread) == (0.0, 0.0)
    assert len({*list_fields(result.ranks, "own"), *list_fields(result.ranks, "averaged")}) == 1
    assert result.sentence.endswith("on every rank: weights and BatchNorm statistics agree")


def test_an_injected_drift_causes_a_spread(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Multiplying rank 1's statistics by 20 changes its accuracy; table, spread and sentence report the difference."""
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
def test_runs_with_whole_models_are_evaluated(ctx: RankContext, syncheck_rank: Rank, changes: dict[str, Any]) -> None:
    """Runs with a whole model per rank are evaluated; only tensors that drift by design are reported as different."""
    settings = replace(SMALL, **changes, out=syncheck_rank.shared)
    run(ctx, settings)
    result = scores(settings.out)
    assert list_fields(result.ranks, "rank") == [0, 1]
    own_values = list_fields(result.ranks, "own")
    expected = (not settings.sync_bn, settings.method == "localsgd")  # 10 steps end two steps after the last average
    assert (result.replicas.statistics_differ, result.replicas.parameters_differ) == expected
    assert (own_values[0] == own_values[1]) is settings.sync_bn
    assert (result.ranks[0].averaged == result.ranks[1].averaged) is (settings.method != "localsgd")


def test_replicas_of_one_process_are_evaluated(tmp_path: Path) -> None:
    """The replicas of DataParallel are evaluated like ranks, with one group per saved step."""
    run(RankContext(), replace(SMALL, method="dp", replicas=2, save_every=3, max_steps=6, out=tmp_path))
    groups, refused = find_replicas([str(tmp_path / "history")])
    assert refused == []
    assert [(r.run, r.step, list_fields(r.files, "rank")) for r in groups] == [("dp", 3, [0, 1]), ("dp", 6, [0, 1])]
    assert all(score_run(r, None).ranks[0].averaged is not None for r in groups)


def test_a_model_without_batchnorm_has_no_averages() -> None:
    """Without BatchNorm, nothing is averaged, and the sentence reports the missing BatchNorm."""
    result = scores(FIXTURES / "in_sync" / "ddp_no_bn")
    assert result.averaged_spread is None
    assert list_fields(result.ranks, "averaged") == [None, None]
    assert result.sentence.endswith("weights agree, and there is no BatchNorm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n.startswith("tv_") or "50" in n else ())
        for n in MODELS
        if not MODELS[n].text
    ],
)
def test_every_model_is_built(name: str, tmp_path: Path) -> None:
    """Each model of the trainer is built from the metadata, and has the accuracy of its state dict."""
    width = None if name.startswith("tv_") else 4  # torchvision's networks have a fixed width
    small = SMALLEST.get(name, {})
    model = build_model(name, 1, 10, width, image_size=8, **small)
    config = {"model": name, "width": width, "data": "digits", **small}
    for rank in range(2):
        block = {"schema": 1, "run": "made", "run_id": "1", "rank": rank, "world_size": 2, "step": 1, "config": config}
        torch.save({"model": model.state_dict(), "syncheck": block}, tmp_path / f"made_rank{rank}.pth")
    result = scores(tmp_path)
    x, y = load_data("digits", None, None).test[:]
    with torch.no_grad():
        expected = (model.eval()(x).argmax(1) == y).double().mean().item()
    assert [rank.own.accuracy for rank in result.ranks] == [expected, expected]


def test_a_nan_loss_is_null_in_json(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a rank has a NaN weight, its loss is null, and stdout is still a complete and valid JSON document."""
    change(synced / SYNCED.format(1), lambda content: content["model"]["fc.bias"].fill_(float("nan")))
    assert main([str(synced), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert (document["schema"], document["refused"]) == (1, [])
    (entry,) = document["runs"]
    assert (entry["run"], entry["step"], entry["model"], entry["world_size"]) == ("ddp-syncbn", 12, "resnet8", 2)
    assert (entry["parameters_differ"], entry["statistics_differ"]) == (True, False)
    assert [Path(rank["path"]).name for rank in entry["ranks"]] == [SYNCED.format(0), SYNCED.format(1)]
    assert entry["ranks"][0]["own"]["loss"] > 0
    assert entry["ranks"][1]["own"]["loss"] is None
    assert entry["spread"] == entry["ranks"][0]["own"]["accuracy"] - entry["ranks"][1]["own"]["accuracy"]
    assert "between ranks with different weights" in entry["sentence"]


@pytest.mark.slow
def test_the_command_line(drifted: Path, programs: Programs) -> None:
    """`python -m train.evaluate ckpts/` prints the table and exits with code 0; --help lists the exit codes."""
    command = (sys.executable, "-m", "train.evaluate")
    done = programs.run(*command, drifted, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "drifted BatchNorm statistics; averaging them gives" in done.stdout.splitlines()[-1]
    helped = programs.run(*command, "--help", cwd=ROOT)
    assert helped.returncode == 0
    assert "exit codes:" in helped.stdout


def test_prints_the_last_saved_step_once(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If --save-every and --save-per-rank both write the last step, the output reports this step once."""
    assert main([str(synced)]) == 0
    output = capsys.readouterr().out
    step = synced / "history" / "ddp-syncbn" / "step_12"
    step.mkdir(parents=True)
    for rank in range(2):
        shutil.copy(synced / f"ddp-syncbn_rank{rank}.pth", step / f"rank_{rank}.pth")
    assert main([str(synced)]) == 0
    assert capsys.readouterr().out == output
