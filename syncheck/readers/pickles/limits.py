"""Limit the memory and time of a pickle, by its opcodes before loading and by its keys before they are hashed.

- Memory: Python allocates its memo up to the largest index (ten bytes can request 32 GB, python/cpython#115952), and
  the stated length of byte strings. `scan` checks both, and counts objects.
- Time: Python hashes a tuple with all its nested contents each time, and dictionaries take quadratic time for keys with
  equal hashes. The rare files with keys that are tuples, sets or long integers are read with Python's own unpickler,
  which is twenty times slower, and `Keys` checks each key.

Opcodes: pickletools.py of Python 3.11 to 3.14, protocols 0 to 5.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.readers import untrusted
from syncheck.snapshots import MOST_ELEMENTS
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Iterable
    from mmap import mmap

# Limits: nested parts of one key; parts of all keys, plus four per byte of the file; different keys with one hash.
MOST_PARTS = 10_000
_MOST_ALL = 1_000_000
_MOST_OF_ONE_HASH = 100
# Memo indexes below this limit cost a few MB and are not checked.
_FEW = 1 << 20
_ATOM = rb"(?:[N\x88\x89]|K.|M..|J.{4}|G.{8})"
_STORE = rb"(?:q.|r..[\x00-\x0f]\x00|\x94|p\d{1,6}\n)?"
# Atoms without the numbers that share a hash: -1 and -2 do, and 1.0 and 2.0**61.
_COUNT = rb"(?:[N\x88\x89]|K.|M..|J.{3}[\x00-\x7f])"
# Harmless tuples: of a few numbers, or consumed at once by a call, which checks its arguments.
_TUPLE = rb"\((?:COUNT{0,64}t)?|ATOM(?:ATOM(?:ATOM+[\x85-\x87]?|[\x85\x86])?|\x85)?|[t\x85-\x87]STORE[QRb\x81]"
_TUPLE = _TUPLE.replace(b"ATOM", _ATOM).replace(b"COUNT", _COUNT).replace(b"STORE", _STORE)
# A run of opcodes between two strings, with arguments of fixed size or up to the end of the line. It ends at memo
# indexes of _FEW or more, other tuples, long integers and STOP.
# Not possessive: Python before 3.11.5 matches a possessive repeat of such alternatives wrongly.
_RUN = re.compile(
    rb"(?:" + _TUPLE + rb"|[)012N}\]esuabldoQR\x81\x88\x89\x8f\x90"
    rb"\x92-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|r..[\x00-\x0f]\x00"
    rb"|[G\x95].{8}|[FSVPg][^\n]*\n|[IL][^\n]{0,20}\n|p\d{1,6}\n|[ci][^\n]*\n[^\n]*\n){0,1000}",
    re.DOTALL,
)
# Opcodes of strings, bytes and integers that start with their length: the number of bytes of this length.
_COUNTED = dict.fromkeys(b"UC\x8a\x8c", 1) | dict.fromkeys(b"TXB\x8b", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)
# Integers: different integers of more than 64 bits can have the same hash.
_LONG = b"\x8a\x8bIL"
_BYTES = b"B\x8e\x96"
# Opcodes that create keys that may take long to hash: tuples, frozensets, and integers in decimal digits.
_SLOW = b"t\x85\x86\x87\x91IL"
# Opcodes that store an object under a memo index: in 4 bytes, or in decimal digits.
_PUT = b"rp"
_PUT_INDEX = 4
# One opcode of a run. The first byte is kept to count objects.
_OPCODE = (
    rb"(?s)(.)(?:(?<=[Khq\x80\x82]).|(?<=[M\x83])..|(?<=[Jjr\x84]).{4}|(?<=[G\x95]).{8}|(?<=[FSVPgpIL])[^\n]*\n"
    rb"|(?<=[ci])[^\n]*\n[^\n]*\n)?"
)
# Free opcodes create nothing, or objects that Python creates only once, like None and small integers. Light opcodes
# are all other opcodes except calls, sets and dictionary items, which take some hundred bytes and count as _HEAVY
# check_nesting opcodes, as do strings.
_FREE = b"()012N.abceghjpqrK\x80\x82\x83\x84\x88\x89\x90\x93\x94\x95\x97\x98"
_LIGHT = bytes(set(range(256)) - set(b"QRdiosu\x81\x8f\x91\x92"))
_HEAVY = 4
# Bytes of opcodes without strings that are not counted, about 50,000 tensors. In the worst case they take 1 GB.
_FEW_OPCODES = 1 << 22


class Scan(NamedTuple):
    """The result of a scan."""

    fault: str = ""
    """The reason to refuse the pickle, or empty."""
    slow: bool = False
    """Whether keys must be checked."""
    size: int = 0
    """Bytes from the start of the pickle to the end of the data."""


def _count_objects(run: bytes) -> int:
    """Estimate the memory of a run of opcodes, in hundreds of bytes."""
    codes = re.sub(_OPCODE, rb"\1", run)
    return len(codes.translate(None, _FREE)) + (_HEAVY - 1) * len(codes.translate(None, _LIGHT))


def scan(data: bytes | mmap, start: int = 0, most: int | None = None) -> Scan:
    """Check the opcodes of the pickle at `start` without loading it.

    The scan stops at an invalid opcode or the end of the data; the unpickler refuses both.
    most: limit of objects in place of `MOST_OBJECTS`.
    """
    most = untrusted.MOST_OBJECTS if most is None else most
    position, end = start, len(data)
    slow = False
    bytes_in_runs = objects = 0
    while position < end and objects <= most:
        run_start = position
        run = _RUN.match(data, run_start)
        # Because a run may be empty.
        assert run is not None
        position = run.end()
        bytes_in_runs += position - run_start
        if bytes_in_runs > _FEW_OPCODES:
            objects += _count_objects(data[run_start:position])
        if position == end:
            break
        code = data[position]
        if code in _COUNTED:
            width = _COUNTED[code]
            size = int.from_bytes(data[position + 1 : position + 1 + width], "little")
            position += 1 + width + size
            objects += _HEAVY
            if size > 8 and code in _LONG:
                slow = True
            # Python allocates bytes before it reads them.
            if position > end and size > _FEW and code in _BYTES:
                return Scan(f"it asks for {size} bytes, more than it has")
        elif position > run_start:  # a run may have ended at its maximum length
            continue
        elif code in _SLOW:
            slow = True
            objects += 1
            position = _skip_slow(data, position)
        elif code in _PUT:
            fault = _find_memo_fault(data, position, start)
            if fault:
                return Scan(fault)
            position += 1 + _PUT_INDEX
        else:  # STOP, or no opcode
            break

    fault = f"it has more than {most} objects" if objects > most else ""
    return Scan(fault, slow, end - start)


def _skip_slow(data: bytes | mmap, position: int) -> int:
    """Return the end of an opcode of _SLOW: of its line, if it is an integer in decimal digits."""
    if data[position] in _LONG:
        return data.find(b"\n", position) + 1 or len(data)
    return position + 1


def _find_memo_fault(data: bytes | mmap, position: int, start: int) -> str:
    """Return why a memo index is refused, or an empty text. position: of the opcode that stores an object."""
    if data[position] == ord("p"):
        line = bytes(data[position + 1 : position + 20])
        return f"it stores object {line!r}, beyond six digits"

    index = int.from_bytes(data[position + 1 : position + 1 + _PUT_INDEX], "little")
    if index > max(_FEW, position - start):
        return f"it stores object {index} after {position - start} bytes"
    return ""


def check_nesting(*arguments: Any) -> None:
    """Check the arguments of a call. Raises UnpicklingError for tuples with more than MOST_PARTS nested parts."""
    for argument in arguments:
        if isinstance(argument, (tuple, frozenset)):
            # Usually a few numbers.
            for part in argument:
                if isinstance(part, (tuple, frozenset)):
                    _count_parts(argument)
                    break


def _count_parts(key: tuple[Any, ...] | frozenset[Any]) -> int:
    """Count the parts that Python hashes for a key. Raises UnpicklingError above the limit."""
    count = 1
    waiting = [key]
    while waiting:
        parts = waiting.pop()
        count += len(parts)
        require(count <= MOST_PARTS, f"keys unfold to more than {MOST_PARTS} parts")
        waiting += [part for part in parts if isinstance(part, (tuple, frozenset))]
    return count


class Keys:
    """Checks the keys of a pickle before Python hashes them. size: bytes of the pickle."""

    def __init__(self, size: int) -> None:
        self._remaining_parts = _MOST_ALL + 4 * size
        self._checked: set[Any] = set()
        self._hashes: Counter[int] = Counter()

    def check(self, keys: Iterable[Any]) -> None:
        """Raise UnpicklingError for keys that take too long to hash, or too many keys with the same hash."""
        for key in keys:
            if isinstance(key, (tuple, frozenset)):
                self._remaining_parts -= _count_parts(key)
            elif type(key) is not int or key.bit_length() <= 64:
                continue
            require(self._remaining_parts >= 0, "its keys unfold to too many parts")
            if key not in self._checked:
                self._checked.add(key)
                self._hashes[hash(key)] += 1
                most = _MOST_OF_ONE_HASH
                require(self._hashes[hash(key)] <= most, f"more than {most} keys with equal hashes")


def require(condition: bool, problem: str, *values: Any) -> None:
    """Raise UnpicklingError unless a condition holds.

    problem: the text of the error, with `{}` for each value.
    values: are formatted only for the error, because a large file has many checks.
    """
    if condition:
        return

    if values:
        problem = problem.format(*[brief(value) for value in values])
    raise pickle.UnpicklingError(problem)


def is_count(value: Any) -> bool:
    """Whether a value is valid as an offset or a number of elements."""
    return type(value) is int and 0 <= value <= MOST_ELEMENTS
