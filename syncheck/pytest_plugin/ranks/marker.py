"""Arguments of `@pytest.mark.syncheck(ranks=4)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "syncheck"

# User property of a test whose ranks were started again.
RETRIED = "syncheck_retried_start"

# The fixture for the parametrization of `ranks=[2, 4]`, which the test does not request.
PARAMETER = "_syncheck_ranks"

# Each rank is a process with torch, so a larger number is most likely a mistake.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of the marker. ranks: numbers of ranks. several: whether `ranks` was a list.

    timeout: seconds, None for the default of the run. group: whether to create a process group; if not, torch is not
    imported.
    """

    ranks: tuple[int, ...]
    several: bool = False
    timeout: float | None = None
    group: bool = True


def read_marker(node: Any) -> Settings | None:
    """Return the settings of a node's closest marker, or None. Fails the test if the marker is invalid."""
    mark = node.get_closest_marker(NAME)
    return None if mark is None else _read(mark.args, mark.kwargs, node.nodeid)


def ranks_of(item: Any) -> int:
    """Return the number of ranks of one test."""
    settings = read_marker(item)
    assert settings is not None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if settings.several and PARAMETER not in parameters:
        _fail(item.nodeid, "with a list of ranks must be on the test, its class or module, not on a parameter")
    number: int = parameters[PARAMETER] if settings.several else settings.ranks[0]
    return number


def _read(args: Sequence[Any], kwargs: Mapping[str, Any], node: str) -> Settings:
    given = dict(kwargs)
    if args:
        given.setdefault("ranks", args[0])
    unknown = sorted(given.keys() - {"ranks", "timeout", "group"})
    if unknown or len(args) > 1:
        _fail(node, f"has no argument {', '.join(unknown) or args[1]!r}; it takes ranks, timeout and group")
    ranks = given.get("ranks", 2)
    several = isinstance(ranks, (list, tuple))
    listed = tuple(ranks) if several else (ranks,)
    if not listed or not all(type(n) is int and 1 <= n <= MOST_RANKS for n in listed) or len(set(listed)) < len(listed):
        _fail(node, f"ranks={ranks!r}: must be a number from 1 to {MOST_RANKS}, or a list of different numbers")
    timeout = given.get("timeout")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf")):
        _fail(node, f"timeout={timeout!r}: must be a number of seconds above 0")
    return Settings(listed, several, timeout, bool(given.get("group", True)))


def _fail(node: str, problem: str) -> NoReturn:
    pytest.fail(f"{node}: @pytest.mark.syncheck {problem}", pytrace=False)
