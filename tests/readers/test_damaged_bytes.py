"""Torch files cut at any byte or with any bit flipped: never a wrong result, always a one-line error."""

from __future__ import annotations

import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from malformed.torch_parts import DATA, INTACT
from support.listings import list_codes, list_fields, list_pairs

import syncheck

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BYTE_ORDER = b"archive/byteorder"


def outcome(folder: Path, data: bytes, intact: bytes) -> tuple[int, str, tuple[str, ...]]:
    """Compare a damaged file with its intact copy; return the exit code, the error and the findings."""
    for name, content in (("m_rank0.pth", data), ("m_rank1.pth", intact)):
        (folder / name).write_bytes(content)
    began = time.process_time()
    report = syncheck.compare(folder)
    assert time.process_time() - began < 5
    why = "; ".join(list_fields(report.unreadable, "reason"))
    assert why.isprintable()
    assert len(why) < 2000
    return report.exit_code, why, tuple(list_codes(report.findings))


def flipped(data: bytes, at: int, bit: int) -> bytes:
    """Return a copy with one bit flipped."""
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def unseen(name: str, data: bytes) -> set[int]:
    """Return the offsets of bytes that do not affect the comparison; every other flip must be noticed.

    Zip: version, flags, times and checksum in a record's local header; versions, flags, times, checksum of data and
    attributes in its directory entry; the record `version`, the name of `byteorder`, the length of the comment at the
    end. Legacy pickles: the protocol up to 5, a tensor's device, its requires_grad, the name of its hooks' class,
    system information.
    """
    free: set[int] = set()
    if name == "torch-zip":  # the pickle has a checksum
        start = data.index(b"PK\x03\x04", data.index(DATA))  # the record `version`, which nothing reads
        free |= set(range(start, data.index(b"PK\x01\x02")))
        position = data.find(b"PK\x03\x04")
        while 0 <= position < start:  # version, flags, times and checksum of a record's own header
            free |= set(range(position + 4, position + 18))
            position = data.find(b"PK\x03\x04", position + 1)
        position = data.find(b"PK\x01\x02")
        while position >= 0:  # versions, flags, times, checksum of data, attributes
            free |= (
                set(range(position + 4, position + 10))
                | set(range(position + 12, position + 20))
                | set(range(position + 36, position + 42))
            )
            last = position
            position = data.find(b"PK\x01\x02", position + 1)
        free |= set(range(last, len(data) - 22))  # of `version`
        free |= {len(data) - 2, len(data) - 1}
        # Without its name in the directory there is no byte order, as in old files, which are little-endian.
        second = data.rindex(BYTE_ORDER)
        free |= set(range(second - 26, second + len(BYTE_ORDER)))
    else:
        facts = data.index(b"little_endian")
        free |= set(range(facts, facts + 15))
        free |= {position + 1 for position in range(len(data) - 1) if data[position : position + 2] == b"\x80\x02"}
        for text in (b"cpu", b"collections", b"OrderedDict"):
            free |= set(range(data.index(text), data.index(text) + len(text)))
        free.add(data.index(b"\x89ccollections"))
    return free


def check(name: str, folder: Path, cuts: Iterable[int], flips: Iterable[tuple[int, int]]) -> Counter[str]:
    """Cut the file to each length and flip each bit, given as byte and bit. Return the number of each outcome."""
    data = INTACT[name]
    assert outcome(folder, data, data)[0] == 0
    start, free, observed = data.index(DATA), unseen(name, data), Counter[str]()
    for length in cuts:
        code, why, _ = outcome(folder, data[:length], data)
        assert code == 2, length
        assert why, length
        observed["cut, cannot be read"] += 1
    for position, bit in flips:
        code, why, findings = outcome(folder, flipped(data, position, bit), data)
        if start <= position < start + len(DATA):
            zero = (position, bit) == (start + 3, 7)
            assert (code, why) == (0 if zero else 1, "")
            assert zero or name != "torch-zip" or "SYN223" in findings
            observed["data flipped, " + ("in sync" if zero else "out of sync")] += 1
        else:
            assert code in (0, 1, 2), (position, bit)
            assert code != 2 or why, (position, bit)
            assert code != 0 or position in free, (position, bit, data[position - 8 : position + 8])
            observed["flipped, " + ("in sync", "out of sync", "cannot be read")[code]] += 1
    return observed


@pytest.mark.parametrize("name", sorted(INTACT))
def test_a_sample_of_cuts_and_flips(name: str, tmp_path: Path) -> None:
    """Every 37th cut and flip gives an error, out of sync, or in sync if no compared byte changed."""
    size = len(INTACT[name])
    observed = check(name, tmp_path, range(0, size, 37), [divmod(location, 8) for location in range(0, 8 * size, 37)])
    assert sum(observed.values()) > 50


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(INTACT))
def test_every_cut_and_a_flip_in_every_byte(name: str, tmp_path: Path) -> None:
    """Every cut, every flip in the data, and a random flip in every other byte.

    Each flip in the data, except of a zero's sign, is out of sync.
    """
    size, start, random = len(INTACT[name]), INTACT[name].index(DATA), Random(name)
    bits = {
        position: range(8) if start <= position < start + len(DATA) else [random.randrange(8)]
        for position in range(size)
    }
    observed = check(name, tmp_path, range(size), list_pairs(bits))
    assert observed["cut, cannot be read"] == size
    assert observed["data flipped, out of sync"] == 8 * len(DATA) - 1
    assert observed["data flipped, in sync"] == 1
    assert sum(observed.values()) == 2 * size + 7 * len(DATA)
    assert observed["flipped, cannot be read"] > size // 4
