"""When is a difference small enough? By default never: true replicas are bitwise equal."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from syncheck.errors import OptionError
from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# (rtol, atol) by dtype: _DTYPE_PRECISIONS in torch/testing/_comparison.py, the defaults of torch.testing.assert_close,
# https://docs.pytorch.org/docs/stable/testing.html. As there, a dtype without a row (float8, integers, bool) has to be
# equal. torch takes rtol times the expected value; there is no expected side here, so it is times the larger one.
CLOSE = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex32": (1e-3, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
# Kinds that count, and last parts of names that do: 100,000 steps and 100,001 are not "close".
COUNTING = ("optimizer_step", "bn_count")
COUNTERS = frozenset(
    "step steps num_steps step_count _step_count global_step optimization_step num_updates n_averaged count counter "
    "num_batches_tracked iteration iterations num_iters iter n_iter epoch last_epoch growth_tracker "
    "_growth_tracker".split()
)
# The types of the numbers of an entry. rtol and atol may be integers, ulp no float.
_FIELDS = {"rtol": (int, float), "atol": (int, float), "ulp": (int,)}
_NEEDED = 'must be "close", "bitwise", or rtol and atol, or ulp, as in {rtol = 1e-5, atol = 1e-8} or {ulp = 4}'


def _is_within(number: float | None, most: float) -> bool:
    """Whether an optional number is at least 0 and at most `most`."""
    if number is None:
        return True

    return 0 <= number <= most


@record
class Tolerance:
    """Two finite floats are close if |a-b| <= atol + rtol * max(|a|, |b|), or if they lie within `ulp` steps.

    A tensor is close if every pair of replicas is, in each element. Integers and bools are never close. Unlike numpy's
    and torch's rule, this rule is symmetric.

    rtol, atol: None is off. They come together, because rtol alone has no sensible default for atol.
    ulp: None is off.
    rule: its source, for the report; empty for the options rtol, atol and ulp themselves.

    Raises OptionError for rtol without atol, atol without rtol, negative values, and rtol above 1, which would pass
    everything.
    """

    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None
    rule: str = ""

    def __post_init__(self) -> None:
        if (self.rtol is None) != (self.atol is None):
            from syncheck.messages import Usage  # only errors need it

            raise OptionError(Usage.TOLERANCE_PAIR())

        # A larger rtol, or an infinite atol, would pass everything.
        is_in_range = _is_within(self.rtol, 1) and _is_within(self.atol, sys.float_info.max)
        if not is_in_range:
            raise OptionError(
                "must be 0 <= rtol <= 1 and a finite atol >= 0",
                rtol=self.rtol,
                atol=self.atol,
            )

        if not _is_within(self.ulp, math.inf):
            raise OptionError("must be at least 0", ulp=self.ulp)

    @property
    def exact(self) -> bool:
        """Whether nothing but equality passes."""
        return self.rtol is None and self.ulp is None

    def __str__(self) -> str:
        parts = []
        # rtol and atol come together.
        if self.rtol is not None:
            parts += [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]

        if self.ulp is not None:
            parts.append(f"ulp={self.ulp}")

        text = " ".join(parts) or "bitwise"
        return f"{text} ({self.rule})" if self.rule else text


# A tolerance, or "close": that of the tensor's dtype in the table above.
Entry = Tolerance | Literal["close"]


@record
class Tolerances:
    """Which tolerance applies to which tensor: names come before kinds, and both before the general tolerance.

    names: by globs of full names. If several globs match, the first counts.
    kinds: by kinds of `kinds.KINDS`.
    """

    general: Entry = Tolerance()
    names: tuple[tuple[str, Entry], ...] = ()
    kinds: tuple[tuple[str, Entry], ...] = ()

    def of(self, name: str, kind: str, dtype: str) -> Tolerance:
        """Return the tolerance of a tensor; its `rule` is the entry of the table that applies.

        Counters are exact, also those stored as floats, unless an entry is of their kind or ends with their own name.
        """
        last = name.rpartition(".")[2]
        applicable = self
        if kind in COUNTING or last in COUNTERS:
            applicable = self._for_counters(last)

        for glob, entry in applicable.names:
            if fnmatchcase(name, glob):
                return _of_dtype(entry, dtype, f"tolerance of {glob}")

        kinds = dict(applicable.kinds)
        if kind in kinds:
            return _of_dtype(kinds[kind], dtype, f"tolerance of {kind}")

        general = applicable.general
        return general if isinstance(general, Tolerance) else _of_dtype(general, dtype, "")

    def _for_counters(self, last: str) -> Tolerances:
        """Return the tolerances of counters. last: the last part of their name."""
        return Tolerances(
            general=Tolerance(),
            names=tuple(row for row in self.names if row[0].endswith(last)),
            kinds=tuple(row for row in self.kinds if row[0] in COUNTING),
        )

    def idle(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the globs that match none of the names."""
        unused_globs = []
        for glob, _ in self.names:
            is_used = any(fnmatchcase(name, glob) for name in names)
            if not is_used:
                unused_globs.append(glob)

        return tuple(unused_globs)


def tolerances(
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
    close: bool | None = None,
    table: Mapping[str, object] | None = None,
    kinds: Collection[str] = (),
) -> Tolerances:
    """Return the tolerances of options.

    table: by kind or glob of names, "close", "bitwise" or a table of rtol, atol, ulp. A key that is one of `kinds` is a
        kind, any other key a glob.

    Raises OptionError for options that contradict each other or are out of range.
    """
    options = {"rtol": rtol, "atol": atol, "ulp": ulp}
    numbers = [name for name, value in options.items() if value is not None]
    if close and numbers:
        from syncheck.messages import Usage  # only errors need it

        raise OptionError(Usage.CLOSE_WITH_OTHERS(), close=close, **{name: options[name] for name in numbers})

    by_name: list[tuple[str, Entry]] = []
    by_kind: list[tuple[str, Entry]] = []
    for key, value in (table or {}).items():
        entries = by_kind if key in kinds else by_name
        entries.append((key, _read_entry(key, value)))

    general: Entry = "close" if close else Tolerance(rtol, atol, ulp)
    return Tolerances(general, tuple(by_name), tuple(by_kind))


def _read_entry(key: str, value: object) -> Entry:
    """Read one entry of the table."""
    if value == "close":
        return "close"

    if value == "bitwise":
        return Tolerance()

    wrong = {f'tolerance["{key}"]': value}
    if not isinstance(value, dict) or not value:
        raise OptionError(_NEEDED, **wrong)

    for name, number in value.items():
        # TOML takes the dots of a bare key for nested tables.
        if name not in _FIELDS and isinstance(number, dict):
            raise OptionError('a name with dots needs quotes, as in "layer4.*" = {ulp = 4}', **wrong)

        types = _FIELDS.get(name, ())
        # A bool is an integer in Python.
        is_flag = isinstance(number, bool)
        if is_flag or not isinstance(number, types):
            raise OptionError(_NEEDED, **wrong)

    try:
        return Tolerance(
            rtol=_read_float(value, "rtol"),
            atol=_read_float(value, "atol"),
            ulp=value.get("ulp"),
        )
    except OptionError as error:
        raise OptionError(str(error), **wrong) from None


def _read_float(table: Mapping[str, Any], name: str) -> float | None:
    """Return an optional number of an entry; infinity for integers beyond floats, because TOML's have no bound."""
    if name not in table:
        return None

    try:
        return float(table[name])
    except OverflowError:
        return math.inf


@cache
def _of_dtype(entry: Entry, dtype: str, rule: str) -> Tolerance:
    """Return the tolerance of an entry for a dtype. rule: the entry as the user wrote it."""
    if isinstance(entry, Tolerance):
        return replace(entry, rule=rule)

    rule = f"close, {rule}" if rule else "close"
    rtol, atol = CLOSE.get(dtype, (None, None))
    return Tolerance(rtol, atol, rule=rule)
