"""When is a difference small enough? By default never: true replicas are bitwise equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal

from syncheck.errors import OptionError

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
_FIELDS = ("rtol", "atol", "ulp")
_NEEDED = 'must be "close", "bitwise", or rtol and atol, or ulp, as in {rtol = 1e-5, atol = 1e-8} or {ulp = 4}'


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two finite floats are close if |a-b| <= atol + rtol * max(|a|, |b|), or if they lie within `ulp` steps.

    A tensor is close if every pair of replicas is, in each element.

    rtol, atol, ulp: None is off; rtol and atol come together, for one alone has no sensible default for the other.
    rule: its source, for the report; empty for the options rtol, atol and ulp themselves.
    Integers and bools are never close. Unlike numpy's and torch's rule, this one is symmetric.
    Raises OptionError for one of rtol and atol alone, negative values, and rtol above 1, which would pass everything.
    """

    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None
    rule: str = ""

    def __post_init__(self) -> None:
        if (self.rtol is None) != (self.atol is None):
            raise OptionError("rtol and atol belong together: give both (0 is a value)")
        if (
            self.rtol is not None
            and self.atol is not None
            and not (0 <= self.rtol <= 1 and 0 <= self.atol < float("inf"))
        ):
            raise OptionError("must be 0 <= rtol <= 1 and a finite atol >= 0", rtol=self.rtol, atol=self.atol)
        if self.ulp is not None and self.ulp < 0:
            raise OptionError("must be at least 0", ulp=self.ulp)

    @property
    def exact(self) -> bool:
        """Whether nothing but equality passes."""
        return self.rtol is None and self.ulp is None

    def __str__(self) -> str:
        parts = [] if self.rtol is None else [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]
        text = " ".join(parts + ([] if self.ulp is None else [f"ulp={self.ulp}"])) or "bitwise"
        return f"{text} ({self.rule})" if self.rule else text


# A tolerance, or "close": that of the tensor's dtype in the table above.
Said = Tolerance | Literal["close"]


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Which tolerance applies to which tensor: names come before kinds, and both before the general one.

    names: globs of whole names; of several that match, the first counts. kinds: of `kinds.KINDS`.
    """

    general: Said = Tolerance()
    names: tuple[tuple[str, Said], ...] = ()
    kinds: tuple[tuple[str, Said], ...] = ()

    def of(self, name: str, kind: str, dtype: str) -> Tolerance:
        """Return what applies to a tensor; its `rule` names the entry that says so.

        Counters are exact, also those stored as floats, unless an entry is of their kind or ends with their own name.
        """
        last = name.rpartition(".")[2]
        counter = kind in COUNTING or last in COUNTERS
        for glob, said in self.names:
            if fnmatchcase(name, glob) and not (counter and not glob.endswith(last)):
                return _of_dtype(said, dtype, f"tolerance of {glob}")
        for of, said in self.kinds:
            if of == kind and not (counter and kind not in COUNTING):
                return _of_dtype(said, dtype, f"tolerance of {of}")
        if counter:
            return Tolerance()
        return self.general if isinstance(self.general, Tolerance) else _of_dtype(self.general, dtype, "")

    def idle(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the globs that match none of these names."""
        return tuple(glob for glob, _ in self.names if not any(fnmatchcase(name, glob) for name in names))


def tolerances(
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
    close: bool | None = None,
    table: Mapping[str, object] | None = None,
    kinds: Collection[str] = (),
) -> Tolerances:
    """Put the options together. table: by kind or glob of names, "close", "bitwise" or a table of rtol, atol, ulp.

    A key of the table that is one of `kinds` is a kind, any other a glob. Raises OptionError for what contradicts
    itself or makes no sense.
    """
    given = [name for name, value in zip(_FIELDS, (rtol, atol, ulp), strict=True) if value is not None]
    if close and given:
        raise OptionError(f"close cannot be combined with {' and '.join(given)}: it sets the tolerance of each dtype")
    rules = {key: _said(key, value) for key, value in (table or {}).items()}
    return Tolerances(
        "close" if close else Tolerance(rtol, atol, ulp),
        tuple((key, said) for key, said in rules.items() if key not in kinds),
        tuple((key, said) for key, said in rules.items() if key in kinds),
    )


def _said(key: str, value: object) -> Said:
    """Read one entry of the table."""
    if value == "close":
        return "close"
    if value == "bitwise":
        return Tolerance()
    wrong = {f'tolerance["{key}"]': value}
    if not isinstance(value, dict) or not value:
        raise OptionError(_NEEDED, **wrong)
    for name, number in value.items():
        if isinstance(number, dict) and name not in _FIELDS:
            # TOML takes the dots of a bare key for nested tables.
            raise OptionError('a name with dots needs quotes, as in "layer4.*" = {ulp = 4}', **wrong)
        whole = isinstance(number, int) and not isinstance(number, bool)
        if name not in _FIELDS or not (whole or (isinstance(number, float) and name != "ulp")):
            raise OptionError(_NEEDED, **wrong)
    try:
        rtol, atol = (None if name not in value else _float(value[name]) for name in _FIELDS[:2])
        return Tolerance(rtol, atol, value.get("ulp"))
    except OptionError as error:
        raise OptionError(str(error), **wrong) from None


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # TOML's integers have no bound
        return math.inf


@cache
def _of_dtype(said: Said, dtype: str, rule: str) -> Tolerance:
    """Return what an entry means for a dtype, with the entry's name in it."""
    if isinstance(said, Tolerance):
        return replace(said, rule=rule)
    rule = ", ".join(filter(None, ("close", rule)))
    return Tolerance(*CLOSE[dtype], rule=rule) if dtype in CLOSE else Tolerance(rule=rule)
