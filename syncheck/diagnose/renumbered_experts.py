"""Recognize experts of B that have other numbers together with the rows of their router, which keeps the function."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import TensorDiff

    # The number of the expert, or row, of A for each one of B, as text.
    Order = dict[str, str]

# A tensor of an expert: the text before the experts of its layer, the number of the expert, and the rest.
_EXPERT = re.compile(r"(.*)\bexperts?\.(?:local_experts\.)?(\d+)(\..*)")
# A matrix with a row for each expert, beside the experts.
_ROUTER = re.compile(r"^(.*\.|)(?:\w*gate|\w*router|router\.classifier)\.weight$")


def find_routers(
    names: Iterable[str], misplaced: Sequence[TensorDiff], reordered: Iterable[TensorDiff]
) -> tuple[TensorDiff, ...]:
    """Return the routers whose rows have the order of the experts, if this holds for the experts of all layers.

    names: of all tensors.
    misplaced: tensors of experts of B with the data of another expert of A.
    reordered: tensors of B with the rows of A in another order.
    """
    orders = _list_orders(names)
    for diff in misplaced:
        source = _EXPERT.fullmatch(parameters_of(diff).get("other", ""))
        target = _EXPERT.fullmatch(diff.name)
        # Stacks of experts have no number in their names.
        if source is None or target is None:
            return ()
        layer, source_number, end = source.groups()
        order = orders[layer].setdefault(end, {})
        order[target[2]] = source_number

    routers: dict[str, TensorDiff] = {}
    for diff in reordered:
        router = _ROUTER.fullmatch(diff.name)
        if router is not None and router[1] in orders:
            routers[router[1]] = diff

    for layer, order_by_tensor in orders.items():
        for order in order_by_tensor.values():
            # A part of the experts that stays, or is elsewhere, computes with the rows of another expert.
            if order != _read_order(routers.get(layer), len(order)):
                return ()

    return tuple(routers.values())


def _list_orders(names: Iterable[str]) -> dict[str, dict[str, Order]]:
    """Return the order of A for each tensor that the experts of a layer have, by the text before the experts."""
    orders: defaultdict[str, dict[str, Order]] = defaultdict(dict)
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        layer, number, end = match.groups()
        order = orders[layer].setdefault(end, {})
        order[number] = number

    return orders


def _read_order(diff: TensorDiff | None, count: int) -> Order:
    """Return the row of A for each row of a router of B; empty if the evidence does not state it.

    diff: None for a router with equal rows in both models.
    count: the number of experts.
    """
    rows: Iterable[int] = ()
    parameters = {"pattern": "equal"} if diff is None else parameters_of(diff)
    # Columns, which are no experts, have another dimension.
    pattern = (parameters["pattern"], parameters.get("dim", 0))
    if pattern == ("equal", 0):
        rows = range(count)
    elif pattern == ("reversed", 0):
        rows = reversed(range(count))
    elif pattern == ("blocks", 0):
        runs = parameters["runs"]
        rows = chain.from_iterable(map(_list_rows, runs[::2], runs[1::2]))

    order: Order = {}
    for number, row in zip(range(count), rows, strict=False):
        order[str(number)] = str(row)

    return order


def _list_rows(first: int, count: int) -> range:
    """Return the rows of a block."""
    return range(first, first + count)
