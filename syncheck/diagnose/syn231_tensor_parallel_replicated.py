"""Tensor-parallel ranks differ in replicated tensors.

Signature: an unpartitioned tensor (a norm, a router, the bias of a row-parallel layer, and its optimizer state) is
equal on ranks with the same tensor-parallel coordinate, and differs between coordinates. The mesh in the metadata, or
DTensors, contain the coordinates. Plain tensors are compared along this dimension only if name and shape show clearly
that they are replicated; DTensors declare it.

Cause: the tensor started with different values, or was changed differently, on the ranks of a tensor-parallel group.
This follows from the mesh and the values. Usually, each tensor-parallel rank computes the gradient of a replicated
tensor, or a part of it, on its own, and something made the gradients unequal: clipping or scaling on some ranks, a
missing reduction over the tensor-parallel group (norms under sequence parallelism, routers, norms of queries and keys),
or different dropout. A load or a change of the values on some ranks has the same result. The loss looks normal for
weeks, but merging the shards has to choose one rank's values.

Fix: reduce the gradients of replicated tensors over the tensor-parallel group before the optimizer step, and clip by
the same norm on all ranks of the group. Use the sum if each rank has a part of the gradient, as for norms under
sequence parallelism, and the mean if each rank computes the whole gradient. Repair saved parameters, fp32 masters and
optimizer state together, or the difference returns.

Incidents: deepspeedai/DeepSpeed#1801 (clipping on tensor-parallel rank 0 only, BLOOM-176B),
bigscience-workshop/Megatron-DeepSpeed#271, NVIDIA/Megatron-LM#206, NVIDIA/Megatron-LM#1446, pytorch/torchtitan#2387,
pytorch/torchtitan#2532, NVIDIA-NeMo/Automodel#3822, pytorch/pytorch#160169.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.diagnose.features import agreeing_along_tensor_parallel
from syncheck.diagnose.history import suspects
from syncheck.diagnose.selection import list_names
from syncheck.diagnose.statements import largest_difference
from syncheck.layout.replica_groups import TENSOR_PARALLEL
from syncheck.messages import Sentence
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN231"
SLUG = "tensor-parallel-replicated"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Replicated tensors were initialized, loaded or changed differently on the ranks of a tensor-parallel group. "
        "Usually, a gradient was not reduced over the group, or some ranks clipped or scaled it."
    )
    FIX = (
        "Before `optimizer.step()`, call for each unpartitioned parameter p: `dist.all_reduce(p.grad, "
        "group=tp_group)`. If each rank computes the whole gradient, and not a part of it as under sequence "
        "parallelism, also `p.grad.div_(tp_group.size())`. Clip by the same norm on all ranks of the group. Initialize "
        "and load these tensors alike on all ranks of the group. Repair parameters, fp32 masters and optimizer state."
    )
    RANKS_DIFFER = (
        "Tensor-parallel ranks differ in {count:count tensor} that should be replicated ({names:names}), {size}"
    )
    COORDINATES_AGREE = "ranks with the same tensor-parallel coordinate agree ({groups:sets 3})"


# Running statistics depend on each rank's data, and counters have rules of their own.
_KINDS = ("parameter", "optimizer", "buffer", "ema")


def _find_replicated(case: Case) -> tuple[TensorDiff, ...]:
    """Return the tensors with equal values exactly on the ranks of the same tensor-parallel coordinate."""
    return tuple(agreeing_along_tensor_parallel(case.differing(*_KINDS), case))


@requires(_find_replicated)
def apply(case: Case) -> Match | None:
    """Match tensors that differ between tensor-parallel coordinates only."""
    tensors = _find_replicated(case)
    summary = Text.RANKS_DIFFER(
        count=len(tensors),
        names=list_names(tensors),
        size=largest_difference(tensors),
    )
    # Without two ranks of one coordinate, nothing shows an agreement.
    sets_of_ranks = group_ranks(case.coordinates(TENSOR_PARALLEL)).values()
    groups = tuple(tuple(ranks) for ranks in sets_of_ranks if len(ranks) > 1)
    agreement = (Text.COORDINATES_AGREE(groups=groups),) if groups else case.agreement_facts(tensors)
    return Match(tensors, suspects(tensors, case.group), (summary, *agreement))
