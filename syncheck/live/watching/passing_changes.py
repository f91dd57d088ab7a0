"""Parameters that a script changes for a backward pass and restores before the step: sharpness-aware minimization.

At the reduction of such a script, each rank may hold other parameters than before and after it, and no comparison at a
reduction shows whether the replicas are in sync. The change is recognized at the reduction before a comparison: the
parameters differ from those after the last step, and the script changes them again before it steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.digest import digest_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.layouts import Layout


class PassingChanges:
    """The changes of this rank.

    Digests count, because `parameter.data.copy_()` changes neither the version nor the address of a parameter.
    """

    def __init__(self) -> None:
        # The digests by the identity of a parameter: after its last step, and at the last observed reduction.
        self._after_step: dict[int, bytes] = {}
        self._at_reduction: dict[int, bytes] = {}
        # Whether the parameters of a clock were restored before its last observed step, by the name of the clock.
        self._restored: dict[str, bool] = {}

    @property
    def exist(self) -> bool:
        """Whether parameters were changed and restored, as far as the last observed steps show."""
        return any(self._restored.values())

    def note_start(self, clock: Clock) -> None:
        """Note the parameters of a new wrapper, before its first step."""
        self._after_step.update(_digest(dict(clock.list_parameters()).values()))

    def forget_reduction(self, layout: Layout) -> None:
        """Forget the parameters at the last reduction, after the step that follows it."""
        for identity in layout.identities:
            self._at_reduction.pop(identity, None)

    def note_after_step(self, layout: Layout) -> None:
        """Note the parameters after a step."""
        self._after_step.update(_digest(layout.parameters))

    def note_reduction(self, clock: Clock) -> None:
        """Note the parameters at a reduction."""
        self._at_reduction.update(_digest(dict(clock.list_parameters()).values()))

    def note_before_step(self, layout: Layout) -> None:
        """Determine before a step whether the script has restored the parameters since the last reduction."""
        # Without an observed reduction since the last step, nothing is known, nor within a step.
        if layout.is_moved or self._at_reduction.keys().isdisjoint(map(id, layout.parameters)):
            return
        is_restored = False
        for identity, digest in _digest(layout.parameters).items():
            at_reduction = self._at_reduction.get(identity, digest)
            is_restored |= at_reduction not in (digest, self._after_step.get(identity))
        self._restored[layout.clock.name] = is_restored


def _digest(parameters: Iterable[Any]) -> dict[int, bytes]:
    """Return the digests of parameters, or of their shards, by identity."""
    contents: dict[int, Any] = {}
    for parameter in parameters:
        contents[id(parameter)] = getattr(parameter, "_local_tensor", parameter).detach()
    # One thread: the others belong to the training.
    hashed = digest_all(list(contents.values()), threads=1)
    digests = {}
    for identity, (_, digest) in zip(contents, hashed, strict=True):
        digests[identity] = digest
    return digests
