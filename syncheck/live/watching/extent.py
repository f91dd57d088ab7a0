"""How much of a run was judged, as the last line states it: steps of optimizers, and reductions without a seen step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncheck.live.witnesses.rules import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.live.watching.layouts import Layout
    from syncheck.sentences import Message


class Extent(NamedTuple):
    """What the judge of a rank judged."""

    steps: int = 0
    """The number of optimizer steps."""
    optimizers: int = 1
    """The number of optimizers that took them; an optimizer of several models counts for each of them."""
    observed: int = 0
    """The number of reductions of models without a seen step: an optimizer that is not torch's follows them."""
    reductions: int = 0
    """The number of all reductions of these models; the first ones do not show that no step follows."""

    def describe(self, checks: int) -> Message:
        """Return the extent with the number of comparisons of all replicas."""
        sentence = Seen.WATCHED
        if self.reductions:
            sentence = Seen.WATCHED_WITH_REDUCTIONS if self.steps else Seen.WATCHED_REDUCTIONS
        elif self.optimizers > 1:
            sentence = Seen.WATCHED_OPTIMIZERS
        return sentence(
            steps=self.steps,
            optimizers=self.optimizers,
            observed=self.observed,
            reductions=self.reductions,
            checks=checks,
        )


def measure_extent(layouts: Iterable[Layout], counts: Mapping[str, int]) -> Extent:
    """Return the extent of a run.

    layouts: that were judged.
    counts: the numbers of judged steps by the key of the layout.
    """
    stepping = [layout for layout in layouts if layout.sees_steps]
    # A script that reduces gradients some times before its first step, as a warm-up does, has an optimizer of torch.
    stepping_clocks = {layout.clock.name for layout in stepping}
    reducing = [layout for layout in layouts if not layout.sees_steps and layout.clock.name not in stepping_clocks]
    return Extent(
        steps=sum(counts[layout.key] for layout in stepping),
        optimizers=_count_optimizers(stepping),
        observed=sum(counts[layout.key] for layout in reducing),
        reductions=sum(layout.clock.ticks for layout in reducing),
    )


def _count_optimizers(layouts: Iterable[Layout]) -> int:
    """Return the number of optimizers of some layouts.

    Layouts with a common parameter have one optimizer, or optimizers that replace each other: a wrapper may replace
    another one, and a script may add, freeze or replace parameters.
    """
    sets: list[set[int]] = []
    for layout in layouts:
        joined = set(layout.identities)
        separate = []
        for identities in sets:
            if identities.isdisjoint(joined):
                separate.append(identities)
            else:
                joined |= identities
        sets = [*separate, joined]
    return len(sets)
