"""What the rules have in common that look for a few elements that differ where all else agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.diagnose.case import counted, parameter_of
from syncheck.evidence.suspects import sets_within
from syncheck.kinds import BN_STATISTICS
from syncheck.snapshots import ravel_index

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

# Running statistics drift by themselves where each rank has its own, and are another matter then.
_OF_BATCHES = (*BN_STATISTICS, "bn_count")
# Tensors of the model that may be hit at a time: where more differ here and there, something touches all of them.
MOST = 4


@dataclass(frozen=True, slots=True)
class Spot:
    """Elements of one tensor of the model that differ, and what the updates made of them.

    hit: the tensor in which most of them differ, the parameter where that is no more than its optimizer's. followers:
    its optimizer's and averaged copies, which differ within the same elements.
    """

    hit: TensorDiff
    followers: tuple[TensorDiff, ...]

    @property
    def tensors(self) -> tuple[TensorDiff, ...]:
        """All that differ in this place."""
        return (self.hit, *self.followers)


def spots(case: Case) -> tuple[Spot, ...]:
    """Sort what differs by place; empty where anything differs that is no small part of a few tensors.

    Tensors that an earlier rule covers are not asked, nor are running statistics, unless one bit of them differs: a
    batch of its own may move few channels of many.
    """
    apart = [diff for diff in case.tensors if diff.kind not in _OF_BATCHES]
    if not apart and len(case.tensors) == 1 and one_bit(case.tensors[0]):
        apart = list(case.tensors)
    # Buffers may follow each rank's data, and are another matter then too.
    loose = case.loose
    apart = [diff for diff in apart if diff.kind != "buffer" and diff.name not in loose] or apart
    if not all(_in_part(diff) for diff in apart):
        return ()
    names = {diff.name for diff in apart}
    by_name: dict[str, list[TensorDiff]] = {}
    for diff in apart:
        by_name.setdefault(_owner(diff, names), []).append(diff)
    if len(by_name) > MOST:
        return ()
    found = []
    for diffs in by_name.values():
        hit, *others = sorted(diffs, key=lambda diff: (-(diff.mismatched or 0), diff.kind == "optimizer"))
        if not all(_within(other, hit) for other in others):
            return ()
        found.append(Spot(hit, tuple(others)))
    return tuple(found)


def _in_part(diff: TensorDiff) -> bool:
    """Whether it is known that some elements of it differ and at least half do not.

    Where several replica groups differ this is not known: the numbers are those of the worst of them only.
    """
    if diff.status != "different" or diff.reason is not None or not diff.mismatched:
        return False
    return 2 * diff.mismatched <= diff.numel and len(sets_within(diff)) < 2


def _owner(diff: TensorDiff, names: Collection[str]) -> str:
    """Return the parameter that a tensor is the optimizer's state or an averaged copy of, else its own name."""
    if diff.kind == "optimizer":
        return parameter_of(diff.name)
    if diff.kind == "ema":
        parts = diff.name.split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        return next((tail for tail in tails if tail in names), diff.name)
    return diff.name


def _within(other: TensorDiff, hit: TensorDiff) -> bool:
    """Whether a follower differs where the tensor that was hit does, as far as its worst element tells."""
    if other.shape != hit.shape:
        return False
    if hit.extent == "one":
        return other.extent == "one" and other.index == hit.index
    first = hit.evidence.first if hit.evidence else None
    return first is None or first <= ravel_index(other.index, other.shape) < first + (hit.mismatched or 0)


def one_bit(diff: TensorDiff) -> bool:
    """Whether one element differs, and in one bit."""
    return diff.extent == "one" and diff.evidence is not None and diff.evidence.flipped_bits == 1


def also_there_text(spot: Spot) -> str:
    """Say what else differs in the same place: ', and so does its momentum_buffer there'."""
    names = [
        f"its {diff.name.rpartition('.')[2]}"
        if diff.kind == "optimizer" and spot.hit.kind != "optimizer"
        else diff.name
        for diff in sorted(spot.followers, key=lambda diff: diff.kind != "optimizer")
    ]
    return f", and so do{'es' * (len(names) == 1)} {' and '.join(names)} there" if names else ""


def agreeing_text(case: Case) -> str:
    """Say what agrees: '; all else of 20 parameters and 40 optimizer tensors agrees'."""
    parameters, states = case.compared("parameter"), case.compared("optimizer")
    counts = [counted(parameters, "parameter")] if parameters else []
    counts += [counted(states, "optimizer tensor")] if states else []
    return f"; all else of {' and '.join(counts)} agrees" if counts else ""
