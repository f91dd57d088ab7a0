"""`syncheck report`: all runs and steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
from support.checkpoints import changed, network, save_pth
from support.listings import find_texts, list_codes, list_fields

import syncheck as library

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    Run = Callable[..., Done]

SCHEMA = json.loads((Path(library.__file__).parent / "report" / "schema.json").read_text())


def write_run(folder: Path, name: str, drift: dict[int | None, float], **block: Any) -> None:
    """Write two ranks at each step, whose running means differ by the drift; the None step is the final file."""
    last = max((step for step in drift if step is not None), default=9)
    for step, gap in drift.items():
        for rank in range(2):
            state = changed(network(), "running_mean", by=gap * rank) if gap else network()
            metadata = library.metadata(
                run=name, rank=rank, world_size=2, step=last if step is None else step, run_id=name, **block
            )
            file = f"{name}_rank{rank}.pth" if step is None else f"history/{name}/step_{step}/rank_{rank}.pth"
            save_pth(folder / file, {"model": state, "syncheck": metadata})


def test_default_folder(cli: Run, tmp_path: Path) -> None:
    """Without a path, `report` reads ckpts/, and the error for a missing folder names ckpts."""
    done = cli("report")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "ckpts" in done.err
    write_run(tmp_path / "ckpts", "ddp", {None: 0.5})
    assert cli("report").code == 1


def test_matrix_drift_and_closure(cli: Run, tmp_path: Path) -> None:
    """The report lists runs by kind, drift over steps, and how far SyncBatchNorm closed the gap."""
    write_run(tmp_path / "ckpts", "ddp", {2: 0.25, 9: 0.5, None: 0.5}, config={"sync_bn": False, "lr": 1})
    write_run(tmp_path / "ckpts", "ddp-syncbn", {None: 0.0}, config={"sync_bn": True, "lr": 1})
    done = cli("report", "--only-buffers")
    assert done.code == 1
    assert "2/2 differ" in done.out
    assert "SyncBatchNorm closed the gap: the largest drift of any running statistic was 0.5 in " in done.out
    assert "and is 0.0 in ddp-syncbn." in done.out
    drift = [line.split()[:3] for line in done.lines if line.startswith("ddp") and ".bn.running_mean" in line]
    assert ["2", "0.25"] in [row[1:] for row in drift]
    assert "fc.weight" not in done.out


def test_runs_with_other_settings_are_not_paired(cli: Run, tmp_path: Path) -> None:
    """Runs that differ in more than SyncBatchNorm are not paired."""
    write_run(tmp_path / "ckpts", "ddp", {None: 0.5}, config={"sync_bn": False, "lr": 1})
    write_run(tmp_path / "ckpts", "ddp-syncbn", {None: 0.0}, config={"sync_bn": True, "lr": 2})
    assert "SyncBatchNorm closed" not in cli("report").out


def test_growth_over_steps_is_syn202(cli: Run, tmp_path: Path) -> None:
    """Growing drift is SYN202 in the run's last step, in JSON and in text."""
    write_run(tmp_path / "ckpts", "ddp", {1: 0.1, 5: 0.2, 9: 0.4})
    done = cli("report", "--format", "json")
    document = json.loads(done.out)
    jsonschema.validate(document, SCHEMA)
    codes = [list_codes(group["findings"]) for group in document["groups"]]
    assert codes == [["SYN201"], ["SYN201"], ["SYN202"]]
    assert list_fields(document["groups"], "step") == [1, 5, 9]
    assert list_fields(document["drift"], "step") == [1, 5, 9]
    assert "SYN202" in cli("report").out


def test_constant_drift_is_not_growth(cli: Run, tmp_path: Path) -> None:
    """The one-step lag of plain DDP, constant over the steps, is SYN201."""
    write_run(tmp_path / "ckpts", "ddp", {1: 0.4, 5: 0.5, 9: 0.45})
    done = cli("report")
    assert "SYN201" in done.out
    assert "SYN202" not in done.out


def test_allow_and_exit_zero(cli: Run, tmp_path: Path) -> None:
    """--allow, --exit-zero and --only-* have the same effect on `report` as on `compare`."""
    write_run(tmp_path / "ckpts", "ddp", {None: 0.5})
    assert cli("report", "--allow", "SYN201").code == 0
    assert cli("report", "--exit-zero").code == 0
    assert cli("report", "--only-params").code == 0
    assert cli("report", "--only-optimizer").code == 2


def test_skipped_files_are_counted(cli: Run, tmp_path: Path) -> None:
    """Non-checkpoint files are skipped and counted, and checkpoints without a replica are named."""
    write_run(tmp_path / "ckpts", "ddp", {None: 0.0})
    (tmp_path / "ckpts" / "model.part").write_text("text")
    (tmp_path / "ckpts" / ".hidden.pth").write_text("text")
    save_pth(tmp_path / "ckpts" / "best.pth", {"w": np.ones(2, np.float32)})
    for command in (("report",), ("compare", "ckpts"), ("compare", "ckpts", "--format", "github")):
        done = cli(*command)
        assert done.code == 2
        assert "1 file is not a checkpoint and was skipped" in done.out
        assert "1 checkpoint has no replica and was not compared: ckpts/best.pth" in done.out


def test_compare_of_several_steps_recommends_report(cli: Run, tmp_path: Path) -> None:
    """If several steps are out of sync, `compare` recommends `syncheck report`."""
    for step in (50, 100):
        for rank in (0, 1):
            state = changed(network(), "fc.bias") if rank else network()
            save_pth(tmp_path / "c" / f"ckpt-rank{rank}-step{step}.pth", state)
    hint = "several steps of ckpt: syncheck report shows the first step that differs"
    assert hint in cli("compare", "c").lines
    assert not find_texts(cli("compare", *sorted((tmp_path / "c").glob("*50.pth"))).lines, "several steps")
