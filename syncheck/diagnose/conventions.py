"""Layouts of B that are no fault by themselves: which tensors are wrong depends on the tensors that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.selection import list_names
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case, Match


class Conventions(Sentence):
    """Causes, fixes and statements about tensors that agree, beside tensors in another layout."""

    EXCEPTIONS = (
        "{count:count tensor} with the same {count:verb name|names} in other layers {count:verb is|are} in the layout "
        "of A: {names:names}"
    )
    CAUSE_EXCEPTIONS = (
        "Most tensors with the listed names have another layout than in A, so B probably needs it. The tensors in the "
        "layout of A are probably the fault: the conversion left them out."
    )
    FIX_EXCEPTIONS = (
        "Convert the tensors in the layout of A like the other layers. If B needs the layout of A, keep it in "
        "all layers."
    )
    FITTED = (
        "the size of a head was chosen because it fits {count:count other tensor}: {names:names}; with another size, "
        "the tensors above may agree and {count:verb this tensor|they} differ"
    )
    CAUSE_FITTED = (
        "Tensors of B are permuted for two sizes of a head, and no configuration states the right size: either "
        "the tensors that differ are wrong, or the tensors that agree with the chosen size."
    )
    FIX_FITTED = (
        "Pass a model with its config.json, or a map that states head_dim, and compare again. Then permute the rows of "
        "the tensors that still differ with this size."
    )


def weigh_exceptions(match: Match, case: Case) -> Match:
    """Name the tensors of other layers that agree, if most tensors have the layout of this match."""
    covered_names = set(list_names(match.tensors))
    exceptions = []
    for name, differing_name in case.group.evidence.exceptions.items():
        if differing_name in covered_names:
            exceptions.append(name)
    if not exceptions:
        return match
    fact = Conventions.EXCEPTIONS(count=len(exceptions), names=tuple(exceptions))
    return replace(
        match,
        facts=[fact, *match.facts],
        cause=Conventions.CAUSE_EXCEPTIONS,
        fix=Conventions.FIX_EXCEPTIONS,
        certainty="likely",
    )


def weigh_fitted(match: Match, case: Case) -> Match:
    """Name the tensors to which the size of a head was fitted; they may be wrong, and the match right."""
    # Without a guess, or with a configuration, nothing was fitted.
    fitted_names = set(case.group.evidence.fitted)
    differing_names = set(list_names(match.tensors))
    if not fitted_names & differing_names:
        return weigh_exceptions(match, case)
    agreeing_names = fitted_names & case.group.evidence.names.keys()
    agreeing_names -= {diff.name for diff in case.group.tensors if diff.out_of_sync}
    if not agreeing_names:
        return replace(match, certainty="consistent")
    fact = Conventions.FITTED(count=len(agreeing_names), names=tuple(sorted(agreeing_names)))
    weighed = replace(match, facts=[*match.facts, fact], certainty="likely")
    # Most tensors agree with the size, as they would if the match is wrong.
    if len(agreeing_names) > len(differing_names):
        return weighed
    return weighed.with_cause(Conventions.CAUSE_FITTED, Conventions.FIX_FITTED).as_consistent()
