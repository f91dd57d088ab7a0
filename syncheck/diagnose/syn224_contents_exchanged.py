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

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case, Match
    from syncheck.records import TensorDiff

CODE = "SYN224"
SLUG = "contents-exchanged"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
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
        "Register parameters and buffers in the same order on every rank: iterate over a list or sorted(names), not "
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


def apply(case: Case) -> Match | None:
    """Match tensors that hold the values of other tensors."""
    exact = _find_exact(case)
    alike = {diff.name: evidence_of(diff).resembles for diff in case.tensors if evidence_of(diff).resembles}
    others_by_name = {**alike, **exact}
    if not others_by_name:
        return None
    ranks = tuple(sorted({rank for others in others_by_name.values() for rank in others}))
    summary = Text.EXCHANGED if exact else Text.ALIKE
    pairs = [
        Text.PAIR(name=name, other=other)
        for name, others in others_by_name.items()
        for other in dict.fromkeys(others.values())
    ]
    facts = [summary(ranks=ranks, count=len(others_by_name)), *limit_facts(pairs, _MOST, Text.MORE)]
    match = case.make_match([diff for diff in case.tensors if diff.name in others_by_name], facts)
    sources = {other for others in others_by_name.values() for other in others.values()}
    if not sources <= others_by_name.keys():  # copied or renamed, but not exchanged
        match = replace(match, cause=Text.CAUSE_COPIED, fix=Text.FIX_COPIED)
    return match if exact else replace(match, certainty="likely")


def _find_exact(case: Case) -> dict[str, dict[int, str]]:
    """Return by tensor and rank the tensor whose values the rank holds, without shifted histories."""
    exact: dict[str, dict[int, str]] = {}
    for diff in case.tensors:
        others = {rank: name for rank, name in evidence_of(diff).holds.items() if not _is_shifted(diff, name)}
        if others:
            exact[diff.name] = others
    return exact


def _is_shifted(diff: TensorDiff, other: str) -> bool:
    """Whether both tensors are entries of one list of an optimizer's state, such as LBFGS's old directions."""
    container, _, position = diff.name.rpartition(".")
    return diff.kind == "optimizer" and position.isdecimal() and other.rpartition(".")[0] == container
