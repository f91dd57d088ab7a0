"""Without a wrapper, nothing states which ranks hold copies: ranks are held to what they showed.

Ranks with equal tensors at several steps belong together. So do ranks with most tensors equal, or all tensors one
factor apart: ranks of separate trainings show neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.channel import count_messages
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    ReadDetails = Callable[[], Mapping[int, Any]]
    ShowCopies = Callable[[Mapping[int, Any], Mapping[int, Any]], bool]

# Steps with equal and changing tensors after which ranks are held to be copies.
_EQUAL_STEPS = 3
# The two steps in a row whose tensors are compared one by one, if not all ranks were equal before.
_COMPARED_STEPS = (_EQUAL_STEPS + 1, _EQUAL_STEPS + 2)

# The first steps whose messages are counted.
_MOST_STEPS = 16


class Messages:
    """Whether the script has exchanged anything between its steps, so far."""

    def __init__(self) -> None:
        self.were_sent = False
        self._count: int | None = None
        # Whether anything was exchanged before each of the first steps.
        self._before_steps: list[bool] = []

    def observe(self) -> None:
        """Count the messages before a step."""
        if self.were_sent and len(self._before_steps) == _MOST_STEPS:
            return
        count = count_messages()
        # Nothing is known of a backend without numbers.
        are_new = any((count is None, self._count not in (None, count)))
        self.were_sent |= are_new
        self._before_steps = [*self._before_steps, are_new][:_MOST_STEPS]
        self._count = count

    @property
    def are_rare(self) -> bool:
        """Whether nothing was exchanged before most of the first steps: the ranks train separately."""
        return 2 * sum(self._before_steps) < len(self._before_steps)


class LearnedSets:
    """The sets of ranks of a layout with copies.

    are_partial: no step had equal tensors only; a part showed the set.
    """

    def __init__(self) -> None:
        self.are_partial = False
        self._sets: list[tuple[int, ...]] = []
        self._equal_steps = 0
        self._steps = 0
        self._last: Mapping[int, str] = {}
        self._earlier: Mapping[int, Any] = {}

    @property
    def are_known(self) -> bool:
        """Whether the sets are known."""
        return self._equal_steps >= _EQUAL_STEPS

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The ranks with equal tensors by design; empty if unknown."""
        return self._sets if self.are_known else []

    def learn(self, digests: Mapping[int, str]) -> None:
        """Learn from the digests of each rank in a step."""
        self._steps += 1
        if not self.are_known:
            self._learn_equal(digests)

    def learn_parts(self, ranks: tuple[int, ...], read_details: ReadDetails, show_copies: ShowCopies) -> None:
        """Learn from the single tensors of ranks, at two steps.

        read_details: returns the details of each rank in the step.
        show_copies: whether the details of two steps in a row show copies.
        """
        if self._steps not in _COMPARED_STEPS or ranks in self._sets:
            return
        details = read_details()
        is_complete = set(ranks) == details.keys() == self._earlier.keys()
        if is_complete and show_copies(self._earlier, details):
            self._sets, self._equal_steps, self.are_partial = [ranks], _EQUAL_STEPS, True
        self._earlier = details

    def _learn_equal(self, digests: Mapping[int, str]) -> None:
        # Tensors that do not change, like zeros, are equal by chance; an empty digest is of no tensor.
        changed = {rank: digest for rank, digest in sorted(digests.items()) if digest != self._last.get(rank, "")}
        sets = [tuple(ranks) for ranks in group_ranks(changed).values() if len(ranks) > 1]
        if sets != self._sets:
            self._equal_steps = 0
        if sets:
            self._equal_steps += 1
        self._sets, self._last = sets, digests
