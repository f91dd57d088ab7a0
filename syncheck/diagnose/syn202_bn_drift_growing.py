"""BatchNorm's running statistics run freely on each rank: they are never synchronized.

Signature: that of SYN201, and one of these. The metadata says that the method does not synchronize buffers. A running
variance is lower than one that was synchronized since an earlier step can be: one batch takes a variance to
(1 - momentum) of rank 0's at most, which proves it. Or the gaps of three early steps close together grow and keep their
direction as those of free-running statistics do, and not as a lag that each step renews. That outweighs metadata which
says that buffers are synchronized: it says what was meant. Without such metadata, and where the gaps' directions are
not known, drift that grows at least 1.5 times from the first to the last step will do.

Growth alone is no sign where more is known: activations grow with training, and a lag with them. Nor is direction
alone: with shards of unlike data a lag points the same way at each step.

Cause: DDP with `forward_sync_buffers=False` (or the older `broadcast_buffers=False`), FSDP and HSDP, which never
synchronize buffers, or a forward that goes around the wrapper. Each rank's running averages follow its own share of
the data for the whole run: with shares of unlike mean the gap grows towards the full difference between the shares,
1/momentum times the one step's gap of SYN201.

Fix: convert to SyncBatchNorm before wrapping, or leave DDP's buffer synchronization on; under FSDP average the
running statistics over the ranks before saving and evaluating.

Incidents: facebookresearch/detectron2#1297, facebookresearch/maskrcnn-benchmark#692, open-mmlab/mmdetection#2539,
pytorch/pytorch#22095, facebookresearch/fairseq2#1081.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import drift, evidence, statistics_alone
from syncheck.diagnose.case import Match
from syncheck.evidence.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import FreeRunning, Severity

CODE = "SYN202"
SLUG = "bn-drift-growing"
SEVERITY: Severity = "error"
CAUSE = "Nothing synchronizes the running statistics: each rank's follow its own share of the data for the whole run."
FIX = (
    "Convert before wrapping: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or leave DDP's "
    "forward_sync_buffers (in older torch broadcast_buffers) on. Under FSDP, before saving: for b in "
    "filter(torch.is_floating_point, model.buffers()): dist.all_reduce(b.div_(dist.get_world_size()))."
)


# Of gaps of which only the size is known: between the growth of free-running statistics from step 2 to 12 (about 2
# times at momentum 0.1, and up to 1/momentum for unlike shares) and the scatter of one-step gaps, whose level stays.
GROWTH = 1.5
# Of gaps of which the direction is known too, measured at momentum 0.1 on 2 and 4 ranks: free-running statistics grew
# 1.35 times or more from step 3 to 12 with a cosine over 0.5, and a lag explained them at best as well as free running
# did. Lags of plain and of unlike shards, with accumulation and without, were explained by it twice as well.
SEEN_GROWTH, SEEN_COSINE, AS_WELL = 1.25, 0.45, 0.75


def apply(case: Case) -> Match | None:
    """Fit running statistics that differ alone and are known, or seen, to run freely."""
    statistics = statistics_alone(case)
    if not statistics:
        return None
    ranks = suspects(statistics, case.group)
    recorded = None if case.group.evidence.metadata is None else case.group.evidence.metadata.buffers_synced
    if recorded is False:
        why = f"{'' if case.in_memory else 'the metadata says that '}buffers are not synchronized"
    else:
        why = _seen(case.group.evidence.free_running) or ("" if recorded else _grown(case))
        if why and recorded:
            why += "; the metadata says that buffers are synchronized once a step, which these files do not bear out"
    return Match(statistics, ranks, f"{evidence(case, statistics)}; {why}") if why else None


def _seen(found: FreeRunning | None) -> str:
    """Say how the steps show that the statistics run freely; empty where they do not."""
    if found is None:
        return ""
    if found.below > 1:  # one could be a flipped bit
        return (
            f"{found.below} running variances are lower than one batch after another can make them from rank 0's of an "
            "earlier step: they were not copied from there in between"
        )
    if found.misfit_free is None or found.misfit_lag is None:
        return ""
    if found.cosine < SEEN_COSINE or found.growth < SEEN_GROWTH or found.misfit_lag < AS_WELL * found.misfit_free:
        return ""
    return (
        f"from step {found.steps[0]} to {found.steps[-1]} the gaps grew {found.growth:.1f} times and kept their "
        f"direction (cosine {found.cosine:.2f} from step to step), as statistics do that run freely"
    )


def _grown(case: Case) -> str:
    """Say how much the drift grew, where no more is known of it than its size; empty where it did not."""
    if len(case.series) < 2 or case.group.evidence.free_running is not None:
        return ""
    first, last = drift(case.series[0]), drift(case.series[-1])
    if not 0 < first * GROWTH <= last:
        return ""
    steps = f"step {case.series[0].step} to {case.series[-1].step}"
    return f"the mean gap grew {last / first:.1f} times from {steps}"
