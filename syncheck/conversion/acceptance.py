"""Accept differences between two models that are conversions: one cast, or the rounding of a merged adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.adapted_tensors import Merged, Replaced, are_comparable, find_adapted
from syncheck.conversion.casts import check_conversion
from syncheck.conversion.merges import is_merge
from syncheck.frozen import record
from syncheck.messages import Detail, Note
from syncheck.records import Counts, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.adapters import AdaptedModel, Adapter
    from syncheck.messages import Message
    from syncheck.records import Comparison, Status, TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


def accept_conversions(
    comparison: Comparison, models: Sequence[AdaptedModel], dtype: str | None, files: Files
) -> Comparison:
    """Count tensors as close if they are merges of an adapter, or converted to `dtype` and to the dtype of B.

    A tensor that differs is not compared if parts of an adapter, which were not merged, may change it.

    comparison: of the two models.
    models: A and B.
    dtype: of the accepted conversion; None if the user accepts no conversion.
    """
    doubts = _Doubts(models)
    tensors = []
    for diff in comparison.tensors:
        accepted = diff
        if diff.out_of_sync:
            accepted = _accept(
                diff,
                models,
                dtype,
                doubts,
                files,
            )
        tensors.append(accepted)
    flushed = [diff.detail for diff in tensors if getattr(diff.detail, "code", None) is Detail.FLUSHED]
    notes = list(comparison.notes)
    if flushed:
        notes.append(Note.FLUSHED(dtype=dtype, tensors=flushed))
    return replace(with_tensors(comparison, tensors), notes=tuple(notes))


def with_tensors(comparison: Comparison, tensors: Sequence[TensorDiff]) -> Comparison:
    """Return a comparison with other results for its tensors, and with their numbers. tensors: in the same order."""
    kinds = dict(comparison.kinds)
    for old, new in zip(comparison.tensors, tensors, strict=True):
        kinds[old.kind] = _move_count(kinds[old.kind], old.status, new.status)
    return replace(
        comparison,
        tensors=tuple(tensors),
        kinds=kinds,
        counts=sum(kinds.values(), Counts()),
    )


def _move_count(counts: Counts, old_status: Status, new_status: Status) -> Counts:
    """Return the numbers of tensors after one tensor has changed its status."""
    fewer = Counts(**{old_status: -1})
    more = Counts(**{new_status: 1})
    return counts + fewer + more


def _accept(
    diff: TensorDiff, models: Sequence[AdaptedModel], dtype: str | None, doubts: _Doubts, files: Files
) -> TensorDiff:
    """Return a tensor that differs as close or not compared, if a conversion or a doubt explains the difference."""
    pair = [model.tensors[diff.name] for model in models if diff.name in model.tensors]
    explained = None
    # A tensor that one model lacks is no conversion.
    if len(pair) == len(models):
        a, b = pair
        explained = _explain_conversion(
            diff,
            a,
            b,
            dtype,
            files,
        )
    # Doubts come last: a proven conversion needs no explanation.
    return doubts.apply(diff) if explained is None else explained


def _mark_close(diff: TensorDiff, tolerance: str) -> TensorDiff:
    """Return a tensor as close. tolerance: the conversion that explains the difference."""
    # The number of different elements is unknown if the dtypes differ, which is the reason of the difference then.
    mismatched = diff.mismatched if diff.reason is None else None
    plain = _drop_explanation(diff)
    return replace(
        plain,
        status="close",
        tolerance=tolerance,
        mismatched=mismatched,
    )


def _mark_not_compared(diff: TensorDiff, detail: Message) -> TensorDiff:
    """Return a tensor as not compared. detail: why its difference may come from an adapter."""
    plain = _drop_explanation(diff)
    return replace(
        plain,
        status="not_compared",
        reason=Reason.REFUSED,
        detail=detail,
        mismatched=None,
    )


def _drop_explanation(diff: TensorDiff) -> TensorDiff:
    """Return a tensor without the evidence for a difference that is no difference any more."""
    return replace(
        diff,
        reason=None,
        detail=None,
        facts=(),
        minority=(),
    )


def _explain_conversion(diff: TensorDiff, a: Tensor, b: Tensor, dtype: str | None, files: Files) -> TensorDiff | None:
    """Return a tensor whose difference is a conversion; None for a difference that is not accepted.

    The tensor is not compared if rounding hides the product of an adapter.
    """
    if isinstance(find_adapted(a), Merged):
        return _explain_merge(
            diff,
            merged=a,
            partner=b,
            dtype=dtype,
            files=files,
            to_partner=True,
        )
    if isinstance(find_adapted(b), Merged):
        return _explain_merge(
            diff,
            merged=b,
            partner=a,
            dtype=dtype,
            files=files,
            to_partner=False,
        )
    # Without the option, no conversion is accepted.
    if dtype is None or not are_comparable(a, b):
        return None
    losses = check_conversion(a, b, dtype, files)
    if losses is None:
        return None
    accepted = _mark_close(diff, f"cast {dtype}")
    if not losses.flushed:
        return accepted
    detail = Detail.FLUSHED(name=diff.name, flushed=losses.flushed, index=str(list(losses.first)))
    return replace(accepted, detail=detail)


def _explain_merge(
    diff: TensorDiff, merged: Tensor, partner: Tensor, dtype: str | None, files: Files, *, to_partner: bool
) -> TensorDiff | None:
    """Return a tensor whose difference is the rounding of a merge, as `_explain_conversion` does.

    merged: the tensor with the product of the adapter.
    partner: the tensor of the other model.
    dtype: of the accepted conversion.
    to_partner: whether the partner is the converted copy.
    """
    # A merge without the conversion comes first, because it is the simpler explanation.
    tolerances: dict[str | None, str] = {None: "rounding of a merge"}
    tolerances.setdefault(dtype, f"cast {dtype}, rounding of a merge")
    result: bool | None = False
    for conversion, tolerance in tolerances.items():
        result = is_merge(
            merged,
            partner,
            dtype=conversion,
            files=files,
            to_partner=to_partner,
        )
        if result:
            return _mark_close(diff, tolerance)
    # Neither a merge nor a difference: the bounds of rounding include weights without the product.
    if result is None:
        return _mark_not_compared(diff, Detail.HIDDEN_ADAPTER())
    return None


class _Doubts:
    """The tensors of two models that parts of an adapter may change."""

    def __init__(self, models: Sequence[AdaptedModel]) -> None:
        self._remainders: list[_Remainder] = []
        self._untied: set[str] = set()
        for index, model in enumerate(models):
            self._untied |= _find_untied(model)
            if model.adapter is not None:
                parts_by_prefix = model.adapter.list_touched()
                remainder = _Remainder(index, model.adapter, model.stored_names, parts_by_prefix)
                self._remainders.append(remainder)

    def apply(self, diff: TensorDiff) -> TensorDiff:
        """Return a tensor as not compared if its difference may come from an adapter, and unchanged otherwise."""
        for remainder in self._remainders:
            parts = remainder.find_parts(diff)
            if parts:
                # One problem is enough: the parts of one module usually share it.
                problem = remainder.adapter.problems[parts[0]]
                detail = Detail.ADAPTER_PARTS(names=tuple(parts), problem=problem)
                return _mark_not_compared(diff, detail)
        if diff.name in self._untied:
            return _mark_not_compared(diff, Detail.UNTIED())
        return diff


@record
class _Remainder:
    """The parts of an adapter that were not merged."""

    index: int
    """0 for an adapter of A, 1 for an adapter of B."""
    adapter: Adapter
    """The adapter with the problems of its parts."""
    stored_names: Mapping[str, str]
    """The stored names of mapped tensors."""
    parts_by_prefix: Mapping[str, list[str]]
    """The parts by the prefix of all tensors that they may change."""

    def find_parts(self, diff: TensorDiff) -> list[str]:
        """Return the parts that may explain a difference."""
        parts: list[str] = []
        # A merge changes and adds tensors, and never removes them.
        removed = (Reason.MISSING, ((self.index,),))
        if (diff.reason, diff.clusters) == removed:
            return parts
        stored_name = self.stored_names.get(diff.name, diff.name)
        for prefix, names in self.parts_by_prefix.items():
            if stored_name.startswith(prefix):
                parts += names
        return parts


def _find_untied(model: AdaptedModel) -> set[str]:
    """Return the second names of tied weights that the adapter replaces as a whole.

    PEFT replaces one name of them, and the other name is the base model's until the weights are tied again.
    """
    whole_names = {}
    second_names = {}
    for name, tensor in model.tensors.items():
        data = find_adapted(tensor)
        if isinstance(data, Replaced):
            whole_names[name] = data.whole_name
            if name != data.whole_name:
                second_names[name] = data.whole_name
    # Without its own name, the tensor was renamed by a map.
    return {name for name, whole_name in second_names.items() if whole_name in whole_names}
