"""`syncheck parity module:Class`: exit codes, formats and one-line errors, in one process and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from torch import nn
from syncheck.testing import ParityCase


class Mine(ParityCase):
    micro_batches = 2
    divisor = 8

    def build(self):
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def batch(self):
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def loss_terms(self, model, batch):
        return model(batch).square().sum(1)

    def parallelize(self, model, mesh):
        return model

    def backward(self, model, batch, mesh):
        ranks = 1 if mesh is None else mesh.size()
        rank = 0 if mesh is None else mesh.get_rank()
        for part in batch[rank::ranks].tensor_split(2):
            (self.loss_terms(model, part).sum() / self.divisor).backward()
        for parameter in model.parameters():
            if mesh is not None:
                torch.distributed.all_reduce(parameter.grad)


class Wrong(Mine):
    divisor = 4


class Mean(Mine):
    def loss_terms(self, model, batch):
        return model(batch).mean()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write the module of the cases to the empty folder of `cli`."""
    path = tmp_path / f"cases_of_{tmp_path.name}.py"
    path.write_text(PROGRAM)
    return path


def test_exit_codes(cli: Callable[..., Done], program: Path) -> None:
    """A right program exits with 0, a wrong one with 1, and a case that cannot be checked with 2 and one line."""
    done = cli("parity", f"{program.stem}:Mine", "--dtype", "float32")
    assert (done.code, done.err) == (0, "")
    assert "IN SYNC" in done.out
    assert cli("parity", f"{program.stem}:Mine", "-q").out == ""
    done = cli("parity", f"{program.stem}:Wrong", "--format", "json", "-o", "r.html", "-o", "r.xml", "-o", "r.md")
    document = json.loads(done.out)
    assert (done.code, document["command"], document["verdict"]) == (1, "parity", "out_of_sync")
    assert [finding["code"] for finding in document["groups"][0]["findings"]] == ["SYN441"]
    assert "accumulation (2)" in document["groups"][0]["findings"][0]["evidence"]
    assert all("SYN441" in Path(f"r.{extension}").read_text() for extension in ("html", "xml", "md"))
    assert cli("parity", f"{program.stem}:Wrong", "--exit-zero", "-q").code == 0


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("{}:Mean", "must return one loss per sample"),
        ("{}:Gone", "AttributeError"),
        ("no_such_module_of_cases:Mine", "ModuleNotFoundError"),
        ("{}", "expected module:Class"),
        ("json:JSONDecoder", "expected an instance of a subclass of ParityCase"),
    ],
)
def test_errors_are_one_line(cli: Callable[..., Done], program: Path, case: str, part: str) -> None:
    """Modules, classes and cases that cannot be used exit with 2 and one line."""
    done = cli("parity", case.format(program.stem))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert part in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("case", "code"), [("Mine", 0), ("Wrong", 1), ("Gone", 2)])
def test_torchrun(tmp_path: Path, program: Path, case: str, code: int) -> None:
    """Under torchrun, rank 0 prints the only report or error, and all ranks exit with the same code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "syncheck"]
    done = subprocess.run(
        [*command, "parity", f"{program.stem}:{case}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode != 0) == (code != 0)
    if code == 2:
        assert done.stderr.count("syncheck: error: ") == 1
        assert done.stderr.count(f"exitcode  : {code}") == 2
    else:
        assert done.stdout.count("tensors: ") == 1
        assert ("SYN441" in done.stdout) == (code == 1)
