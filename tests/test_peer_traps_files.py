"""Files on which tools of today crash, run what they hold, or say "identical": each with the right answer."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import Call, Global, network, save, save_pth, save_records, save_safetensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path


def test_damaged_safetensors_is_not_identical(tmp_path: Path) -> None:
    """A .safetensors cut short is unreadable, never structurally identical."""
    for rank in range(2):
        path = save_safetensors(tmp_path / f"rank{rank}.safetensors", network())
    path.write_bytes(path.read_bytes()[:-10])
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, len(report.unreadable)) == (2, 1)


OBJECTS = {
    # "refused" by loaders that know weights only, or loaded by running it
    "whole module": lambda w: Call(Global("torch.nn", "Linear"), (), {"_parameters": OrderedDict(weight=w)}),
    "arguments and scalars": lambda w: {
        "model": {"weight": w},
        "args": Call(Global("argparse", "Namespace"), (), {"lr": 0.1}),
        "best": np.float64(0.5),
    },
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_beside_tensors(tmp_path: Path, kind: str) -> None:
    """A whole module, a Namespace or a numpy scalar in a file is no reason to refuse it: its tensors are compared."""
    for rank in range(2):
        save_pth(tmp_path / f"same/rank{rank}.pth", OBJECTS[kind](np.ones(3, np.float32)))
        save_pth(tmp_path / f"apart/rank{rank}.pth", OBJECTS[kind](np.full(3, rank, np.float32)))
    assert syncheck.compare(tmp_path / "same").exit_code == 0
    report = syncheck.compare(tmp_path / "apart")
    assert (report.exit_code, report.groups[0].counts.different) == (1, 1)


BAD: dict[str, tuple[str, bytes, str]] = {
    # what was seen: only "Aborted!"; KeyError: 101; FormatError; "structurally identical" and 0
    "empty": (".pth", b"", "the file is empty"),
    "text": (".pth", b"hello, this is no checkpoint\n", "b'hello, this"),
    "empty safetensors": (".safetensors", b"", "the file is empty"),
    "huge header": (".safetensors", b"\xff" * 7 + b"\x7f{}", "header"),
    "torch.save, cut": (".pth", b"PK\x03\x04" + bytes(60), "cut short"),
    "safetensors, cut": (".safetensors", b"\x40" + bytes(7) + b'{"w":', "cut short"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named(tmp_path: Path, kind: str) -> None:
    """A broken file beside a good one is neither a traceback nor identical: could not tell, and why, in one line."""
    ending, data, words = BAD[kind]
    good = save(tmp_path / f"rank0{ending}", network())
    bad = tmp_path / f"rank1{ending}"
    bad.write_bytes(data)
    report = syncheck.compare(good, bad)
    assert (report.exit_code, [found.path for found in report.unreadable]) == (2, [str(bad)])
    assert words in report.unreadable[0].reason
    assert "\n" not in report.unreadable[0].reason


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("raw", [False, True], ids=["in a zip", "a bare pickle"])
def test_nothing_is_run(tmp_path: Path, raw: bool) -> None:
    """A pickle that calls os.system is never loaded by falling back to weights_only=False: it is refused, unrun."""
    good, bad = save_pth(tmp_path / "rank0.pth", network()), tmp_path / "rank1.pth"
    pickled = pickle.dumps({"w": Evil(f"touch {tmp_path}/canary")}, protocol=2)
    if raw:
        bad.write_bytes(pickled)
    else:
        save_records(bad, pickled)
    report = syncheck.compare(good, bad)
    assert (report.exit_code, len(report.unreadable)) == (2, 1)
    assert not (tmp_path / "canary").exists()
