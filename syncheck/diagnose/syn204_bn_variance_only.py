"""BatchNorm's running variances differ between ranks, but its running means agree.

Signature: only `running_var` differs. Running means, parameters, optimizer state and `num_batches_tracked` agree.
Different data would change the means too, so the ranks used the same sums with different numbers of samples.

Cause: a synchronized BatchNorm computes the mean over all ranks, but uses a wrong number of samples (its own instead of
all ranks') to make the variance unbiased (n / (n - 1)) or to combine it. The error becomes visible if the batches of
the ranks differ in size, or if one rank runs other code. A variance that was clamped, reset or overwritten on some
ranks (SYN205) looks alike, so the finding is only consistent with this cause. Training normalizes with the biased
variance and is not affected. Evaluation uses the running variance.

Fix: use the number of samples of all ranks on every rank: upgrade torch, or correct your own layer. torch's
SyncBatchNorm needs GPUs; a layer of your own for CPUs must all-reduce the sums, the squares and the number of samples.
Then broadcast the buffers once: `for b in model.buffers(): dist.broadcast(b, 0)`.

Incidents: pytorch/pytorch#22192 (fixed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import others_agree
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case, Match

CODE = "SYN204"
SLUG = "bn-variance-only"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "On some ranks, a synchronized BatchNorm computed its running variance with a wrong number of samples. The "
        "means come from the same data and agree."
    )
    FIX = (
        "In the synchronized BatchNorm, compute the unbiased variance from the samples of all ranks: `var * n / (n - "
        "1)` with the all-reduced n. If the layer is torch's own (for GPUs only), upgrade torch. Then broadcast the "
        "buffers: `for b in model.buffers(): dist.broadcast(b, 0)`."
    )
    VARIANCES = (
        "The ranks have different BatchNorm running variances, but the same running means: {count} of "
        "{total:count variance} {count:verb differs|differ}, {size}"
    )
    RELATIVE = "relative to the variance, the differences are at most {ratio:.2g}"
    MEANS_AGREE = "all running means agree ({count} compared)"


def _means_agree(case: Case) -> bool:
    """Whether running means were compared and agree. Different data would change them too."""
    return case.is_in_sync("bn_mean")


def _variances_differ(case: Case) -> bool:
    """Whether running variances differ."""
    return bool(case.of_kind("bn_var"))


@requires(_variances_differ, _means_agree, others_agree)
def apply(case: Case) -> Match | None:
    """Match running variances that differ if running means were compared and agree."""
    variances = case.of_kind("bn_var")
    # Variances without a finite element have no relative difference.
    relative = [diff.max_rel for diff in variances if diff.max_rel is not None]
    facts = [
        Text.VARIANCES(
            count=len(variances),
            total=case.compared("bn_var"),
            size=largest_difference(variances),
        ),
        *state_if(relative, Text.RELATIVE(ratio=max(relative, default=0.0))),
        Text.MEANS_AGREE(count=case.compared("bn_mean")),
    ]
    # A variance that was clamped or reset on some ranks looks alike.
    return case.make_match(variances, facts).as_consistent("SYN205", "SYN201")
