"""Files with which other tools crash, execute code, or report "identical", each with the correct result."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import Call, Global, network, save, save_pth, save_records, save_safetensors
from support.listings import list_fields

import syncheck

if TYPE_CHECKING:
    from pathlib import Path


def test_damaged_safetensors_is_not_identical(tmp_path: Path) -> None:
    """A truncated .safetensors file is unreadable, not identical."""
    for rank in range(2):
        path = save_safetensors(tmp_path / f"rank{rank}.safetensors", network())
    path.write_bytes(path.read_bytes()[:-10])
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, len(report.unreadable)) == (2, 1)


OBJECTS = {
    # "refused" by weights-only loaders, or loaded by executing the file
    "whole module": lambda w: Call(Global("torch.nn", "Linear"), (), {"_parameters": OrderedDict(weight=w)}),
    "arguments and scalars": lambda w: {
        "model": {"weight": w},
        "args": Call(Global("argparse", "Namespace"), (), {"lr": 0.1}),
        "best": np.float64(0.5),
    },
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_beside_tensors(tmp_path: Path, kind: str) -> None:
    """Files with a whole module, a Namespace or a numpy scalar are read, and their tensors are compared."""
    for rank in range(2):
        save_pth(tmp_path / f"same/rank{rank}.pth", OBJECTS[kind](np.ones(3, np.float32)))
        save_pth(tmp_path / f"apart/rank{rank}.pth", OBJECTS[kind](np.full(3, rank, np.float32)))
    assert syncheck.compare(tmp_path / "same").exit_code == 0
    report = syncheck.compare(tmp_path / "apart")
    assert (report.exit_code, report.groups[0].counts.different) == (1, 1)


BAD: dict[str, tuple[str, bytes, str]] = {
    # results of other tools: only "Aborted!"; KeyError: 101; FormatError; "structurally identical" and 0
    "empty": (".pth", b"", "the file is empty"),
    "text": (".pth", b"hello, this is no checkpoint\n", "b'hello, this"),
    "empty safetensors": (".safetensors", b"", "the file is empty"),
    "huge header": (".safetensors", b"\xff" * 7 + b"\x7f{}", "header"),
    "torch.save, cut": (".pth", b"PK\x03\x04" + bytes(60), "cut short"),
    "safetensors, cut": (".safetensors", b"\x40" + bytes(7) + b'{"w":', "cut short"),
}


@pytest.mark.parametrize("kind", BAD)
def test_broken_files_are_reported(tmp_path: Path, kind: str) -> None:
    """A broken file beside a valid file gives exit code 2 and a one-line reason."""
    ending, data, words = BAD[kind]
    good = save(tmp_path / f"rank0{ending}", network())
    bad = tmp_path / f"rank1{ending}"
    bad.write_bytes(data)
    report = syncheck.compare(good, bad)
    assert (report.exit_code, list_fields(report.unreadable, "path")) == (2, [str(bad)])
    assert words in report.unreadable[0].reason
    assert "\n" not in report.unreadable[0].reason


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("raw", [False, True], ids=["in a zip", "a bare pickle"])
def test_nothing_is_executed(tmp_path: Path, raw: bool) -> None:
    """A pickle that calls os.system is refused, and nothing is executed."""
    good, bad = save_pth(tmp_path / "rank0.pth", network()), tmp_path / "rank1.pth"
    pickled = pickle.dumps({"w": Evil(f"touch {tmp_path}/canary")}, protocol=2)
    if raw:
        bad.write_bytes(pickled)
    else:
        save_records(bad, pickled)
    report = syncheck.compare(good, bad)
    assert (report.exit_code, len(report.unreadable)) == (2, 1)
    assert not (tmp_path / "canary").exists()
