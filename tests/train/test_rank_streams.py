"""Random numbers in training: each rank draws its own, a run draws the same again; models without BatchNorm agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from resumed import TINY, assert_bitwise
from scenarios import SMALL, fsdp, run, trained, whole_state

import syncheck
from train.job import prepare
from train.launch import RankContext
from train.options import build_parser
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

DROPOUT = replace(SMALL, model="mnist_convnet", save_per_rank=False)


def masks(ctx: RankContext, settings: Settings) -> list[bytes]:
    """What the first dropout of the model leaves of the first steps' images: where it is zero."""
    found: list[bytes] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        # One sample's mask: shares may be of different sizes.
        found.append((output[0] == 0).numpy().tobytes())

    job = prepare(replace(settings, max_steps=2), ctx)
    layer = job.method.module.get_submodule("dropout1")
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0 + 1,))
    layer.register_forward_hook(keep)
    for step, (x, y) in enumerate(job.train_batches, 1):
        job.trainer.run(step, x, y, settings.batch_size, _NoMeter())
        if step == 2:
            break
    return found


class _NoMeter:
    """Counts nothing."""

    def add(self, *_: Any) -> None:
        """Do nothing."""


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
def test_dropout_differs_between_ranks(ctx: RankContext, method: str) -> None:
    """Each rank and each step drops other places; with one stream for all, every share would lose the same ones."""
    everyone = ctx.gather(masks(ctx, replace(DROPOUT, method=method)))
    assert len({mask for rank in everyone for mask in rank}) == 4


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", fsdp("fsdp")])
def test_a_run_with_dropout_is_reproducible(ctx: RankContext, method: str) -> None:
    """With one seed it ends with the same bits again, on both ranks; with another it does not."""
    settings = replace(DROPOUT, method=method)
    first, again, other = (whole_state(trained(ctx, s)) for s in (settings, settings, replace(settings, seed=1)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc2.weight"], other["fc2.weight"])
    if method == "ddp":
        state = {name: tensor.tolist() for name, tensor in first.items()}
        theirs = ctx.gather(state)
        assert theirs == [state] * 2


@pytest.mark.syncheck(ranks=2)
def test_a_resumed_run_draws_on(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Crashed within the first and the second epoch and resumed, dropout and augmentation go on bit by bit."""
    assert_bitwise(ctx, syncheck_rank.shared, replace(TINY, model="mnist_convnet", augment="basic"), [3, 6])


def test_dropout_of_dp_is_reproducible() -> None:
    """Replicas that are threads take turns, so a run with dropout ends with the same bits again."""
    settings = replace(DROPOUT, method="dp", replicas=3)
    states = [trained(RankContext(), settings).method.module.state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_without_dropout_draws_nothing() -> None:
    """The generator stands where `prepare` left it after training, so nothing depends on the ranks' own streams."""
    settings = replace(SMALL, method="single", save_per_rank=False)
    job = prepare(settings, RankContext())
    state = torch.get_rng_state()
    x, y = job.train_samples[:8]
    job.trainer.run(1, x, y, 8, _NoMeter())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.syncheck(ranks=2)
def test_transformers_stay_in_sync(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Without BatchNorm plain DDP keeps replicas equal bit by bit: syncheck says in sync, and finds nothing."""
    settings = replace(SMALL, model="transformer", width=16, depth=2, out=syncheck_rank.shared)
    result = run(ctx, settings)
    report = syncheck.compare(*map(str, result.saved))
    assert report.verdict == "in_sync"
    assert not [finding for group in report.groups for finding in group.findings]


@pytest.mark.syncheck(ranks=2)
def test_a_transformer_learns_in_16_bits(ctx: RankContext) -> None:
    """Its attention works in mixed precision on two ranks."""
    settings = Settings(method="ddp", model="transformer", width=16, depth=2, amp="bf16", max_steps=120, lr=0.01,
                        optimizer="adamw")  # fmt: skip
    assert run(ctx, settings).test.accuracy > 0.4


def test_the_list_of_models_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--list-models prints the table and leaves with 0; of several processes one prints it."""
    pytest.importorskip("torchvision")
    for variables, lines in (({}, 14), ({"RANK": "0", "WORLD_SIZE": "2"}, 14), ({"RANK": "1", "WORLD_SIZE": "2"}, 0)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            build_parser().parse_args(["--list-models"])
        assert left.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.slow
def test_the_new_options_as_a_user_types_them(script: Any, tmp_path: Path) -> None:
    """Data, augmentation and model of a run are chosen on the command line, with two ranks, and can be evaluated."""
    done = script(
        "--spawn", 2, "--data", "synthetic", "--image-size", 12, "--channels", 1, "--classes", 4, "--train-samples", 64,
        "--model", "pyramidnet", "--depth", 8, "--alpha", 6, "--augment", "basic", "--batch-size", 16, "--epochs", 1,
        "--save-per-rank", "--progress", "none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = syncheck.read(tmp_path / "ckpts" / "ddp_rank0.pth").metadata.config
    assert {name: config[name] for name in ("image_size", "classes", "depth", "alpha", "augment")} == {
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
