"""Accept differences between two models that are conversions: one cast, or the rounding of a merged adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.merges import Merged, Replaced, find_adapted, is_merge
from syncheck.conversion.recognition import is_readable
from syncheck.kernel.clustering import cluster_replicas
from syncheck.messages import Detail
from syncheck.records import Counts, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.adapters import AdaptedModel
    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor


def accept_conversions(
    comparison: Comparison, models: Sequence[AdaptedModel], dtype: str | None, files: Files
) -> Comparison:
    """Count tensors as close if they are merges of an adapter, or converted to `dtype` and to the dtype of B.

    A tensor that differs is not compared if parts of an adapter, which were not merged, may change it.
    """
    doubts = _Doubts(models)
    kinds = dict(comparison.kinds)
    tensors = []
    for diff in comparison.tensors:
        accepted = diff
        if diff.out_of_sync:
            accepted = _accept(diff, models, dtype, doubts, files)
        if accepted.status != diff.status:
            counts = kinds[diff.kind]
            fewer = getattr(counts, diff.status) - 1
            more = getattr(counts, accepted.status) + 1
            kinds[diff.kind] = replace(counts, **{diff.status: fewer, accepted.status: more})
        tensors.append(accepted)
    return replace(comparison, tensors=tuple(tensors), kinds=kinds, counts=sum(kinds.values(), Counts()))


def _accept(
    diff: TensorDiff, models: Sequence[AdaptedModel], dtype: str | None, doubts: _Doubts, files: Files
) -> TensorDiff:
    """Return a tensor that differs as close or not compared, if a conversion or a doubt explains the difference."""
    a, b = (model.tensors.get(diff.name) for model in models)
    result: str | Message | None = None
    if a is not None and b is not None:
        result = _find_tolerance(a, b, dtype, files)
    # Doubts come last: a proven conversion needs no explanation.
    if result is None:
        result = doubts.find(diff)
    if result is None:
        return diff
    explained = replace(diff, reason=None, detail=None, facts=(), minority=())
    if isinstance(result, str):
        # The number of different elements is unknown if the dtypes differ.
        measured = None
        if diff.reason is None:
            measured = diff.mismatched
        return replace(explained, status="close", tolerance=result, mismatched=measured)
    return replace(explained, status="not_compared", reason=Reason.REFUSED, detail=result, mismatched=None)


def _find_tolerance(a: Tensor, b: Tensor, dtype: str | None, files: Files) -> str | Message | None:
    """Return the conversion that explains a difference; None for a difference that is not accepted.

    Returns a message if rounding hides the product of an adapter.
    """
    if isinstance(find_adapted(a), Merged):
        return _find_merge(a, b, dtype, files, to_partner=True)
    if isinstance(find_adapted(b), Merged):
        return _find_merge(b, a, dtype, files, to_partner=False)
    if dtype is not None and _is_cast(a, b, dtype, files):
        return f"cast {dtype}"
    return None


def _find_merge(
    merged: Tensor, tensor: Tensor, dtype: str | None, files: Files, *, to_partner: bool
) -> str | Message | None:
    """Return how a tensor is a merge, as `_find_tolerance` does. to_partner: whether it is the copy."""
    result = is_merge(merged, tensor, None, files, to_partner=to_partner)
    if result:
        return "rounding of a merge"
    if dtype is not None:
        result = is_merge(merged, tensor, dtype, files, to_partner=to_partner)
    if result:
        return f"cast {dtype}, rounding of a merge"
    # Neither a merge nor a difference: the bounds of rounding include weights without the product.
    if result is None:
        return Detail.HIDDEN_ADAPTER()
    return None


def _is_cast(a: Tensor, b: Tensor, dtype: str, files: Files) -> bool:
    if a.shape != b.shape or not (is_readable(a) and is_readable(b)):
        return False
    return len(cluster_replicas([convert(a, (dtype, b.dtype), files), b], files)) == 1


class _Doubts:
    """The tensors of two models that parts of an adapter may change."""

    def __init__(self, models: Sequence[AdaptedModel]) -> None:
        self._models = models
        self._touched: list[Mapping[str, list[str]]] = []
        self._untied: set[str] = set()
        for model in models:
            touched: Mapping[str, list[str]] = {}
            if model.adapter is not None:
                touched = model.adapter.list_touched()
            self._touched.append(touched)
            self._untied |= _find_untied(model)

    def find(self, diff: TensorDiff) -> Message | None:
        """Return why a difference may come from an adapter; None if it certainly does not."""
        for index, model in enumerate(self._models):
            # A merge changes and adds tensors, and never removes them.
            lost = diff.reason is Reason.MISSING and diff.clusters == ((index,),)
            if lost or model.adapter is None:
                continue
            stored_name = model.stored_names.get(diff.name, diff.name)
            parts = []
            for prefix, names in self._touched[index].items():
                if stored_name.startswith(prefix):
                    parts += names
            if parts:
                return Detail.ADAPTER_PARTS(names=tuple(parts), problem=model.adapter.problems[parts[0]])
        if diff.name in self._untied:
            return Detail.UNTIED()
        return None


def _find_untied(model: AdaptedModel) -> set[str]:
    """Return the second names of tied weights that the adapter replaces as a whole.

    PEFT replaces one name of them, and the other name is the base model's until the weights are tied again.
    """
    whole_names = {}
    for name, tensor in model.tensors.items():
        data = find_adapted(tensor)
        if isinstance(data, Replaced):
            whole_names[name] = data.whole_name
    untied = set()
    for name, whole_name in whole_names.items():
        # Without its own name, the tensor was renamed by a map.
        if name != whole_name and whole_name in whole_names:
            untied.add(name)
    return untied
