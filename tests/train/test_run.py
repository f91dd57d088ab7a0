"""The command line: options, output and errors, as in the README."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.listings import find_texts, join_fields, list_fields, list_files, list_starts
from support.scenarios import differing, load

from train.engine import train
from train.options import build_parser, settings_from
from train.recorders.base import Recorder
from train.run import main
from train.settings import Settings

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from train.launch import RankContext

FLAGS = """
    accumulate alpha amp augment average-every backend batch-size bucket-view channels channels-last
    checkpoint-every classes comm-hook compile context-mode cpu-offload cudnn-benchmark data data-dir depth
    download ema epochs eval-every fault fault-step find-unused gpus grad-clip help image-size init-method ip join
    keep-last label-smoothing limit-train list-faults list-models local-rank log-dir log-interval loss-parallel lr
    lr-scale max-steps method mixup model momentum monitor monitor-every mp-policy no-buffer-sync no-shuffle on-desync
    optimizer out outer-lr outer-momentum parallel-degree pipeline-schedule port powersgd-rank powersgd-start progress
    rank replicas reshard-after-forward resume save-best save-every save-format save-per-rank schedule seed
    sequence-parallel spawn static-graph sync-bn task tensorboard timeout train-samples warmup-epochs warmup-steps
    weight-decay width workers world-size
"""
pytestmark = pytest.mark.usefixtures("no_launcher")


def test_flags_are_frozen() -> None:
    """Option names do not change, because users' scripts depend on them; every option has a help text."""
    actions = build_parser()._actions
    names = set(find_texts(join_fields(actions, "option_strings"), start="--"))
    assert names == {f"--{name}" for name in FLAGS.split()}
    assert all(list_fields(actions, "help"))


def test_every_option_may_have_underscores() -> None:
    """--batch_size is --batch-size, for every option with hyphens; values and values after "=" keep theirs."""
    parser = build_parser()
    parsed = 0
    for action in parser._actions:
        for name in action.option_strings:
            if "-" not in name[2:] or name.startswith("--list"):
                continue
            value = [] if action.nargs == 0 else [[*(action.choices or ["7"])][-1]]
            hyphens = parser.parse_args([name, *value])
            assert parser.parse_args(["--" + name[2:].replace("-", "_"), *value]) == hyphens != parser.parse_args([])
            parsed += 1
    assert parsed > 35
    args = parser.parse_args(["--log_dir=my_logs", "--init_method", "file:///a_b"])
    assert (args.log_dir, args.init_method) == (Path("my_logs"), "file:///a_b")


def test_cudnn_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """--cudnn-benchmark switches cuDNN's search for its fastest algorithms on; another run switches it off."""
    monkeypatch.setattr("torch.backends.cudnn.benchmark", False)
    for options, expected in ((["--cudnn-benchmark"], True), ([], False)):
        assert main([*options, "--limit-train", "64", "--epochs", "1", "--width", "4", "--progress", "none"]).code == 0
        assert torch.backends.cudnn.benchmark is expected


def test_defaults_are_those_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options, the defaults are those of Settings, except for method ddp under torchrun."""
    assert settings_from(build_parser().parse_args([])) == Settings()
    monkeypatch.setenv("RANK", "0")
    assert settings_from(build_parser().parse_args([])).method == "ddp"
    for model, data in (("gpt-tiny", "text"), ("gpt-tiny-moe", "text"), ("convnet", "digits")):
        assert settings_from(build_parser().parse_args(["--model", model])).data == data
    assert settings_from(build_parser().parse_args(["--model", "gpt-tiny", "--data", "mnist"])).data == "mnist"
    args = ["--optimizer", "adamw", "--save-every", "5"]
    settings = settings_from(build_parser().parse_args(args))
    assert (settings.lr, settings.save_per_rank) == (0.005, True)


def test_a_non_finite_loss_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """If the loss becomes infinite or NaN, stderr has one warning, and the exit code is 0."""
    assert main("--lr 3e38 --limit-train 64 --epochs 2 --width 4 --progress none".split()).code == 0
    warning = "run.py: warning: the loss is not finite since epoch 1; lower --lr, or add --grad-clip\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_only_rank_0_reports_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    """Under a launcher, every rank exits with 2 before any communication, and only rank 0 prints the error."""
    environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["--batch-size", "1"]).code == 2
    expected = "run.py: error: --batch-size 1 (global) leaves some of 2 ranks empty; use 2 or more\n"
    assert capsys.readouterr().err == expected * lines


def test_broken_environment_is_reported_by_its_own_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with RANK but without WORLD_SIZE reports the error itself, also if its rank is not 0."""
    monkeypatch.setenv("RANK", "3")
    assert main([]).code == 2
    assert capsys.readouterr().err.startswith("run.py: error: the environment variable WORLD_SIZE is not set")


@pytest.mark.slow
def test_single_from_any_folder(script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """`python train/run.py` runs in any folder, and prints a line per epoch, a summary and the saved files."""
    run = script("--width", 4, "--epochs", 2, "--save-per-rank", "--save-format", "safetensors")
    assert (run.returncode, run.stderr) == (0, "")
    epoch_one, epoch_two, summary, saved = run.stdout.splitlines()
    assert epoch_one.startswith("single: epoch 1/2  step 44/88  loss ")
    assert epoch_two.startswith("single: epoch 2/2  step 88/88  loss ")
    assert "% test accuracy, 2 epochs, 88 steps, " in summary
    assert saved == "saved 1 file: ckpts/single_rank0.safetensors"
    assert list_files(tmp_path / "ckpts") == ["single_rank0.safetensors"]


@pytest.mark.slow
def test_torchrun_of_the_readme(torchrun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """The README's command trains ddp on two processes, saves the files of both, and prints only on rank 0."""
    run = torchrun("--save-per-rank", "--epochs", 2, "--save-every", 44)
    assert (run.returncode, run.stderr) == (0, "")
    assert list_starts(run.stdout.splitlines(), ":") == ["ddp", "ddp", "ddp", "saved 6 files"]
    a = tmp_path / "ckpts" / "ddp_rank0.pth"
    b = tmp_path / "ckpts" / "ddp_rank1.pth"
    assert load(a)["step"] == 88
    assert {name.rpartition(".")[2] for name in differing(a, b)} == {"running_mean", "running_var"}
    assert len(list((tmp_path / "ckpts" / "history" / "ddp").glob("step_*/rank_*.pth"))) == 4


@pytest.mark.slow
def test_single_under_two_processes_is_refused(torchrun: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Both ranks exit with 2, and the error appears once, before torchrun's summary."""
    run = torchrun("--method", "single")
    assert run.returncode != 0
    line = "run.py: error: --method single is one process, the launcher started 2\n"
    assert run.stderr.count(line) == 1
    assert run.stderr.index(line) < run.stderr.index("FAILED")
    assert "Traceback" not in run.stderr[: run.stderr.index("torch/distributed")]
    assert "exitcode  : 2" in run.stderr


@pytest.mark.slow
def test_unwritable_out_stops_all_ranks(torchrun: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """If --out is not writable, all ranks end, and the error appears once."""
    run = torchrun("--save-per-rank", "--out", "/dev/null/ckpts")
    assert run.returncode != 0
    assert run.stderr.count("run.py: error: cannot write to --out /dev/null/ckpts: Not a directory\n") == 1


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=110)
@pytest.mark.parametrize("sync_bn", [False, True])
def test_defaults_reach_97_percent(ctx: RankContext, *, sync_bn: bool) -> None:
    """The default run reaches at least 97% test accuracy with BatchNorm and with SyncBatchNorm."""
    assert train(Settings(method="ddp", sync_bn=sync_bn), ctx, Recorder()).test.accuracy >= 0.97


@pytest.mark.slow
def test_imports_its_own_clone(script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """`run.py` ignores another `train` package in the working folder."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").write_text("raise ImportError('the wrong one')\n")
    assert script("--help").returncode == 0
    assert str(Path(sys.modules["train"].__file__ or "").parents[1]) != os.fspath(tmp_path)
