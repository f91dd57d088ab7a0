"""Check, inside a running job, that all ranks hold the same model."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from syncheck.api import Options
from syncheck.live.exchange import compare_across_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Report

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function that is called in compiled code: collectives and hashes are no graph.

    torch.compiler.disable does that too, but loads the compiler, more than a second, also where nobody compiles.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            found: R = torch.compiler.disable(function)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return called


@eager
def check(
    model: Any,
    optimizer: Any = None,
    scaler: Any = None,
    *,
    group: Any = None,
    only: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> Report:
    """Compare the model of every rank of a process group, and return the same report on all of them.

    A collective call: every rank of the group has to make it. Nothing is changed. model: a module, or a tuple of
    modules and of whatever has a `state_dict()`. optimizer, scaler: of this rank; None to leave them out, on all ranks
    or on some, which is then a difference. group: a process group of torch.distributed, by default all ranks. only,
    include, exclude, allow: as in `syncheck.Options`.

    Raises, on all ranks and with one text: UsageError for what cannot be compared, RankFailed where a rank could not
    take part. A difference does not raise: it is `report.verdict == "out_of_sync"`.
    """
    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)

    def options() -> Options:
        return Options(only=tuple(only), include=tuple(include), exclude=tuple(exclude), allow=tuple(allow))

    return compare_across_ranks(parts, group, options)
