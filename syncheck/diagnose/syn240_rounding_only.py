"""Replicas differ by a few rounding steps, and by nothing more.

Signature: more than one element differs, and in every tensor that does, all gaps are of the size of rounding: at most
4 ULP (steps between neighbouring floats), or at most 32 machine epsilons of the tensor's root mean square. Optimizer
state that differs has to be as near; step counters and settings have to agree. Running statistics that differ by more
are left to the rules of BatchNorm. Averaged copies that differ alone are no rounding: one step's update moves a slow
average by as little.

The second measure is needed because updates keep a gap and move the value: an element that training took from 0.1 to
near zero has kept the gap of 0.1's last bit, which is thousands of ULP there. In runs of 60 steps after one such step
(resnet8, AdamW and SGD), gaps reached 32,768 ULP and stayed below 6 epsilons of the root mean square.
In float16 and bfloat16 one step at most counts, for 4 of bfloat16 are 3 %; in narrower floats nothing is rounding only.

Cause: the ranks did the same arithmetic in another order, or with other kernels: non-deterministic atomics, other
algorithms chosen on each rank, unlike devices or library versions; in bfloat16 also stochastic rounding with a
generator of each rank.

Fix: `torch.use_deterministic_algorithms(True)` and one version and device type everywhere; or accept it for a
comparison across hardware with `--ulp 4`. Ranks that hold replicas should get equal bits from one all-reduce, so look
for what each of them computes by itself; averaging or broadcasting the parameters now and then keeps it from growing.

Incidents: pytorch/pytorch#160169 (parameters that are replicated over tensor-parallel ranks drift apart, by ULPs first,
because of non-deterministic operations), huggingface/nanotron#242, Nerogar/OneTrainer#804 (stochastic rounding).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.averaging import averaging_of
from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import Sentence
from syncheck.records import MEASURED

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN240"
SLUG = "rounding-only"
SEVERITY: Severity = "warning"
CAUSE = (
    "The ranks did the same arithmetic with another rounding: non-deterministic kernels, another order of summing, or "
    "unlike devices or versions."
)


class Text(Sentence):
    """The sentences of this finding."""

    FIX = (
        "Call torch.use_deterministic_algorithms(True), and use the same versions and devices on all ranks. To accept "
        "rounding differences between kinds of hardware: {ulp:option=4}."
    )


FIX = Text.FIX
# dtype: (steps that are rounding, machine epsilon where gaps may be measured against the tensor's size, else 0).
_LIMITS = {
    "float64": (4, 2.0**-52),
    "float32": (4, 2.0**-23),
    "complex128": (4, 0.0),
    "complex64": (4, 0.0),
    "float16": (1, 0.0),
    "bfloat16": (1, 0.0),
}
_SHORT = ("float16", "bfloat16")
# Machine epsilons of the root mean square: one step of elements up to 32 times as large as that.
_EPSILONS = 32


def apply(case: Case) -> Match | None:
    """Fit what differs by rounding where nothing differs by more."""
    others = [diff for diff in case.tensors if diff.kind not in BN_STATISTICS]
    statistics = [diff for diff in case.tensors if diff.kind in BN_STATISTICS]
    # Ranks that take steps of their own drift apart by little at first: SYN241.
    if averaging_of(case.group) is not None or not all(map(_is_rounding, others)) or case.values:
        return None
    near = all(map(_is_rounding, statistics))
    tensors = tuple(case.tensors) if near else tuple(others)
    elements = sum(diff.mismatched or 0 for diff in tensors)
    if elements < 2 or all(diff.kind == "ema" for diff in tensors):
        return None
    most = max(diff.max_ulp or 0 for diff in tensors)
    text = f"{counted(len(tensors), 'tensor')} {differ(len(tensors))} in {counted(elements, 'element')}, "
    if all(_is_few_steps(diff) for diff in tensors):
        text += f"all by at most {most} ULP"
    else:
        text += (
            f"all by at most {max(map(_epsilons, tensors)):.2g} epsilons of the tensor's root mean square "
            f"({most} ULP near zero)"
        )
    text += f", {gap_text(tensors)}"
    if any(diff.dtype in _SHORT for diff in tensors) and not case.compared("optimizer"):
        text += "; in so short floats this is also consistent with unlike updates, and there are no moments to tell"
    return Match(tensors, suspects(tensors, case.group), text + agreement_text(tensors, case.group))


def _is_rounding(diff: TensorDiff) -> bool:
    if diff.status != "different" or diff.reason is not None or not diff.mismatched or diff.dtype not in _LIMITS:
        return False
    if len(set(diff.nonfinite.values())) > 1 or diff.max_abs is None:
        return False
    return _is_few_steps(diff) or _epsilons(diff) <= _EPSILONS


def _is_few_steps(diff: TensorDiff) -> bool:
    return diff.max_ulp is not None and diff.max_ulp <= _LIMITS[diff.dtype][0]


def _epsilons(diff: TensorDiff) -> float:
    """Return the largest gap in machine epsilons of the tensor's root mean square; infinity where it is not known."""
    norm = max(diff.evidence.norms.values(), default=0.0) if diff.evidence else 0.0
    epsilon = _LIMITS[diff.dtype][1]
    if not norm or not epsilon or diff.max_abs is None:
        return math.inf
    return float(diff.max_abs) / (epsilon * norm / math.sqrt(min(diff.numel, MEASURED)))
