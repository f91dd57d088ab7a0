"""train/minimal.py trains exactly like the engine, resumes under every method, and runs as a single copied file."""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from support.programs import TRAIN, Programs
from support.scenarios import NEEDS_FSDP, fsdp, load, run, trained, whole_state
from support.started import ROOT
from support.states import pick
from torch.utils.data import TensorDataset

from train import minimal
from train.data.all_data_sets import DATASETS
from train.data.dataset import Data, Images
from train.launch import RankContext
from train.models.all_models import MODELS, Network
from train.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

FILE = Path(minimal.__file__)
ARGS = Namespace(method="single", epochs=3, batch_size=64, accumulate=1, lr=0.1, amp="off", resume=False)
SETTINGS = Settings(model="minimal", data="minimal", epochs=3, batch_size=64, warmup_steps=0, grad_clip=1.0)
METHODS = ["ddp", fsdp("fsdp")]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "bf16": {"amp": "bf16"},
    "fp16 and accumulate": {"amp": "fp16", "accumulate": 2},
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) if "fp16" in name else name for name in VARIANTS]  # slow on CPUs


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on 256 samples, 4 steps an epoch, and add the data and the model of minimal.py to the engine's tables.

    Larger inputs have larger gradients, so that clipping matters.
    """
    make_data = minimal.make_data

    def make_small_data(samples: int, seed: int) -> TensorDataset:
        x, y = make_data(samples // 16, seed).tensors
        return TensorDataset(8 * x, y)

    monkeypatch.setattr(minimal, "make_data", make_small_data)

    def load_data(*_: Any) -> Data:
        parts = (Images(*minimal.make_data(*arguments).tensors) for arguments in ((4096, 1), (1024, 2)))
        return Data(*parts, channels=1, classes=10, image_size=16)

    monkeypatch.setitem(DATASETS, "minimal", load_data)
    monkeypatch.setitem(MODELS, "minimal", Network(lambda _: minimal.make_model(), "", ()))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the mean loss of each micro-batch of this rank."""
    cross_entropy, recorded = F.cross_entropy, []

    def record(logits: Tensor, y: Tensor, **arguments: Any) -> Tensor:
        loss = cross_entropy(logits, y, **arguments)
        if torch.is_grad_enabled():
            recorded.append(loss.item() / (len(y) if arguments["reduction"] == "sum" else 1))
        return loss

    monkeypatch.setattr(F, "cross_entropy", record)
    return recorded


def path_of(ctx: RankContext, folder: Path) -> str:
    """Return the checkpoint's path, equal on all ranks; a collective."""
    return ctx.gather(str(folder / "minimal.pt"))[0]


def run_minimal(ctx: RankContext, path: str, **changes: Any) -> None:
    """Run minimal.py in this process, until rank 0 has written its file; a collective."""
    args = Namespace(**{**vars(ARGS), "checkpoint": path, **changes})
    try:
        minimal.train(args, ctx.rank, ctx.world_size, ctx.device)
    finally:
        ctx.gather(0)


def compare(ctx: RankContext, folder: Path, losses: list[float], **changes: Any) -> tuple[bool, bool]:
    """Train with both programs; return whether this rank's losses, and the final models, are bitwise equal."""
    path = path_of(ctx, folder)
    run_minimal(ctx, path, **changes)
    first, model = list(losses), load(Path(path))["model"]
    losses.clear()
    settings = replace(SETTINGS, **changes)
    job = trained(ctx, settings)
    state = whole_state(job)
    share = minimal.evaluate(job.method.module, minimal.make_data(1024, 2), ctx.rank, ctx.world_size, ctx.device)
    assert len(first) == len(losses) == 3 * 4 * changes.get("accumulate", 1)
    assert list(model) == list(state)
    equal = first == losses, all(torch.equal(model[name], state[name]) for name in model)
    assert ctx.sum_over_ranks(share).item() == pytest.approx(run(ctx, settings).test.accuracy)
    return equal


@pytest.mark.parametrize("variant", SLOW)
def test_single_equals_the_engine(tmp_path: Path, losses: list[float], variant: str) -> None:
    """In one process, all losses and the final model are bitwise equal to the engine's."""
    assert compare(RankContext(), tmp_path, losses, **VARIANTS[variant]) == (True, True)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("variant", SLOW)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_the_engine(
    ctx: RankContext, tmp_path: Path, losses: list[float], method: str, variant: str
) -> None:
    """On two ranks, all losses of each rank and the final model are bitwise equal to the engine's."""
    assert compare(ctx, tmp_path, losses, method=method, **VARIANTS[variant]) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no set_epoch", "no clipping", "no zero_grad"])
def test_faults_differ_from_the_engine(
    tmp_path: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The comparison detects common mistakes."""
    if fault == "no set_epoch":
        monkeypatch.setattr(minimal.DistributedSampler, "set_epoch", lambda *_: None)
    elif fault == "no clipping":
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    else:
        monkeypatch.setattr(minimal, "SGD", type("Sgd", (torch.optim.SGD,), {"zero_grad": lambda _: None}))
    assert compare(RankContext(), tmp_path, losses) == (False, False)


class Interrupted(Exception):
    """Ends a run of minimal.py after a save."""


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("second", METHODS)
@pytest.mark.parametrize("first", METHODS)
def test_resumes(ctx: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str) -> None:
    """A run of one method, resumed by a method, ends like an uninterrupted run; with the same method bitwise."""
    path = path_of(ctx, tmp_path)
    run_minimal(ctx, path, method=second)
    complete = load(Path(path))
    save = minimal.save

    def save_once(*arguments: Any) -> None:
        save(*arguments)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(minimal, "save", save_once)
        with pytest.raises(Interrupted):
            run_minimal(ctx, path, method=first)
    assert load(Path(path))["epoch"] == 1
    run_minimal(ctx, path, method=second, resume=True)
    resumed = load(Path(path))
    assert resumed["epoch"] == 3
    rtol, atol = (0.0, 0.0) if first == second else (1e-4, 1e-6)
    for state, expected in (
        (resumed["model"], complete["model"]),
        (resumed["optimizer"]["state"], complete["optimizer"]["state"]),
    ):
        torch.testing.assert_close(state, expected, rtol=rtol, atol=atol)


def test_is_one_short_file() -> None:
    """The file has at most 160 lines, and imports only torch and the standard library."""
    source = FILE.read_text()
    assert len(source.splitlines()) <= 160
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").partition(".")[0])
    assert "torch" in names
    assert names - {"torch"} <= sys.stdlib_module_names


def read_epochs(out: str) -> dict[int, float]:
    """Return the training loss of each printed epoch."""
    lines = re.findall(r"^epoch (\d+): train loss ([\d.]+), test accuracy [\d.]+%$", out, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in lines}


@pytest.mark.slow
@pytest.mark.timeout(300)
@NEEDS_FSDP
def test_a_copy_of_the_file_runs(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """Copied to an empty folder, it trains alone, is stopped, and continues on two ranks; syncheck reads its file.

    Each method continues from the file of the previous method, and the losses match one uninterrupted process.
    """
    shutil.copy(FILE, tmp_path / "minimal.py")
    complete = programs.run(sys.executable, "minimal.py", "--epochs", 4, "--checkpoint", "whole.pt")
    assert complete.returncode == 0, complete.stderr
    expected = read_epochs(complete.stdout)
    assert list(expected) == [1, 2, 3, 4]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port)
    done, result = 0, {}
    for method, launcher in (("single", TRAIN[:1]), ("fsdp", torchrun), ("ddp", torchrun)):
        process = programs.start(*launcher, "minimal.py", "--method", method, "--epochs", 4, "--resume")
        assert process.stdout is not None
        assert process.stdout.readline() == f"{done} of 4 epochs are done\n"
        out = process.stdout.readline()
        if method != "ddp":
            process.terminate()
        remainder = programs.finish(process, 120)
        assert (remainder.returncode == 0) == (method == "ddp"), remainder.stderr
        result |= read_epochs(out + remainder.stdout)
        output = programs.run(sys.executable, "-m", "syncheck", "show", "minimal.pt", PYTHONPATH=str(ROOT))
        assert output.returncode == 0, output.stderr
        assert "16 tensors" in output.stdout
        done = load(tmp_path / "minimal.pt")["epoch"]
        assert f"epoch = {done}," in output.stdout
    assert done == 4
    assert result == pytest.approx(pick(expected, result), abs=2e-3)
    assert {1, 4} <= set(result)


@pytest.mark.parametrize(
    ("argv", "torchrun", "message"),
    [
        (
            "--method ddp",
            False,
            "--method ddp: start single with python, ddp and fsdp with torchrun --nproc-per-node 2",
        ),
        ("--method single", True, "--method single: start single with python"),
        ("--accumulate 3", False, "--batch-size: at most 4096, and a multiple of 1 ranks x 3 micro-batches"),
        ("--accumulate 0", False, "--batch-size: "),
        ("--batch-size 8192", False, "--batch-size: at most 4096"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: str, torchrun: bool, message: str
) -> None:
    """Options that would train another model end with one message."""
    monkeypatch.delenv("RANK", raising=False)
    if torchrun:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", [str(FILE), *argv.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(FILE), run_name="__main__")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["minimal_spawn.py", "minimal_by_hand.py"])
def test_a_variant_differs_in_few_lines(name: str) -> None:
    """At most 40 lines of a variant are not in minimal.py, and in the training only those of the loader."""
    lines, variant = (FILE.with_name(file).read_text().splitlines() for file in ("minimal.py", name))
    added = [line[2:] for line in difflib.ndiff(lines, variant) if line.startswith("+ ")]
    assert 10 < len(added) <= 40
    for function in ("wrap", "evaluate", "train", "save", "load"):
        lines, variant = (list_statements(FILE.with_name(file), function) for file in ("minimal.py", name))
        assert {line for line in variant if line not in lines and "DataLoader" not in line} == set(), function


def list_statements(path: Path, name: str) -> list[str]:
    """Return the lines of a function without comments, one statement each."""
    (function,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name)
    return ast.unparse(function).splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
@NEEDS_FSDP
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_copies_of_the_variants_train_alike(programs: Programs, tmp_path: Path, method: str) -> None:
    """Two ranks of mp.spawn, and two processes started by hand, print the losses of one process; both have workers."""
    for name in ("minimal.py", "minimal_spawn.py", "minimal_by_hand.py"):
        shutil.copy(FILE.with_name(name), tmp_path / name)
    options = ("--epochs", 1, "--num-workers", 1, "--method", method, "--ranks", 2)
    outputs = [programs.run(sys.executable, "minimal.py", "--epochs", 1, timeout=120)]
    outputs.append(programs.run(sys.executable, "minimal_spawn.py", *options, timeout=240))
    meet = ("--init-method", f"file://{tmp_path}/meet")
    second = programs.start(sys.executable, "minimal_by_hand.py", *options, *meet, "--rank", 1)
    outputs.append(programs.run(sys.executable, "minimal_by_hand.py", *options, *meet, "--rank", 0, timeout=240))
    outputs.append(programs.finish(second, 120))
    assert [output.returncode for output in outputs] == [0, 0, 0, 0], [output.stderr for output in outputs]
    *losses, of_rank_1 = (read_epochs(output.stdout) for output in outputs)
    assert list(losses[0]) == [1]
    assert of_rank_1 == {}
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal_spawn.py", "minimal_by_hand.py"])
def test_a_variant_refuses_one_rank_of_ddp(programs: Programs, name: str) -> None:
    """A method for several ranks with one rank ends with one message that names the missing option."""
    done = programs.run(sys.executable, str(FILE.with_name(name)), "--method", "ddp")
    assert done.returncode == 2
    assert "--method ddp: " in done.stderr
    assert "--ranks" in done.stderr
