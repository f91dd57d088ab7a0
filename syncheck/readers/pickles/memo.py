"""Whether a pickle builds too much, or stores objects at numbers out of proportion: Python makes room for all below.

Ten bytes that store one object as number 2,000,000,000 cost 32 GB (python/cpython#115952). A pickle counts its objects
up, so that no number can be greater than the bytes before it. Only the lengths of opcodes are looked at; nothing runs.
Opcodes: pickletools.py of Python 3.11 to 3.14, protocols 0 to 5.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.readers import bounds
from syncheck.readers.pickles import hashing

if TYPE_CHECKING:
    from mmap import mmap

# Numbers that cost some MB at most and are let pass.
_FEW = 1 << 20
_ATOM = rb"(?:[N\x88\x89]|K.|M..|J.{4}|G.{8})"
_STORE = rb"(?:q.|r..[\x00-\x0f]\x00|\x94|p\d{1,6}\n)?"
# The same without those that may share a hash with another: -1 and -2 have one, and so have 1.0 and 2.0**61.
_COUNT = rb"(?:[N\x88\x89]|K.|M..|J.{3}[\x00-\x7f])"
# Tuples that nobody need look into: of a few numbers, or consumed at once by a call, which looks itself.
_TUPLE = rb"\((?:COUNT{0,64}t)?|ATOM(?:ATOM(?:ATOM+[\x85-\x87]?|[\x85\x86])?|\x85)?|[t\x85-\x87]STORE[QRb\x81]"
_TUPLE = _TUPLE.replace(b"ATOM", _ATOM).replace(b"COUNT", _COUNT).replace(b"STORE", _STORE)
# As many opcodes as stand between two texts, with arguments of a fixed size or up to the end of the line. What stores
# at a number of _FEW or more is not among them, nor are other tuples, long integers and STOP.
_RUN = re.compile(
    rb"(?:" + _TUPLE + rb"|[)012N}\]esuabldoQR\x81\x88\x89\x8f\x90"
    rb"\x92-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|r..[\x00-\x0f]\x00"
    rb"|[G\x95].{8}|[FSVPg][^\n]*\n|[IL][^\n]{0,20}\n|p\d{1,6}\n|[ci][^\n]*\n[^\n]*\n){0,1000}+",
    re.DOTALL,
)
# Opcodes of tuples, frozen sets, and of integers that may be long.
_ODD = b"t\x85\x86\x87\x91\x8a\x8bIL"
# Those for which Python makes room before it reads: bytes and bytearray.
_MADE_FIRST = b"B\x8e\x96"
# Opcodes with a length before their text or bytes: how many bytes the length has.
_COUNTED = dict.fromkeys(b"UC\x8a\x8c", 1) | dict.fromkeys(b"TXB\x8b", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)


# One opcode of a run, of which the first byte is kept, so that objects can be counted.
_OPCODE = re.compile(
    rb"(.)(?:(?<=[Khq\x80\x82]).|(?<=[M\x83])..|(?<=[Jjr\x84]).{4}|(?<=[G\x95]).{8}|(?<=[FSVPgpIL])[^\n]*\n"
    rb"|(?<=[ci])[^\n]*\n[^\n]*\n)?",
    re.DOTALL,
)
# Free: opcodes that make nothing, or objects of which Python keeps one only, such as None and small integers.
# Light: all but those that make an object of some hundred bytes (a call, a set), or let a dictionary grow by as much.
# Such a one counts as _HEAVY light ones.
_FREE = b"()012N.abceghjpqrK\x80\x82\x83\x84\x88\x89\x90\x93\x94\x95\x97\x98"
_LIGHT = bytes(set(range(256)) - set(b"QRdiosu\x81\x8f\x91\x92"))
_HEAVY = 4
# Bytes of opcodes without texts that are let pass uncounted: of some 50,000 tensors. At worst they take a GB.
_FEW_OPCODES = 1 << 22


def _objects(run: bytes) -> int:
    """Count what a run of opcodes makes, in hundreds of bytes."""
    codes = _OPCODE.sub(rb"\1", run)
    return len(codes.translate(None, _FREE)) + (_HEAVY - 1) * len(codes.translate(None, _LIGHT))


def fault(data: bytes | mmap, start: int = 0, most: tuple[int, int] | None = None) -> str:
    """Say what is wrong with the numbers of the pickle that begins at `start`; empty where nothing is.

    most: texts and objects, where not those of `bounds`. What is no opcode, or has no end, is left for the unpickler
    to refuse: it gets no further than that.
    """
    most_texts, most_objects = most or (bounds.MOST_ENTRIES, bounds.MOST_OBJECTS)
    at, end, odd, texts, passed, objects = start, len(data), False, 0, 0, 0
    while at < end and texts <= most_texts and objects <= most_objects:
        run = _RUN.match(data, at)
        if run:
            passed += run.end() - at
            if passed > _FEW_OPCODES:
                objects += _objects(data[at : run.end()])
            at = run.end()
        if at >= end:
            break
        code = data[at]
        width = _COUNTED.get(code)
        if width is not None:
            length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            odd = odd or (length > 8 and code in _ODD)
            at += 1 + width + length
            texts += 1
            if at > end and length > _FEW and code in _MADE_FIRST:
                return f"it asks for {length} bytes, beyond its end"
        elif run and run.end() > run.start() and code not in b"rp":  # it was as long as one may be
            continue
        elif code in _ODD:
            odd, objects = True, objects + 1
            at = at + 1 if code not in b"IL" else (data.find(b"\n", at) + 1 or end)
        elif code in b"rp":
            number, at_next = _stored(data, at)
            if number > max(_FEW, at - start):
                return f"it stores object {number} after {at - start} bytes"
            at = at_next
        else:  # STOP, or no opcode
            break
    if texts > most_texts or objects > most_objects:
        return (
            f"it has more than {most_texts} texts" if texts > most_texts else f"it has more than {most_objects} objects"
        )
    return hashing.fault(data, start) if odd else ""


def _stored(data: bytes | mmap, at: int) -> tuple[int, int]:
    """Return the number that an opcode stores at, and where the next one begins."""
    if data[at] == ord("r"):
        return int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
    line_end = data.find(b"\n", at)
    if line_end < 0:
        return 0, len(data)
    try:
        return int(data[at + 1 : line_end]), line_end + 1
    except ValueError:  # no number, or one of thousands of digits: the unpickler refuses it too
        return 0, len(data)
