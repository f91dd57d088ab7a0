"""Omit frequencies of rotary embeddings that only one model stores and the other one computes from its settings.

Old versions of transformers stored `inv_freq` in each layer, newer ones compute it from `rope_theta`. Frequencies that
do not follow from the settings are missing in the other model, which computes others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.recognition import is_readable
from syncheck.messages import Note, note_if
from syncheck.settings.defaults import find_default
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_NAME, _THETA = "inv_freq", "rope_theta"
# Any two frequencies follow from some base; heads have up to 1,024 rows.
_FEWEST, _MOST = 4, 512
_MOST_BASE = 1e30
# The relative errors of the dtypes in which models were stored, and of their computation.
_ERRORS = {"float32": 1e-5, "float64": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}
# Small frequencies in float16 are multiples of this number.
_LEAST = {"float16": 2**-24}


def omit_frequencies(sides: Sequence[Side], files: Files) -> tuple[tuple[Side, ...], list[Message]]:
    """Return the sides without frequencies that only one of them stores and that follow from its settings, and notes.

    Without any settings, the frequencies of both sides must follow from one base.
    """
    side_a, side_b = sides
    only_a, only_b = _select_frequencies(side_a, side_b), _select_frequencies(side_b, side_a)
    tensors = [*only_a.values(), *only_b.values()]
    base = _find_base(sides, tensors, files) if tensors else 0.0
    following = [tensor for tensor in tensors if _follows(tensor, base, files)]
    if len(following) < len(tensors):
        return tuple(sides), []
    omitted_sides = []
    notes: list[Message] = []
    for side, omitted in zip(sides, (only_a, only_b), strict=True):
        remaining = dict(side.model.tensors)
        for name in omitted:
            remaining.pop(name, None)
        omitted_sides.append(replace(side, model=replace(side.model, tensors=remaining)))
        note = Note.COMPUTED_FREQUENCIES(side=side.label, names=tuple(omitted), theta=f"{base:.6g}")
        notes += note_if(omitted, note)
    return tuple(omitted_sides), notes


def _select_frequencies(side: Side, other_side: Side) -> dict[str, Tensor]:
    """Return the frequencies, by stored name, that the other side does not store under the same name."""
    other_names = normalize_keys(other_side.model.tensors)
    frequencies: dict[str, Tensor] = {}
    stored_names = {name: name for name in side.model.tensors}
    for name, stored_name in normalize_keys(stored_names).items():
        if name not in other_names and name.rpartition(".")[2] == _NAME:
            frequencies[stored_name] = side.model.tensors[stored_name]
    return frequencies


def _find_base(sides: Sequence[Side], tensors: Sequence[Tensor], files: Files) -> float:
    """Return the only base that the configurations state, or the one of the first tensor without any; 0 if unknown."""
    bases: set[Any] = set()
    for side in sides:
        settings = side.configurations.merge()
        if side.configurations.by_name:
            bases.add(settings.get(_THETA, find_default(_THETA, settings.get("model_type"))))
        if not _have_size(tensors, side.variables.get("head_dim"), settings.get("partial_rotary_factor", 1)):
            return 0.0
    if not bases:
        return _fit_base(tensors[0], files)
    base = bases.pop()
    # Some models have a default of their own.
    is_known = not bases and type(base) in (int, float) and 1 < base < _MOST_BASE
    return float(base) if is_known else 0.0


def _have_size(tensors: Sequence[Tensor], head_dim: int | None, factor: object) -> bool:
    """Whether all tensors have the frequencies of a head of this size, if a configuration states it.

    factor: the rotated share of a head, as a configuration states it.
    """
    if head_dim is None:
        return True
    # Any value may stand in a configuration, so it is only compared.
    factors = set()
    for tensor in tensors:
        factors.add(2 * tensor.numel / head_dim)
    return list(factors) == [factor]


def _fit_base(tensor: Tensor, files: Files) -> float:
    """Return the base that gives the middle frequency of a tensor; 0 if it is none of this kind."""
    if not _has_frequencies(tensor) or tensor.numel < _FEWEST:
        return 0.0
    middle = tensor.numel // 2
    frequency = min(1.0, float(_read(tensor, files)[middle]))
    return frequency ** (-tensor.numel / middle) if frequency > 0 else 0.0


def _follows(tensor: Tensor, base: float, files: Files) -> bool:
    """Whether all frequencies follow from a base, within the rounding of their dtype."""
    import numpy as np

    if not base or not _has_frequencies(tensor):
        return False
    computed = base ** -(np.arange(tensor.numel) / tensor.numel)
    relative_error, absolute_error = _ERRORS[tensor.dtype], _LEAST.get(tensor.dtype, 0.0)
    errors = np.abs(_read(tensor, files) - computed)
    # NaN is not less than anything.
    return bool((errors <= relative_error * computed + absolute_error).all())


def _has_frequencies(tensor: Tensor) -> bool:
    """Whether a tensor can be read and has the shape of frequencies."""
    conditions = (is_readable(tensor), tensor.dtype in _ERRORS, len(tensor.shape) == 1, 0 < tensor.numel <= _MOST)
    return all(conditions)


def _read(tensor: Tensor, files: Files) -> Any:
    """Return the frequencies as float64."""
    from syncheck.tensors.differences import read_float64

    return read_float64(tensor, files, 0, tensor.numel, 0)
