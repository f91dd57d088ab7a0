"""A copy of train/ runs alone, without the rest of the clone and without syncheck."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from train.errors import UserError
from train.settings import Settings, check

if TYPE_CHECKING:
    from support.programs import Programs

TRAIN = Path(__file__).resolve().parents[2] / "train"


def test_one_module_imports_syncheck() -> None:
    """Only train/optional.py imports syncheck; annotations import it for type checkers."""
    importing = {}
    for path in TRAIN.rglob("*.py"):
        if lines := re.findall(r"^ *(?:from|import) syncheck\b", path.read_text(), re.MULTILINE):
            importing[path.name] = len(lines)
    assert importing == {"optional.py": 2, "replicas.py": 1}
    assert "if TYPE_CHECKING:" in (TRAIN / "evaluate" / "replicas.py").read_text().partition("    from syncheck")[0]


def test_options_that_need_syncheck_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without syncheck, --monitor and --fault are errors before the first step."""
    monkeypatch.setattr("train.settings.MISSING", "syncheck cannot be imported (absent)")
    for settings, option in ((Settings(monitor=1), "--monitor"), (Settings(fault="bit-flip-weight"), "--fault")):
        with pytest.raises(UserError, match=rf"^{option}: syncheck cannot be imported \(absent\)"):
            check(settings, 2)


@pytest.mark.slow
def test_a_copy_trains_saves_and_resumes(tmp_path: Path, programs: Programs) -> None:
    """The copy trains two ranks on digits, reports the missing syncheck once, and resumes its state."""
    shutil.copytree(TRAIN, tmp_path / "train", ignore=shutil.ignore_patterns("__pycache__"))
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "syncheck.py").write_text("raise ModuleNotFoundError(\"No module named 'syncheck'\", name='syncheck')\n")
    command = (sys.executable, "train/run.py", "--spawn", 2, "--save-per-rank", "--width", 4, "--checkpoint-every", 2)
    variables = {"PYTHONPATH": str(blocker)}
    for steps, more in ((2, ()), (4, ("--resume",))):
        run = programs.run(*command, "--max-steps", steps, *more, timeout=120, **variables)
        assert run.returncode == 0, run.stderr
        assert len(re.findall("syncheck.*no metadata blocks", run.stderr)) == 1
    assert "resumed ddp at step 2/4" in run.stderr
    file = torch.load(tmp_path / "ckpts" / "ddp_rank1.pth", weights_only=True)
    assert (file["step"], "syncheck" in file) == (4, False)
