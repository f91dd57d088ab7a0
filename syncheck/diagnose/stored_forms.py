"""Tensors that one copy stores in another form: quantized, sparse, nested, or without values.

The reader lists the parts of such a tensor (numbers, scales, indices) as tensors and values below its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.selection import list_names, select_missing, select_prefixes

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

# The end of the form of a plain tensor, after its dtype: see `comparison.tensors`.
_PLAIN = " with values"


def list_forms(diff: TensorDiff) -> tuple[str, ...]:
    """Return the forms of a tensor with different dtypes, as texts; empty for other differences."""
    if diff.reason != "dtype" or diff.detail is None:
        return ()
    forms = []
    for form, _ in diff.detail.parameters.get("values", ()):
        # Forms are messages or texts.
        forms.append(str(form))
    return tuple(forms)


def is_in_other_form(diff: TensorDiff) -> bool:
    """Whether a copy of the tensor is plain and another copy is not."""
    return any(form.endswith(_PLAIN) for form in list_forms(diff))


def list_parts(case: Case) -> tuple[tuple[TensorDiff, ...], tuple[str, ...]]:
    """Return the missing tensors and the names of the missing values that are parts of tensors in another form."""
    in_other_form = filter(is_in_other_form, case.tensors)
    # The reader adds the names of the parts to the name of the tensor.
    prefixes = tuple(f"{name}." for name in list_names(in_other_form))
    missing_tensors = select_missing(case.tensors)
    missing_values = [value for value in case.of_values() if value.lost]
    tensors = select_prefixes(missing_tensors, prefixes)
    values = select_prefixes(missing_values, prefixes)
    return tuple(tensors), list_names(values)
