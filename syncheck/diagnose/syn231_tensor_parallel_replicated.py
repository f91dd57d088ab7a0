"""What tensor-parallel ranks should hold alike differs between them, and agrees along every other dimension.

Signature: a tensor that tensor parallelism does not divide (a norm, a router, the bias of a row-parallel layer, with
its optimizer state) is equal on ranks with the same tensor-parallel coordinate and differs between those with another
one. Where the ranks stand is told by the mesh in the metadata or by DTensors. Of plain tensors only those are
compared along that dimension whose name and shape leave no doubt that they are replicated; DTensors say it
themselves.

Cause: each tensor-parallel rank computes the gradient of what is replicated, or a part of it, for itself, and
something made these unequal: clipping or scaling on some of them, a reduction over the tensor-parallel group that is
missing (norms under sequence parallelism, routers, norms of queries and keys), unequal dropout, or a start from
unequal values. Losses look normal for weeks; merging the parts then has to choose one of them.

Fix: reduce these gradients over the tensor-parallel group before the optimizer's step, and clip by one norm on all of
its ranks: the sum where each rank has a part of the gradient, as norms under sequence parallelism do, the mean where
each computes the whole. Mend what is saved in parameters, fp32 masters and optimizer state alike, or the difference
comes back.

Incidents: deepspeedai/DeepSpeed#1801 (clipping on tensor-parallel rank 0 only, BLOOM-176B),
bigscience-workshop/Megatron-DeepSpeed#271, NVIDIA/Megatron-LM#206, NVIDIA/Megatron-LM#1446, pytorch/torchtitan#2387,
pytorch/torchtitan#2532, NVIDIA-NeMo/Automodel#3822, pytorch/pytorch#160169.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text
from syncheck.diagnose.places import divided_by
from syncheck.evidence.suspects import suspects
from syncheck.messages import names_text, ranks_text
from syncheck.tensor_parallel import TENSOR_PARALLEL

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, Severity

CODE = "SYN231"
SLUG = "tensor-parallel-replicated"
SEVERITY: Severity = "error"
CAUSE = (
    "Tensor-parallel ranks updated what they should hold alike in unequal ways: a gradient was not reduced over them, "
    "or clipped or scaled on some of them only."
)
FIX = (
    "Before optimizer.step(), for each parameter p that is not divided: dist.all_reduce(p.grad, group=tp_group), and "
    "p.grad.div_(tp_group.size()) where each rank computes the whole gradient and not, as under sequence parallelism, "
    "a part of it; clip by one norm on all of them; repair parameters, fp32 masters and optimizer state."
)
# Running statistics follow each rank's data, and counters have rules of their own.
_KINDS = ("parameter", "optimizer", "buffer", "ema")


def apply(case: Case) -> Match | None:
    """Fit the tensors whose sets of equal ranks are whole tensor-parallel coordinates."""
    places = _coordinates(case.group)
    if len(set(places.values())) < 2:
        return None
    fitting = tuple(d for d in case.of_kind(*_KINDS) if d.status == "different" and divided_by(d, places))
    if not fitting:
        return None
    by_place = {at: tuple(rank for rank, of in places.items() if of == at) for at in dict.fromkeys(places.values())}
    copies = [ranks for ranks in by_place.values() if len(ranks) > 1]
    text = (
        f"{counted(len(fitting), 'tensor')} that tensor parallelism does not divide "
        f"{differ(len(fitting))} between tensor-parallel ranks: "
        f"{names_text([diff.name for diff in fitting])}, {gap_text(fitting)}"
    )
    if copies:
        text += f"; equal within each coordinate ({' and '.join(ranks_text(ranks) for ranks in copies[:3])})"
    else:
        text += agreement_text(fitting, case.group)
    return Match(fitting, suspects(fitting, case.group), text)


def _coordinates(group: Comparison) -> dict[int, int]:
    """Return each rank's tensor-parallel coordinate; empty where one has none."""
    found = {}
    for replica in group.replicas:
        at = next((at for name, at in replica.mesh.items() if name.lower() in TENSOR_PARALLEL), None)
        if at is None:
            return {}
        found[replica.rank] = at
    return found
