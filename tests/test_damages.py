"""Random damages to real checkpoints: the program that makes them sees a wrong answer, and finds none."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from syncheck.readers import READERS
from syncheck.readers.folders import FOLDERS

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # what is under fixtures/ is not installed
    sys.path.insert(0, str(ROOT))

from fixtures.damages import DAMAGES  # noqa: E402
from fixtures.damages.judge import MOST_MEMORY, judged  # noqa: E402
from fixtures.damages.kinds import KINDS, damage, touched  # noqa: E402
from fixtures.damages.stretches import DATA, stretches  # noqa: E402
from fixtures.damages.worker import Worker, _compare, _load  # noqa: E402

TENSOR = ["torch.float32", [2], "bits", "numbers"]
INTACT = {"tensors": {"w": TENSOR, "v": TENSOR}, "values": {"epoch": "2", "note": "'a'"}}


def answer(code: int, tensors: tuple[tuple[str, str], ...] = (), **more: Any) -> dict[str, Any]:
    """What the command line said. tensors: name and status of those that are not identical."""
    listed = [{"name": name, "status": status, "reason": None} for name, status in tensors]
    codes = more.pop("codes", ("SYN299",) if code else ())
    findings = [{"code": c, "severity": "error", "ranks": [1], "tensors": [n for n, _ in tensors]} for c in codes]
    values = [{"name": name} for name in more.pop("values", ())]
    out = json.dumps({"groups": [{"tensors": listed, "values": values, "findings": findings}]})
    return {"code": code, "out": "" if code == 2 else out, "err": "", "memory": 0, **more}


def test_every_format_is_damaged() -> None:
    """No reader's format is left out, neither of what is made to be damaged nor of what its own library reads."""
    pytest.importorskip("torch")
    from fixtures.damages.oracle import _LOADERS
    from fixtures.damages.subjects import MAKERS

    assert set(MAKERS) == set(READERS | FOLDERS), "a reader without one in MAKERS of fixtures/damages/subjects.py"
    assert set(_LOADERS) == set(MAKERS), "a format without its library in _LOADERS of fixtures/damages/oracle.py"


def read(**changed: Any) -> dict[str, Any]:
    """What the libraries read from the damaged file: tensors and values by name, None for one that is gone."""
    kinds = {kind: {**INTACT[kind], **{k: v for k, v in changed.items() if k in INTACT[kind]}} for kind in INTACT}
    return {kind: {name: value for name, value in found.items() if value} for kind, found in kinds.items()}


OTHER = ["torch.float32", [2], "others", "other numbers"]
ONE_LINE = "syncheck: error: f.pth: broken\n"


@pytest.mark.parametrize(
    ("said", "damaged", "fault"),
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
        (answer(1, (("v", "different"),), codes=("SYN223",)), read(w=OTHER), "w differs and is not named"),
        (answer(1, (("w", "not_compared"),)), read(w=OTHER), "w differs and is not compared"),
        (answer(1, (("w", "different"),), codes=("SYN223",)), read(), "w is named and does not differ"),
        (answer(1), read(), "out of sync, and nothing differs"),
        (answer(2, err=ONE_LINE), read(), ""),
        (answer(2), read(), "exit 2 without a word"),
        (answer(2, err=2 * ONE_LINE), read(), "stderr: "),
        (answer(2, err="syncheck: error: \x1b[2J\n"), read(), "stderr: "),
        (answer(3, err="Traceback (most recent call last):\n"), read(), "Traceback"),
        (answer(3), read(), "exit code 3"),
        (answer(2, err=ONE_LINE, memory=MOST_MEMORY + 1), read(), "1024 MiB of memory"),
        ({"died": "hang"}, read(), "hang"),
    ],
)
def test_a_wrong_answer_is_seen(said: dict[str, Any], damaged: dict[str, Any], fault: str) -> None:
    """Of damage to a tensor in a zip: each way to answer wrongly is a fault, and the right answers are none."""
    faults = judged("torch-zip", {DATA}, said, INTACT, damaged).faults
    assert any(fault in found for found in faults) if fault else faults == []


def test_damage_that_nothing_depends_on() -> None:
    """Where the libraries refuse a file for a field that nothing compared depends on, in sync is right."""
    said = answer(0)
    assert judged("torch-zip", {"local date"}, said, INTACT, {"error": "RuntimeError"}).faults == []
    assert judged("torch-zip", {"local date", "pickle"}, said, INTACT, {"error": "RuntimeError"}).faults != []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_something(kind: str) -> None:
    """Each damage changes the bytes, is the same again for the same random stream, and says what it fell on."""
    files = {"a.json": b"0123456789" * 30, "b.json": b"abcdefghij" * 30}
    for seed in range(20):
        after = damage(Random(seed), kind, files, files)
        assert after != files
        assert after == damage(Random(seed), kind, files, files)
        assert touched(files, after) <= {"json", "behind the end", "json and all behind it"}


def test_stretches_name_what_bytes_are_for(tmp_path: Path) -> None:
    """Each byte of a torch.save file has one use: tensors' bytes are those of its records, and all else has a name."""
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(5.0)}, tmp_path / "f.pth")
    data = (tmp_path / "f.pth").read_bytes()
    parts = stretches("f.pth", data)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == len(data)
    assert [data[p.start : p.stop] for p in parts if p.label == DATA] == [torch.arange(5.0).numpy().tobytes()]
    assert {"pickle", "padding", "local crc", "directory crc", "byteorder", "unused record"} <= {p.label for p in parts}


def test_a_worker_that_hangs_or_dies_is_replaced() -> None:
    """A question without an answer in time, or one that ends the process, is told as that; the next is answered."""
    with Worker("syncheck") as worker:
        assert worker.ask("no", "such", seconds=0) == {"died": "hang"}
        assert worker.ask("one word only", seconds=20) == {"died": "exit 1"}
        assert worker.ask("no", "such", seconds=20)["code"] == 2


def test_a_few_damages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of damage to a torch.save file and a safetensors file is answered rightly."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")
    from fixtures.damages import run

    def ask(self: Worker, *words: str, seconds: float) -> dict[str, Any]:
        return (_compare if self.role == "syncheck" else _load)(*words) | {"memory": 0}

    monkeypatch.setattr(Worker, "ask", ask)  # in this process, which has torch already
    monkeypatch.setattr(run, "EVERY", 10**9)
    done = list(run.trials(0, 22, tmp_path, formats=("torch-zip", "safetensors")))
    assert {(trial.format, trial.kind) for trial in done} == set(product(("torch-zip", "safetensors"), KINDS))
    assert [trial.name for trial in done if trial.answer.faults] == []


def test_readme_has_the_number() -> None:
    """README states as many damages as the program makes, and the slow test, unless told otherwise."""
    assert f"{DAMAGES:,} random damages" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_damages(tmp_path: Path) -> None:
    """Of README's number of damages, spread over all formats and kinds, none is answered wrongly."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")
    from fixtures.damages.run import trials

    done = list(trials(0, DAMAGES, tmp_path))
    assert [f"{trial.name}: {trial.answer.faults}" for trial in done if trial.answer.faults] == []
    outcomes = [trial.answer.outcome for trial in done]
    assert len(outcomes) == DAMAGES
    assert min(outcomes.count(outcome) for outcome in ("out of sync", "exit 2", "in sync")) > DAMAGES // 20
