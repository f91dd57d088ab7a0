"""syncheck answers correctly for randomly damaged checkpoints, and the harness reports every wrong answer."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.listings import find_texts, join_fields, list_fields
from support.states import pick

from fuzz import damages
from fuzz.damages import run_trials
from fuzz.fields import DATA, find_fields
from fuzz.judge import compare_guarded, judge_comparison
from fuzz.mutations import KINDS, damage_checkpoint, damaged_labels
from syncheck.errors import MalformedFile
from syncheck.readers import torch_zip
from syncheck.readers.folders import FOLDERS
from syncheck.readers.formats import READERS

ROOT = Path(__file__).resolve().parents[1]

DAMAGES = 360  # three of each kind to each format
TENSOR = ["torch.float32", [2], "bits", "numbers"]
INTACT = {"tensors": {"w": TENSOR, "v": TENSOR}, "values": {"epoch": "2", "note": "'a'"}}


def answer(code: int, tensors: tuple[tuple[str, str], ...] = (), **more: Any) -> dict[str, Any]:
    """Return an answer of syncheck. tensors: name and status of all differing tensors."""
    listing = [{"name": name, "status": status, "reason": None} for name, status in tensors]
    codes = more.pop("codes", ("SYN299",) if code else ())
    findings = [{"code": c, "severity": "error", "ranks": [1], "tensors": list_fields(tensors, 0)} for c in codes]
    values = [{"name": name} for name in more.pop("values", ())]
    out = json.dumps({"groups": [{"tensors": listing, "values": values, "findings": findings}]})
    return {"code": code, "out": "" if code == 2 else out, "err": "", "faults": [], **more}


def test_every_format_is_damaged() -> None:
    """Each format of a reader has a checkpoint to damage, and a loader of its library."""
    pytest.importorskip("torch")
    from fuzz.checkpoints import MAKERS
    from fuzz.oracle import LOADERS

    assert set(MAKERS) == set(READERS | FOLDERS), "a format without a maker in MAKERS of fuzz/checkpoints.py"
    assert set(LOADERS) == set(MAKERS), "a format without its library in LOADERS of fuzz/oracle.py"


def read(**changed: Any) -> dict[str, Any]:
    """Return the contents of the damaged file as read by the libraries. None removes a tensor or value."""
    kinds = {}
    for kind, contents in INTACT.items():
        damaged = contents | pick(changed, contents.keys() & changed.keys())
        kinds[kind] = {name: value for name, value in damaged.items() if value}
    return kinds


OTHER = ["torch.float32", [2], "others", "other numbers"]
ONE_LINE = "syncheck: error: f.pth: broken\n"


@pytest.mark.parametrize(
    ("reply", "damaged", "fault"),
    [
        (answer(0), read(), ""),
        (answer(0), read(w=OTHER), "in sync, and w differs"),
        (answer(0, (("w", "equal"),)), read(w=OTHER), ""),
        (answer(0), read(w=None), "in sync, and w differs"),
        (answer(0), read(epoch="3"), "in sync, and epoch differs"),
        (answer(0, values=("note",)), read(note="'b'"), ""),
        (answer(0), read(note="'b'"), "note differs and is not listed"),
        (answer(0), {"error": "RuntimeError"}, "in sync, and the libraries cannot read it (RuntimeError)"),
        (answer(1), {"error": "RuntimeError"}, ""),
        (answer(1, (("w", "different"),), codes=("SYN223",)), read(w=OTHER), ""),
        (answer(1, (("w", "different"),)), read(w=OTHER), "findings ['SYN299'] of damage on disk"),
        (answer(1, (("w", "different"),), codes=()), read(w=OTHER), "no finding"),
        (answer(1, (("v", "different"),), codes=("SYN223",)), read(w=OTHER), "w differs and is not reported"),
        (answer(1, (("w", "not_compared"),)), read(w=OTHER), "w differs and is not compared"),
        (answer(1, (("w", "different"),), codes=("SYN223",)), read(), "w is reported and does not differ"),
        (answer(1), read(), "out of sync, and nothing differs"),
        (answer(2, err=ONE_LINE), read(), ""),
        (answer(2), read(), "exit 2 without a message"),
        (answer(2, err=2 * ONE_LINE), read(), "stderr: "),
        (answer(2, err="syncheck: error: \x1b[2J\n"), read(), "stderr: "),
        (answer(3, err="Traceback (most recent call last):\n"), read(), "stderr: 'Traceback"),
        (answer(3), read(), "exit code 3"),
        (answer(2, err=ONE_LINE, faults=["it tried to import"]), read(), "it tried to import"),
        ({"died": "hang"}, read(), "hang"),
    ],
)
def test_wrong_answers_are_faults(reply: dict[str, Any], damaged: dict[str, Any], fault: str) -> None:
    """Each wrong answer to damaged tensor data in a zip is a fault, and correct answers are not."""
    faults = judge_comparison("torch-zip", {DATA}, reply, INTACT, damaged).faults
    assert any(fault in result for result in faults) if fault else faults == []


def test_damage_without_effect() -> None:
    """If the libraries refuse a file because of a field without effect on compared data, "in sync" is correct."""
    reply = answer(0)
    assert judge_comparison("torch-zip", {"local date"}, reply, INTACT, {"error": "RuntimeError"}).faults == []
    assert (
        judge_comparison("torch-zip", {"local date", "pickle"}, reply, INTACT, {"error": "RuntimeError"}).faults != []
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_a_file(kind: str) -> None:
    """Each kind changes bytes, is reproducible by its seed, and names the damaged fields."""
    files = {"a.json": b"0123456789" * 30, "b.json": b"abcdefghij" * 30}
    for seed in range(20):
        after = damage_checkpoint(Random(seed), kind, files, files)
        assert after != files
        assert after == damage_checkpoint(Random(seed), kind, files, files)
        assert damaged_labels(files, after) <= {"json", "behind the end", "json and all behind it"}


def test_fields_of_a_zip(tmp_path: Path) -> None:
    """Each byte of a torch.save file belongs to one field, and tensor data is exactly the records of tensors."""
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(5.0)}, tmp_path / "f.pth")
    data = (tmp_path / "f.pth").read_bytes()
    fields = find_fields("f.pth", data)
    assert list_fields(fields, "start") == [0, *list_fields(fields[:-1], "stop")]
    assert fields[-1].stop == len(data)
    assert [data[start:stop] for start, stop, label in fields if label == DATA] == [torch.arange(5.0).numpy().tobytes()]
    labels = set(list_fields(fields, "label"))
    assert {"pickle", "padding", "local crc", "directory crc", "byteorder", "unused record"} <= labels


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    """A call that hangs or kills the process is reported, and the next call is answered."""
    with damages.Worker(compare_guarded) as worker:
        worker.send("/no", "/no/such", "/no/path")
        assert worker.receive(60)["code"] == 2
        os.kill(worker.process.pid, signal.SIGSTOP)
        worker.send("/no", "/no/such", "/no/path")
        assert worker.receive(0.1) == {"died": "hang"}
        worker.send("too few arguments")
        assert worker.receive(60) == {"died": "exit 1"}
        worker.send("/no", "/no/such", "/no/path")
        answer = worker.receive(60)
        assert (answer["code"], answer["faults"]) == (2, [])


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the functions of workers in this process, so tests can inject faults."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(damages.Worker, "send", lambda self, *given: setattr(self, "result", self.function(*given)))
    monkeypatch.setattr(damages.Worker, "receive", lambda self, _: self.result)
    monkeypatch.setattr(damages, "_COMMAND_LINE_EVERY", 10**9)


@pytest.mark.usefixtures("_one_process")
def test_a_few_damages(tmp_path: Path) -> None:
    """Each kind of damage to a torch.save file and a safetensors file is answered correctly."""
    formats = ("torch-zip", "safetensors")
    trials = list(run_trials(0, range(2 * len(KINDS)), tmp_path, formats))
    assert set(list_fields(trials, "format", "kind")) == set(product(formats, KINDS))
    assert [str(trial) for trial in trials if trial.verdict.faults] == []


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
def test_injected_faults_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that drops a tensor, runs a command, or crashes gives wrong answers."""
    intact = torch_zip.read

    def drop(path: str) -> Any:
        snapshot = intact(path)
        del snapshot.tensors["3.weight"]
        return snapshot

    def execute(path: str) -> Any:
        try:
            os.system("true")
        except Exception:  # noqa: BLE001 - as the unpickler does
            raise MalformedFile(path, found="something") from None
        return intact(path)

    def crash(_: str) -> Any:
        raise KeyError("w")

    expected = {drop: "3.weight differs", execute: "it tried to os.system", crash: "exit code 3"}
    for read, fault in expected.items():
        monkeypatch.setattr(torch_zip, "read", read)
        trials = run_trials(0, range(4 * len(KINDS)), tmp_path / read.__name__, ["torch-zip"])
        faults = join_fields(list_fields(trials, "verdict"), "faults")
        assert find_texts(faults, fault), (fault, faults)


def test_security_states_the_number_of_damages() -> None:
    """SECURITY.md states the number of damages of the slow test."""
    assert f"{DAMAGES} random damages" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_damages(tmp_path: Path) -> None:
    """No damage, over all formats and kinds, has a wrong answer."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")
    from fuzz.checkpoints import MAKERS

    trials = list(run_trials(0, range(DAMAGES), tmp_path))
    assert [f"{trial}: {trial.verdict.faults}" for trial in trials if trial.verdict.faults] == []
    assert Counter(list_fields(trials, "format", "kind")) == dict.fromkeys(product(MAKERS, KINDS), 3)
    outcomes = [trial.verdict.outcome for trial in trials]
    assert min(outcomes.count(outcome) for outcome in ("out of sync", "exit 2", "in sync")) > DAMAGES // 20
