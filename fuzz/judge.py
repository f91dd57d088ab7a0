"""The property of every reader: any file is either refused in one line or read correctly.

- `check_copies` needs no reference: two copies of a file are read equally, and are never out of sync.
- `compare_guarded` compares an intact checkpoint with a damaged one, and `judge_comparison` checks the answer against
  the data that torch and safetensors read.

Both run syncheck under the guard.
"""

from __future__ import annotations

import json
import re
import traceback
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from fuzz.fields import DATA
from fuzz.guard import Guard
from syncheck import api
from syncheck.errors import CheckpointError, SyncheckError
from syncheck.layout.grouping import group_replicas
from syncheck.readers.fingerprints import fingerprint
from syncheck.report import formats, json_document
from syncheck.snapshots import Snapshot
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report

    Read = Callable[[str], Snapshot]

RANKS = ("rank0", "rank1")
# After this number of nodes, two trees count as equal.
_MAX_NODES = 100_000
ZIPPED = ("torch-zip", "dcp", "accelerate", "deepspeed", "megatron")
# Python values whose differences make replicas out of sync; other values are only listed.
_COUNTED = re.compile(
    r"(step|epoch|global_steps?|iteration)|scaler\..*|optimizer\..*(param_groups\..*|step)", re.DOTALL
)
# Compared only on request.
_IGNORED = re.compile(r"(.*\.)?(rng_state|torch_manual_seed|params\.\d+)", re.DOTALL)
# Fields that affect no compared data, according to the specifications of the formats.
_NOT_COMPARED = re.compile(
    r"(local|directory) (version|flags|time|date|crc|attributes|made-by)|local (method|size)|padding|"
    r"end comment-length|zip64 (made-by|version)|"
    r"descriptor|unused record('s header|'s entry)?|byteorder's (header|entry)|system information|header's spaces|"
    r"behind the end|"
    r"fingerprint's (min|max|mean|std|nonfinite|kind|source|stubs|notes)"
)


class Broken(AssertionError):
    """A violation of the property. kind: equal for inputs with the same fault. text: the details."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind


def check_copies(read: Read, folder: Path) -> Snapshot | CheckpointError:
    """Read and compare two copies of a checkpoint, `rank0` and `rank1` in the folder. Raises Broken.

    Each read returns a Snapshot, or raises a CheckpointError of one printable line, with equal results. Snapshots can
    be compared, shown and turned into fingerprints, and are never out of sync. The guard has nothing to report.
    """
    failure: Exception | None = None
    with Guard(str(folder)) as guard:
        try:
            outcome = _check_copies(read, folder)
        except Exception as error:  # noqa: BLE001 - the traceback needs source files, which the guard would stop
            failure = error
    faults = guard.faults()
    if guard.acts:  # the cause of all other faults
        raise Broken(faults[0][:80], "; ".join(faults))
    if isinstance(failure, Broken):
        raise failure
    if failure is not None:
        raise Broken(_location(failure), "".join(traceback.format_exception(failure))[-3000:]) from failure
    if faults:
        raise Broken(faults[0].partition(":")[0], faults[0])
    return outcome


def _check_copies(read: Read, folder: Path) -> Snapshot | CheckpointError:
    paths = [str(folder / name) for name in RANKS]
    first, again, copy = (_read(read, path) for path in (paths[0], *paths))
    if not are_equal(first, again):
        raise Broken("two reads of one file are not the same", f"{first!s:.300} / {again!s:.300}")
    if type(first) is not type(copy):
        raise Broken("a copy is read otherwise", f"{first!s:.300} / {copy!s:.300}")
    if isinstance(first, Snapshot) and isinstance(copy, Snapshot):
        _check_commands(first, copy)
    return first


def _read(read: Read, path: str) -> Snapshot | CheckpointError:
    try:
        snapshot = read(path)
    except CheckpointError as error:
        text = str(error)
        if not text.isprintable() or not text.startswith(path) or len(text) == len(path):
            raise Broken("an error that is not one printable line on the file", repr(text)[:500]) from error
        return error
    if not isinstance(snapshot, Snapshot):
        raise Broken("it returns something else than a Snapshot", repr(type(snapshot)))
    # Addresses differ between processes, and names with an address would never match.
    for name in (*snapshot.tensors, *snapshot.values, *snapshot.values.values()):
        if isinstance(name, str) and " object at 0x" in name:
            raise Broken("an address in a name or a value", name[:200])
    return snapshot


def _check_commands(first: Snapshot, copy: Snapshot) -> None:
    """Compare, show and fingerprint two snapshots with equal contents, as the commands do."""
    try:
        report = api.judge(api.Found(group_replicas([first, copy])))
        _, text = _render(report)
    except CheckpointError:
        return  # a tensor cannot be read, for example beyond the end of the file
    if report.exit_code == 1:
        raise Broken("a checkpoint is out of sync with its copy", text[-2000:])
    try:
        fingerprint(first)
    except SyncheckError:
        return


def _render(report: Report) -> tuple[str, str]:
    """Return a report as a JSON document and as text. A constant replaces the version, which is read from a file."""
    return json_document.render(report, "0"), formats.render_format("text", report)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two results of a read are equal. NaN equals NaN, and unknown objects of one class are equal."""
    stack, left = [(one, other)], _MAX_NODES
    while stack and left:
        a, b = stack.pop()
        left -= 1
        if type(a) is not type(b):
            return False
        if isinstance(a, CheckpointError):
            stack.append((str(a), str(b)))
        elif isinstance(a, dict):
            if list(map(brief, a)) != list(map(brief, b)):
                return False
            stack += zip(a.values(), b.values(), strict=True)
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            stack += zip(a, b, strict=True)
        elif is_dataclass(a):
            stack += [(getattr(a, part.name), getattr(b, part.name)) for part in fields(a)]
        elif isinstance(a, (str, bytes, bool, int, float, complex)) and a != b and (a == a or b == b):
            return False
    return True


def _location(error: BaseException) -> str:
    """Return the class of an error and the function of syncheck that raised it; equal for equal faults."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/syncheck/" in frame.filename]
    location = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{location}"


def compare_guarded(folder: str, left: str, right: str) -> dict[str, Any]:
    """Compare two checkpoints in a folder.

    Returns the exit code, the JSON document and the lines of stderr of the command line, the faults that the guard
    recorded, and time and memory. Exit code 3 is a crash.
    """
    code, out, errors, failure = 3, "", [], None
    with Guard(folder) as guard:
        try:
            report = api.compare(left, right)
            out, _ = _render(report)
            code = report.exit_code
            errors = [f"{broken.path}: {broken.reason}" for broken in report.unreadable]
        except SyncheckError as error:
            code, errors = error.exit_code, [str(error)]
        except Exception as error:  # noqa: BLE001 - as in check_copies
            failure = error
    err = "".join(f"syncheck: error: {error}\n" for error in errors)
    if failure is not None:
        err = "".join(traceback.format_exception(failure))
    return {
        "code": code, "out": out, "err": err, "faults": guard.faults(), "seconds": guard.seconds,
        "memory": guard.memory,
    }  # fmt: skip


@dataclass
class Verdict:
    """The verdict on one comparison. outcome: `out of sync`, `exit 2`, `undecided`, `in sync` or `crash`."""

    outcome: str
    faults: list[str] = field(default_factory=list)


def judge_comparison(format_name: str, labels: set[str], answer: dict[str, Any], intact: Any, damaged: Any) -> Verdict:
    """Judge the comparison of an intact checkpoint (rank 0) with a damaged one (rank 1).

    labels: of the damaged fields. answer: of `compare_guarded`. intact, damaged: of `oracle.load`.
    """
    if "died" in answer:
        return Verdict("crash", [answer["died"]])
    faults = [*answer["faults"], *_message_faults(answer["err"])]
    if answer["code"] == 2:
        if answer["err"]:
            return Verdict("exit 2", faults)
        return Verdict("undecided", faults + ([] if '"undecided"' in answer["out"] else ["exit 2 without a message"]))
    if answer["code"] not in (0, 1):
        return Verdict("crash", [*faults, f"exit code {answer['code']}"])
    in_sync = answer["code"] == 0
    (group,) = json.loads(answer["out"])["groups"]
    if unread := damaged.get("error") or damaged.get("died"):
        if in_sync and not all(map(_NOT_COMPARED.fullmatch, labels)):
            faults.append(f"in sync, and the libraries cannot read it ({unread})")
    elif in_sync:
        faults += _in_sync_faults(group, intact, damaged)
    else:
        faults += _out_of_sync_faults(group, intact, damaged) + _finding_faults(format_name, labels, group)
    return Verdict("in sync" if in_sync else "out of sync", faults)


def _message_faults(err: str) -> list[str]:
    """Return a fault unless stderr is empty or one printable error line."""
    line = err.removesuffix("\n")
    if not line or (line.isprintable() and line.startswith("syncheck: error: ")):
        return []
    return [f"stderr: {err[-300:]!r}"]


def _differences(kind: str, intact: Any, damaged: Any) -> set[str]:
    """Return the names of the tensors or values that the libraries read differently."""
    one, two = intact[kind], damaged[kind]
    names = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    return {name for name in names if not _IGNORED.fullmatch(name)}


def _in_sync_faults(group: Any, intact: Any, damaged: Any) -> list[str]:
    """Return faults of the verdict in sync: tensors that differ, and values that count or are not listed."""
    equal = {tensor["name"] for tensor in group["tensors"] if tensor["status"] == "equal"}
    faults = [f"in sync, and {name} differs" for name in sorted(_differences("tensors", intact, damaged) - equal)]
    values = {name for name in _differences("values", intact, damaged) if not name.startswith("syncheck")}
    # A value that one file lacks is listed and does not count, because formats store different values.
    in_both = values & damaged["values"].keys() & intact["values"].keys()
    faults += [f"in sync, and {name} differs" for name in sorted(in_both) if _COUNTED.fullmatch(name)]
    listed = {value["name"] for value in group["values"]}
    listed_lists = {re.sub(r"\.\d+$", "", name) for name in listed}
    hidden = {name for name in values - listed if re.sub(r"\.\d+$", "", name) not in listed_lists}
    return faults + [f"{name} differs and is not listed" for name in sorted(hidden) if damaged["values"].get(name)]


def _out_of_sync_faults(group: Any, intact: Any, damaged: Any) -> list[str]:
    """Return faults of the verdict out of sync: exactly the tensors that differ must be reported."""
    tensors, values = (_differences(kind, intact, damaged) for kind in ("tensors", "values"))
    reported = {
        tensor["name"]
        for tensor in group["tensors"]
        if tensor["status"] in ("different", "equal") or tensor.get("reason") in ("missing", "shape", "dtype")
    }
    skipped = {tensor["name"] for tensor in group["tensors"] if tensor["status"] == "not_compared"}
    if tensors - intact["tensors"].keys():  # swapped files: the oracle may read the new names from another file
        return [] if reported else ["out of sync, and no tensor is reported"]
    faults = [f"{name} differs and is not reported" for name in sorted(tensors - reported - skipped)]
    faults += [f"{name} differs and is not compared" for name in sorted((tensors & skipped) - reported)]
    # Values affect names: syncheck takes the names of optimizer state from the metadata, the oracle does not.
    if not values:
        faults += [f"{name} is reported and does not differ" for name in sorted(reported - tensors)]
    if not tensors and not reported and not group["values"]:
        faults.append("out of sync, and nothing differs")
    return faults


def _finding_faults(format_name: str, labels: set[str], group: Any) -> list[str]:
    """Return faults of the findings: if only tensor data in a zip was damaged, the only finding is SYN223 on rank 1."""
    findings = {finding["code"]: finding for finding in group["findings"]}
    severities = {finding["severity"] for finding in findings.values()}
    faults = [] if severities - {"info"} else ["no finding"]
    if format_name in ("torch-legacy", "safetensors", "fingerprint") and "SYN223" in findings:
        faults.append("SYN223 without checksums")
    if format_name in ZIPPED and labels == {DATA}:
        different = {tensor["name"] for tensor in group["tensors"] if tensor["status"] == "different"}
        corruption = findings.get("SYN223")
        if (
            corruption is None
            or set(corruption["tensors"]) != different
            or corruption["ranks"] != [1]
            or len(findings) != 1
        ):
            faults.append(f"findings {sorted(findings)} of damage on disk")
    return faults
