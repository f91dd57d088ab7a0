"""The table of causes: what the weights of a pattern must look like for each finding. The first match explains it.

A cause states only what the numbers show. If several causes fit, the finding is `consistent` and lists all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from syncheck.diagnose.rule import Rule
from syncheck.parity import sentences
from syncheck.parity.factors import match_factor
from syncheck.parity.measurements import CLEAR, CLOSE
from syncheck.parity.patterns import (
    find_common_row,
    find_constant,
    find_multiples,
    find_share,
    find_usual,
    is_near,
    make_share,
)
from syncheck.text import number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.findings import Certainty
    from syncheck.messages import Message, Sentence
    from syncheck.parity.patterns import Pattern, Row, Share, Situation

_MOST_ROWS = 4
_MOST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why tensors are wrong.

    facts: the evidence.
    certainty: of the finding.
    alternatives: codes of other causes that fit.
    ranks: suspects; empty for all ranks.
    parameters: of the sentence of the cause.
    """

    facts: Sequence[Message]
    certainty: Certainty = "proved"
    alternatives: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the table.

    code, slug, sentences: of the finding.
    match: returns why a pattern is wrong; None for causes of a wrong step, which `step` finds.
    """

    code: str
    slug: str
    sentences: type[Sentence]
    match: Callable[[Situation, Pattern], Explanation | None] | None = None

    @property
    def rule(self) -> Rule:
        """The record that `syncheck explain` and the documents need."""
        return Rule(code=self.code, slug=self.slug, sentences=self.sentences)


def match_not_reduced(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match ranks that lack the terms of other data ranks, which other copies contain."""
    ranks_of_parts: dict[tuple[int, ...], list[int]] = {}
    all_parts: set[int] = set()
    for rank, row in pattern.rows.items():
        present, absent = _find_parts(situation, row)
        all_parts |= present
        if present and absent - present:
            ranks_of_parts.setdefault(tuple(sorted(present)), []).append(rank)
    # Terms that no rank has are lost, not unreduced.
    is_complete = all_parts == {owner.rank for owner in situation.owners}
    if not ranks_of_parts or not is_complete or find_common_row(pattern) is not None:
        return None
    # One fact for all ranks with the same terms.
    facts = []
    suspects: list[int] = []
    for parts, ranks in ranks_of_parts.items():
        row = pattern.rows[ranks[0]]
        weights = _write_numbers(np.unique(row[np.abs(row) > CLEAR].round(6)))
        facts.append(
            sentences.NotReduced.ROW(
                ranks=tuple(ranks),
                parts=[f"data rank {part}" for part in parts],
                weight=" or ".join(dict.fromkeys(weights)),
            )
        )
        suspects += ranks
    return Explanation(facts[:_MOST_ROWS], ranks=tuple(sorted(suspects)))


def _find_parts(situation: Situation, row: Row) -> tuple[set[int], set[int]]:
    """Return the data ranks with terms in a copy, and data ranks with missing terms."""
    present: set[int] = set()
    absent: set[int] = set()
    for owner, weight in zip(situation.owners, row.tolist(), strict=True):
        # An unknown weight is neither.
        if abs(weight) > CLEAR:
            present.add(owner.rank)
        elif abs(weight) <= CLEAR:
            absent.add(owner.rank)
    return present, absent


def _write_numbers(numbers: Sequence[float] | Row) -> list[str]:
    """Return numbers with four digits."""
    return [number_text(float(number), 4) for number in numbers]


def match_scaled(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match one weight in all tensors."""
    factor = find_constant(find_common_row(pattern))
    # Tensors whose gradient is too small to show a weight are neither right nor wrong.
    is_everywhere = not situation.right and len(situation.patterns) == 1
    if factor is None or not is_everywhere or pattern.assumed:
        return None
    text = sentences.Scaled
    facts = [text.FACTOR(owners=len(situation.owners), factor=factor, count=pattern.size)]
    matches = situation.match(factor)
    if matches:
        facts.append(text.MATCHES(factor=factor, matches=matches))
    else:
        facts.append(text.NO_MATCH(factor=factor, sizes=[*situation.sizes, *situation.counts]))
    return Explanation(facts)


def match_summed(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match one weight in some tensors, while the rest has another weight."""
    factor = find_constant(find_common_row(pattern))
    is_everywhere = not situation.right and len(situation.patterns) == 1
    if factor is None or is_everywhere:
        return None
    matches = situation.match(factor)
    # One factor was assumed for a tensor of few elements: only a size of the run makes it more than a guess.
    if pattern.assumed and not matches:
        return None
    text = sentences.SummedOrAveraged
    names = situation.sort(pattern.names)
    facts = [text.FACTOR(count=len(names), factor=factor, names=names)]
    if is_near(factor, 0, CLEAR):
        facts = [text.NONE(count=len(names), names=names)]
    elif matches:
        facts.append(text.MATCHES(factor=factor, matches=matches))
    facts.append(text.REMAINDER(right=len(situation.right)))
    for dimension in _find_replicated(situation, pattern, factor):
        facts.append(text.DIMENSION(dimension=dimension))
    return Explanation(facts, "consistent" if pattern.assumed else "proved")


def _find_replicated(situation: Situation, pattern: Pattern, factor: float) -> list[str]:
    """Return the mesh dimensions with the size of a factor along which all tensors of a pattern are replicated."""
    dimensions = []
    for dimension, size in situation.mesh.items():
        # Plain tensors have no placements; all ranks hold them.
        placements = {situation.tensors[name].placements.get(dimension, "R") for name in pattern.names}
        # A factor is the size of the dimension, or its inverse.
        if match_factor(factor, {dimension: size}, {}) and placements == {"R"}:
            dimensions.append(dimension)
    return dimensions


def match_mean_of_means(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match weights that are inverse to the numbers of terms of ranks, micro-batches or samples."""
    share = _find_share(situation, pattern)
    if share is None:
        return None
    text = sentences.MeanOfMeans
    parts = []
    for label, count, weight in zip(share.labels, share.counts, share.weights, strict=True):
        parts.append(text.PART(label=label, count=count, weight=weight))
    facts: list[Message] = [text.SHARE(level=share.level, parts=parts)]
    parameters = {"level": share.level}
    matches = situation.match(share.factor)
    is_plain = is_near(share.factor, 1, CLOSE)
    if is_plain or matches:
        if not is_plain:
            facts.append(text.FACTOR(factor=share.factor, matches=matches))
        return Explanation(facts, parameters=parameters)
    # Two parts may have inverse weights by chance.
    if len(parts) < 3:
        return None
    facts.append(text.UNKNOWN_FACTOR(factor=share.factor))
    return Explanation(facts, "consistent", ("SYN447",), parameters=parameters)


def _find_share(situation: Situation, pattern: Pattern) -> Share | None:
    """Return the share of ranks and micro-batches, or of samples; None if weights do not follow counts."""
    refined = situation.refined
    if pattern.is_refined and refined is not None:
        labels, _, _ = _list_parts(situation, pattern)
        return make_share(refined.level, refined.weights, refined.counts, labels, situation.divisor)
    row = find_common_row(pattern)
    return None if row is None else find_share(row, situation.owners, situation.divisor)


def match_sample_lost(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match parts of the batch with 0, 2, 3, ... times the weight of the rest."""
    labels, counts, weights = _list_parts(situation, pattern)
    # Ranks differ, or weights are unknown.
    if weights is None:
        return None
    usual = find_usual(weights, counts)
    multiples = find_multiples(weights, usual)
    if not multiples:
        return None
    text = sentences.SampleLost
    facts = []
    for multiple, numbers in sorted(multiples.items()):
        parts = [labels[number] for number in numbers]
        sentence = text.WEIGHT if multiple else text.LOST
        facts.append(sentence(parts=parts, multiple=multiple))
    if is_near(usual, 1, CLOSE):
        return Explanation(facts)
    reason = _explain_usual(situation, usual, weights, counts)
    facts.append(text.USUAL(usual=usual, matches=reason))
    # A weight of the remaining batch without a reason may have another cause.
    return Explanation(facts, "proved" if reason else "consistent")


def _list_parts(situation: Situation, pattern: Pattern) -> tuple[list[str], Row, Row | None]:
    """Return the names, the numbers of terms and the weights of the smallest parts with known weights."""
    refined = situation.refined
    if pattern.is_refined and refined is not None:
        labels = [f"{refined.level} {', '.join(map(str, unit))}" for unit in refined.units]
        return labels, np.array(refined.counts), np.array(refined.weights)
    labels = []
    counts = []
    for owner in situation.owners:
        # A finding names samples, with which the user can find the loader at fault.
        samples = ", ".join(map(str, owner.samples[:_MOST_SAMPLES]))
        labels.append(f"data rank {owner.rank}, micro-batch {owner.micro_batch} (samples {samples})")
        counts.append(owner.terms)
    return labels, np.array(counts), find_common_row(pattern)


def _explain_usual(situation: Situation, usual: float, weights: Row, counts: Row) -> str:
    """Return why the usual weight is not 1: the mean is over the terms that entered, or a factor."""
    entered = float((weights / usual * counts).sum())
    if is_near(usual * entered, situation.divisor, CLOSE * situation.divisor):
        return f" = {situation.divisor:g} / {entered:g}, because the mean is over the terms that entered"
    matches = situation.match(usual)
    return f" = {matches[0]}" if matches else ""


def match_partial(_situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match copies that add up to the definition along dimensions of the mesh."""
    # A sum of zero times the definition adds up to nothing.
    if pattern.partial is None or is_near(pattern.partial[1], 0, CLEAR):
        return None
    dimensions, factor = pattern.partial
    text = sentences.PartialNotReduced
    facts = [
        text.SUM(dimensions=dimensions, count=pattern.size, names=pattern.names),
        text.TOTAL(factor=factor),
    ]
    return Explanation(facts)


def match_unexplained(situation: Situation, pattern: Pattern) -> Explanation:
    """Match all that is left, with the numbers."""
    text = sentences.Unexplained
    ranks_of_row: dict[tuple[str, ...], list[int]] = {}
    for rank, row in pattern.rows.items():
        ranks_of_row.setdefault(tuple(_write_numbers(row)), []).append(rank)
    facts = []
    for weights, ranks in ranks_of_row.items():
        parts = len(situation.owners)
        fact = text.WEIGHTS(ranks=tuple(ranks), weights=weights, parts=parts)
        facts.append(fact)
    # On many ranks, the first rows show the pattern.
    facts = facts[:_MOST_ROWS]
    if not pattern.is_explained:
        residual = max(situation.tensors[name].residual for name in pattern.names)
        facts.append(text.RESIDUAL(count=pattern.size, residual=residual))
    executed = situation.sort(pattern.names)
    facts.append(text.ORDER(first=executed[0], last=executed[-1]))
    return Explanation(facts, "consistent")


# In the order in which they are tried.
CAUSES = (
    Cause("SYN443", "not-reduced", sentences.NotReduced, match_not_reduced),
    Cause("SYN441", "gradient-scaled", sentences.Scaled, match_scaled),
    Cause("SYN444", "summed-or-averaged", sentences.SummedOrAveraged, match_summed),
    Cause("SYN445", "partial-not-reduced", sentences.PartialNotReduced, match_partial),
    Cause("SYN442", "mean-of-means", sentences.MeanOfMeans, match_mean_of_means),
    Cause("SYN447", "sample-lost", sentences.SampleLost, match_sample_lost),
    Cause("SYN446", "gradient-norm", sentences.GradientNorm),
    Cause("SYN448", "update-differs", sentences.UpdateDiffers),
    Cause("SYN449", "unexplained-gradient", sentences.Unexplained, match_unexplained),
)
PARITY_RULES = tuple(sorted(map(attrgetter("rule"), CAUSES), key=attrgetter("code")))
