"""How much Python would hash for the keys of a pickle: a tuple that holds a tuple twice, 60 times over, takes for ever.

The hash of a tuple is computed anew each time, from all that it unfolds to, and one of a million levels overruns the
stack. So the opcodes are followed with a number for each object, how many parts it unfolds to, and nothing is built.
Only pickles with tuples that are not the arguments of a call, and not a few numbers, are looked at: no torch file has
many. Of tuples of numbers that were chosen to have equal hashes a dictionary takes quadratic time: where there are
thousands of such keys, tuples get hashes that nobody can foresee.
Opcodes: pickletools.py of Python 3.11 to 3.14.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmap import mmap

# Parts of one key, and of all keys together beside those that a file has bytes for.
MOST_PARTS = 10_000
_MOST_ALL = 10_000_000
# Keys of several parts, of which a few seconds are spent at worst; then `fault` says MANY, and hashes are to be salted.
_MOST_KEYS = 10_000
MANY = "many keys of several parts"
# What an integer beyond 64 bits counts for as a key: those of 2**61 - 1 times a number all have one hash.
_BIG = 1_000
_PUSH = frozenset(b"N\x88\x89)]}\x8f")
_FIXED = {ord(code): width for code, width in zip("KMJG", (1, 2, 4, 8), strict=True)}
_COUNTED = dict.fromkeys(b"UC\x8c", 1) | dict.fromkeys(b"TXB", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)
_LINES = dict.fromkeys(b"IFLSVPc", 1) | {ord("c"): 2, ord("i"): 2}


class _Heavy(Exception):
    """A key has too many parts."""


def light(*given: Any) -> None:
    """Check what a call is given. Raises UnpicklingError for tuples that unfold to more parts than a key may have."""
    for part in given:
        if isinstance(part, (tuple, frozenset)):
            for inner in part:  # mostly a few numbers
                if isinstance(inner, (tuple, frozenset)):
                    _unfold(part)
                    break


def _unfold(part: tuple[Any, ...] | frozenset[Any]) -> None:
    left, stack = MOST_PARTS, [part]
    while stack:
        inside = stack.pop()
        left -= len(inside)
        if left < 0:
            raise pickle.UnpicklingError(f"tuples that unfold to more than {MOST_PARTS} parts")
        stack += [part for part in inside if isinstance(part, (tuple, frozenset))]


def fault(data: bytes | mmap, start: int) -> str:
    """Say whether the keys of the pickle at `start` take too long to hash; empty where they do not.

    What is no opcode, or takes what is not there, is left for the unpickler to refuse: it gets no further than that.
    """
    follower = _Follower(data, start)
    try:
        follower.run()
    except (LookupError, ValueError):
        pass
    except _Heavy as heavy:
        return str(heavy)
    return MANY if follower.keys > _MOST_KEYS else ""


def _salted(part: Any) -> int:
    """Return the hash of a number's text, which differs from run to run; of equal numbers the same."""
    if isinstance(part, float) and part.is_integer():
        part = int(part)
    if isinstance(part, int):
        return hash(hex(part))
    return hash(str(part) if isinstance(part, float) else part)


class Salted(tuple[Any, ...]):
    """A tuple whose hash nobody can foresee; its parts are such tuples, too."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple(map(_salted, self)))


class SaltedSet(frozenset[Any]):
    """A frozen set whose hash nobody can foresee."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(frozenset(map(_salted, self)))


class _Follower:
    """The stack of an unpickler, of numbers of parts."""

    def __init__(self, data: bytes | mmap, start: int) -> None:
        self.data, self.at = data, start
        self.left = _MOST_ALL + 4 * (len(data) - start)
        self.keys = 0
        self.stack: list[int] = []
        self.marks: list[list[int]] = []
        self.memo: dict[int, int] = {}

    def run(self) -> None:
        code = 0
        while code != ord("."):
            code = self.data[self.at]
            self.at += 1
            if code in _PUSH:
                self.stack.append(1)
            elif code in _FIXED:
                self.at += _FIXED[code]
                self.stack.append(1)
            elif code in _COUNTED:
                self._take(_COUNTED[code])
                self.stack.append(1)
            elif code in b"\x8a\x8b":
                self.stack.append(_BIG if self._take(1 if code == 0x8A else 4) > 8 else 1)
            elif code in _LINES:
                for _ in range(_LINES[code]):
                    line = self.at
                    self.at = self._line()
                self.stack.append(sum(self._to_mark()) if code == ord("i") else 1)
                if code in b"IL" and self.at - line > 20:
                    self.stack[-1] = _BIG
            elif code in b"qrp\x94hjg":
                self._memo(code)
            else:
                self._step(code)

    def _line(self) -> int:
        """Return where the line ends that begins here: mmap has no `index`."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        return end + 1

    def _number(self, width: int) -> int:
        self.at += width
        return int.from_bytes(self.data[self.at - width : self.at], "little")

    def _take(self, width: int) -> int:
        length = self._number(width)
        self.at += length
        return length

    def _memo(self, code: int) -> None:
        if code == 0x94:
            number = len(self.memo)
        elif code in b"pg":
            line = self.at
            self.at = self._line()
            number = int(self.data[line : self.at])
        else:
            number = self._number(1 if code in b"qh" else 4)
        if code in b"hjg":
            self.stack.append(self.memo[number])
        else:
            self.memo[number] = self.stack[-1]

    def _to_mark(self) -> list[int]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _hash(self, keys: list[int]) -> None:
        self.left -= sum(keys)
        self.keys += len(keys) - keys.count(1)
        if self.left < 0 or max(keys, default=0) > MOST_PARTS:
            raise _Heavy(f"its keys unfold to more than {MOST_PARTS} parts, or all to more than {_MOST_ALL}")

    def _step(self, code: int) -> None:
        stack = self.stack
        if code == ord("("):
            self.marks.append(stack)
            self.stack = []
        elif code == ord("t"):
            parts = self._to_mark()
            self.stack.append(1 + sum(parts))
        elif code in b"\x85\x86\x87":
            parts = [stack.pop() for _ in range(code - 0x84)]
            stack.append(1 + sum(parts))
        elif code in b"ld\x91o":
            parts = self._to_mark()
            if code in b"d\x91":
                self._hash(parts[:: 2 if code == ord("d") else 1])
            self.stack.append(1 if code in b"ld" else 1 + sum(parts))
        elif code in b"ue\x90":
            parts = self._to_mark()
            self.stack[-1]  # what they are put into
            self._hash(parts[::2] if code == ord("u") else parts if code == 0x90 else [])
        elif code == ord("s"):
            _, key = stack.pop(), stack.pop()
            self._hash([key])
        elif code in b"ab":
            stack.pop()
            stack[-1]
        elif code in b"R\x81\x92":  # a call may give back what it is given
            given = [stack.pop() for _ in range(3 if code == 0x92 else 2)]
            stack.append(max(given))
        elif code == ord("0"):
            self._pop()
        elif code == ord("1"):
            self._to_mark()
        elif code == ord("2"):
            stack.append(stack[-1])
        elif code == 0x93:
            stack.pop()
            stack[-1] = 1
        elif code in b"\x80\x95":
            self.at += 1 if code == 0x80 else 8
        elif code not in b"Q\x98.":
            raise IndexError

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._to_mark()
