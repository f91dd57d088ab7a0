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
    """The number of optimizers of these steps; an optimizer of several models counts for each model."""
    observed: int = 0
    """The number of reductions of models without a seen step: an optimizer that is not torch's follows them."""
    reductions: int = 0
    """The number of all reductions of these models; the first two do not show that no step follows."""

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

    layouts: with judged steps.
    counts: the numbers of judged steps by the key of the layout.
    """
    stepping: list[Layout] = []
    reducing: list[Layout] = []
    for layout in layouts:
        group = stepping if layout.sees_steps else reducing
        group.append(layout)
    # A script that reduces gradients some times before its first step, as a warm-up does, has an optimizer of torch.
    stepping_clocks = {layout.clock.name for layout in stepping}
    steps = observed = reductions = 0
    for layout in stepping:
        steps += counts[layout.key]
    for layout in reducing:
        if layout.clock.name not in stepping_clocks:
            observed += counts[layout.key]
            reductions += layout.clock.ticks
    return Extent(
        steps,
        _count_optimizers(stepping),
        observed,
        reductions,
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
        # A layout may join several sets.
        for identities in sets:
            if identities.isdisjoint(joined):
                separate.append(identities)
            else:
                joined |= identities
        sets = [*separate, joined]
    return len(sets)
