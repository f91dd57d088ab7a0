"""BatchNorm's running statistics run freely on each rank: they are never synchronized.

Signature: that of SYN201, and the drift grows over the saved steps (at least 1.5 times from the first to the last),
or the metadata in the files says that the method does not synchronize buffers.

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
from syncheck.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN202"
SLUG = "bn-drift-growing"
SEVERITY: Severity = "error"
CAUSE = "Nothing synchronizes the running statistics: each rank's follow its own share of the data for the whole run."
FIX = (
    "Convert before wrapping: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or leave DDP's "
    "forward_sync_buffers on; under FSDP average the running statistics before saving."
)


# Between the growth of free-running statistics from step 2 to 12 (about 2 times at momentum 0.1, and up to 1/momentum
# for unlike shares) and the scatter of one-step gaps, whose level stays.
GROWTH = 1.5


def apply(case: Case) -> Match | None:
    """Fit running statistics that differ alone and are known, or seen, to run freely."""
    statistics = statistics_alone(case)
    if not statistics:
        return None
    ranks = suspects(statistics, case.group)
    recorded = None if case.group.metadata is None else case.group.metadata.buffers_synced
    if recorded is False:
        return Match(
            statistics,
            ranks,
            f"{evidence(case, statistics)}; the metadata says that buffers are not synchronized",
        )
    first, last = drift(case.series[0]), drift(case.series[-1])
    # A method that is known to synchronize its buffers has a lag, whose size may follow the activations' scale.
    if recorded is None and len(case.series) > 1 and 0 < first * GROWTH <= last:
        steps = f"step {case.series[0].step} to {case.series[-1].step}"
        text = f"{evidence(case, statistics)}; the mean gap grew {last / first:.1f} times from {steps}"
        return Match(statistics, ranks, text)
    return None
