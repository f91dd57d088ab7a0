"""Tolerances for differences. By default there are none, because replicas are bitwise equal."""

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
# https://docs.pytorch.org/docs/stable/testing.html. Dtypes without a row (float8, integers, bool) must be equal, as in
# torch. torch multiplies rtol by the expected value; replicas have no expected side, so the larger value is used.
CLOSE = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex32": (1e-3, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
# Kinds and last name segments of counters, which must be equal: 100,000 steps are not "close" to 100,001.
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
    """Two finite floats are close if |a-b| <= atol + rtol * max(|a|, |b|), or if they are at most `ulp` values apart.

    A tensor is close if each element is close on every pair of replicas. Integers and bools are never close. The rule
    is symmetric, unlike the rules of numpy and torch.

    rtol, atol, ulp: None is off; rtol requires atol and vice versa, because neither has a sensible default.
    rule: the entry that sets the tolerance, printed in reports; empty for the options rtol, atol and ulp.
    Raises OptionError for rtol without atol or the reverse, negative values, and rtol above 1, which accepts any
    difference.
    """

    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None
    rule: str = ""

    def __post_init__(self) -> None:
        if (self.rtol is None) != (self.atol is None):
            raise OptionError("{rtol} and {atol} belong together: give both (either may be 0)", "rtol", "atol")
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
        """Whether values must be equal."""
        return self.rtol is None and self.ulp is None

    def __str__(self) -> str:
        parts = [] if self.rtol is None else [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]
        text = " ".join(parts + ([] if self.ulp is None else [f"ulp={self.ulp}"])) or "bitwise"
        return f"{text} ({self.rule})" if self.rule else text


# A tolerance, or "close" for the tolerance of the tensor's dtype in CLOSE.
Rule = Tolerance | Literal["close"]


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The tolerances of all tensors. Names take precedence over kinds, and kinds over the general tolerance.

    names: by glob of full names, of which the first match applies. kinds: by kind, see `kinds.KINDS`.
    """

    general: Rule = Tolerance()
    names: tuple[tuple[str, Rule], ...] = ()
    kinds: tuple[tuple[str, Rule], ...] = ()

    def of(self, name: str, kind: str, dtype: str) -> Tolerance:
        """Return the tolerance of a tensor; its `rule` is the matching entry.

        Counters must be equal, even if stored as floats, unless an entry names their kind or ends with their name.
        """
        last = name.rpartition(".")[2]
        counter = kind in COUNTING or last in COUNTERS
        for glob, rule in self.names:
            if fnmatchcase(name, glob) and not (counter and not glob.endswith(last)):
                return _resolve_rule(rule, dtype, f"tolerance of {glob}")
        for of, rule in self.kinds:
            if of == kind and not (counter and kind not in COUNTING):
                return _resolve_rule(rule, dtype, f"tolerance of {of}")
        if counter:
            return Tolerance()
        return self.general if isinstance(self.general, Tolerance) else _resolve_rule(self.general, dtype, "")

    def find_unused(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the globs that match no name."""
        return tuple(glob for glob, _ in self.names if not any(fnmatchcase(name, glob) for name in names))


def build_tolerances(
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
    close: bool | None = None,
    table: Mapping[str, object] | None = None,
    kinds: Collection[str] = (),
) -> Tolerances:
    """Return the tolerances of the given options.

    table: "close", "bitwise" or a table of rtol, atol and ulp, by kind or glob of names; a key in `kinds` is a kind.
    Raises OptionError for contradicting options and invalid values.
    """
    given = [name for name, value in zip(_FIELDS, (rtol, atol, ulp), strict=True) if value is not None]
    if close and given:
        others = " and ".join(f"{{{name}}}" for name in given)
        raise OptionError(
            f"{{close}} cannot be combined with {others}: it sets the tolerance of each dtype", "close", *given
        )
    rules = {key: _parse_rule(key, value) for key, value in (table or {}).items()}
    return Tolerances(
        "close" if close else Tolerance(rtol, atol, ulp),
        tuple((key, rule) for key, rule in rules.items() if key not in kinds),
        tuple((key, rule) for key, rule in rules.items() if key in kinds),
    )


def _parse_rule(key: str, value: object) -> Rule:
    """Convert an entry of the table. Raises OptionError for an invalid value."""
    if value == "close":
        return "close"
    if value == "bitwise":
        return Tolerance()
    wrong = {f"tolerance.{key}": value}
    if not isinstance(value, dict) or not value:
        raise OptionError(_NEEDED, **wrong)
    for name, number in value.items():
        if isinstance(number, dict) and name not in _FIELDS:
            # In TOML, the dots of a bare key create nested tables.
            raise OptionError('a name with dots needs quotes, as in "layer4.*" = {ulp = 4}', **wrong)
        whole = isinstance(number, int) and not isinstance(number, bool)
        if name not in _FIELDS or not (whole or (isinstance(number, float) and name != "ulp")):
            raise OptionError(_NEEDED, **wrong)
    try:
        rtol, atol = (None if name not in value else _convert_number(value[name]) for name in _FIELDS[:2])
        return Tolerance(rtol, atol, value.get("ulp"))
    except OptionError as error:
        raise OptionError(str(error), **wrong) from None


def _convert_number(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # TOML's integers are unbounded
        return math.inf


@cache
def _resolve_rule(rule: Rule, dtype: str, entry: str) -> Tolerance:
    """Return the tolerance of a rule for a dtype. entry: the description of the rule for the report."""
    if isinstance(rule, Tolerance):
        return replace(rule, rule=entry)
    entry = ", ".join(filter(None, ("close", entry)))
    return Tolerance(*CLOSE[dtype], rule=entry) if dtype in CLOSE else Tolerance(rule=entry)
