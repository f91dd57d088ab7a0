"""The witness of random numbers: data-parallel ranks that draw equal numbers in the forward pass.

Only states are read, and no number is drawn.
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from syncheck.live.witnesses.rules import EqualStreams
from syncheck.live.witnesses.witness import Suspicion, Witness
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask


class RngWitness(Witness):
    """The random numbers that forward passes of this rank consume."""

    name: ClassVar[str] = "rng"
    key: ClassVar[str] = "n"

    def __init__(self) -> None:
        super().__init__()
        self._before: bytes | None = None
        # The digest of the last forward pass that drew random numbers since the last step.
        self._consumed = ""

    def see_forward(self, module: Any, _inputs: Sequence[Any]) -> None:
        """Read the state before a forward pass."""
        self._before = _read_state(module)

    def see_output(self, module: Any) -> None:
        """Note whether the forward pass drew random numbers."""
        if self._before is not None and _read_state(module) != self._before:
            self._consumed = hashlib.blake2b(self._before, digest_size=6).hexdigest()
        self._before = None

    def observe(self, _key: str, _layout: Any) -> str | None:
        """Return the digest of the state before the last forward pass that drew random numbers; None without any."""
        consumed, self._consumed = self._consumed, ""
        return consumed or None

    def judge(self, layout: Any, observations: Mapping[int, Any], _ask: Ask) -> list[Suspicion]:
        """Return SYN404 if data-parallel ranks drew from equal states. Without a wrapper, nobody knows the ranks."""
        if not layout.clock.reduces:
            return []
        for ranks in group_ranks(dict(sorted(observations.items()))).values():
            if len(ranks) > 1:
                return [Suspicion("SYN404", tuple(ranks), (EqualStreams.FACT(ranks=tuple(ranks)),))]
        return []


def _read_state(module: Any) -> bytes:
    """Return the state of the generator of a module's device."""
    torch: Any = sys.modules["torch"]
    state = torch.get_rng_state()
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        # The state of the generator on the host: no work of the GPU is waited for.
        state = torch.cat([state, torch.cuda.get_rng_state(parameter.device)])
    data: bytes = state.numpy().tobytes()
    return data
