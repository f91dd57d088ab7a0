"""When is a difference small enough? By default never: true replicas are bitwise equal."""

from __future__ import annotations

from dataclasses import dataclass

from syncheck.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two finite floats are close if |a-b| <= atol + rtol * max(|a|, |b|), or if they lie within `ulp` steps.

    rtol, atol, ulp: None is off; rtol and atol come together, for one alone has no sensible default for the other.
    Integers and bools are never close. Unlike numpy's and torch's rule, this one is symmetric.
    Raises UsageError for one of rtol and atol alone, negative values, and rtol above 1, which would pass everything.
    """

    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None

    def __post_init__(self) -> None:
        if (self.rtol is None) != (self.atol is None):
            raise UsageError("--rtol and --atol belong together: give both (0 is a value)")
        if (
            self.rtol is not None
            and self.atol is not None
            and not (0 <= self.rtol <= 1 and 0 <= self.atol < float("inf"))
        ):
            raise UsageError(f"--rtol {self.rtol:g} --atol {self.atol:g}: needs 0 <= rtol <= 1 and a finite atol >= 0")
        if self.ulp is not None and self.ulp < 0:
            raise UsageError(f"--ulp {self.ulp}: needs a number of at least 0")

    @property
    def exact(self) -> bool:
        """Whether nothing but equality passes."""
        return self.rtol is None and self.ulp is None

    def __str__(self) -> str:
        parts = [] if self.rtol is None else [f"rtol={self.rtol:g}", f"atol={self.atol:g}"]
        return " ".join(parts + ([] if self.ulp is None else [f"ulp={self.ulp}"])) or "bitwise"
