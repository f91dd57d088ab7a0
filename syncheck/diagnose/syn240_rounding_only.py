"""Replicas differ only by a few rounding steps.

Signature: more than one element differs, and all differences have the size of rounding: at most 4 ULP (steps between
adjacent floating-point numbers), or at most 32 machine epsilons of the tensor's root mean square. Differences of the
optimizer state must be as small, and step counters and settings must agree. Larger differences of running statistics
are left to the rules on BatchNorm. If only averaged copies differ, the rule does not match, because the update of one
step changes a slow average by as little.

The finding is only "consistent". First moments that differ by rounding too support it, because the gradients were
rounded differently then. An event outside the gradients (another learning rate in a step of the warm-up,
a weight merged and unmerged, a cast and back) leaves the first moments equal, and another gradient changes them by more
than rounding.

The second measure is needed because updates preserve a difference and change the value. If training moves an element
from 0.1 to near zero, a difference in the last bit of 0.1 becomes thousands of ULP. In runs of 60 steps after one
rounding difference (resnet8, AdamW and SGD), differences reached 32,768 ULP, and stayed below 6 epsilons of the root
mean square. float16 and bfloat16 allow at most one step, because 4 ULP of bfloat16 are 3 %. Shorter dtypes never match.

Cause: the ranks computed the same values in another order or with other kernels: non-deterministic atomics, different
algorithms on each rank, different devices or library versions; in bfloat16 also stochastic rounding with a generator
per rank. Or a small update, a merge or a cast changed values on some ranks only.

Fix: `torch.use_deterministic_algorithms(True)`, and the same versions and devices on all ranks. For a comparison across
hardware, accept the difference with `--ulp 4`. Replicas should receive equal bits from an all-reduce, so look for
values computed by each rank on its own, and for code that changes weights on some ranks only. Averaging or broadcasting
the parameters regularly stops the growth.

Incidents: pytorch/pytorch#160169 (parameters replicated over tensor-parallel ranks drift apart, by ULPs at first,
because of non-deterministic operations), huggingface/nanotron#242, Nerogar/OneTrainer#804 (stochastic rounding).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.averaging import find_averaging
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.measures import count_mismatched, is_below, is_partly_nonfinite, largest_norm
from syncheck.diagnose.moments import only_decay
from syncheck.diagnose.selection import differing_elements, exclude_kinds
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Message, Sentence
from syncheck.records import MEASURED
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Case, Match
    from syncheck.records import TensorDiff

CODE = "SYN240"
SLUG = "rounding-only"
SEVERITY = "warning"
CERTAINTY = "consistent"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks computed the same values with different rounding: non-deterministic kernels, another order of "
        "summation, or different devices or versions."
    )
    CAUSE_UNSURE = (
        "The difference has the size of rounding: the ranks computed the same values with different rounding, or a "
        "small update, a merge or a cast changed values on some ranks only."
    )
    FIX_UNSURE = (
        "Look for code that updates, merges or casts weights on some ranks only. If there is none, call "
        "`torch.use_deterministic_algorithms(True)`, and use the same versions and devices on all ranks. To accept "
        "rounding differences between kinds of hardware: {ulp:option=4}."
    )
    FIX = (
        "Call `torch.use_deterministic_algorithms(True)`, and use the same versions and devices on all ranks. To "
        "accept rounding differences between kinds of hardware: {ulp:option=4}."
    )
    ROUNDING_STEPS = (
        "The replicas differ by no more than rounding: at most {ulp} ULP in {elements:count element} of "
        "{tensors:count tensor}"
    )
    ROUNDING_EPSILONS = (
        "The replicas differ by no more than rounding: at most {epsilons:.2g} machine epsilons of the root mean square "
        "({ulp} ULP near zero) in {elements:count element} of {tensors:count tensor}"
    )
    SHORT_FLOATS = (
        "also consistent with different updates, because one step of a 16-bit float is large, and no optimizer state "
        "was compared"
    )


class _Limit(NamedTuple):
    """The largest differences of a dtype that are rounding."""

    steps: int
    """The largest number of rounding steps."""
    epsilon: float
    """The machine epsilon; 0 if differences may not be measured against the tensor's size."""


# By dtype.
_LIMITS = {
    "float64": _Limit(4, 2.0**-52),
    "float32": _Limit(4, 2.0**-23),
    "complex128": _Limit(4, 0.0),
    "complex64": _Limit(4, 0.0),
    "float16": _Limit(1, 0.0),
    "bfloat16": _Limit(1, 0.0),
}
_SHORT = ("float16", "bfloat16")
# Machine epsilons of the root mean square: one step of elements up to 32 times as large.
_EPSILONS = 32


def _have_equal_values(case: Case) -> bool:
    """Whether no setting or counter differs."""
    return not case.values


def _is_without_averages(case: Case) -> bool:
    """Whether the run does not average parameters. With local SGD (SYN241), the first differences are small too."""
    return find_averaging(case.group) is None


@requires(_have_equal_values, _is_without_averages)
def apply(case: Case) -> Match | None:
    """Match differences of the size of rounding if there is no larger difference."""
    tensors = _select_rounded(case)
    is_single = differing_elements(tensors) < 2
    are_copies = not exclude_kinds(tensors, "ema")
    # A single element has a rule of its own, and so have copies.
    if is_single or are_copies:
        return None

    has_short_floats = any(diff.dtype in _SHORT for diff in tensors)
    is_stateless = not case.compared("optimizer")
    facts = [
        _summarize(tensors),
        largest_difference(tensors),
        *state_if(has_short_floats and is_stateless, Text.SHORT_FLOATS()),
    ]
    match = case.make_match(tensors, facts)

    # Gradients that differ by rounding support it. Small differences are never more than consistent with it.
    have_rounded_gradients = bool(case.differing_moments()) and not only_decay(case)
    have_equal_parameters = not case.differing("parameter")
    if have_rounded_gradients or have_equal_parameters:
        return match.as_consistent("SYN213")
    return match.with_cause(Text.CAUSE_UNSURE, Text.FIX_UNSURE).as_consistent(*_list_alternatives(case))


def _select_rounded(case: Case) -> list[TensorDiff]:
    """Return the tensors that differ by rounding; empty if a tensor differs by more.

    Running statistics may differ by more for another reason; the other tensors are returned then.
    """
    larger = [diff for diff in case.tensors if not is_rounding(diff)]
    if exclude_kinds(larger, *BN_STATISTICS):
        return []
    return exclude_kinds(case.tensors, *BN_STATISTICS) if larger else list(case.tensors)


def _summarize(tensors: Sequence[TensorDiff]) -> Message:
    """State the largest difference in rounding steps, or near zero in epsilons of the size of the tensor."""
    counts = {
        "ulp": max(map(_steps_of, tensors)),
        "elements": differing_elements(tensors),
        "tensors": len(tensors),
    }
    if all(map(_is_few_steps, tensors)):
        return Text.ROUNDING_STEPS(**counts)
    return Text.ROUNDING_EPSILONS(epsilons=max(map(_epsilons, tensors)), **counts)


def _steps_of(diff: TensorDiff) -> int:
    """Return the largest difference in rounding steps; 0 if it was not measured."""
    return diff.max_ulp or 0


def _list_alternatives(case: Case) -> tuple[str, ...]:
    """Return the causes of small differences that fit as well."""
    if not case.differing_parameters():  # only weights that are not trained differ
        return ("SYN218",)
    # In the first steps, optimizers that normalize their updates hide a scale of the gradients. With optimizer state,
    # its moments would differ.
    return ("SYN107",) if case.compared("optimizer") else ("SYN107", "SYN213")


def is_rounding(diff: TensorDiff) -> bool:
    """Whether the replicas of a tensor differ by no more than rounding."""
    if diff.dtype not in _LIMITS or not _is_measured(diff):
        return False
    if is_partly_nonfinite(diff):
        return False
    # Near zero, a tiny difference is many steps.
    return _is_few_steps(diff) or _epsilons(diff) <= _EPSILONS


def _is_measured(diff: TensorDiff) -> bool:
    """Whether the values were compared and differ, and the size of the difference is known, unlike that of digests."""
    has_values = diff.status == "different" and diff.reason is None
    has_size = count_mismatched(diff) > 0 and diff.max_abs is not None
    return has_values and has_size


def _is_few_steps(diff: TensorDiff) -> bool:
    """Whether the largest difference has few rounding steps."""
    return is_below(diff.max_ulp, _LIMITS[diff.dtype].steps + 1)


def _epsilons(diff: TensorDiff) -> float:
    """Return the largest difference in machine epsilons of the tensor's root mean square; infinity if unknown."""
    root_mean_square = largest_norm(diff, 0.0) / math.sqrt(min(diff.numel, MEASURED))
    # Short floats and complex numbers have no limit of this kind.
    epsilon = _LIMITS[diff.dtype].epsilon * root_mean_square
    if not epsilon or diff.max_abs is None:
        return math.inf
    return float(diff.max_abs) / epsilon
