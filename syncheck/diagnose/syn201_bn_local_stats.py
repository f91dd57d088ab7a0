"""BatchNorm's running statistics differ between ranks, and nothing else differs.

Signature: only `running_mean` and `running_var` differ. Parameters and `num_batches_tracked` agree.

Cause: in training mode, each rank normalizes with the statistics of its own batch and adds them to its own running
averages. Plain DDP copies rank 0's buffers to all ranks at the start of each forward pass. At the end of a step, each
rank is therefore one update away from rank 0: momentum x (statistics of its batch - statistics of rank 0's batch).
Gradients and parameters are not affected.

This is normal for default DDP. It fails by default because the replicas differ. It matters if a rank's own file is
evaluated, resumed from or exported: the ranks then predict differently, and rank 0's statistics come only from its
share of the data. It does not matter if only rank 0's file is used and its share resembles the shares of the other
ranks; accept the finding with `--allow SYN201` then. Small or dissimilar per-rank batches cause a large difference.

One checkpoint does not show whether the statistics are one step apart or never synchronized (SYN202), because both
differences stay at the same size after about 1/momentum steps. To find out, save three or more early steps close
together, or record the metadata. The steps show a lag of one update if it explains them at least 5 times as well as
missing synchronization. If neither explains them clearly better, as often with few channels or small batches, the
finding is only consistent with this cause and with SYN202.

Batches of each rank change the statistics of all layers in training mode, on all ranks. If most of three or more ranks
agree, the statistics were changed on the other ranks only, which is SYN205. With two ranks, the finding is only
consistent with this cause if some layers agree (they may be in evaluation mode), or if all agreed at an earlier step.

Beside SYN107 the weights differ too, and with them the activations and their statistics: fix SYN107 first.

Fix, best first: convert to SyncBatchNorm before wrapping, which uses the statistics of the global batch on every rank
(`model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`); torch's SyncBatchNorm needs GPUs. On a CPU, and
otherwise too: broadcast or average the buffers before saving and evaluating
(`for b in model.buffers(): dist.broadcast(b, 0)`). Or use a normalization without running statistics.

An evaluation through the DDP wrapper also copies rank 0's buffers, so files saved afterwards do not show the
difference.

Incidents: pytorch/pytorch#13711, pytorch/pytorch#30718, open-mmlab/mmpose#998, rwightman/pytorch-image-models#110.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.bn import explained_by_settings, match_statistics, may_be_changed, statistics_alone
from syncheck.diagnose.conditions import doubt, requires, select_codes, state_if
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case, Match
    from syncheck.records import FreeRunning

CODE = "SYN201"
SLUG = "bn-local-stats"
SEVERITY = "warning"
CERTAINTY = "likely"
# Largest ratio of the misfits at which early steps show a lag of one update, chosen by benchmarks/early_statistics.py.
# In its test, it holds for 53 % of selected steps with synchronized buffers, and for 0.6 % without. With a ratio of 1,
# it would hold for 97 % and 11 %.
EXPLAINED = 0.2


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Each rank normalized with its own batches. This is normal for default DDP, which copies rank 0's buffers only "
        "at the start of each forward pass. It matters if a rank's own file is evaluated or resumed from, but not if "
        "only rank 0's file is used."
    )
    FIX = (
        "On GPUs, convert before wrapping: `model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`. On a CPU, "
        "where torch's SyncBatchNorm does not run, or without it, broadcast before saving, also the buffers of an "
        "averaged copy: `for b in model.buffers(): dist.broadcast(b, 0)`. To accept the finding: {allow:option=SYN201}."
    )
    CAUSE_OF_SETTINGS = (
        "The weights of the ranks differ because of their settings (SYN107), and so do the activations. The statistics "
        "of their batches then differ too."
    )
    FIX_OF_SETTINGS = (
        "Fix SYN107 first. If the statistics still differ after that, broadcast them before saving: `for b in "
        "model.buffers(): dist.broadcast(b, 0)`."
    )
    STATISTICS = (
        "The ranks have different BatchNorm running statistics: {count} of {total} {count:verb differs|differ}, {size}"
    )
    SYNCHRONIZED = "buffers are synchronized once per step, so the ranks differ by one update"
    SYNCHRONIZED_BY_METADATA = (
        "according to the metadata, buffers are synchronized once per step, so the ranks differ by one update"
    )
    ONE_UPDATE = (
        "over {steps} early steps the differences grew {growth:.1f} times with a cosine of {cosine:.2f} between steps, "
        "as expected of buffers that are synchronized once per step"
    )
    INCONCLUSIVE = (
        "over {steps} early steps the differences grew {growth:.1f} times with a cosine of {cosine:.2f} between steps, "
        "which does not show whether buffers are synchronized"
    )
    UNKNOWN = "it is unknown whether buffers are synchronized"
    STEPS_UNSUITABLE = "steps {first} to {last} do not show whether buffers are synchronized"
    SAVE_EARLY_STEPS = "to find out, save three or more early steps close together"
    USE_WRAPPER = "to find out, pass DDP's wrapper instead of the module inside it"


class _Words(NamedTuple):
    """The sentences for the ranks of a running job, or for their files."""

    synchronized: Sentence
    remedy: Sentence
    """How to find out whether buffers are synchronized."""


_IN_MEMORY = _Words(Text.SYNCHRONIZED, remedy=Text.USE_WRAPPER)
_IN_FILES = _Words(Text.SYNCHRONIZED_BY_METADATA, remedy=Text.SAVE_EARLY_STEPS)


@requires(statistics_alone)
def apply(case: Case) -> Match | None:
    """Match running statistics that differ alone."""
    statistics = statistics_alone(case)
    synchronization = _synchronization_facts(case)
    match = match_statistics(
        case,
        statistics=statistics,
        first=Text.STATISTICS,
        synchronization=synchronization,
    )
    if explained_by_settings(case):
        return match.with_cause(Text.CAUSE_OF_SETTINGS, Text.FIX_OF_SETTINGS)
    # A synchronization in the metadata, which decides if the steps do not, would be the first fact.
    may_be_unsynchronized = synchronization[0].code is Text.INCONCLUSIVE
    other_causes = select_codes({"SYN202": may_be_unsynchronized, "SYN205": may_be_changed(case)})
    return doubt(match, other_causes)


def _synchronization_facts(case: Case) -> list[Message]:
    """State whether buffers are synchronized once per step, from the metadata and from the steps of the run."""
    are_synchronized = case.group.evidence.metadata.buffers_synced
    # In a running job, DDP's wrapper itself shows whether it synchronizes buffers.
    words = _IN_MEMORY if case.in_running_job else _IN_FILES
    intention = state_if(are_synchronized, words.synchronized())

    course = case.group.evidence.free_running
    if course is not None and course.misfit_free is not None:
        # The steps outweigh the metadata, which records the intention.
        return [*intention, _describe_course(course)]
    if are_synchronized:
        return [*intention]
    return [_describe_missing_course(course), words.remedy()]


def _describe_course(course: FreeRunning) -> Message:
    """State whether the early steps of the run fit differences of one update."""
    sentence = Text.ONE_UPDATE if fits_one_update(course) else Text.INCONCLUSIVE
    return sentence(
        steps=len(course.steps),
        growth=course.growth,
        cosine=course.cosine,
    )


def _describe_missing_course(course: FreeRunning | None) -> Message:
    """State why the steps do not show whether buffers are synchronized."""
    if course is None:
        return Text.UNKNOWN()
    return Text.STEPS_UNSUITABLE(first=course.steps[0], last=course.steps[-1])


def fits_one_update(course: FreeRunning) -> bool:
    """Whether differences of one update explain the steps much better than missing synchronization."""
    if course.misfit_free is None or course.misfit_lag is None:
        return False
    return course.misfit_lag <= EXPLAINED * course.misfit_free
