"""Options in texts are spelled as the user of each surface types them, so that a text can be followed as it stands."""

from __future__ import annotations

import contextlib
import html
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import changed, network, save

import syncheck
from syncheck.cli import main
from syncheck.cli.watch import _read_settings
from syncheck.errors import UsageError
from syncheck.options import EXTENSIONS, FORMATS
from syncheck.testing import assert_in_sync, compare
from syncheck.text import TYPED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIELD, FLAG, PYTEST_FLAG = "allow='SYN201'", "--allow SYN201", "--syncheck-allow SYN201"
ENDINGS = [extension.removeprefix(".") for extension in EXTENSIONS]
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

import syncheck

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
try:
    syncheck.live.check(model.module, allow="SYN999")
except syncheck.UsageError as error:
    print(f"the script caught {error}")
dist.barrier()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working directory, with two ranks whose BatchNorm statistics differ."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "running_mean"))
    with contextlib.chdir(tmp_path):
        yield tmp_path


def read_plain(text: str) -> str:
    """Return a text without the marks of code and the escapes of HTML, XML and GitHub."""
    return html.unescape(text).replace("`", "").replace("&#x27;", "'").replace("%25", "%")


@pytest.mark.parametrize("form", FORMATS)
def test_stdout_of_a_command(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each format on stdout has the option of the command line."""
    assert folder.is_dir()
    assert main(["compare", "ddp_rank0.pth", "ddp_rank1.pth", "--format", form]) == 1
    text = read_plain(capsys.readouterr().out)
    assert FLAG in text
    assert FIELD not in text


def test_files_of_a_command(folder: Path) -> None:
    """Each file that a command writes has the option of the command line."""
    outputs = [f"--output=one.{ending}" for ending in ENDINGS]
    assert main(["compare", "ddp_rank0.pth", "ddp_rank1.pth", "--quiet", *outputs]) == 1
    for ending in ENDINGS:
        text = read_plain((folder / f"one.{ending}").read_text())
        assert FLAG in text
        assert FIELD not in text


def test_texts_for_python(folder: Path) -> None:
    """An assertion, a report and an exception in Python have arguments of Python."""
    with pytest.raises(AssertionError) as caught:
        assert_in_sync("ddp_rank*.pth")
    fix = str(syncheck.compare("ddp_rank*.pth").groups[0].findings[0].fix)
    for text in (str(caught.value), fix):
        assert FIELD in text
        assert "--" not in text
    with pytest.raises(UsageError, match=r"no such baseline; create it with update_baseline$"):
        syncheck.compare("ddp_rank*.pth", options=syncheck.Options(baseline=str(folder / "none.json")))


@pytest.mark.slow
def test_texts_of_pytest(folder: Path) -> None:
    """A test of checkpoints has the options of pytest, and an assertion in the code of a test those of Python."""
    (folder / "test_own.py").write_text(
        "from syncheck.testing import assert_in_sync\ndef test_own():\n    assert_in_sync('ddp_rank*.pth')\n"
    )
    texts = []
    for arguments in (["--syncheck=ddp_rank*.pth"], ["test_own.py"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        texts.append(done.stdout)
    checkpoints, own_code = texts
    assert (PYTEST_FLAG in checkpoints, FIELD in checkpoints) == (True, False)
    assert (PYTEST_FLAG in own_code, FIELD in own_code) == (False, True)


@pytest.mark.parametrize(
    ("call", "field", "flag"),
    [
        ({"rtol": 0.5}, "rtol and atol", "--rtol and --atol"),
        ({"close": True, "ulp": 4}, "close=True ulp=4", "--close --ulp 4"),
        ({"group_by": "("}, "group_by='('", "--group-by '('"),
        ({"baseline": "none.json"}, "create it with update_baseline", "create it with --update-baseline"),
    ],
)
def test_errors(folder: Path, call: dict[str, Any], field: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error about options names them as they were given."""
    assert folder.is_dir()
    with pytest.raises(UsageError) as caught:
        compare("ddp_rank*.pth", **call)
    assert field in str(caught.value)
    arguments = []
    for name, value in call.items():
        arguments.append(f"--{name.replace('_', '-')}")
        arguments += [] if value is True else [str(value)]
    assert main(["compare", "ddp_rank0.pth", "ddp_rank1.pth", *arguments]) == 2
    assert flag in capsys.readouterr().err


def test_errors_of_a_file_of_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option of pyproject.toml has the name of its key, also on the command line."""
    (folder / "pyproject.toml").write_text("[tool.syncheck]\ngroup_by = '('\n")
    assert main(["compare", "ddp_rank0.pth", "ddp_rank1.pth"]) == 2
    assert "pyproject.toml: group_by='(': " in capsys.readouterr().err


def test_settings_of_watch() -> None:
    """The command has the prefix of its options, which the processes that a script starts inherit."""
    assert _read_settings([]).prefix == TYPED


@pytest.mark.slow
def test_texts_of_watch(tmp_path: Path) -> None:
    """A watched run has the options of the command line, and the script's own calls have arguments of Python."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    watch = ["-m", "syncheck", "watch", "--events", "events.jsonl", "-o", "page.html", str(script)]
    folders = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *watch], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "the script caught allow='SYN999': " in done.stdout
    findings = []
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        findings += json.loads(line).get("findings", [])
    texts = [done.stderr, read_plain((tmp_path / "page.html").read_text()), *[row["fix"] for row in findings]]
    assert len(texts) > 2
    for text in texts:
        assert FLAG in text
        assert FIELD not in text
