"""`@pytest.mark.syncheck(ranks=4)`: what a test asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "syncheck"
# The user property of a test whose ranks were started anew.
RETRIED = "syncheck_retried_start"
# The fixture through which `ranks=[2, 4]` becomes two tests; the test itself need not ask for it.
PARAMETER = "_syncheck_ranks"
# Each rank is a process with torch in it. More than this is taken for a mistake, not for a wish.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the marker says. ranks: numbers of ranks to run the test on. several: whether they came as a list.

    timeout: seconds, None for the run's own limit. group: whether a process group is to be ready; without one, torch is
    not imported either.
    """

    ranks: tuple[int, ...]
    several: bool = False
    timeout: float | None = None
    group: bool = True


def of(node: Any) -> Wanted | None:
    """Read a node's closest marker, None where it has none. Fails the test, in one line, for a wrong marker."""
    mark = node.get_closest_marker(NAME)
    return None if mark is None else _read(mark.args, mark.kwargs, node.nodeid)


def ranks_of(item: Any) -> int:
    """Return the number of ranks of one test, of the list its own entry."""
    wanted = of(item)
    assert wanted is not None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if wanted.several and PARAMETER not in parameters:
        _refuse(item.nodeid, "with a list of ranks must stand on the test, its class or module, not on a parameter")
    number: int = parameters[PARAMETER] if wanted.several else wanted.ranks[0]
    return number


def limit(config: pytest.Config) -> float:
    """Return the seconds a test may take whose marker does not say: the option, then the ini value."""
    given = config.getoption("syncheck_timeout")
    text = config.getini("syncheck_timeout") if given is None else given
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        name = "syncheck_timeout" if given is None else "--syncheck-timeout"
        raise pytest.UsageError(f"{name} {text}: needs a number of seconds above 0")
    return seconds


def _read(args: Sequence[Any], kwargs: Mapping[str, Any], node: str) -> Wanted:
    given = dict(kwargs)
    if args:
        given.setdefault("ranks", args[0])
    unknown = sorted(given.keys() - {"ranks", "timeout", "group"})
    if unknown or len(args) > 1:
        _refuse(node, f"does not know {', '.join(unknown) or args[1]!r}; it takes ranks, timeout and group")
    ranks = given.get("ranks", 2)
    several = isinstance(ranks, (list, tuple))
    listed = tuple(ranks) if several else (ranks,)
    if not listed or not all(type(n) is int and 1 <= n <= MOST_RANKS for n in listed) or len(set(listed)) < len(listed):
        _refuse(node, f"ranks={ranks!r}: needs a number from 1 to {MOST_RANKS}, or a list of different ones")
    timeout = given.get("timeout")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf")):
        _refuse(node, f"timeout={timeout!r}: needs a number of seconds above 0")
    return Wanted(listed, several, timeout, bool(given.get("group", True)))


def _refuse(node: str, why: str) -> NoReturn:
    pytest.fail(f"{node}: @pytest.mark.syncheck {why}", pytrace=False)
