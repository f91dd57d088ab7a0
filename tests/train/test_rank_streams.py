"""Random numbers in training: RNG streams differ between ranks and are reproducible between runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.imports import import_or_skip
from support.resumed import TINY, assert_bitwise
from support.scenarios import SMALL, fsdp, make_job, run, trained, whole_state
from support.states import list_differing, pick

import syncheck
from train.engine import Job
from train.launch import RankContext
from train.metrics import MetricSums
from train.options import build_parser
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

DROPOUT = replace(SMALL, model="mnist_convnet", save_per_rank=False)


def masks(ctx: RankContext, settings: Settings) -> list[bytes]:
    """Return the masks of the model's first dropout layer in the first two steps."""
    masks_of_steps: list[bytes] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        # One sample's mask, because ranks may have shares of different sizes.
        masks_of_steps.append((output[0] == 0).numpy().tobytes())

    job = make_job(ctx, replace(settings, max_steps=2))
    layer = job.method.module.get_submodule("dropout1")
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0 + 1,))
    layer.register_forward_hook(keep)
    for step, (x, y) in enumerate(job.loaders.train_batches, 1):
        job.trainer.run(step, x, y, settings.batch_size, MetricSums(torch.device("cpu")))
        if step == 2:
            break
    return masks_of_steps


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
def test_dropout_differs_between_ranks(ctx: RankContext, method: str) -> None:
    """Dropout masks differ between ranks and between steps."""
    masks_of_ranks = ctx.gather(masks(ctx, replace(DROPOUT, method=method)))
    assert len(set(chain.from_iterable(masks_of_ranks))) == 4


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", fsdp("fsdp")])
def test_a_run_with_dropout_is_reproducible(ctx: RankContext, method: str) -> None:
    """Two runs with the same seed end with bitwise equal weights; another seed changes the weights."""
    settings = replace(DROPOUT, method=method)
    first = whole_state(trained(ctx, settings))
    again = whole_state(trained(ctx, settings))
    second = whole_state(trained(ctx, replace(settings, seed=1)))
    assert not list_differing(first, again)
    assert not torch.equal(first["fc2.weight"], second["fc2.weight"])
    if method == "ddp":
        state = {name: tensor.tolist() for name, tensor in first.items()}
        theirs = ctx.gather(state)
        assert theirs == [state] * 2


@pytest.mark.syncheck(ranks=2)
def test_a_resumed_run_continues_its_streams(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run with dropout and augmentation is bitwise equal after a crash in each epoch."""
    assert_bitwise(ctx, syncheck_rank.shared, replace(TINY, model="mnist_convnet", augment="basic"), [3, 6])


def test_dropout_of_dp_is_reproducible() -> None:
    """Two dp runs with dropout end with bitwise equal weights, because the replicas' threads take turns."""
    settings = replace(DROPOUT, method="dp", replicas=3)
    states = [trained(RankContext(), settings).method.module.state_dict() for _ in range(2)]
    assert not list_differing(states[0], states[1])


def test_a_model_without_dropout_draws_no_random_numbers() -> None:
    """A training step without dropout does not change the RNG state."""
    settings = replace(SMALL, method="single", save_per_rank=False)
    job = Job(settings, RankContext())
    state = torch.get_rng_state()
    x, y = job.loaders.dataset[:8]
    job.trainer.run(1, x, y, 8, MetricSums(torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.syncheck(ranks=2)
def test_transformers_stay_in_sync(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Plain DDP keeps replicas of a model without BatchNorm in sync, and syncheck reports no findings."""
    settings = replace(SMALL, model="transformer", width=16, depth=2, out=syncheck_rank.shared)
    result = run(ctx, settings)
    report = syncheck.compare(*map(str, result.saved))
    assert report.verdict == "in_sync"
    assert not list(report.findings)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_a_transformer_learns_in_16_bits(ctx: RankContext) -> None:
    """A transformer learns in bfloat16 on two ranks."""
    settings = Settings(method="ddp", model="transformer", width=16, depth=2, amp="bf16", max_steps=120, lr=0.01,
                        optimizer="adamw")  # fmt: skip
    assert run(ctx, settings).test.accuracy > 0.4


@pytest.mark.slow
def test_the_list_of_models_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--list-models prints the table on rank 0 only and exits with 0."""
    import_or_skip("torchvision")
    for variables, lines in (({}, 16), ({"RANK": "0", "WORLD_SIZE": "2"}, 16), ({"RANK": "1", "WORLD_SIZE": "2"}, 0)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args(["--list-models"])
        assert caught.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.slow
def test_data_and_model_options_on_the_command_line(script: Any, tmp_path: Path) -> None:
    """Two ranks train with options for data, model and augmentation, and the checkpoint's config records them."""
    done = script(
        "--spawn", 2, "--data", "synthetic", "--image-size", 12, "--channels", 1, "--classes", 4, "--train-samples", 64,
        "--model", "pyramidnet", "--depth", 8, "--alpha", 6, "--augment", "basic", "--batch-size", 16, "--epochs", 1,
        "--save-per-rank", "--progress", "none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = syncheck.read(tmp_path / "ckpts" / "ddp_rank0.pth").metadata.config
    assert pick(config, ("image_size", "classes", "depth", "alpha", "augment")) == {
        "image_size": 12,
        "classes": 4,
        "depth": 8,
        "alpha": 6,
        "augment": "basic",
    }
    assert "download" not in config
    done = script("--list-models")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("name ")
