"""Conditions of two tensors with one name, without which no relation between the tensors is searched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.model_pairs import FEW
from syncheck.conversion.recognition import are_readable
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.kinds import OPTIMIZER
from syncheck.tensors.names import is_code_constant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncheck.conversion.model_pairs import Models

    Condition = Callable[[str, Models], bool]


def meet(conditions: Iterable[Condition], name: str, models: Models) -> bool:
    """Whether the tensors of a name meet all conditions."""
    return all(is_met(name, models) for is_met in conditions)


def have_same_shape(name: str, models: Models) -> bool:
    """Whether the shapes are equal."""
    return models.a[name].shape == models.b[name].shape


def are_matrices(name: str, models: Models) -> bool:
    """Whether the tensor of A is a matrix."""
    return len(models.a[name].shape) == 2


def have_rows(name: str, models: Models) -> bool:
    """Whether the tensor of A is a matrix, or a convolution, which is a matrix of its output channels."""
    return len(models.a[name].shape) >= 2


def have_other_dtype(name: str, models: Models) -> bool:
    """Whether the dtypes differ."""
    return models.a[name].dtype != models.b[name].dtype


def have_same_row_shape(name: str, models: Models) -> bool:
    """Whether the shapes are equal but for the first dimension."""
    return models.a[name].shape[1:] == models.b[name].shape[1:]


def have_same_dtype(name: str, models: Models) -> bool:
    """Whether the dtypes are equal."""
    return models.a[name].dtype == models.b[name].dtype


def have_floats(name: str, models: Models) -> bool:
    """Whether both tensors have floating-point numbers."""
    return are_readable(models.a[name], models.b[name])


def have_numbers(name: str, models: Models) -> bool:
    """Whether the tensor of B has real numbers."""
    return DTYPES[models.b[name].dtype].family != "complex"


def have_many_elements(name: str, models: Models) -> bool:
    """Whether equal elements are no coincidence."""
    return min(models.a[name].numel, models.b[name].numel) >= FEW


def are_whole(name: str, models: Models) -> bool:
    """Whether the tensors are no parts of tensors that are compared in parts."""
    return not models.is_part(name)


def differ_widely(name: str, models: Models) -> bool:
    """Whether more than a few elements differ. A few wrong elements are no property of the whole tensor."""
    return name not in models.local


def differ_in_part(name: str, models: Models) -> bool:
    """Whether a part of the elements agrees."""
    return name in models.partial


def are_loaded(name: str, _models: Models) -> bool:
    """Whether a model loads the tensors from a file. The constants of other code are not loaded from A."""
    return not is_code_constant(name)


def are_weights(name: str, models: Models) -> bool:
    """Whether the tensors are no state of an optimizer, which training changes."""
    return models.kinds[name] not in OPTIMIZER
