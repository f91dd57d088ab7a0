"""Tensors of some ranks hold the values of other tensors.

Signature: a tensor of one rank is bitwise equal to another tensor of the other ranks, and is not constant. This proves
that the values were moved. Entries of a list in an optimizer's state do not count: LBFGS shifts its history at every
iteration, so a rank with an iteration less holds older entries. If the ranks have trained since, the values are no
longer equal, but two parameters of a rank have nearly the direction of each other (cosine of at least 0.8), and not
their own (cosine under 0.6).

Cause: a rank registered its parameters or buffers in another order, for example in the order of a set, and
DistributedDataParallel pairs them by position; or it loaded the state of an optimizer, which has no names, into
parameters in another order; or a loader renamed tensors on some ranks only. If some values do not return under another
name, nothing was exchanged: a rank may also have copied or tied tensors (layers initialised from other layers).

Fix: register tensors in the same order on every rank, and load them by name. For optimizer state, use
`torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, which stores the names of the parameters.

Incidents: huggingface/transformers#48162 (rotary buffers in the order of a set).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.conditions import requires
from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.selection import ends_with_number, join_ranks, module_of, select_names
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.diagnose.case import Case, Match
    from syncheck.records import TensorDiff

CODE = "SYN224"
SLUG = "contents-exchanged"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Some ranks hold values under the names of other tensors: they register or load tensors in another order "
        "than the other ranks."
    )
    CAUSE_COPIED = (
        "Some ranks hold the values of a tensor under the name of another: loaded or registered under another name, "
        "copied, or tied, on some ranks only."
    )
    FIX_COPIED = (
        "Look for code that copies, ties or renames tensors on some ranks only, and run it on all ranks. Load tensors "
        "and optimizer state by name. Then load a checkpoint in which the ranks agree."
    )
    FIX = (
        "Register parameters and buffers in the same order on every rank: iterate over a list or `sorted(names)`, not "
        "over a set. Load optimizer state by name, with `torch.distributed.checkpoint.state_dict`. Then load a "
        "checkpoint in which the ranks agree."
    )
    EXCHANGED = "{ranks:Ranks} {ranks:verb holds|hold} the values of other tensors in {count:count tensor}"
    ALIKE = (
        "{ranks:Ranks} {ranks:verb holds|hold} values with nearly the direction of other tensors in "
        "{count:count tensor}, and have trained since"
    )
    PAIR = "{name:name} contains {other:name}"
    MORE = "{count:count more tensor} {count:verb is|are} exchanged"


_MOST = 4  # described tensors


def _find_sources(case: Case) -> dict[str, Mapping[int, str]]:
    """Return by tensor and rank the tensor whose values or direction the rank holds there."""
    # Equal values outweigh a similar direction.
    return {**_find_alike(case), **_find_exact(case)}


@requires(_find_sources)
def apply(case: Case) -> Match | None:
    """Match tensors that hold the values of other tensors."""
    source_of = _find_sources(case)
    is_exact = bool(_find_exact(case))
    pairs = []
    sources: set[str] = set()
    for name, source_by_rank in source_of.items():
        sources.update(source_by_rank.values())
        for source in dict.fromkeys(source_by_rank.values()):
            pairs.append(Text.PAIR(name=name, other=source))
    summary = Text.EXCHANGED if is_exact else Text.ALIKE
    facts = [
        summary(ranks=tuple(sorted(join_ranks(source_of.values()))), count=len(source_of)),
        *limit_facts(pairs, _MOST, Text.MORE),
    ]
    match = case.make_match(select_names(case.tensors, source_of), facts)

    if not sources <= source_of.keys():  # copied or renamed, but not exchanged
        match = match.with_cause(Text.CAUSE_COPIED, Text.FIX_COPIED)
    return match if is_exact else replace(match, certainty="likely")


def _find_alike(case: Case) -> dict[str, Mapping[int, str]]:
    """Return by tensor and rank the tensor whose direction the rank's values nearly have."""
    alike: dict[str, Mapping[int, str]] = {}
    for diff in case.tensors:
        alike[diff.name] = evidence_of(diff).resembles
    return _without_empty(alike)


def _find_exact(case: Case) -> dict[str, Mapping[int, str]]:
    """Return by tensor and rank the tensor whose values the rank holds, without shifted histories."""
    exact: dict[str, Mapping[int, str]] = {}
    for diff in case.tensors:
        holds = evidence_of(diff).holds
        exact[diff.name] = {rank: source for rank, source in holds.items() if not _is_shifted(diff, source)}
    return _without_empty(exact)


def _without_empty(source_of: Mapping[str, Mapping[int, str]]) -> dict[str, Mapping[int, str]]:
    """Return the tensors with a source on some rank. source_of: the sources by tensor and rank."""
    return {name: sources for name, sources in source_of.items() if sources}


def _is_shifted(diff: TensorDiff, source: str) -> bool:
    """Whether both tensors are entries of one list of an optimizer's state, such as LBFGS's old directions."""
    is_entry = diff.kind == "optimizer" and ends_with_number(diff.name)
    return is_entry and module_of(source) == module_of(diff.name)
