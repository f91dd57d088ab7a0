"""Options of older scripts: every option of the table on the page names its counterpart in an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train.old_options import COUNTERPARTS
from train.options import build_parser
from train.run import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/from-your-old-script.md", "docs/zh-CN/from-your-old-script.md")


def read_rows(page: str) -> dict[str, str]:
    """Return the counterpart of each old option in the first two columns of the table."""
    rows: dict[str, str] = {}
    section = (ROOT / page).read_text(encoding="utf-8").split("\n## ")[1]
    for old, new in re.findall(r"^\| (`-.+?) \| `(-.+?)`", section, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`(--?[a-z][\w-]*)", old), new)
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_every_old_option(page: str) -> None:
    """The table of a page lists the options of the trainer's table, with the same counterparts."""
    rows = {old.replace("_", "-"): new for old, new in read_rows(page).items()}
    assert rows == COUNTERPARTS


def test_counterparts_are_options() -> None:
    """Each counterpart begins with an option of run.py, and no old option is one."""
    options = set(build_parser()._option_string_actions)
    assert {new.split()[0] for new in COUNTERPARTS.values()} <= options
    assert options.isdisjoint(COUNTERPARTS)


@pytest.mark.parametrize("old", COUNTERPARTS)
def test_an_old_option_names_its_counterpart(capsys: pytest.CaptureFixture[str], old: str) -> None:
    """A run with an old option ends with exit code 2 and one line that names the counterpart."""
    assert main([old, "1"]).code == 2
    message = f"run.py: error: unrecognized arguments: {old} 1; did you mean {COUNTERPARTS[old]}?\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--arch", "resnet18", "--pretrained"], "--model for --arch"),
        (["--batchsize", "32", "--learning_rate", "-1"], "--batch-size for --batchsize, --lr for --learning_rate"),
        (["--optim=sgd", "--seeds", "3"], "--optimizer for --optim, --seed for --seeds"),
        (["--syncbn"], "--sync-bn"),
        (["--Batch_Sizes", "3"], "--batch-size"),
        (["--resume-from", "x"], "--resume"),
        (["--evaluate", "--zzzz"], "python -m train.evaluate ckpts/ for --evaluate"),
        (["--save_per_ranks"], "--save-per-rank"),
    ],
)
def test_each_unknown_option_has_its_suggestion(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    """Several unknown options, of older scripts or misspelled, are named with their suggestions."""
    assert main(words).code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("imagefolder", "docs/tasks.md"),
        ("photos/train", "docs/tasks.md"),
        ("cifar", "did you mean cifar10"),
        ("CIFAR100", "did you mean cifar100"),
    ],
)
def test_an_unknown_data_set_leads_to_tasks(capsys: pytest.CaptureFixture[str], name: str, advice: str) -> None:
    """A folder or a class in place of the name of a data set leads to the page on tasks, a misspelled name does not."""
    assert main(["--data", name]).code == 2
    error = capsys.readouterr().err
    assert ("docs/tasks.md" in error, advice in error) == ("tasks" in advice, True)


@pytest.mark.parametrize("words", [["--gpu", "cpu"], ["--gpu=cpu"], ["--gpu_id", "-1"], ["--gpu-devices=None"]])
def test_the_cpu_of_an_old_option(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """A value that selects the CPU has another counterpart than the number of a GPU."""
    assert main([*words, "--epochs", "1"]).code == 2
    error = capsys.readouterr().err
    assert error.endswith("; did you mean --gpus none?\n")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("ours", "of_launcher"), [("--ip", "--master-addr"), ("--port", "--master-port")])
def test_an_address_under_a_launcher_is_an_option_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ours: str, of_launcher: str
) -> None:
    """Under torchrun and torch.distributed.launch, --ip and --port are refused with the option of the launcher."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([ours, "29500"]).code == 2
    assert f"did you mean {of_launcher} of the launcher, before train/run.py?" in capsys.readouterr().err
