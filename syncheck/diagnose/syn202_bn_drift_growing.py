"""BatchNorm's running statistics are never synchronized and drift apart.

Signature: as SYN201, and one sign of missing synchronization. Either the metadata records a method without buffer
synchronization. Or a running variance is too low to have been copied from rank 0 since an earlier step: one batch
leaves at least (1 - momentum) of rank 0's variance, so this is a proof. Or the differences at three early
steps close together grow and keep their direction, as unsynchronized statistics do. Differences of one update, which
each step renews, do not. This sign outweighs contrary metadata, because the metadata records the intention. Without
metadata, and if the directions of the differences are unknown, growth of the mean difference by a factor of at least
1.5 from the first to the last step is sufficient.

Growth alone is not sufficient if the directions are known, because activations grow during training, and differences of
one update grow with them. Direction alone is not sufficient either: if the shards differ, differences of one update
have the same direction at each step.

The course of the steps is consistent with SYN201 too: if the data of the ranks differ more and more, differences of one
update also grow in one direction. Metadata and too low variances decide.

Cause: DDP with `forward_sync_buffers=False` (or the older `broadcast_buffers=False`), FSDP and HSDP, which never
synchronize buffers, or a forward pass that bypasses the wrapper. Each rank's running averages follow its own share of
the data for the whole run. If the shares have different means, the difference grows to the full difference between the
shares, 1/momentum times the difference of SYN201.

Fix: convert to SyncBatchNorm before wrapping, or keep DDP's buffer synchronization on. torch's SyncBatchNorm needs
GPUs. On a CPU, and under FSDP, average the running statistics over the ranks before saving and evaluating.

Incidents: facebookresearch/detectron2#1297, facebookresearch/maskrcnn-benchmark#692, open-mmlab/mmdetection#2539,
pytorch/pytorch#22095, facebookresearch/fairseq2#1081.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import drift, match_statistics, may_be_changed, statistics_alone
from syncheck.diagnose.conditions import requires, state_if
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case, Match
    from syncheck.records import FreeRunning

CODE = "SYN202"
SLUG = "bn-drift-growing"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Nothing synchronizes BatchNorm's running statistics, so each rank's statistics follow its own share of the "
        "data for the whole run."
    )
    FIX = (
        "On GPUs, convert before wrapping: `model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, which does "
        "not run on a CPU. Or keep DDP's `forward_sync_buffers` (`broadcast_buffers` in older torch) on. On a CPU, and "
        "under FSDP, average the statistics before saving: `for b in filter(torch.is_floating_point, model.buffers()): "
        "dist.all_reduce(b.div_(dist.get_world_size()))`."
    )
    STATISTICS = (
        "The ranks never synchronized their BatchNorm running statistics: {count} of {total} "
        "{count:verb differs|differ}, {size}"
    )
    NOT_SYNCHRONIZED = "buffers are not synchronized"
    NOT_SYNCHRONIZED_BY_METADATA = "according to the metadata, buffers are not synchronized"
    TOO_LOW = "{count} running variances are too low to have been copied from rank 0 since an earlier step"
    GREW_IN_ONE_DIRECTION = (
        "from step {first} to {last} the differences grew {growth:.1f} times and kept their direction (cosine "
        "{cosine:.2f} between steps), as expected without synchronization"
    )
    MEAN_GREW = "the mean difference grew {growth:.1f} times from step {first} to {last}"
    METADATA_CONTRADICTED = (
        "according to the metadata, buffers are synchronized once per step, but the checkpoints contradict it"
    )


# For differences of known size but unknown direction. Unsynchronized statistics grow about 2 times from step 2 to 12 at
# momentum 0.1, and up to 1/momentum times for dissimilar shares. The level of differences of one update stays the same.
GROWTH = 1.5
# For differences of known direction, measured at momentum 0.1 on 2 and 4 ranks. Unsynchronized statistics grew 1.35
# times or more from step 3 to 12 with a cosine above 0.5, and one update explained them at best as well as no
# synchronization. One update explained its own differences at least twice as well, for similar and dissimilar shards,
# with and without gradient accumulation.
SEEN_GROWTH, SEEN_COSINE, AS_WELL = 1.25, 0.45, 0.75


def _has_no_stale_rank(case: Case) -> bool:
    """Whether no rank holds values of an earlier step, whose statistics do not follow the course of all ranks."""
    return not case.group.evidence.stale


@requires(statistics_alone, _has_no_stale_rank)
def apply(case: Case) -> Match | None:
    """Match running statistics that differ alone if the metadata or the steps show missing synchronization."""
    signs = _find_signs(case)
    if not signs:
        return None

    match = match_statistics(
        case,
        statistics=statistics_alone(case),
        first=Text.STATISTICS,
        synchronization=signs,
    )
    # Synchronized runs whose data differ more in each step reached cosines of 0.96 in measurements: no limit decides.
    is_growth = signs[0].code in (Text.GREW_IN_ONE_DIRECTION, Text.MEAN_GREW)
    if is_growth:
        return match.as_consistent("SYN201")
    if may_be_changed(case):
        return match.as_consistent("SYN205")
    return match


def _find_signs(case: Case) -> list[Message]:
    """State what shows missing synchronization: the metadata, or else the steps of the run; empty without signs."""
    are_synchronized = case.group.evidence.metadata.buffers_synced
    if are_synchronized is False:
        sentence = Text.NOT_SYNCHRONIZED if case.in_running_job else Text.NOT_SYNCHRONIZED_BY_METADATA
        return [sentence()]

    # The metadata records the intention, so the checkpoints outweigh it.
    course = case.group.evidence.free_running
    if course is not None and _shows_free_running(course):
        contradiction = state_if(are_synchronized, Text.METADATA_CONTRADICTED())
        return [_describe_course(course), *contradiction]

    # Growth alone is a weaker sign than the metadata.
    if are_synchronized:
        return []
    return _describe_growth(case)


def _shows_free_running(course: FreeRunning) -> bool:
    """Whether several steps show missing synchronization."""
    return _has_low_variances(course) or fits_free_running(course)


def _has_low_variances(course: FreeRunning) -> bool:
    """Whether running variances are too low for a synchronization. A single low variance may be a flipped bit."""
    return course.below > 1


def _describe_course(course: FreeRunning) -> Message:
    """State how several steps show missing synchronization."""
    if _has_low_variances(course):
        return Text.TOO_LOW(count=course.below)
    return Text.GREW_IN_ONE_DIRECTION(
        first=course.steps[0],
        last=course.steps[-1],
        growth=course.growth,
        cosine=course.cosine,
    )


def fits_free_running(course: FreeRunning) -> bool:
    """Whether the differences grew in one direction, and one update explains them no better."""
    if course.misfit_free is None or course.misfit_lag is None:
        return False
    has_direction = course.cosine >= SEEN_COSINE
    has_grown = course.growth >= SEEN_GROWTH
    is_explained_as_well = course.misfit_lag >= AS_WELL * course.misfit_free
    return has_direction and has_grown and is_explained_as_well


def _describe_growth(case: Case) -> list[Message]:
    """State the growth of the mean difference if only sizes are known; empty if it did not grow enough."""
    # Directions that do not show missing synchronization outweigh the growth.
    has_directions = case.group.evidence.free_running is not None
    if len(case.series) < 2 or has_directions:
        return []
    first, last = case.series[0], case.series[-1]
    has_grown = 0 < drift(first) * GROWTH <= drift(last)
    if not has_grown:
        return []
    growth = Text.MEAN_GREW(
        growth=drift(last) / drift(first),
        first=first.step,
        last=last.step,
    )
    return [growth]
