"""BatchNorm's running statistics differ between the ranks, and nothing else does.

Signature: only `running_mean` and `running_var` differ; parameters and `num_batches_tracked` agree.

Cause: in training mode each rank normalizes with the statistics of its own batch and folds them into its own running
averages. Plain DDP copies rank 0's buffers to the others at the start of each forward, so at the end of a step every
rank is one update away from rank 0: momentum x (its batch's statistics - rank 0's). Gradients and parameters are not
touched.

This is the normal state of default DDP, and it fails by default because the replicas do differ. It matters when a
rank's own file is evaluated, resumed from or exported: ranks then give different predictions, and rank 0's statistics
come from its share of the data alone. It does not matter when only rank 0's file is ever used and its share is like
the others'; then `--allow SYN201` accepts it. With small or unlike per-rank batches the gap is large.

From one snapshot, this one-step lag and freely running statistics (SYN202) cannot be told apart by size: both are
flat after about 1/momentum steps. Save at three or more early steps close together, or record the metadata, to know.

Fix, best first: convert to SyncBatchNorm before wrapping, which uses the statistics of the global batch on every rank
(`model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`); or broadcast or average the buffers before saving
and evaluating (`for b in model.buffers(): dist.broadcast(b, 0)`); or use a normalization without running statistics.

An evaluation through the DDP wrapper also copies rank 0's buffers and hides the gap from files saved afterwards.

Incidents: pytorch/pytorch#13711, pytorch/pytorch#30718, open-mmlab/mmpose#998, rwightman/pytorch-image-models#110.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import evidence, statistics_alone
from syncheck.diagnose.case import Match
from syncheck.evidence.suspects import suspects
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import FreeRunning, Severity

CODE = "SYN201"
SLUG = "bn-local-stats"
SEVERITY: Severity = "warning"
CAUSE = (
    "Each rank normalized with its own batches. This is normal for default DDP, which copies rank 0's buffers "
    "only at the start of each forward; it matters when a rank's own file is evaluated or resumed from, and "
    "not when only rank 0's is used."
)


class Text(Sentence):
    """The sentences of this finding."""

    FIX = (
        "Convert before wrapping: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or broadcast before "
        "saving: for b in model.buffers(): dist.broadcast(b, 0). To accept the finding: {allow:option=SYN201}."
    )


FIX = Text.FIX


def apply(case: Case) -> Match | None:
    """Fit running statistics that differ alone."""
    statistics = statistics_alone(case)
    if not statistics:
        return None
    text = evidence(case, statistics)
    recorded = None if case.group.evidence.metadata is None else case.group.evidence.metadata.buffers_synced
    seen = case.group.evidence.free_running
    if recorded:
        who = "" if case.in_memory else "the metadata says that "
        text += f"; {who}buffers are synchronized once a step, and then this is one step's lag"
    if seen is not None and seen.misfit_free is not None:
        text += (
            f"; over {len(seen.steps)} early steps the gaps grew {seen.growth:.1f} times with a cosine of "
            f"{seen.cosine:.2f} from step to step, which "
            + ("fits such a lag" if _fits_lag(seen) else "tells such a lag from free-running statistics not for sure")
        )
    elif not recorded:
        where = "here" if seen is None else f"at steps {', '.join(map(str, seen.steps[:4]))}"
        how = "save at three or more early steps, close together,"
        if case.in_memory:  # DDP itself says what it does with buffers
            how = "give DDP's wrapper, not the module inside it,"
        text += f"; one step's lag and freely running statistics look alike {where}: {how} to tell them apart"
    return Match(statistics, suspects(statistics, case.group), text)


def _fits_lag(seen: FreeRunning) -> bool:
    return seen.misfit_free is not None and seen.misfit_lag is not None and seen.misfit_lag < seen.misfit_free
