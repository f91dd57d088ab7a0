"""Find the parts of a stack among tensors without a partner of their name, in a layout without a map.

Libraries store the experts of a layer as separate matrices, or as one tensor with the expert as its first dimension,
which may also be transposed, or hold two matrices of each expert one after the other. Inference maps the simple stacks.
For all other stacks, equal rows show no lost data, but not the order in which a library expects it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.refused_tensors import refuse_tensors
from syncheck.conversion.rows import MOST_ROWS, digest_rows
from syncheck.layout import views
from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.records import Comparison
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


def explain_stacks(comparison: Comparison, sides: Sequence[Side], files: Files) -> Comparison:
    """Return the comparison with refused tensors in the place of missing tensors whose rows a stack contains."""
    missing: list[dict[str, Tensor]] = [{}, {}]
    models = [normalize_keys(side.model.tensors) for side in sides]
    for diff in comparison.tensors:
        if diff.reason is Reason.MISSING:
            holder = diff.clusters[0][0]
            missing[holder][diff.name] = models[holder][diff.name]

    details: dict[str, Message] = {}
    for tensors, other_tensors in (missing, reversed(missing)):
        for stack, names in _find_stacks(tensors, other_tensors, files).items():
            detail = Detail.UNMAPPED_STACK(stack=stack)
            details |= dict.fromkeys([stack, *names], detail)

    return refuse_tensors(comparison, details)


def _find_stacks(
    tensors: Mapping[str, Tensor], other_tensors: Mapping[str, Tensor], files: Files
) -> dict[str, list[str]]:
    """Return the names of the parts of each stack.

    tensors: of the model with stacks.
    other_tensors: of the model with their parts.
    """
    rows_of_parts: dict[str, list[bytes]] = {}
    parts_by_stack: dict[str, list[str]] = {}
    for name, stack in tensors.items():
        if not _has_dims(stack, 3):
            continue
        # Most models have no stacks, and digests need all data.
        rows_of_parts = rows_of_parts or _digest_parts(other_tensors, files)
        for rows in _list_rows(stack, files):
            part_names = _find_parts(rows, rows_of_parts)
            if part_names:
                parts_by_stack[name] = part_names

    return parts_by_stack


def _digest_parts(tensors: Mapping[str, Tensor], files: Files) -> dict[str, list[bytes]]:
    """Return the digests of the rows of all matrices."""
    digests: dict[str, list[bytes]] = {}
    for name, tensor in tensors.items():
        if _has_dims(tensor, 2):
            rows, _ = tensor.shape
            digests[name] = digest_rows(tensor, files, rows)

    return digests


def _has_dims(tensor: Tensor, count: int) -> bool:
    """Whether a tensor has a number of dimensions, and readable rows."""
    has_rows = len(tensor.shape) == count and 0 < tensor.numel <= MOST_ROWS * min(tensor.shape[1:])
    return has_rows and has_elements(tensor)


def _list_rows(stack: Tensor, files: Files) -> Iterator[list[bytes]]:
    """Yield the digests of all rows of the matrices in a stack, and of all their columns."""
    count, rows, columns = stack.shape
    yield digest_rows(stack, files, count * rows)
    transposed = views.permute(stack, (0, 2, 1))
    yield digest_rows(transposed, files, count * columns)


def _find_parts(rows: Sequence[bytes], rows_of_parts: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Return the names of the parts with the rows of a stack; empty if the stack has other rows, too.

    rows: of the stack.
    """
    stack_rows = set(rows)
    names: list[str] = []
    found_rows: list[bytes] = []
    for name, part_rows in rows_of_parts.items():
        if stack_rows.issuperset(part_rows):
            names.append(name)
            found_rows += part_rows

    # A row of two parts must be in the stack twice.
    return names if sorted(found_rows) == sorted(rows) else []
