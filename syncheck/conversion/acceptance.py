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
    untied = _find_untied(models)
    touched = [model.adapter.list_touched() if model.adapter is not None else {} for model in models]
    kinds, tensors = dict(comparison.kinds), []
    for diff in comparison.tensors:
        accepted = diff
        if diff.out_of_sync:
            a, b = (model.tensors.get(diff.name) for model in models)
            tolerance = None if a is None or b is None else _find_tolerance(a, b, dtype, files)
            doubt = None if isinstance(tolerance, str) else tolerance or _find_doubt(diff, models, touched)
            if doubt is None and diff.name in untied:
                doubt = Detail.UNTIED()
            if isinstance(tolerance, str):
                accepted = _make_close(diff, tolerance)
            elif doubt is not None:
                accepted = replace(_without_difference(diff), status="not_compared", detail=doubt)
                accepted = replace(accepted, reason=Reason.REFUSED, mismatched=None)
        if accepted.status != diff.status:
            old = kinds[diff.kind]
            changes = {accepted.status: getattr(old, accepted.status) + 1, diff.status: getattr(old, diff.status) - 1}
            kinds[diff.kind] = replace(old, **changes)
        tensors.append(accepted)
    return replace(comparison, tensors=tuple(tensors), kinds=kinds, counts=sum(kinds.values(), Counts()))


def _find_untied(models: Sequence[AdaptedModel]) -> set[str]:
    """Return the second names of tied weights that the adapter replaces as a whole.

    PEFT replaces one name of them, and the other name is the base model's until the weights are tied again.
    """
    untied = set()
    for model in models:
        replaced = {name: find_adapted(tensor) for name, tensor in model.tensors.items()}
        firsts = {data.whole for name, data in replaced.items() if isinstance(data, Replaced) and data.whole == name}
        untied |= {
            name for name, data in replaced.items() if isinstance(data, Replaced) and data.whole in firsts - {name}
        }
    return untied


def _without_difference(diff: TensorDiff) -> TensorDiff:
    return replace(diff, reason=None, detail=None, facts=(), minority=())


def _make_close(diff: TensorDiff, tolerance: str) -> TensorDiff:
    # The number of different elements is unknown if the dtypes differ.
    measured = diff.mismatched if diff.reason is None else None
    return replace(_without_difference(diff), status="close", tolerance=tolerance, mismatched=measured)


def _find_doubt(
    diff: TensorDiff, models: Sequence[AdaptedModel], touched: Sequence[Mapping[str, list[str]]]
) -> Message | None:
    """Return why a difference may come from parts of an adapter that were not merged; None if it certainly does not."""
    for i, model in enumerate(models):
        # A merge changes and adds tensors, and never removes them.
        if diff.reason is Reason.MISSING and diff.clusters == ((i,),):
            continue
        stored = model.stored.get(diff.name, diff.name)
        parts: list[str] = []
        for prefix, names in touched[i].items():
            if stored.startswith(prefix):
                parts += names
        if parts and model.adapter is not None:
            return Detail.ADAPTER_PARTS(names=tuple(parts), problem=model.adapter.problems[parts[0]])
    return None


def _find_tolerance(a: Tensor, b: Tensor, dtype: str | None, files: Files) -> str | Message | None:
    """Return the conversion that explains a difference; None for a difference that is not accepted.

    Returns a message if rounding hides the product of an adapter.
    """
    for tensor, other in ((a, b), (b, a)):
        if not isinstance(find_adapted(tensor), Merged) or find_adapted(other) is not None:
            continue
        result = is_merge(tensor, other, None, files, to_other=tensor is a)
        if result:
            return "rounding of a merge"
        if dtype is not None:
            result = is_merge(tensor, other, dtype, files, to_other=tensor is a)
        if result:
            return f"cast {dtype}, rounding of a merge"
        return Detail.HIDDEN_ADAPTER() if result is None else None
    return f"cast {dtype}" if dtype is not None and _is_cast(a, b, dtype, files) else None


def _is_cast(a: Tensor, b: Tensor, dtype: str, files: Files) -> bool:
    if not (is_readable(a) and is_readable(b)) or a.shape != b.shape:
        return False
    return len(cluster_replicas([convert(a, (dtype, b.dtype), files), b], files)) == 1
