"""Tensors that one copy stores in another form: quantized, sparse, nested, or without values.

The reader lists the parts of such a tensor (numbers, scales, indices) as tensors and values below its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

# The end of the form of a plain tensor, after its dtype: see `comparison.tensors`.
_PLAIN = " with values"


def list_forms(diff: TensorDiff) -> tuple[str, ...]:
    """Return the forms of a tensor with different dtypes, as texts; empty for other differences."""
    if diff.reason != "dtype" or diff.detail is None:
        return ()
    return tuple(str(form) for form, _ in diff.detail.parameters.get("values", ()))


def is_in_other_form(diff: TensorDiff) -> bool:
    """Whether a copy of the tensor is plain and another copy is not."""
    return any(form.endswith(_PLAIN) for form in list_forms(diff))


def list_parts(case: Case) -> tuple[tuple[TensorDiff, ...], tuple[str, ...]]:
    """Return the missing tensors and the names of the missing values that are parts of tensors in another form."""
    # The reader adds the names of the parts to the name of the tensor.
    prefixes = tuple(f"{diff.name}." for diff in case.tensors if is_in_other_form(diff))
    # No name starts with one of no prefixes.
    missing_tensors = [diff for diff in case.tensors if diff.reason == "missing"]
    missing_values = [value.name for value in case.of_values() if value.lost]
    tensors = tuple(diff for diff in missing_tensors if diff.name.startswith(prefixes))
    values = tuple(name for name in missing_values if name.startswith(prefixes))
    return tensors, values
