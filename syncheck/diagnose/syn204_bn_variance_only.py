"""BatchNorm's running variances differ between the ranks, and its running means do not.

Signature: only `running_var` differs; running means, parameters, optimizer state and `num_batches_tracked` agree.
Statistics of other data would move the means too, so the ranks saw the same sums and counted them differently.

Cause: a synchronized BatchNorm computes the mean over all ranks, and makes the variance unbiased (n / (n - 1)) or
combines it with a wrong number of samples: its own in place of all. It shows where ranks have unequal batches, or
where one rank runs other code. Training normalizes with the biased variance and does not notice; evaluation uses the
running one.

Fix: use the number of samples over all ranks on every rank: upgrade torch, or mend the layer of your own. Then
broadcast the buffers once: `for b in model.buffers(): dist.broadcast(b, 0)`.

Incidents: pytorch/pytorch#22192 (fixed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import others_agree
from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text
from syncheck.evidence.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN204"
SLUG = "bn-variance-only"
SEVERITY: Severity = "error"
CAUSE = (
    "A synchronized BatchNorm took a wrong number of samples for its running variance on some ranks: the means, which "
    "came from the same data, agree."
)
FIX = (
    "In the synchronized BatchNorm, make the variance unbiased with the samples of all ranks, var * n / (n - 1) with "
    "the all-reduced n (torch: upgrade); then for b in model.buffers(): dist.broadcast(b, 0)."
)


def apply(case: Case) -> Match | None:
    """Fit running variances that differ where running means were compared and agree."""
    variances = case.of_kind("bn_var")
    means = case.compared("bn_mean")
    if not variances or not means or not case.agrees("bn_mean") or not others_agree(case):
        return None
    largest = max((diff.max_rel for diff in variances if diff.max_rel is not None), default=None)
    text = (
        f"{len(variances)} of {counted(case.compared('bn_var'), 'running variance')} "
        f"{differ(len(variances))}, {gap_text(variances)}"
    )
    if largest is not None:
        text += f", at most {largest:.2g} of their size"
    text += f"; all {counted(means, 'running mean')} agree{agreement_text(variances, case.group)}"
    return Match(variances, suspects(variances, case.group), text)
