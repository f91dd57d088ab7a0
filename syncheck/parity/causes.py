"""The table of causes: what the weights of a pattern must look like for each finding. The first match explains it.

A cause states only what the numbers show. If several causes fit, the finding is `consistent` and lists all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from syncheck.diagnose.rule import Rule
from syncheck.parity import sentences
from syncheck.parity.case import DATA_DIMENSIONS
from syncheck.parity.factors import match_factor
from syncheck.parity.measurements import CLEAR, CLOSE
from syncheck.parity.patterns import (
    ZERO,
    find_common_row,
    find_constant,
    find_cut,
    find_multiples,
    find_share,
    find_usual,
    is_near,
    make_share,
)
from syncheck.parity.trained import Explanation, match_frozen, match_untied
from syncheck.text import number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.findings import Certainty
    from syncheck.messages import Message, Sentence
    from syncheck.parity.patterns import Pattern, Row, Share, Situation

_MOST_ROWS = 4
_MOST_SAMPLES = 8


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
    if pattern.partial is not None:
        return _match_other_owners(pattern)
    ranks_of_parts: dict[tuple[int, ...], list[int]] = {}
    all_parts: set[int] = set()
    cut = find_cut(pattern)
    for rank, row in pattern.rows.items():
        present, absent = _find_parts(situation, row, cut)
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
        weights = _write_numbers(np.sort(row[np.abs(row) > cut]))
        facts.append(
            sentences.NotReduced.ROW(
                ranks=tuple(ranks),
                parts=[f"data rank {part}" for part in parts],
                weight=" or ".join(dict.fromkeys(weights)),
            )
        )
        suspects += ranks
    total = len(situation.tensors)
    names = situation.sort(pattern.names)
    facts = [*facts[:_MOST_ROWS], sentences.NotReduced.TENSORS(count=pattern.size, total=total, names=names)]
    # A wrapper that reduces other tensors reduces.
    variant = "_SOME" if situation.right else ""
    return Explanation(facts, ranks=tuple(sorted(suspects)), variant=variant)


def _match_other_owners(pattern: Pattern) -> Explanation | None:
    """Match copies that add up along data dimensions and follow no owner: ranks split the batch in another way."""
    assert pattern.partial is not None
    dimensions, factor = pattern.partial
    # Along other dimensions, ranks with the same samples compute parts of a gradient.
    if not DATA_DIMENSIONS.issuperset(dimensions) or is_near(factor, 0, CLEAR):
        return None
    facts = [
        sentences.NotReduced.SUM(dimensions=dimensions, count=pattern.size, names=pattern.names, factor=factor),
        sentences.NotReduced.OWNER(),
    ]
    return Explanation(facts, "consistent", ("SYN445",))


def _find_parts(situation: Situation, row: Row, cut: float) -> tuple[set[int], set[int]]:
    """Return the data ranks with terms in a copy, and data ranks with missing terms. cut: see `find_cut`."""
    present: set[int] = set()
    absent: set[int] = set()
    for owner, weight in zip(situation.owners, row.tolist(), strict=True):
        # An unknown weight is neither.
        if abs(weight) > cut:
            present.add(owner.rank)
        elif abs(weight) <= cut:
            absent.add(owner.rank)
    return present, absent


def _write_numbers(numbers: Sequence[float] | Row, doubt: float = 1.0) -> list[str]:
    """Return numbers with four digits; rounding errors of 0 and 1 are 0 and 1.

    doubt: the largest error of a number. Beyond it, a number close to 1 has as many digits as it needs.
    """
    texts = []
    for number in numbers:
        rounded = 0.0 if is_near(float(number), 0, ZERO) else float(number)
        if f"{rounded:.4g}" == "1" and abs(rounded - 1) <= doubt:
            rounded = 1.0
        texts.append(number_text(rounded, 4))
    return texts


def match_scaled(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match one weight in all tensors."""
    factor = find_constant(find_common_row(pattern))
    if factor is None or not situation.is_uniform:
        return None
    matches = situation.match(factor)
    # One factor was assumed for tensors of few elements, as in `match_summed`.
    if pattern.assumed and not matches:
        return None
    text = sentences.Scaled
    facts = [text.FACTOR(owners=len(situation.owners), factor=factor, count=pattern.size)]
    certainty: Certainty = "consistent" if pattern.assumed else "proved"
    if is_near(factor, 0, ZERO):
        facts = [text.NONE(count=pattern.size)]
    elif situation.matches_counts_only(factor):
        facts.append(text.ONLY_COUNTS(factor=factor, matches=matches))
    elif matches:
        facts.append(text.MATCHES(factor=factor, matches=matches))
    else:
        facts.append(text.NO_MATCH(factor=factor, sizes=[*situation.sizes, *situation.counts]))
        # The factor is measured, and no division by a size of the run explains it.
        certainty = "consistent"
    return Explanation(facts, certainty)


def match_summed(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match one weight in some tensors, while the rest has another weight."""
    factor = find_constant(find_common_row(pattern))
    if factor is None or situation.is_uniform:
        return None
    matches = situation.match(factor)
    # One factor was assumed for a tensor of few elements: only a size of the run makes it more than a guess.
    if pattern.assumed and not matches:
        return None
    text = sentences.SummedOrAveraged
    names = situation.sort(pattern.names)
    facts = [text.FACTOR(count=len(names), factor=factor, names=names)]
    variant = "_FACTOR"
    # The factor is proved, and which code has it is not: a hook may have the factor of a wrong reduction.
    certainty: Certainty = "consistent" if pattern.assumed else "proved"
    if is_near(factor, 0, ZERO):
        facts = [text.NONE(count=len(names), names=names)]
        variant = "_NONE"
    elif matches:
        facts.append(text.MATCHES(factor=factor, matches=matches))
        if not situation.matches_counts_only(factor):
            variant, certainty = "", "consistent"
    facts.append(text.REMAINDER(right=len(situation.right)))
    for dimension in _find_replicated(situation, pattern, factor):
        facts.append(text.DIMENSION(dimension=dimension))
    return Explanation(facts, certainty, variant=variant)


def _find_replicated(situation: Situation, pattern: Pattern, factor: float) -> list[str]:
    """Return the mesh dimensions with the size of a factor along which all tensors of a pattern are replicated."""
    dimensions = []
    for dimension, size in situation.mesh.items():
        # Plain tensors have no placements; all ranks hold them.
        placements = {situation.tensors[name].placements.get(dimension, "R") for name in pattern.names}
        # Stages of a pipeline hold other tensors.
        ranks = min(len(situation.tensors[name].solutions) for name in pattern.names)
        if ranks < math.prod(situation.mesh.values()):
            continue
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
    # Amounts that the case counts are no whole numbers.
    are_terms = all(isinstance(count, int) for count in share.counts)
    sentence = text.PART if are_terms else text.PART_OF_COUNT
    parts = []
    for label, count, weight in zip(share.labels, share.counts, share.weights, strict=True):
        parts.append(sentence(label=label, count=count, weight=weight))
    amount = "number of terms" if are_terms else "part of the count"
    parameters = {"level": share.level, "amount": amount}
    facts: list[Message] = [text.SHARE(parts=parts, **parameters)]
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
        labels = [_label_unit(refined.level, unit) for unit in refined.units]
        return labels, np.array(refined.counts), np.array(refined.weights)
    labels = []
    counts = []
    for owner in situation.owners:
        # A finding names samples, with which the user can find the loader at fault.
        samples = ", ".join(map(str, owner.samples[:_MOST_SAMPLES]))
        labels.append(f"data rank {owner.rank}, micro-batch {owner.micro_batch} (samples {samples})")
        counts.append(owner.terms)
    return labels, np.array(counts), find_common_row(pattern)


def _label_unit(level: str, unit: Sequence[int]) -> str:
    """Return the name of a unit: `sample 3`, or `token 9 of sample 3`."""
    if level == "token" and len(unit) > 1:
        positions = ", ".join(map(str, unit[1:]))
        return f"token {positions} of sample {unit[0]}"
    return f"{level} {unit[0]}"


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
    executed = situation.sort(pattern.names)
    split: set[str] = set()
    residuals = []
    for name in executed:
        tensor = situation.tensors[name]
        split.update(tensor.split)
        residuals.append(tensor.residual)
    wrong_ranks = situation.list_wrong_ranks(executed)
    facts = _list_rows(situation, pattern)
    variant, parameters = "", {}
    if pattern.missing:
        facts = [text.MISSING(ranks=pattern.missing, names=executed)]
    elif not pattern.is_finite:
        facts = [text.NOT_FINITE(ranks=wrong_ranks, names=executed, count=pattern.size)]
    elif _are_means(find_common_row(pattern)):
        facts.append(text.RECIPROCALS())
    elif not pattern.is_explained:
        facts.append(text.RESIDUAL(count=pattern.size, residual=max(residuals)))
        if split:
            facts.append(text.SPLIT(dimensions=sorted(split)))
            variant, parameters = "_SPLIT", {"dimensions": sorted(split)}
        # A batch that is not split has no owners to define.
        elif len(situation.owners) > 1:
            facts.append(text.OWNER())
    facts.append(text.ORDER(first=executed[0], last=executed[-1]))
    return Explanation(facts, "consistent", ranks=wrong_ranks, variant=variant, parameters=parameters)


def _list_rows(situation: Situation, pattern: Pattern) -> list[Message]:
    """Return the weights of a pattern by ranks. On many ranks, the first rows show the pattern."""
    ranks_of_row: dict[tuple[str, ...], list[int]] = {}
    for rank, row in pattern.rows.items():
        weights = _write_numbers(row, max(pattern.doubt, ZERO))
        ranks_of_row.setdefault(tuple(weights), []).append(rank)
    facts: list[Message] = []
    for row_weights, ranks in ranks_of_row.items():
        fact = sentences.Unexplained.WEIGHTS(ranks=tuple(ranks), weights=row_weights, parts=len(situation.owners))
        facts.append(fact)
    return facts[:_MOST_ROWS]


def _are_means(row: Row | None) -> bool:
    """Whether weights may belong to a mean of k means, N / (k * n) for parts n of N: their reciprocals average 1."""
    return row is not None and row.min() > 0 and is_near(float((1 / row).mean()), 1, CLOSE)


# In the order in which they are tried.
CAUSES = (
    # Before all causes in weights, which frozen parameters and copies of a tied one may have by chance.
    Cause("SYN445", "partial-not-reduced", sentences.PartialNotReduced, match_untied),
    Cause("SYN444", "summed-or-averaged", sentences.SummedOrAveraged, match_frozen),
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
# Two rows may have one code.
_RULE_OF_CODE = {cause.code: cause.rule for cause in CAUSES}
PARITY_RULES = tuple(sorted(_RULE_OF_CODE.values(), key=attrgetter("code")))
