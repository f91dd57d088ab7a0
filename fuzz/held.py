"""The property that every reader must have, whatever bytes it is given."""

from __future__ import annotations

import resource
import time
import traceback
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from fuzz.guard import Guard
from syncheck import api
from syncheck.errors import CheckpointError, SyncheckError, brief
from syncheck.fingerprint import fingerprint
from syncheck.layout.grouping import group_replicas
from syncheck.report import files, json_document
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Read = Callable[[str], Snapshot]

# Of one input, which has some kB: processor time in seconds, and memory in bytes.
MOST_SECONDS = 20.0
MOST_MEMORY = 256 << 20
# Nodes of two trees that are looked at before they are taken for equal.
_MOST_NODES = 100_000


class Broken(AssertionError):
    """The property does not hold. kind: what tells this fault from another; the text is the whole story."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind


def hold(read: Read, folder: Path) -> Snapshot | CheckpointError:
    """Read two copies of one checkpoint and compare them. Raises Broken where anything else than this happens.

    Reading returns a Snapshot or raises a CheckpointError of one printable line, twice the same. What was returned can
    be compared with its copy, shown, and made into a fingerprint, and is never out of sync with it. Nothing is
    imported, run or written, and nothing is read outside of the folder. Time and memory have bounds.
    folder: with the copies `rank0` and `rank1`, files or folders; nothing else of this machine may be read.
    """
    memory, started = _peak(), time.process_time()
    failed: Broken | Exception | None = None
    with Guard(str(folder)) as guard:
        try:
            found = _outcome(read, folder)
        except Exception as error:  # noqa: BLE001 - looked at when files of source may be read again
            failed = error
    if guard.acts:  # the cause of whatever else is wrong
        raise Broken(f"it tried to {guard.acts[0]}"[:80], "; ".join(guard.acts))
    if failed is not None:
        raise failed if isinstance(failed, Broken) else Broken(place_of(failed), _trace(failed)) from failed
    if (seconds := time.process_time() - started) > MOST_SECONDS:
        raise Broken("it takes too long", f"{seconds:.1f} s")
    if (more := _peak() - memory) > MOST_MEMORY:
        raise Broken("it takes too much memory", f"{more >> 20} MiB")
    return found


def _outcome(read: Read, folder: Path) -> Snapshot | CheckpointError:
    paths = [str(folder / name) for name in ("rank0", "rank1")]
    first, again, copy = (_read(read, path) for path in (paths[0], *paths))
    if not same(first, again):
        raise Broken("two reads of one file are not the same", f"{_text(first)} / {_text(again)}")
    if type(first) is not type(copy):
        raise Broken("a copy is read otherwise", f"{_text(first)} / {_text(copy)}")
    if isinstance(first, Snapshot) and isinstance(copy, Snapshot):
        _use(first, copy)
    return first


def _read(read: Read, path: str) -> Snapshot | CheckpointError:
    """Read once; the only error is one that says the file, in a line."""
    try:
        snapshot = read(path)
    except CheckpointError as error:
        text = str(error)
        if not text.isprintable() or not text.startswith(path) or len(text) == len(path):
            raise Broken("an error that is not one printable line on the file", repr(text)[:500]) from error
        return error
    if not isinstance(snapshot, Snapshot):
        raise Broken("it returns something else than a Snapshot", repr(type(snapshot)))
    # An address is another one in each process: replicas would seem to have tensors of different names.
    for name in (*snapshot.tensors, *snapshot.values, *snapshot.values.values()):
        if isinstance(name, str) and " object at 0x" in name:
            raise Broken("an address in a name or a value", name[:200])
    return snapshot


def _use(first: Snapshot, copy: Snapshot) -> None:
    """Do with two equal snapshots what the commands do; they must not differ, and no step may fail."""
    try:
        report = api.judge(api.GroupedCheckpoints(group_replicas([first, copy])))
        text = json_document.render(report, "0") + files.drawn("text", report)
    except CheckpointError:
        return  # of a single tensor, such as one that lies beyond the file's end
    if report.exit_code == 1:
        raise Broken("a checkpoint is out of sync with its copy", text[-2000:])
    try:
        fingerprint(first)
    except SyncheckError:
        return


def same(one: Any, other: Any) -> bool:
    """Whether two answers are the same; NaN is the same as NaN, and an object of no known class as one of its class."""
    stack, left = [(one, other)], _MOST_NODES
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
            stack += [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
        elif isinstance(a, (str, bytes, bool, int, float, complex)) and a != b and (a == a or b == b):
            return False
    return True


def place_of(error: BaseException) -> str:
    """Name the kind of an error and where in syncheck it came from; equal for equal faults."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/syncheck/" in frame.filename]
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3000:]


def _text(outcome: Snapshot | CheckpointError) -> str:
    return str(outcome)[:300] if isinstance(outcome, CheckpointError) else f"{len(outcome.tensors)} tensors"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
