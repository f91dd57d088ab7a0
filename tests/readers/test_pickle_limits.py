"""Memo indexes of a pickle: Python allocates all lower indexes, so that ten bytes could request 32 GB."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest

from syncheck.readers.pickles.limits import scan

HUGE = b"r" + struct.pack("<I", 2**31 - 1)
# Texts and bytes in which the opcode seems to stand.
TREE: Any = {
    "running_var": [b"r\xff\xff\xff\x7f" * 60, "p999999999\n", 2**80, 1.5, None, True, {3, 4}, ("r", ("r",))],
    "r" * 300: bytearray(b"r...."),
}


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_python_pass(protocol: int) -> None:
    """In no protocol is a string, number or set mistaken for the opcode; an added opcode is found."""
    written = pickle.dumps([TREE] * 3 + [list(range(3000)), [str(i) for i in range(3000)]], protocol)
    assert scan(written).fault == ""
    assert scan(written[:-1] + HUGE + b".").fault == f"it stores object {2**31 - 1} after {len(written) - 1} bytes"
    assert scan(b"xyz" + written[:-1] + HUGE + b".", 3) == scan(written[:-1] + HUGE + b".")


@pytest.mark.parametrize("stored", [HUGE, b"p2000000000\n", b"p 2_000_000_000\n", b"p+2000000000\n"])
@pytest.mark.parametrize(
    "before", [b"\x80\x02N", b"(lp0\n", b"\x80\x04\x95" + struct.pack("<Q", 9) + b"N", b"X\x01\0\0\0a"]
)
def test_a_disproportionate_index_is_found(before: bytes, stored: bytes) -> None:
    """A large index is found in all its encodings, after any opcodes."""
    assert "it stores object" in scan(before + stored + b".").fault


@pytest.mark.parametrize("data", [b"", b"N", b"X\xff\xff\xff\x7fa", b"\xff", b"r"])
def test_broken_pickles_are_left_to_the_unpickler(data: bytes) -> None:
    """A pickle without an end or with an invalid opcode ends the scan."""
    assert scan(data).fault == ""


@pytest.mark.parametrize("data", [b"B\xff\xff\xff\x7fa", b"p5", b"px\n.", b"p" + b"9" * 5000 + b"\n."])
def test_lengths_and_numbers_beyond_the_end(data: bytes) -> None:
    """Bytes longer than the pickle, and invalid or unterminated numbers, are found before loading."""
    assert scan(b"N" + data).fault


@pytest.mark.parametrize("opcode", [b"q\x05", b"r\x05\0\0\0", b"p5\n", b"\x94", b"0N"])
def test_long_runs_of_opcodes(opcode: bytes) -> None:
    """After a run of a thousand opcodes the scan continues, and small indexes pass."""
    for count in range(990, 1010):
        assert scan(b"N" * count + opcode + b"K\x01" * 2000 + b".")[:2] == ("", False)
        assert "it stores" in scan(b"N" * count + opcode + HUGE + b".").fault
