"""What the witnesses did not see of the steps: a cause that they exclude must have been there to see.

The steps, the gradients before them and the settings are seen of torch's optimizers only. An optimizer whose class is
not torch's may change more within its own step than gradients and settings determine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from syncheck.live.watching.watcher import Watcher
    from syncheck.records import Finding

_OF_TORCH = "torch."


class Unseen(NamedTuple):
    """What one rank has not seen."""

    parameters: tuple[Any, ...]
    """The trained parameters of wrappers that no optimizer of torch steps with."""
    has_own_step: bool
    """Whether the class of an optimizer is not torch's."""


def find_unseen(watcher: Watcher, ranks: tuple[int, ...]) -> Unseen:
    """Return what this rank has not seen of the wrappers of some ranks."""
    stepping: set[int] = set()
    classes: set[str] = set()
    for optimizer in watcher.list_optimizers(ranks):
        optimizer_class = type(optimizer)
        classes.add(f"{optimizer_class.__module__}.")
        for layout in watcher.list_layouts_of(optimizer):
            stepping.update(layout.identities)
    trained: dict[int, Any] = {}
    for clock in watcher.clocks:
        if clock.reduces and clock.ranks == ranks:
            parameters = dict(clock.list_parameters()).values()
            trained.update({id(parameter): parameter for parameter in parameters if parameter.requires_grad})
    unseen = [trained[identity] for identity in trained.keys() - stepping]
    are_of_torch = all(name.startswith(_OF_TORCH) for name in classes)
    return Unseen(tuple(unseen), not are_of_torch)


def limit_claims(findings: Iterable[Finding], *, are_unseen: bool, has_own_step: bool) -> tuple[Finding, ...]:
    """Return findings with a cause limited to the compared facts.

    are_unseen: whether the steps of parameters that differ were not seen.
    has_own_step: whether the class of an optimizer is not torch's.
    """
    from syncheck.diagnose.syn299_unexplained_difference import Text  # only needed if the ranks differ

    sentences: Mapping[Any, Any] = {}
    if are_unseen:
        sentences = {Text.CAUSE_STATELESS: (Text.CAUSE_UNSEEN, Text.FIX_UNSEEN)}
    elif has_own_step:
        sentences = {Text.CAUSE_WATCHED: (Text.CAUSE_OWN_STEP, Text.FIX_OWN_STEP)}
    limited = []
    for finding in findings:
        cause, fix = sentences.get(finding.cause.code, (None, None))
        if cause is not None:
            finding = replace(finding, cause=cause(), fix=fix())
        limited.append(finding)
    return tuple(limited)
