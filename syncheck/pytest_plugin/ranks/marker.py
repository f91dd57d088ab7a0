"""Arguments of `@pytest.mark.syncheck(ranks=4)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "syncheck"

# User property of a test whose ranks were started again.
RETRIED = "syncheck_retried_start"

# The fixture for the parametrization of `ranks=[2, 4]`, which the test does not request.
PARAMETER = "_syncheck_ranks"

# Each rank is a process with torch, so a larger number is most likely a mistake.
MOST_RANKS = 64


@record
class Marker:
    """Arguments of the marker.

    ranks: numbers of ranks.
    several: whether `ranks` was a list.
    timeout: seconds, None for the default of the run.
    group: whether to create a process group; if not, torch is not imported.
    """

    ranks: tuple[int, ...]
    several: bool = False
    timeout: float | None = None
    group: bool = True


def read_marker(node: Any) -> Marker | None:
    """Return the arguments of a node's closest marker, or None. Fails the test if the marker is invalid."""
    mark = node.get_closest_marker(NAME)
    return None if mark is None else _read(mark.args, mark.kwargs, node.nodeid)


def ranks_of(item: Any) -> int:
    """Return the number of ranks of one test."""
    marker = read_marker(item)
    assert marker is not None
    if not marker.several:
        return marker.ranks[0]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if PARAMETER not in parameters:
        _fail(item.nodeid, "with a list of ranks must be on the test, its class or module, not on a parameter")
    number: int = parameters[PARAMETER]
    return number


def _read(args: Sequence[Any], kwargs: Mapping[str, Any], node: str) -> Marker:
    """Return the arguments of a marker. Fails the test if one is invalid. node: the id of the test."""
    arguments = dict(kwargs)
    if args:
        arguments.setdefault("ranks", args[0])

    unknown = sorted(arguments.keys() - {"ranks", "timeout", "group"})
    if unknown or len(args) > 1:
        _fail(node, f"has no argument {', '.join(unknown) or args[1]!r}; it takes ranks, timeout and group")

    ranks = arguments.get("ranks", 2)
    several = isinstance(ranks, (list, tuple))
    numbers = tuple(ranks) if several else (ranks,)
    if not _are_different_numbers(numbers):
        _fail(node, f"ranks={ranks!r}: must be a number from 1 to {MOST_RANKS}, or a list of different numbers")

    timeout = arguments.get("timeout")
    if timeout is not None and not _is_duration(timeout):
        _fail(node, f"timeout={timeout!r}: must be a number of seconds above 0")

    return Marker(
        ranks=numbers,
        several=several,
        timeout=timeout,
        group=bool(arguments.get("group", True)),
    )


def _are_different_numbers(numbers: Sequence[object]) -> bool:
    """Whether there is a number of ranks, and each is possible and occurs once."""
    # True is an int to Python.
    valid = [number for number in numbers if type(number) is int and 1 <= number <= MOST_RANKS]
    return 0 < len(numbers) == len(valid) == len(set(valid))


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _fail(node: str, problem: str) -> NoReturn:
    pytest.fail(f"{node}: @pytest.mark.syncheck {problem}", pytrace=False)
