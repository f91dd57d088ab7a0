"""Find NaN and infinity in blocks of bytes that are read anyway, because equal replicas are not measured.

The first test looks at one byte of each element, without numpy: sign and high bits of the exponent. Only elements with
few values of this byte can be NaN or infinity, and these values do not occur in usual weights. A block with such a byte
is then tested exactly, with numpy. For large models numpy is imported at once: its first test is five times as fast.
"""

from __future__ import annotations

from typing import NamedTuple

from syncheck.loaded import find_loaded

Block = bytes | bytearray | memoryview

# Bytes of one replica from which the time of importing numpy is regained.
LARGE = 512 << 20


class _Layout(NamedTuple):
    """Where the exponent of an element is. Elements of complex dtypes are pairs of floats.

    size: bytes of a float.
    high: highest bytes of NaN and infinity.
    exponent: bits that are all set in both of them.
    mantissa: bits of which some are set in NaN only; 0 if the dtype has no infinity.
    """

    size: int
    high: tuple[int, ...]
    exponent: int
    mantissa: int

    def holds_nonfinite(self, block: Block, *, nan_only: bool) -> bool:
        """Whether a block holds NaN, or also infinity."""
        if not self._may_hold_nonfinite(block):
            return False

        import numpy as np

        words = np.frombuffer(block, f"<u{self.size}")
        special = (words & self.exponent) == self.exponent
        if nan_only and self.mantissa:
            special &= (words & self.mantissa) != 0

        return bool(special.any())

    def _may_hold_nonfinite(self, block: Block) -> bool:
        """Return False if a fast test shows that all elements are finite."""
        numpy = find_loaded("numpy")
        if numpy is None:
            return self._has_high_byte(block)

        # numpy has no bfloat16, and converts each float16.
        if self.size < 4:
            return True

        # The fastest of all tests: the float at once, without temporary integers.
        floats = numpy.frombuffer(block, f"<f{self.size}")
        return not numpy.isfinite(floats).all()

    def _has_high_byte(self, block: Block) -> bool:
        """Whether one of the highest bytes of NaN and infinity occurs at its position in an element."""
        # Slices of a view have no fast search.
        if isinstance(block, memoryview):
            return True

        high_bytes = block[self.size - 1 :: self.size]
        # A loop, because any() with a generator takes longer than the searches.
        for byte in self.high:  # noqa: SIM110
            if byte in high_bytes:
                return True

        return False


class _SingleNaN(NamedTuple):
    """The only value of a dtype without infinity that is not finite.

    byte: the element.
    """

    byte: int

    def holds_nonfinite(self, block: Block, *, nan_only: bool) -> bool:  # noqa: ARG002 - as for other dtypes
        """Whether a block holds NaN."""
        return self.byte in block


_TOP = (0x7F, 0xFF)
_TOP_OF_FIVE_BITS = (0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF)
_DOUBLE = _Layout(8, _TOP, 0x7FF0 << 48, (1 << 52) - 1)
_SINGLE = _Layout(4, _TOP, 0x7F80 << 16, (1 << 23) - 1)
# The dtypes that have NaN or infinity.
_FLOATS: dict[str, _Layout | _SingleNaN] = {
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
    "float32": _SINGLE,
    "complex64": _SINGLE,
    "float16": _Layout(2, _TOP_OF_FIVE_BITS, 0x7C00, 0x03FF),
    "bfloat16": _Layout(2, _TOP, 0x7F80, 0x007F),
    "float8_e5m2": _Layout(1, _TOP_OF_FIVE_BITS, 0x7C, 0x03),
    "float8_e4m3fn": _Layout(1, _TOP, 0x7F, 0),
    "float8_e4m3fnuz": _SingleNaN(0x80),
    "float8_e5m2fnuz": _SingleNaN(0x80),
    "float8_e8m0fnu": _SingleNaN(0xFF),
}


class FiniteScan:
    """Searches the blocks of one tensor until one holds NaN or infinity; `found` is the result.

    dtype: of the tensor; other dtypes than floats are always finite.
    nan_only: whether infinity is a usual value, as in masks.
    """

    __slots__ = ("_float", "_nan_only", "dtype", "found")

    def __init__(self, dtype: str, *, nan_only: bool = False) -> None:
        self.dtype = dtype
        self.found = False
        self._nan_only = nan_only
        self._float = _FLOATS.get(dtype)

    @property
    def is_float(self) -> bool:
        """Whether the dtype has NaN or infinity."""
        return self._float is not None

    def look(self, block: Block) -> None:
        """Search a block of little-endian elements. Several threads may search blocks of one tensor."""
        if self._float is None or self.found:
            return

        self.found = self._float.holds_nonfinite(block, nan_only=self._nan_only)


def prepare(size: int) -> None:
    """Import numpy before the blocks of a large model are searched.

    size: bytes of one replica.
    """
    if size >= LARGE:
        import numpy  # noqa: F401, ICN001 - only to be found as loaded
