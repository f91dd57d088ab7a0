"""Ranks whose steps have lost their common number: without a wrapper, a step counts from the first one of each rank.

A rank that skips a step takes the next steps under the numbers of the previous steps. Then the gradients differ at
each number, and are equal to the gradients of the other ranks one step later.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from syncheck.live.witnesses.rules import Seen
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.sentences import Message

# The most steps that a rank is found to be behind.
_MOST = 8
# The observation of a rank without gradients of copies and of shards.
_NO_GRADIENTS = ("", "")


class History:
    """The digests of the last steps, by rank."""

    def __init__(self) -> None:
        self._steps: deque[dict[int, tuple[Any, ...]]] = deque(maxlen=_MOST)

    def add(self, observations: Mapping[int, Any]) -> tuple[Message, ...]:
        """Add a step; return that some ranks step with the gradients that other ranks had before, or nothing."""
        digests = {rank: tuple(observation) for rank, observation in observations.items()}
        facts: tuple[Message, ...] = ()
        sets = group_ranks(digests)
        # The oldest step comes first, so that the fewest steps that explain the gradients count.
        for position, earlier_digests in enumerate(self._steps):
            earlier_sets = group_ranks(earlier_digests)
            earlier_sets.pop(_NO_GRADIENTS, None)
            for digest in earlier_sets.keys() & sets:
                earlier, later = earlier_sets[digest], sets[digest]
                # Gradients that do not change, like zeros, are equal by chance.
                if set(earlier).isdisjoint(later):
                    count = len(self._steps) - position
                    facts = (Seen.SHIFTED(later=tuple(later), earlier=tuple(earlier), count=count),)
        self._steps.append(digests)
        return facts
