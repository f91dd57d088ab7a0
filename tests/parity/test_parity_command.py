"""`syncheck parity module:Class`: exit codes, formats and one-line errors, under torchrun."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from support.programs import Programs
from support.programs_of_ranks import TORCHRUN
from support.started import CLONE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

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


class FailsOnRank1(Mine):
    def backward(self, model, batch, mesh):
        if mesh.get_rank() == 1:
            raise ValueError("no data")
        super().backward(model, batch, mesh)


class SkipsOnRank1(Mine):
    def backward(self, model, batch, mesh):
        if mesh.get_rank() == 0:
            torch.distributed.barrier()
        super().backward(model, batch, mesh)


class Exits(Mine):
    def backward(self, model, batch, mesh):
        raise SystemExit(0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write the module of the cases to the empty folder of `cli`."""
    path = tmp_path / f"cases_of_{tmp_path.name}.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("{}:Gone", "AttributeError"),
        ("no_such_module_of_cases:Mine", "ModuleNotFoundError"),
        ("{}", "expected module:Class"),
        ("{}.py:Mine", "did you mean {}:Mine?"),
    ],
)
def test_errors_are_one_line(cli: Callable[..., Done], program: Path, case: str, part: str) -> None:
    """Modules, paths and classes that cannot be used exit with 2 and one line."""
    with contextlib.chdir(program.parent):
        done = cli("parity", case.format(program.stem))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert part.format(program.stem) in done.err


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in two processes."""
    return launch(folder, "-m", "syncheck", "parity", *arguments)


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes."""
    programs = Programs(folder)
    try:
        return programs.run(
            *TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments, timeout=110, PYTHONPATH=CLONE
        )
    finally:
        programs.kill()


@pytest.mark.slow
def test_formats(tmp_path: Path, program: Path) -> None:
    """A wrong program exits with 1, and all formats have the finding."""
    done = start(
        tmp_path, f"{program.stem}:Wrong", "--format", "json", "-o", "r.html", "-o", "r.xml", "-o", "r.md"
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (document["command"], document["verdict"]) == ("parity", "out_of_sync")
    assert [finding["code"] for finding in document["groups"][0]["findings"]] == ["SYN441"]
    assert "accumulation (2)" in document["groups"][0]["findings"][0]["evidence"]
    assert all("SYN441" in (tmp_path / f"r.{extension}").read_text() for extension in ("html", "xml", "md"))
    assert done.stderr.count("exitcode  : 1") == 2


@pytest.mark.slow
def test_allowed(tmp_path: Path, program: Path) -> None:
    """`--allow` accepts a finding, and an unknown code is an error."""
    done = start(tmp_path, f"{program.stem}:Wrong", "--allow", "SYN441", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "in_sync")
    done = start(tmp_path, f"{program.stem}:Wrong", "--allow", "SYN499")
    assert done.stderr.count("syncheck: error: --allow SYN499: no such code of parity") == 1


@pytest.mark.slow
def test_undecided(tmp_path: Path, program: Path) -> None:
    """A right program is undecided in bfloat16, and all processes exit with 2."""
    done = start(tmp_path, f"{program.stem}:Mine", "--dtype", "bfloat16")
    assert "COULD NOT TELL: bfloat16 cannot tell a right gradient" in done.stdout
    assert done.stderr.count("exitcode  : 2") == 2


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all(tmp_path: Path, program: Path) -> None:
    """If one rank raises before a collective of the program, its error is printed, and no process hangs."""
    done = start(tmp_path, f"{program.stem}:FailsOnRank1")
    assert "rank 1: FailsOnRank1.backward (" in done.stderr
    assert "ValueError: no data; the other ranks have ended or wait in a collective of the program" in done.stderr
    assert done.returncode != 0


@pytest.mark.slow
def test_a_collective_that_a_rank_skips(tmp_path: Path, program: Path) -> None:
    """Before the process group gives up, the rank that waits has written once where it is."""
    (tmp_path / "impatient.py").write_text(
        "import sys\n"
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "from syncheck.parity import phases\n"
        f"from {program.stem} import SkipsOnRank1\n"
        "from syncheck.parity.check import check_parity\n"
        "phases._PATIENCE = 1.0\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=6))\n"
        "check_parity(SkipsOnRank1())\n"
    )
    done = launch(tmp_path, "impatient.py")
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("syncheck: rank 0 has been in ")]
    number = 1 + PROGRAM.splitlines().index("            torch.distributed.barrier()")
    assert f"in SkipsOnRank1.backward ({program.name}:{number}) for 1 s" in line


@pytest.mark.slow
def test_exit_of_the_user(tmp_path: Path, program: Path) -> None:
    """sys.exit(0) in the program is an error."""
    done = start(tmp_path, f"{program.stem}:Exits")
    assert "Exits.backward (" in done.stderr
    assert "called sys.exit(0)" in done.stderr
    assert done.returncode != 0


def test_one_process_is_refused(cli: Callable[..., Done], program: Path) -> None:
    """Without torchrun nothing parallel is checked: exit 2, with the command to start."""
    done = cli("parity", f"{program.stem}:Mine")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"start the case with torchrun --nproc-per-node 2 -m syncheck parity {program.stem}:Mine" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("case", "code"), [("Mine", 0), ("Wrong", 1), ("Gone", 2)])
def test_torchrun(tmp_path: Path, program: Path, case: str, code: int) -> None:
    """Under torchrun, rank 0 prints the only report or error, and all ranks exit with the same code."""
    done = start(tmp_path, f"{program.stem}:{case}")
    assert (done.returncode != 0) == (code != 0)
    if code == 2:
        assert done.stderr.count("syncheck: error: ") == 1
        assert done.stderr.count(f"exitcode  : {code}") == 2
    else:
        assert done.stdout.count("tensors: ") == 1
        assert ("SYN441" in done.stdout) == (code == 1)
